"""Memory of engines on GPUs that are not at hand: what a rank holds, for several numbers of ranks.

The target is made on the meta device, as its loader would cut it, and planned by
:func:`~eagle_kit.engine.memory.engine_memory.plan_memory` as it is before an engine is made. The largest rank
is planned: where ranks share key-value heads it may be any, else it is the last.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import nn

from eagle_kit.autotune.shapes import MOST_STEPS
from eagle_kit.config.engine import EngineConfig, ResolvedConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.gpus import RUNTIME_BYTES, Gpu
from eagle_kit.distributed.collectives import Share
from eagle_kit.drafts.base.draft_model import DraftModel
from eagle_kit.drafts.choose_drafter import drafter_class
from eagle_kit.engine.load_draft import load_draft_model
from eagle_kit.engine.memory.engine_memory import MemoryPlan, Place, fit_sizes, plan_memory, usable_bytes
from eagle_kit.engine.options import context_of_pool, draft_in_target, dtype_of
from eagle_kit.models.blocks.moe import Experts, FP8Experts
from eagle_kit.models.bridge.config import BridgedConfig
from eagle_kit.models.bridge.load import empty_bridged
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.loading.fp8_layout import FP8Layout
from eagle_kit.models.loading.known_targets import target_architecture, target_fp8_layout
from eagle_kit.models.loading.loader import in_dtype
from eagle_kit.models.loading.published import Part, published_parts
from eagle_kit.models.loading.quantize import quantizable
from eagle_kit.models.sharding import Sharding, scale_cuts
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.models.targets.target import Target
from eagle_kit.ops.fp8 import E4M3, FP8Weight
from eagle_kit.ops.linear import FP8Linear, Linear

PARTS = {
    "routed experts": r"\.experts\.",
    "norms and routers": r"norm|\.gate\.|shared_expert_gate",
    "MLP and shared experts": r"\.mlp\.",
    "embedding and output layer": r"(^|\.)(embed_tokens|lm_head|embed_out|embed_in|wte)\.",
    "recurrent layers": r"\.(linear_attn|mamba)\.",
    "attention": "",
}
"""Parts of a target's weights; a name belongs to the first that is found in it."""
NOT_FP8 = ("conv1d.weight", "in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight")
"""Published weights of recurrent layers that are never in fp8."""
GPU = torch.device("cuda")


