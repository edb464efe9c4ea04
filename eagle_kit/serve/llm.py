"""The facade: a target, perhaps a draft, and ``generate``."""

import itertools
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.core.request import RequestOutput, SamplingParams
from eagle_kit.core.shape import MAX_WINDOW, NO_SPECULATION, ShapeTable, SpecShape, auto_shape
from eagle_kit.data.chat.template import prompt_token_ids
from eagle_kit.kernels.cpu_memory import keep_large_blocks
from eagle_kit.kernels.linear import pack_weights
from eagle_kit.kernels.prefill_attention import prefill_attention
from eagle_kit.kinds.registry import algorithms, kind_in_target
from eagle_kit.models.heads.draft_head import DraftHead
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.serve import cpu_graph
from eagle_kit.serve.drafts import load_draft_model
from eagle_kit.serve.engine import Engine, EngineOptions
from eagle_kit.serve.grammar.compiler import GrammarCompiler
from eagle_kit.serve.graph import GraphMode
from eagle_kit.serve.memory import MemoryPlan, plan_memory
from eagle_kit.serve.request import Request
from eagle_kit.serve.text_stream import TextStream
from eagle_kit.speculation.propose.draft_model import DraftModel
from eagle_kit.speculation.propose.ngram import NgramOptions
from eagle_kit.speculation.propose.static import EAGLE1_CHOICES, Topology
from eagle_kit.speculation.verify.proposal import Verifier

Prompt = str | list[int] | list[dict[str, Any]]
EAGLE1_SHAPE = Topology.parse(EAGLE1_CHOICES).shape
NGRAM_SHAPE = SpecShape(8, 4, 12)
DEFAULT_MAX_CONTEXT = 8192


