"""Heads that read fused states of the target, as EAGLE-3's: the published layout, and what is checked.

Published heads keep q, k, v and gate, up apart; ours are fused. Layer ids are stored as "input of layer i",
the numbering of EAGLE, SGLang and vLLM, with the convention beside them: the other one ("output of layer i")
names the same tensors with other numbers, and mixing them fails silently.
"""

from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar

import torch

from eagle_kit.config.train import HeadConfig
from eagle_kit.core.errors import UserError, shown
from eagle_kit.kinds.kind import OUTPUT, HeadKind, Start, Weights, our_names, soften
from eagle_kit.kinds.support import findings
from eagle_kit.kinds.support.beginning import check_vocab_size, start_output
from eagle_kit.kinds.support.config_json import layer_to_dict, read_layer
from eagle_kit.kinds.support.files import OWN, DraftFiles
from eagle_kit.kinds.support.findings import OWN_TARGET, Finding
from eagle_kit.kinds.support.vocab import complete_map, map_fingerprint
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.config_parts import (
    MAX_LAYERS,
    MAX_POSITIONS,
    read_architecture,
    read_flag,
    read_mla,
    read_size,
    read_table,
)
from eagle_kit.models.heads.eagle3 import Eagle3Config, Eagle3Head
from eagle_kit.models.targets.target import Target

LLAMA_LAYER = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LATENT_LAYER = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
ARCHITECTURES = (*LLAMA_LAYER, *LATENT_LAYER)
OLDER_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
OUTPUT_WEIGHT, OUTPUT_BIAS = ".self_attn.o_proj.weight", ".self_attn.o_proj.bias"
LAYER_IDS, CONVENTION = "eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_convention"
SHIFTS = {"input": 0, "output": 1}
"""Convention of layer ids -> what turns one into ours: the output of layer i is the input of layer i + 1."""
FLAGS = ("fc_norm", "norm_output", "norm_before_residual")


Config = TypeVar("Config", bound=Eagle3Config)
Head = TypeVar("Head", bound=Eagle3Head)


