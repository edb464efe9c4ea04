"""MTP modules of DeepSeek, GLM and Qwen: inside a target's folder, or in a folder of their own.

DeepSeek's and GLM's module i of a target of L layers is ``model.layers.{L + i}.*``: a decoder layer with
``enorm``, ``hnorm``, ``eh_proj``, ``shared_head.norm`` and, as copies of the target's, ``embed_tokens`` and
``shared_head.head``. A folder of its own (``DeepseekV3ForCausalLMNextN``) keeps these names, or begins at
``model.layers.0`` when its config counts the modules as its layers; ours do. Qwen's one module is ``mtp.*``,
with other names for the same parts.
"""

import re
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from eagle_kit.config.drafts.mtp import MTPHeadConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.base.kind import (
    HeadKind,
    HeadTensors,
    InitContext,
    describe_attention,
    our_names,
    scale_final_norm,
)
from eagle_kit.drafts.files.config_json import layer_to_dict
from eagle_kit.drafts.files.copies import is_copy
from eagle_kit.drafts.files.draft_files import EMBEDDING, OUTPUT, OWN, DraftFiles, open_draft
from eagle_kit.drafts.mtp.format import DEEPSEEK, MTPFormat
from eagle_kit.drafts.mtp.head import MTPConfig, MTPHead, MTPModule
from eagle_kit.models.blocks.moe import Experts
from eagle_kit.models.config import TargetConfig, mtp_count, text_config
from eagle_kit.models.config_values import read_flag, read_size
from eagle_kit.models.loading.arrangement import QWEN_HYBRID
from eagle_kit.models.loading.fp8_layout import read_fp8_layout
from eagle_kit.models.loading.loader import check_activation, check_tensors
from eagle_kit.models.targets.target import Target