class LLM:
    """A target LLM, decoded plainly or with a draft; the text is the same either way.

    Args:
        target: a Hugging Face folder, a hub id, a name that ``resolve_target`` knows, or a loaded model,
            which is then used as it is.
        draft: a draft's folder, a head (which is copied), any other draft model, or None for ordinary
            decoding.
        algorithm: ``"auto"`` reads it from the draft; ``"EAGLE3"``, ``"EAGLE"`` and ``"STANDALONE"`` insist;
            ``"NEXTN"`` is ``"EAGLE"``, or, without a draft, takes the MTP modules in the target's own folder;
            ``"NGRAM"`` drafts from earlier text, without a draft; ``"NONE"`` drafts nothing.
        ngram: how n-grams are matched, for ``"NGRAM"``.
        token_map: a file with the target ids that an EAGLE or STANDALONE draft may propose (FR-Spec, arXiv
            2502.14856); EAGLE-3 heads bring their own.
        shape: ``steps,topk,tokens``, or several by batch size (``ShapeTable``); default with a draft:
            ``auto_shape``. :meth:`generate` may choose another.
        max_batch_size: most requests decoded together.
        max_context: most tokens of prompt and reply; default the target's context, at most 8,192.
        page_size: tokens per page of the key-value pool.
        prefix_cache: share and remember the keys of common beginnings.
        prefill_tokens: most prompt tokens computed in one step; default 512 on a CPU, 8,192 on a GPU.
        kv_tokens: tokens that the pool holds; default what the batch needs, or what fits.
        kv_dtype: of keys and values in the pool: ``"auto"`` is the model's, ``"fp8_e4m3"`` takes half of its
            bytes or less. LOSSY: the text is close to that of another dtype, not equal.
        lag: steps between a cycle and its results on the host; default 0 on a CPU, 1 on a GPU.
        batch_sizes: batches are padded to the next of these; default exact sizes on a CPU, powers of two on
            a GPU.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``, or ``"auto"``: fp32 on a CPU, bf16 on a GPU.
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        tokenizer: needed for text prompts when ``target`` is a loaded model.
        tree: ``"dynamic"`` keeps a draft's best nodes (EAGLE-2); ``"static"`` has EAGLE-1's fixed topology,
            whose shape is 5,4,26.
        sampled_drafts: for requests that sample, sample drafts from the draft's own distribution (chains and
            static trees).
        verifier: what decides on their drafts, an object of ``eagle_kit.kernels.accept``; default the
            lossless one. ``Relaxed`` is LOSSY.
        seed: of the draws of requests that bring no seed.
        graph_mode: ``"cycle"`` (default) captures whole cycles, on a GPU as CUDA graphs, on a CPU as lists of
            operations that need no Python; ``"phases"`` (GPU) captures their parts, ``"off"`` nothing.
    """

    def __init__(
        self,
        target: str | Path | LlamaModel,
        draft: "str | Path | DraftHead | DraftModel | None" = None,
        *,
        algorithm: str = "auto",
        ngram: NgramOptions | None = None,
        token_map: str | Path | None = None,
        shape: str | SpecShape | ShapeTable | None = None,
        max_batch_size: int = 8,
        max_context: int | None = None,
        page_size: int = 16,
        prefix_cache: bool = True,
        prefill_tokens: int | None = None,
        kv_tokens: int | None = None,
        kv_dtype: str = "auto",
        lag: int | None = None,
        batch_sizes: Sequence[int] | None = None,
        dtype: str = "auto",
        device: str = "auto",
        tokenizer: Any = None,
        tree: Literal["dynamic", "static"] = "dynamic",
        sampled_drafts: bool = False,
        verifier: Verifier | None = None,
        seed: int = 0,
        graph_mode: GraphMode | None = None,
    ) -> None:
        sizes = {"max_batch_size": max_batch_size, "page_size": page_size, "kv_tokens": kv_tokens}
        for name, value in {**sizes, "prefill_tokens": prefill_tokens}.items():
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}.", "Give at least 1.")
        if max_context is not None and max_context < 2:
            raise UserError(f"max_context is {max_context}.", "Give room for a prompt and a reply.")
        keep_large_blocks()
        self.tokenizer = tokenizer
        self._target_name: str | Path | None = None
        if isinstance(target, LlamaModel):
            self.target = target
        else:
            from eagle_kit.models.loading.loader import load_target
            from eagle_kit.models.loading.source import load_tokenizer, resolve_target

            place = choose_device(device)
            if place.startswith("cuda:"):
                torch.cuda.set_device(place)  # graphs and kernels run on the current device
            folder = resolve_target(str(target))
            self._target_name = folder
            self.target = load_target(folder, dtype=_dtype(dtype, place), device=place)
            if tokenizer is None:
                self.tokenizer = load_tokenizer(folder)
        pack_weights(self.target)
        self.config = self.target.config
        self.max_context = min(max_context or DEFAULT_MAX_CONTEXT, self.config.max_position_embeddings)
        self.max_batch_size, self.page_size, self.kv_tokens = max_batch_size, page_size, kv_tokens
        self.seed = seed
        weight = self.target.embed_tokens.weight
        self.kv_dtype = _kv_dtype(kv_dtype, weight.device)
        on_gpu = weight.device.type == "cuda"
        if graph_mode == "phases" and not on_gpu:
            raise UserError(
                "Graphs of the phases of a cycle need a GPU, and the target is on the CPU.",
                "Leave graph_mode out.",
            )
        self._policies: dict[str, Any] = {
            "prefix_cache": prefix_cache,
            "prefill_tokens": prefill_tokens or (8192 if on_gpu else 512),
            "lag": lag if lag is not None else int(on_gpu),
            "tree": tree,
            "sampled_drafts": sampled_drafts,
            "verifier": verifier,
            "seed": seed,
            "graph_mode": graph_mode or ("cycle" if on_gpu or cpu_graph.available() else "off"),
        }
        self._batch_sizes = batch_sizes
        self._on_gpu = on_gpu
        self._engine: Engine | None = None
        self._numbers = itertools.count()
        self.memory_plan: MemoryPlan | None = None
        self.draft: DraftModel | None = None
        self.head: DraftHead | None = None
        self.default_shapes = ShapeTable.parse(NO_SPECULATION)
        self._wanted_shapes = None if shape is None else ShapeTable.parse(shape)
        self._ngram_options = ngram or NgramOptions()
        self.set_draft(draft, algorithm=algorithm, token_map=token_map)

    def set_draft(
        self,
        draft: "str | Path | DraftHead | DraftModel | None",
        *,
        algorithm: str = "auto",
        token_map: str | Path | None = None,
    ) -> None:
        """Use another draft from now on. Raises UserError when it does not fit the target."""
        algorithm = algorithm.upper() if algorithm != "auto" else algorithm
        known = ("auto", *algorithms(), "NGRAM", "NONE")
        if algorithm not in known:
            raise UserError(f"The algorithm {algorithm!r} is not known.", f"Use one of {', '.join(known)}.")
        if algorithm in ("NGRAM", "NONE") and draft is not None:
            raise UserError(
                f"The algorithm {algorithm} takes no draft, and {draft} was given.",
                "Leave the draft out, or the algorithm.",
            )
        if draft is None and algorithm in algorithms():
            if kind_in_target(algorithm) is None:
                raise UserError(f"The algorithm {algorithm} needs a draft.", "Give a draft, or choose NGRAM.")
            if self._target_name is None:
                raise UserError(
                    f"{algorithm} without a draft takes the modules in the target's folder: none is known.",
                    "Give the target as a folder, or a draft.",
                )
            draft = self._target_name
        self._engine = None
        self.head, self.draft = None, None
        self._uses_ngram = algorithm == "NGRAM"
        if draft is not None:
            self.draft = load_draft_model(
                draft, self.target, target_name=self._target_name, algorithm=algorithm, token_map=token_map
            )
            self.head = self.draft.head
            self._check_modules()
        if self._wanted_shapes is not None:
            self.default_shapes = self._wanted_shapes
        else:
            drafts = NO_SPECULATION
            if self.draft is not None:
                static = self._policies["tree"] == "static"
                dear = self.draft.is_whole_model
                drafts = EAGLE1_SHAPE if static else auto_shape(self.config.model_type, drafts_are_dear=dear)
                if (modules := self.draft.num_modules) > 1:
                    drafts = SpecShape(modules, 1, modules + 1)
            self.default_shapes = ShapeTable.parse(NGRAM_SHAPE if self._uses_ngram else drafts)

    def _check_modules(self) -> None:
        """Raise UserError where several modules, one for each step, cannot draft as asked."""
        assert self.draft is not None
        if self.draft.num_modules == 1:
            return
        if self._policies["tree"] == "static" or self._policies["sampled_drafts"]:
            raise UserError(
                f"The draft has {self.draft.num_modules} modules, which draft plain chains only.",
                "Leave static trees and sampled drafts out.",
            )
        if self._wanted_shapes is not None:
            self._check_shapes(self._wanted_shapes)

    def _check_shapes(self, shapes: ShapeTable) -> None:
        """Raise UserError for a shape that the draft cannot fill."""
        modules = 1 if self.draft is None else self.draft.num_modules
        for shape in shapes.shapes:
            if modules > 1 and shape.steps and (shape.topk > 1 or shape.steps > modules):
                raise UserError(
                    f"The shape {shape} was given for a draft of {modules} modules, one a step of a chain.",
                    f"Use a chain of at most {modules} steps, such as {SpecShape(modules, 1, modules + 1)}.",
                )

    @property
    def default_shape(self) -> SpecShape:
        """The shape of a single request when :meth:`generate` names none."""
        return self.default_shapes.at(1)

    def engine(self, shape: SpecShape | ShapeTable | None = None) -> Engine:
        """The engine, set to ``shape`` or the default ones; its memory is taken on first use."""
        if self._engine is None:
            ngram = self._ngram_options if self._uses_ngram else None
            room = MAX_WINDOW * (self._policies["lag"] + 1) + 2
            self.memory_plan = plan_memory(
                self.target,
                self.draft,
                max_running=self.max_batch_size,
                wanted_tokens=self.max_batch_size * (self.max_context + room + self.page_size),
                kv_tokens=self.kv_tokens,
                window=self.default_shapes.tokens,
                ngram_log=ngram.max_bytes if ngram is not None else 0,
                prefill_tokens=self._policies["prefill_tokens"],
                max_context=self.max_context,
                kv_dtype=self.kv_dtype,
            )
            self._fit_context(self.memory_plan.kv_tokens)
            options = EngineOptions(
                max_running=self.max_batch_size,
                max_context=self.max_context,
                kv_tokens=self.memory_plan.kv_tokens,
                page_size=self.page_size,
                kv_dtype=self.kv_dtype,
                batch_sizes=_batch_sizes(self._batch_sizes, self.max_batch_size, self._on_gpu),
                **self._policies,
            )
            grammars = None
            if self.tokenizer is not None:
                ends = self.config.eos_token_ids
                grammars = partial(GrammarCompiler, self.tokenizer, self.config.vocab_size, ends)
            self._engine = Engine(self.target, self.draft, options, grammars, ngram)
        wanted = self.default_shapes if shape is None else ShapeTable.parse(shape)
        self._check_shapes(wanted)
        if self._engine.shapes != wanted:
            self._engine.use_shape(wanted)
        return self._engine

    def _fit_context(self, kv_tokens: int) -> None:
        """Shorten the context to what one request alone may have of the pool.

        Raises:
            UserError: that is nothing.
        """
        ahead = (self._policies["lag"] + 1) * (self.default_shape.steps + 1) + 2
        most = -(-kv_tokens // self.page_size) * self.page_size - ahead
        if most < 2:
            raise UserError(
                f"The key-value pool holds {kv_tokens} tokens, too few for any request.",
                "Give it more, or free memory.",
            )
        if most < self.max_context:
            warnings.warn(
                f"The key-value pool holds {kv_tokens} tokens, so the context is {most} instead of "
                f"{self.max_context}.",
                stacklevel=3,
            )
            self.max_context = most

    def tokenize(self, prompt: Prompt) -> list[int]:
        """A user turn (str), messages (list of dicts) or token ids (as they are) -> token ids."""
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return list(prompt)  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise UserError(
                "A text prompt was given to a model without a tokenizer.", "Pass tokenizer= to LLM."
            )
        if isinstance(prompt, str):
            if not prompt.strip():
                raise UserError("The prompt is empty.", "Give some text.")
            prompt = [{"role": "user", "content": prompt}]
        return prompt_token_ids(self.tokenizer, prompt)  # type: ignore[arg-type]

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        shape: str | SpecShape | ShapeTable | None = None,
        progress: bool = False,
        on_finish: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Decode a reply to every prompt.

        Args:
            prompts: see :meth:`tokenize`.
            params: the same for all, or those of each prompt; default greedy, 256 tokens.
            shape: speculation shape of this call, or several by batch size.
            progress: show a progress bar.
            on_finish: called with (index, reply) as replies finish.

        Returns:
            Replies in the order of the prompts. Raises UserError for an empty or too long prompt before any
            work.
        """
        if isinstance(prompts, str):
            raise UserError("generate was given one text instead of a list of prompts.", "Put it in a list.")
        sampling_params = (
            [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else params
        )
        if len(sampling_params) != len(prompts):
            raise UserError(
                f"{len(prompts)} prompts have {len(sampling_params)} sampling parameters.",
                "Give one for each prompt.",
            )
        engine = self.engine(None if shape is None else ShapeTable.parse(shape))
        requests = [self.make_request(*pair) for pair in zip(prompts, sampling_params, strict=True)]
        for i, request in enumerate(requests):
            try:
                engine.check_request(request)
            except UserError as error:
                which = f"Prompt {i} of {len(requests)}: " if len(requests) > 1 else ""
                raise UserError(which + error.cause, error.remedy) from None
        place = {request: i for i, request in enumerate(requests)}
        bar = _progress_bar(len(requests)) if progress else None
        try:
            for request in requests:
                engine.add_request(request)
            while engine.has_work:
                for request in engine.step():
                    if request.finish_reason is None or request not in place:
                        continue
                    if bar is not None:
                        bar.update()
                    if on_finish is not None:
                        on_finish(place[request], request.output())
        finally:
            for request in requests:
                engine.abort(request)
            engine.drain()
            if bar is not None:
                bar.close()
        return [request.output() for request in requests]

    def make_request(self, prompt: Prompt, params: SamplingParams, priority: int = 0) -> Request:
        """A request for the engine of this model: tokenised, numbered in the order of the calls."""
        stream = None
        if self.tokenizer is not None:
            stream = TextStream(self.tokenizer, stop=params.stop)
        elif params.stop:
            raise UserError(
                "A stop text was given to a model without a tokenizer.", "Pass tokenizer= to LLM."
            )
        return Request(next(self._numbers), self.tokenize(prompt), params, priority, stream)

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """The target's logits after every token of ``ids`` -> ``[T, V]``, in one forward without a cache."""
        device = self.target.embed_tokens.weight.device
        tokens = torch.tensor(ids, device=device)
        scale = self.config.attention_scale
        out = self.target(
            tokens,
            torch.arange(len(ids), device=device),
            lambda layer, q, k, v: prefill_attention(q, k, v, scale),
        )
        return self.target.logits(out.hidden)


def _dtype(name: str, device: str) -> torch.dtype:
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    if name not in dtypes:
        raise UserError(f"The dtype {name!r} is not known.", f"Use auto, {', '.join(dtypes)}.")
    return dtypes[name]


def _kv_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """Of the pool; None for the model's."""
    if name not in ("auto", "fp8_e4m3"):
        raise UserError(f"The key-value dtype {name!r} is not known.", "Use auto or fp8_e4m3.")
    if name == "auto":
        return None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError(
            "Keys and values in fp8 need a GPU of compute capability 8.9 (Ada, Hopper) or later.",
            "Leave the key-value dtype at auto.",
        )
    return torch.float8_e4m3fn


def choose_device(name: str) -> str:
    """The device that ``name`` means on this machine. Raises UserError for one that there is not."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise UserError(f"The device {name!r} is not known.", "Use cpu, cuda or auto.")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"The device {name} was asked for, but CUDA is not there.", "Use cpu or auto.")
    return name


def _batch_sizes(given: Sequence[int] | None, largest: int, on_gpu: bool) -> tuple[int, ...]:
    """Sizes that batches are padded to, the largest batch last."""
    if given is None:
        given = [2**i for i in range(largest.bit_length())] if on_gpu else range(1, largest + 1)
    return tuple(sorted({size for size in given if size < largest} | {largest}))


def _progress_bar(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit="reply", dynamic_ncols=True)