class FusedStatesKind(HeadKind[Config, Head]):
    """Kinds whose heads read three captured states as EAGLE-3's do, with a draft vocabulary of their own.

    Attributes:
        speculators_model_type: the kind's name in configs of the speculators project.
    """

    speculators_model_type: ClassVar[str]

    def read_config(self, files: DraftFiles, target: TargetConfig | None = None) -> Config:
        """See :class:`~eagle_kit.kinds.kind.HeadKind`; ``target`` gives the usual layer ids to a config that
        names none, as the first EAGLE-3 heads' do."""
        return self.config_class(**self.read_fields(files, target))

    def read_fields(self, files: DraftFiles, target: TargetConfig | None) -> dict[str, Any]:
        """Fields of the architecture, by name; arguments and errors as of :meth:`read_config`."""
        where, config = files.where, flatten_config(files.config, files.where, self.speculators_model_type)
        refuse_other_parts(config, (), where)
        name = read_architecture(config, where)
        if name not in ARCHITECTURES:
            raise UserError(
                f"The draft in {where} has the architecture {name}, not EAGLE-3.",
                f"Use one of {', '.join(ARCHITECTURES)}.",
            )
        mla = read_mla(config, where) if name in LATENT_LAYER else None
        sizes = read_layer(config, where, mla)
        return {
            **sizes,
            "target_hidden_size": read_size(config, "target_hidden_size", where, sizes["hidden_size"]),
            "draft_vocab_size": read_size(config, "draft_vocab_size", where, sizes["vocab_size"]),
            "max_position_embeddings": read_size(
                config, "max_position_embeddings", where, 2048, most=MAX_POSITIONS
            ),
            "aux_layer_ids": _layer_ids(config, where, target),
            "fc_norm": read_flag(config, "fc_norm", where) or read_flag(config, "use_aux_norm", where),
            "norm_output": read_flag(config, "norm_output", where),
            "norm_before_residual": read_flag(config, "norm_before_residual", where),
            "attention_bias": read_flag(config, "attention_bias", where),
            "mla": mla,
            "sliding_window": _sliding_window(config, where),
            **files.about,
        }

    def write_config(self, config: Config) -> dict[str, Any]:
        """See :class:`~eagle_kit.kinds.kind.HeadKind`."""
        return {
            "architectures": [(LATENT_LAYER if config.mla else LLAMA_LAYER)[0]],
            "model_type": "deepseek_v3" if config.mla else "llama",
            "num_hidden_layers": 1,
            "target_hidden_size": config.target_hidden_size,
            **layer_to_dict(config, config.rms_norm_eps),
            "attention_bias": config.attention_bias,
            "draft_vocab_size": config.draft_vocab_size,
            **{flag: getattr(config, flag) for flag in FLAGS},
            **_window_to_dict(config),
            "eagle_config": {
                LAYER_IDS: list(config.aux_layer_ids),
                CONVENTION: "input",
                "use_aux_hidden_state": True,
            },
        }

    def write(self, head: Head, dtype: torch.dtype) -> DraftFiles:
        """See :class:`~eagle_kit.kinds.kind.HeadKind`; with the hot-token map and its fingerprint."""
        files = super().write(head, dtype)
        files.config[OWN] |= {"vocab_map": map_fingerprint(head.d2t)}
        return DraftFiles(files.config, {**files.tensors, "d2t": head.d2t.cpu(), "t2d": head.t2d.cpu()})

    def names(self, files: DraftFiles) -> dict[str, str]:
        """See :class:`~eagle_kit.kinds.kind.HeadKind`."""
        return our_names(((canonical_name(name), name) for name in files.tensors), files.where)

    def take(self, files: DraftFiles, config: Config, target: Target | None) -> Weights:
        """See :class:`~eagle_kit.kinds.kind.HeadKind`.

        A bias behind ``o_proj`` that is all zeros is left out: vLLM and speculators have one wherever queries
        have one. ``lm_head.weight`` may be absent when the draft vocabulary is the target's.
        """
        refuse_other_parts(files.config, files.tensors, files.where)
        found = super().take(files, config, target)
        tensors = found.tensors
        for name in [name for name in tensors if name.endswith(OUTPUT_BIAS)]:
            if bool(tensors.pop(name).any()):
                raise UserError(
                    f"The draft in {files.where} has a bias behind its attention ({name}), which our "
                    f"{self.title} has not.",
                    "Serve it with the engine it was made for.",
                )
        d2t, t2d = complete_map(tensors.pop("d2t", None), tensors.pop("t2d", None), config, files.where)
        fingerprint = files.own.get("vocab_map")
        if fingerprint is not None and fingerprint != map_fingerprint(d2t):
            raise UserError(
                f"The vocabulary map of the draft in {files.where} is not the one it was saved with.",
                "Use config.json and model.safetensors of one checkpoint.",
            )
        is_whole = files.config.get("draft_vocab_size") in (None, config.vocab_size)
        borrows = is_whole and OUTPUT not in tensors
        return found._replace(buffers={"d2t": d2t, "t2d": t2d}, borrows_output=borrows)

    def check(self, files: DraftFiles, config: Config, target: TargetConfig) -> list[Finding]:
        """See :class:`~eagle_kit.kinds.kind.HeadKind`; the captured layers too."""
        own_width = {"embedding size": (config.hidden_size, target.hidden_size)}
        raw = flatten_config(files.config, files.where, self.speculators_model_type)
        return [
            *super().check(files, config, target),
            *findings.check_sizes(own_width),
            _check_layers(raw, config, target),
        ]

    def joint_layers(self, head: Head) -> list[str]:
        """See :class:`~eagle_kit.kinds.kind.HeadKind`."""
        config = head.config
        names = ["qkv_proj"]
        if config.mla is not None:
            first = "q_proj" if config.mla.q_lora_rank is None else "q_a_proj"
            names = [first, "kv_a_proj_with_mqa"]
        return [f"midlayer.self_attn.{name}" for name in names]

    def saved_states(self, config: Config, width: int, *, is_gpu: bool) -> tuple[float, float]:
        """See :class:`~eagle_kit.kinds.kind.HeadKind`; on a CPU both projections of latent attention keep a
        copy of their input ``[2 H]`` in half precision."""
        before, behind = super().saved_states(config, width, is_gpu=is_gpu)
        return before + (2 * width if config.mla and width < 4 and not is_gpu else 0), behind