GLM = "glm4_moe"
ARCHITECTURES = {
    **dict.fromkeys(DEEPSEEK, ("DeepseekV3ForCausalLMNextN", "DeepseekV3ForCausalLM")),
    GLM: ("Glm4MoeForCausalLMNextN", "Glm4MoeForCausalLM"),
    "qwen3_next": ("Qwen3NextForCausalLMMTP", "Qwen3NextForCausalLM"),
    "qwen3_5": ("Qwen3_5ForCausalLMMTP", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLMMTP", "Qwen3_5MoeForCausalLM"),
}
"""By family of targets: architectures of modules in a folder of their own, and of the targets."""
SHARED_HEAD = "shared_head.head.weight"
COUNT, LAYERS = "num_nextn_predict_layers", "num_hidden_layers"
QWEN = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
"""Parts of a Qwen module, ``mtp.*``, by their names in DeepSeek's."""
LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(.*)")


class MTPKind(HeadKind[MTPConfig, MTPHead, MTPHeadConfig]):
    """Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

    name = "mtp"
    title = "MTP draft module"
    algorithms = ("NEXTN", "EAGLE")
    vllm_method = "mtp"
    is_in_target = True
    config_class = MTPConfig
    head_class = MTPHead
    trained_as = ("mtp",)
    needs_layers = True
    format_class = MTPFormat

    def recognises(self, files: DraftFiles) -> bool:
        """See :class:`~eagle_kit.drafts.base.kind.DraftKind`; only folders of their own are recognised."""
        return files.architecture in dict(ARCHITECTURES.values())

    def read_config(self, files: DraftFiles, target: TargetConfig | None = None) -> MTPConfig:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`; of a folder of its own, or of a target's."""
        raw = _module_config(files)
        where = files.where
        check_activation(raw, where)
        layer = TargetConfig.from_dict(raw, where)
        if not layer.num_mtp_layers:
            raise UserError(
                f"The model in {where} has no MTP module ({COUNT} is 0).",
                "Give a draft, or choose NGRAM, which needs none.",
            )
        return MTPConfig(
            layer,
            num_modules=layer.num_mtp_layers,
            own_head=read_flag(files.own, "own_head", where),
            **files.about,
        )

    def write_config(self, config: MTPConfig) -> dict[str, Any]:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`; in the keys of its family."""
        layer = config.layer
        raw = {
            "architectures": [ARCHITECTURES[layer.model_type][0]],
            "model_type": "deepseek_v3" if layer.model_type in DEEPSEEK else layer.model_type,
            "num_hidden_layers": config.num_modules,
            COUNT: config.num_modules,
            **layer_to_dict(config, layer.rms_norm_eps),
            **_moe_to_dict(layer),
            **_family_to_dict(config),
            "attention_bias": layer.attention_bias,
            "mlp_bias": layer.mlp_bias,
        }
        raw[OWN] |= {"own_head": config.own_head}
        return raw

    def names(self, files: DraftFiles) -> dict[str, str]:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`; tensors of other layers are not the modules'."""
        files = _as_deepseeks(files)
        first = first_layer(files)
        count = files.config[COUNT]
        pairs = []
        for name in files.tensors:
            match = LAYER.fullmatch(name)
            if match is not None and first <= int(match[1]) < first + count:
                pairs.append((f"model.layers.{int(match[1]) - first}.{match[2]}", name))
        if not pairs:
            raise UserError(
                f"The config in {files.where} speaks of MTP modules, but there are no weights of any.",
                "Use the published checkpoint; transformers leaves them out when it saves one.",
            )
        return our_names(pairs, files.where)

    def published_name(self, part: str) -> str:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        return f"model.layers.0.{SHARED_HEAD}" if part == OUTPUT else f"model.{part}"

    def sort_tensors(self, files: DraftFiles, config: MTPConfig, target: Target | None) -> HeadTensors:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`. The embedding is the target's; so is the output
        layer, unless the files bring one that differs, which is then the head's own."""
        files = _as_deepseeks(files)
        found = super().sort_tensors(files, config, target)
        embedding, output = (
            _take_shared(found.tensors, name, config, files.where) for name in (EMBEDDING, SHARED_HEAD)
        )
        if output is None and config.own_head:
            raise UserError(
                f"The output layer {SHARED_HEAD} is missing in {files.where}.", "Use a complete checkpoint."
            )
        if output is not None:
            is_targets = target is not None and is_copy(output, target.head_weight)
            config = replace(config, own_head=not is_targets)
            if not is_targets:
                found.tensors[self.published_name(OUTPUT)] = output
        copies = {} if embedding is None else {EMBEDDING: embedding}
        return found._replace(config=config, copies=copies)

    def describe(self, config: MTPConfig, dtype: str) -> str:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        layer = config.layer
        count = config.num_modules
        inside = "an MLP" if layer.moe is None else f"{layer.moe.num_experts} experts"
        several = f"{'One' if count == 1 else count} multi-token prediction module{'s' * (count > 1)}"
        uses = "for every step of a draft" if count == 1 else "one for each step of a draft"
        head = "an output layer of its own" if config.own_head else "the target's output layer"
        return (
            f"{several} ({uses}): a decoder layer of hidden size {layer.hidden_size} "
            f"({describe_attention(layer)}, {inside}) in {dtype}. It reads the target's last states, after "
            f"their norm, and then its own, and proposes any of {layer.vocab_size} tokens through {head}."
        )

    def suggested_shape(self, config: MTPConfig) -> SpecShape:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`: a chain."""
        steps = 3 if config.num_modules == 1 else config.num_modules
        return SpecShape(steps, 1, steps + 1)

    def joint_layers(self, head: MTPHead) -> list[str]:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        return [f"layers.{i}.eh_proj" for i in range(len(head.layers))]

    def saved_activation_bytes(self, config: MTPConfig, width: int, *, is_gpu: bool) -> tuple[float, float]:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`; a state is fed back in fp32."""
        return 5 * width + 4, 3 * width

    def new_config(self, settings: MTPHeadConfig, target: TargetConfig) -> MTPConfig:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`; only some families of targets have a published
        form of MTP modules."""
        if target.model_type not in ARCHITECTURES:
            raise UserError(
                f"MTP modules are for targets of DeepSeek, GLM and Qwen, and this one is of the family "
                f"{target.model_type}.",
                "Use an EAGLE-3 head.",
            )
        return MTPConfig(target, settings.num_modules or target.num_mtp_layers or 1)

    def new_head(self, settings: MTPHeadConfig, config: MTPConfig, start: InitContext) -> MTPHead:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`: modules of the target's checkpoint, copies of
        its last layer, or random ones."""
        # Modules of the target's checkpoint; transformers leaves them out when it saves a model.
        files = open_draft(start.folder)
        named = _as_deepseeks(files)
        has = named.config.get(COUNT) or 0
        if has and not _has_module(named, first_layer(named)):
            has = 0

        # Take them where that is asked for, or can be.
        init = str(settings.init)
        if init == "auto":
            init = "checkpoint" if has else "last-layer"
        if init == "checkpoint":
            if config.num_modules > has:
                raise UserError(
                    f"head.num_modules is {config.num_modules}, but the target's checkpoint has {has}.",
                    "Lower it, or set head.init=last-layer.",
                )
            head = self.read(files, start.target, device=start.device)
            head.layers = head.layers[: config.num_modules]
            head.config = replace(config, own_head=head.config.own_head)
            return head

        # New modules.
        head = MTPHead(config).bind(start.target.lm_head)
        for module in head.layers:
            assert isinstance(module, MTPModule)
            if init == "last-layer":
                _copy_last_layer(module, start.target)
            else:
                _randomise_experts(module)
            scale_final_norm(module.shared_head.norm, start.target)
        return head.to(device=start.device, dtype=torch.float32)


MTP = MTPKind()


def first_layer(files: DraftFiles) -> int:
    """The number that the first module has in the names of tensors: 0 in folders of ours and of SGLang's,
    else that of the layer after the last one."""
    layers: int = files.config["num_hidden_layers"]
    if layers != files.config[COUNT] or not MTP.recognises(files):
        return layers
    return layers if _has_module(files, layers) else 0  # there when vLLM is meant


def _module_config(files: DraftFiles) -> dict[str, Any]:
    """Config of the target that modules are read as layers of."""
    raw = text_config(files.config, files.where)
    known = dict(ARCHITECTURES.values())
    if files.architecture in known:
        return raw | {"architectures": [known[files.architecture]]}
    has_qwens = any(name.startswith("mtp.") for name in files.names)
    known_count = files.config.get(COUNT, int(has_qwens))  # there once they have DeepSeek's names
    count = read_size(raw, mtp_count(raw), files.where, known_count, least=0)
    return raw | {"architectures": [files.architecture], COUNT: count, "mtp_num_hidden_layers": count}


def _as_deepseeks(files: DraftFiles) -> DraftFiles:
    """Files of a Qwen whose module, after its last layer, has DeepSeek's names; others as they are."""
    names = [name for name in files.names if name.startswith("mtp.")]
    raw = _module_config(files)
    if not names:
        return replace(files, config=files.config | {COUNT: raw[COUNT], LAYERS: raw[LAYERS]})
    if raw[COUNT] != 1:
        raise UserError(
            f"The target in {files.where} has {raw[COUNT]} MTP modules in one.", "Use a target with one."
        )
    config = TargetConfig.from_dict(raw, files.where)
    first = f"layers.{config.num_layers}."
    tensors = {}
    for name in names:
        part, _, leaf = name.removeprefix("mtp.").partition(".")
        ours = leaf.partition(".")[2] if part == "layers" else f"{QWEN.get(part, part)}.{leaf}"
        tensors[first + ours] = files.tensors[name]
    tensors = QWEN_HYBRID.renamed(tensors)
    QWEN_HYBRID.arrange(tensors, config, read_fp8_layout(files.config, files.where))
    return DraftFiles(files.config | raw, tensors, files.metadata, files.where)


def _family_to_dict(config: MTPConfig) -> dict[str, Any]:
    """Keys that only configs of one family have."""
    layer = config.layer
    if layer.model_type in DEEPSEEK:
        return {}
    share = {"partial_rotary_factor": layer.rope_dim / layer.head_dim}
    if layer.model_type == GLM:
        return share | {"use_qk_norm": layer.qk_norm}
    return share | {"layer_types": ["full_attention"] * config.num_modules}


def _has_module(files: DraftFiles, layer: int) -> bool:
    names = {f"{prefix}layers.{layer}.eh_proj.weight" for prefix in ("", "model.")}
    return not names.isdisjoint(files.tensors)


def _take_shared(
    tensors: dict[str, torch.Tensor], leaf: str, config: MTPConfig, where: str
) -> torch.Tensor | None:
    """Remove a matrix that all modules share from ``tensors``; None where there is none."""
    names = [f"model.layers.{i}.{leaf}" for i in range(config.num_modules)]
    found = {name: tensors.pop(name) for name in names if name in tensors}
    check_tensors(found, dict.fromkeys(found, (config.vocab_size, config.hidden_size)), where)
    brought = list(found.values())
    if any(not is_copy(tensor, brought[0]) for tensor in brought[1:]):
        raise UserError(
            f"The modules in {where} do not share one {leaf}.", "Use modules that share the target's."
        )
    return brought[0] if brought else None


def _copy_last_layer(module: MTPModule, target: Target) -> None:
    """Put the target's last layer after ``eh_proj``, which begins as the sum of its two inputs."""
    state = target.layer_state(-1)
    try:
        module.load_state_dict(state, strict=False)
    except RuntimeError:
        state = {}
    if not state.keys() <= module.state_dict().keys() or not state:
        raise UserError(
            "head.init is last-layer, but the target's last layer is of another kind than its MTP module.",
            "Set head.init=random.",
        )
    size = target.config.hidden_size
    with torch.no_grad():
        module.eh_proj.weight += torch.cat((torch.eye(size), torch.eye(size)), 1)


def _randomise_experts(module: nn.Module) -> None:
    """Start experts as linear layers do."""
    for child in module.modules():
        if isinstance(child, Experts):
            for stack in (child.gate_up_proj, child.down_proj):
                bound = stack.shape[-1] ** -0.5
                nn.init.uniform_(stack, -bound, bound)


def _moe_to_dict(layer: TargetConfig) -> dict[str, Any]:
    """Keys of a module's mixture; none without one."""
    moe = layer.moe
    if moe is None:
        return {}
    if moe.gates_shared:
        return {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_experts_per_token,
            "moe_intermediate_size": moe.intermediate_size,
            "shared_expert_intermediate_size": moe.shared_intermediate_size,
            "norm_topk_prob": moe.normalises,
        }
    method = "greedy" if moe.num_groups == 1 else "group_limited_greedy"
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "n_shared_experts": moe.shared_intermediate_size // moe.intermediate_size,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "scoring_func": moe.scoring,
        "topk_method": "noaux_tc" if moe.has_bias else method,
        "n_group": moe.num_groups,
        "topk_group": moe.num_topk_groups,
        "norm_topk_prob": moe.normalises,
        "routed_scaling_factor": moe.scale,
    }