@dataclass(frozen=True)
class RankPlan:
    """A rank of a target.

    Attributes:
        sharding: what it has.
        target: its model, on the meta device.
        draft: on the meta device.
        config: of its engine, before a GPU's memory lowers its sizes.
        chooses_shapes: whether the engine chooses among several shapes.
        lowers_batch, lowers_context: whether memory decides the batch and the context.
    """

    sharding: Sharding
    target: Target
    draft: DraftModel | None
    config: ResolvedConfig
    chooses_shapes: bool
    lowers_batch: bool
    lowers_context: bool

    @cached_property
    def weights(self) -> dict[str, int]:
        """Bytes by part of :data:`PARTS`, and those of the draft; a matrix that two share is counted once."""
        found = dict.fromkeys((*PARTS, "draft"), 0)
        for name, parameter in self.target.named_parameters():
            part = next(part for part, pattern in PARTS.items() if re.search(pattern, name))
            found[part] += parameter.nbytes
        found["draft"] = self.all_weights - sum(found.values())
        return found

    @cached_property
    def all_weights(self) -> int:
        """Bytes of the weights of target and draft."""
        return self._plan(Place(GPU, 10**15, 10**15), self.config).weights

    def on(self, gpu: Gpu) -> MemoryPlan | None:
        """Its memory on a GPU; None where it does not fit."""
        config = self.config_on(gpu)
        return None if config is None else self._plan(self._place(gpu), config)

    def config_on(self, gpu: Gpu) -> ResolvedConfig | None:
        """Options of its engine on a GPU, with the batch and the context that the memory holds; None where it
        does not fit."""
        if gpu not in self._configs:
            plan = partial(self._plan, self._place(gpu))
            found: ResolvedConfig | None = None
            with suppress(UserError):
                found = fit_sizes(
                    plan,
                    self.config,
                    lowers_batch=self.lowers_batch,
                    lowers_context=self.lowers_context,
                )
                plan(found)
            self._configs[gpu] = found
        return self._configs[gpu]

    @cached_property
    def _configs(self) -> dict[Gpu, ResolvedConfig | None]:
        """Results of :meth:`config_on` so far."""
        return {}

    def sizes_on(self, gpu: Gpu) -> ResolvedConfig | None:
        """Options of its engine on a GPU, with the sizes of its pool too; None where it does not fit."""
        config = self.config_on(gpu)
        if config is None:
            return None
        config = config.replace(**self._plan(self._place(gpu), config).sizes)
        steps = 0 if self.draft is None else MOST_STEPS
        return config.replace(max_context=min(config.max_context, context_of_pool(config, steps)))

    def free(self, gpu: Gpu) -> int:
        """Bytes that are free beside the weights and the runtime."""
        return max(0, int(gpu.memory - RUNTIME_BYTES) - self.all_weights)

    def tokens(self, gpu: Gpu) -> int:
        """Tokens that the pool could hold, that of all ranks together, whatever the batch needs."""
        plan = self.on(gpu)
        if plan is None:
            return 0
        needed = plan.scratch + plan.logits + plan.activations + plan.states + plan.graphs.bytes
        room = usable_bytes(self._place(gpu), self.config) - needed
        return max(0, room // plan.bytes_per_token)

    def _place(self, gpu: Gpu) -> Place:
        """A GPU with the weights and the runtime in its memory."""
        free = self.free(gpu)
        total = int(gpu.memory)
        return Place(GPU, free, total, total - free)

    def _plan(self, place: Place, config: ResolvedConfig) -> MemoryPlan:
        """Its memory in an engine with these options. Raises UserError where it does not fit."""
        return plan_memory(self.target, self.draft, config, chooses_shapes=self.chooses_shapes, place=place)


@dataclass(frozen=True)
class Planner:
    """Plans of a target, perhaps with a draft, for engines with ``options`` on GPUs.

    Attributes:
        name: of the target, see :func:`~eagle_kit.models.loading.known_targets.target_architecture`.
        draft: name of a draft, whose weights are read.
        options: of the engine; those of its ranks are given to :meth:`plan`.
    """

    name: str
    draft: str | None
    options: EngineConfig

    @cached_property
    def config(self) -> TargetConfig:
        """Architecture of the target."""
        config, _ = target_architecture(self.name)
        return config

    @cached_property
    def layout(self) -> FP8Layout | None:
        """Layout of the checkpoint's fp8 weights; None where they are unpacked, as a bridged target's are."""
        if isinstance(self.config, BridgedConfig):
            return None
        return target_fp8_layout(self.name)

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns of the weights in fp8 layers that share a scale; None without such layers or where
        outputs have scales."""
        return None if self.layout is None else self.layout.block

    def plan(
        self, size: int, *, expert_parallel: bool = False, data_parallel_attention: bool = False
    ) -> RankPlan:
        """Plan the largest of ``size`` ranks. Raises UserError where the target cannot be shared so."""
        if isinstance(self.config, BridgedConfig):
            self._check_bridged(self.config, size)
        ranks = [
            Sharding.of(
                self.config,
                Share(rank, size),
                self.block,
                expert_parallel=expert_parallel,
                data_parallel_attention=data_parallel_attention,
            )
            for rank in range(size)
        ]
        sharding, target = self._largest(ranks)
        draft = self._draft(target)
        options = self.options.replace(
            tensor_parallel=size,
            expert_parallel=expert_parallel,
            data_parallel_attention=data_parallel_attention,
        )
        if options.has_auto_shape and draft is not None:
            kind = drafter_class(draft, options)
            options = options.replace(shape=kind.default_shape(draft, self.config.model_type))
        config = options.resolve(on_gpu=True, max_positions=self.config.max_position_embeddings)
        chooses = self.options.has_auto_shape and draft is not None
        takes_gpu = options.gpu_memory_utilization is not None
        return RankPlan(
            sharding,
            target,
            draft,
            config,
            chooses,
            lowers_batch=takes_gpu and options.max_batch_size is None,
            lowers_context=takes_gpu and options.max_context is None,
        )

    def _check_bridged(self, config: BridgedConfig, size: int) -> None:
        """Raise UserError for what the layers of transformers cannot do."""
        if size > 1:
            raise UserError(
                f"The layers of {config.model_type} are those of transformers, which ranks do not share.",
                "Plan one GPU.",
            )
        if self.options.quantization == "fp8":
            raise UserError(
                f"The layers of {config.model_type} are those of transformers, which are not cast to fp8.",
                "Leave the quantization out.",
            )

    def _largest(self, ranks: Sequence[Sharding]) -> tuple[Sharding, Target]:
        """The one of ``ranks`` with the most bytes, and its target. Raises UserError where one of them would
        be refused by its loader."""
        found = {}  # ranks that are alike need one model
        for each in ranks:
            config = each.rank_config()
            num_words = len(each.share.of(self.config.vocab_size))
            if config.moe is not None and (own := config.moe.local_experts) is not None:
                config = replace(config, moe=replace(config.moe, local_experts=range(len(own))))
            found[f"{config} {num_words}"] = each
        for each in ranks:
            self._check_blocks(each)
        targets = [(each, self._target(each)) for each in found.values()]
        return max(targets, key=lambda of: sum(parameter.nbytes for parameter in of[1].parameters()))

    @cached_property
    def _fp8_parts(self) -> list[Part]:
        """Published weights that are in fp8, one of each kind."""
        with torch.device("meta"):
            parameters = list(LlamaModel(self.config).named_parameters())
        found: dict[tuple[str, tuple[int, ...]], Part] = {}
        for name, group in published_parts(parameters, self.config, ()).items():
            for part in group if name.startswith("layers.") else ():
                if len(part.shape) > 1 and not part.name.endswith(NOT_FP8):
                    found.setdefault((re.sub(r"\d+", "", part.name), part.shape), part)
        return list(found.values())

    def _check_blocks(self, sharding: Sharding) -> None:
        """Raise UserError where a block of an fp8 weight would be cut apart, as the loader does."""
        if self.layout is None or self.block is None:
            return
        for part in self._fp8_parts:
            scale_cuts(part, sharding.cuts(part), self.layout.scale_shapes(part.shape)[0], self.block)

    def _target(self, sharding: Sharding) -> Target:
        dtype = dtype_of(self.options.dtype, GPU.type)
        if isinstance(self.config, BridgedConfig):
            return empty_bridged(self.config, self.name, dtype)
        share = sharding.share
        with torch.device("meta"):
            model = LlamaModel(sharding.rank_config())
            num_words = len(share.of(self.config.vocab_size))
            model.embed_tokens = nn.Embedding(num_words, self.config.hidden_size)
            model.lm_head = Linear(self.config.hidden_size, num_words, bias=False)
            if self.config.tie_word_embeddings:
                model.lm_head.weight = model.embed_tokens.weight
            model = in_dtype(model, dtype)
            stays = self.layout is not None and self.options.quantization != "none"
            if stays or self.options.quantization == "fp8":
                _use_fp8(model, self.block if stays else None)
        return model.requires_grad_(False)

    def _draft(self, target: Target) -> DraftModel | None:
        """The draft behind ``target``, which gets the whole embedding where a draft reads it."""
        algorithm = self.options.algorithm
        chosen = draft_in_target(self.draft, algorithm, self.name) or self.draft
        if chosen is None:
            return None
        whole = copy(target)
        dtype = target.embed_tokens.weight.dtype
        whole._modules = dict(target._modules)
        size = self.config.hidden_size
        num_words = self.config.vocab_size
        if len(target.embed_tokens.weight) < num_words:
            with torch.device("meta"):
                whole.embed_tokens = nn.Embedding(num_words, size).to(dtype).requires_grad_(False)
                whole.lm_head = Linear(size, num_words, bias=False).to(dtype).requires_grad_(False)
                if self.config.tie_word_embeddings:
                    whole.lm_head.weight = whole.embed_tokens.weight
        draft = load_draft_model(chosen, whole, algorithm=algorithm, token_map=self.options.token_map)
        whole.lm_head = target.lm_head
        if not draft.is_whole_model:
            target.embed_tokens = whole.embed_tokens
        return draft


def _use_fp8(model: LlamaModel, block: tuple[int, int] | None) -> None:
    """Replace layers of a model on the meta device by those in fp8, with scales of ``block`` or of
    outputs."""

    def weight(of: torch.Tensor) -> FP8Weight:
        rows, columns = block or (1, of.shape[-1])
        scales = torch.empty(*of.shape[:-2], -(-of.shape[-2] // rows), -(-of.shape[-1] // columns))
        return FP8Weight(torch.empty(of.shape, dtype=E4M3), scales, (rows, columns))

    for name, module in list(quantizable(model)):
        made: nn.Module
        if isinstance(module, Experts):
            made = FP8Experts(weight(module.gate_up_proj), weight(module.down_proj))
        else:
            made = FP8Linear(weight(module.weight), module.bias)
        model.set_submodule(name, made)