def _sliding_window(config: dict[str, Any], where: str) -> int | None:
    """Window of a head's layer, where its config says that it has one: a Llama's ``sliding_window`` alone
    says nothing."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        slides = kinds[0] == "sliding_attention"
    else:
        slides = read_flag(config, "use_sliding_window", where)
    if not slides:
        return None
    if config.get("kv_lora_rank"):
        raise UserError(
            f"The draft in {where} has latent attention with a sliding window, which is not supported.",
            "Use a head without one.",
        )
    return read_size(config, "sliding_window", where, most=MAX_POSITIONS)


def _window_to_dict(config: Eagle3Config) -> dict[str, Any]:
    if config.sliding_window is None:
        return {}
    kinds = {"use_sliding_window": True, "layer_types": ["sliding_attention"]}
    return {"sliding_window": config.sliding_window, **kinds}


def canonical_name(name: str) -> str:
    """EAGLE's name for any spelling: ``midlayer.*`` or ``layers.0.*``, with ``model.`` or without; SGLang's
    older ``aux_norm_*`` are ``fc_norm.*``."""
    name = name.removeprefix("model.")
    module, _, leaf = name.partition(".")
    if module in OLDER_NORMS:
        return f"fc_norm.{OLDER_NORMS.index(module)}.{leaf}"
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def flatten_config(config: dict[str, Any], where: str, kind: str = "eagle3") -> dict[str, Any]:
    """A ``config.json`` of the speculators project in the flat form; any other as it is.

    Args:
        kind: its ``speculators_model_type``.

    Raises:
        UserError: another kind, a decoder layer that is not Llama's, or a key left out that
            speculators and vLLM fill in differently.
    """
    algorithm = config.get("speculators_model_type")
    if algorithm is None:
        return config
    if algorithm != kind:
        raise UserError(
            f"The draft in {where} is a speculators model of the kind {shown(algorithm)}, which we have no "
            "head for.",
            f"Use one of the kind {kind}.",
        )
    layer = read_table(config, "transformer_layer_config", where)
    if layer.get("model_type") != "llama":
        raise UserError(
            f"The draft in {where} has a decoder layer of the kind {shown(layer.get('model_type'))}.",
            "Use a head whose transformer_layer_config has the model_type llama.",
        )
    if "norm_before_residual" not in config:
        raise UserError(
            f"The config.json in {where} does not say norm_before_residual, which speculators then takes for "
            "false and vLLM for true.",
            "Write the one that the head was trained with into it.",
        )
    extra = read_table(read_table(config, OWN, where), "extra", where)
    flags = (
        "fc_norm",
        "norm_output",
        "norm_before_residual",
        "norm_before_fc",
        "target_hidden_size",
        "mask_token_id",
    )
    ids = config.get(LAYER_IDS)
    return {
        **extra,
        **layer,
        **{key: config[key] for key in flags if key in config},
        "architectures": [LLAMA_LAYER[0]],
        "draft_vocab_size": config.get("draft_vocab_size"),
        "eagle_config": {} if ids is None else {LAYER_IDS: ids, CONVENTION: "input"},
        **{key: config[key] for key in ("dtype", "torch_dtype", "eagle_kit") if key in config},
    }


def refuse_other_parts(config: dict[str, Any], names: Iterable[str], where: str) -> None:
    """Raise UserError, with the reason, for heads that call themselves EAGLE-3 and have parts ours has not.

    Args:
        names: of the tensors; none when only the config is known.
    """
    names = set(names)
    eagle = read_table(config, "eagle_config", where)
    endings = {name.rpartition(".self_attn.")[2] for name in names}
    parts = {
        "one norm over all captured states in front of fc (norm_before_fc)": bool(
            config.get("norm_before_fc") or eagle.get("norm_before_fc") or "input_norm.weight" in names
        ),
        "norms of queries and keys, as Qwen3's layers do": bool({"q_norm.weight", "k_norm.weight"} & endings),
        "no captured states (use_aux_hidden_state is false)": eagle.get("use_aux_hidden_state") is False,
    }
    for part, found in parts.items():
        if found:
            raise UserError(
                f"The draft in {where} has {part}, which our EAGLE-3 head has not.",
                "Serve it with the engine it was made for.",
            )


def _layer_ids(config: dict[str, Any], where: str, target: TargetConfig | None) -> tuple[int, ...]:
    """The captured layers in the "input of layer i" numbering, whichever one they are stored in."""
    ids, convention = layer_numbers(config, where)
    if ids is None and target is not None:
        return target.default_aux_layer_ids
    if ids is None:
        raise UserError(
            f"The draft in {where} does not say which target layers it reads.",
            f"Load it together with its target, or add eagle_config.{LAYER_IDS} to its config.json.",
        )
    if not ids:
        raise wrong_ids(ids, where)
    return tuple(layer + SHIFTS[convention or "input"] for layer in ids)


def layer_numbers(config: dict[str, Any], where: str) -> tuple[list[int] | None, str | None]:
    """Layer ids as they are stored, and their convention; None for what is not there. Raises UserError."""
    eagle = read_table(config, "eagle_config", where)
    ids, convention = eagle.get(LAYER_IDS), eagle.get(CONVENTION)
    is_list = isinstance(ids, list) and len(ids) <= MAX_LAYERS and all(type(layer) is int for layer in ids)
    if ids is not None and not (is_list and all(abs(layer) <= MAX_LAYERS for layer in ids)):
        raise wrong_ids(ids, where)
    if convention not in (None, *SHIFTS):
        raise UserError(
            f"The draft in {where} numbers its layers by the unknown convention {shown(convention)}.",
            f'Set {CONVENTION} to "input" or "output".',
        )
    return ids, convention


def wrong_ids(ids: object, where: str) -> UserError:
    """Error for what is no list of layer ids."""
    return UserError(
        f"The draft in {where} has the layer ids {shown(ids)}.",
        f"Make {LAYER_IDS} a list such as [2, 15, 27].",
    )


def is_usual(ids: list[int], shift: int = 0) -> bool:
    """True when ``ids + shift`` are 2, L//2, L-3 for some number of layers L."""
    ids = [layer + shift for layer in ids]
    return len(ids) == 3 and ids[0] == 2 and ids[1] == (ids[2] + 3) // 2


def numbering(files: DraftFiles) -> str | None:
    """Convention of the layer ids of a head: stated, or told by the usual ids; None when nothing tells."""
    ids, convention = layer_numbers(files.config, files.where)
    if convention is not None or not ids:
        return convention or "input"
    return next((name for name, shift in SHIFTS.items() if is_usual(ids, shift)), None)


def _check_layers(raw: dict[str, Any], draft: Eagle3Config, target: TargetConfig) -> Finding:
    """Find ids out of range, and the usual ones in the other numbering, which fails silently."""
    eagle = raw.get("eagle_config") or {}
    ids, count, usual = list(draft.aux_layer_ids), target.num_layers, list(target.default_aux_layer_ids)
    if not all(0 <= layer <= count for layer in ids):
        cause = f"the draft reads the inputs of layers {ids}, the target has {count} layers."
        return Finding("error", "layer ids", cause, OWN_TARGET)
    if eagle.get(LAYER_IDS) is None:
        cause = (
            f"the draft does not say which layers it reads, so the usual inputs of layers {usual} are taken."
        )
        return Finding("warning", "layer ids", cause, f"Add eagle_config.{LAYER_IDS} to its config.json.")
    if CONVENTION not in eagle and ids != usual and [layer + 1 for layer in ids] == usual:
        cause = (
            f"the draft reads the inputs of layers {ids}, which look like the usual {usual} in the numbering "
            "'output of layer i' that SpecForge and ModelOpt write."
        )
        remedy = (
            f'If the accept length is about 1.0, add "{CONVENTION}": "output" to its eagle_config, or import '
            "it with --format sglang."
        )
        return Finding("warning", "layer ids", cause, remedy)
    return Finding("ok", "layer ids", f"inputs of layers {ids} of {count}.")


def chosen_fields(settings: HeadConfig, target: TargetConfig) -> dict[str, Any]:
    """Fields of a new head's architecture that a training config chooses. Raises UserError for what the
    target has not."""
    check_vocab_size(settings.num_draft_tokens, target)
    fields: dict[str, Any] = {flag: getattr(settings, flag) for flag in FLAGS}
    if settings.intermediate_size is not None:
        fields["intermediate_size"] = settings.intermediate_size
    if (ids := settings.aux_layer_ids) is not None:
        if not ids or not all(0 <= layer <= target.num_layers for layer in ids):
            raise UserError(
                f"head.aux_layer_ids is {list(ids)}, but the target has layers 0 to {target.num_layers - 1}.",
                f"Name inputs of layers, for example {list(target.default_aux_layer_ids)}.",
            )
        fields["aux_layer_ids"] = ids
    return fields


def start_new_head(head: Head, settings: HeadConfig, start: Start) -> Head:
    """Give a new head its vocabulary and the target's output rows, in fp32."""
    head.to(device=start.device, dtype=torch.float32)
    start_output(head, settings, start)
    if settings.lm_head_init == "target":
        soften(head.norm, start.target)
    return head
