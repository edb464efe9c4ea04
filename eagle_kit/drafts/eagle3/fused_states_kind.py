"""Files of EAGLE-3 and P-EAGLE heads: reading, writing and checking of config.json and tensors.

Heads of both kinds fuse captured hidden states (``Eagle3Head.fuse`` in :mod:`eagle_kit.drafts.eagle3.head`),
have a draft vocabulary (``d2t``, ``t2d``), and one layout of ``config.json`` and tensors. They differ in the
number of layers and in the steps: an EAGLE-3 head feeds its output back, a P-EAGLE head runs all steps in one
pass over masks.

In order: the kind (:class:`FusedStatesKind`), its decoder layers in ``config.json``, layouts of
speculators, sizes, layer ids, checks against a target, and first weights.

Layer ids. "Input of layer i" is the convention of EAGLE, vLLM and this package; "output of layer i"
is the one of SpecForge and SGLang. The output of layer i is the input of layer i + 1. A head that
is read with the wrong convention loads without an error, and its acceptance is low.

Legend: H hidden, V / Vd target / draft vocabulary, L layers of the target.
"""

from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch

from eagle_kit.config.drafts.base import CapturedStatesHeadConfig
from eagle_kit.config.drafts.fused_states import FusedStatesHeadConfig
from eagle_kit.core.errors import UserError, shown
from eagle_kit.drafts.base.initial_weights import check_start_from, check_vocab_size, init_output_layer
from eagle_kit.drafts.base.kind import HeadKind, HeadTensors, InitContext, our_names, scale_final_norm
from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.drafts.files import findings
from eagle_kit.drafts.files.config_json import OWN_EMBEDDING, layer_to_dict, read_layer
from eagle_kit.drafts.files.draft_files import EMBEDDING, OUTPUT, OWN, DraftFiles, open_draft, without_keys
from eagle_kit.drafts.files.findings import OWN_TARGET, Finding
from eagle_kit.drafts.files.structure import (
    canonical_name,
    canonical_names,
    count_layers,
    fuses_states,
    num_layers,
)
from eagle_kit.drafts.files.vocab import complete_map, map_fingerprint
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.config_values import (
    MAX_LAYERS,
    MAX_POSITIONS,
    read_architecture,
    read_flag,
    read_size,
    read_table,
    wrong_value,
)
from eagle_kit.models.layer_configs import read_mla
from eagle_kit.models.targets.target import Target

LLAMA_LAYER = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LATENT_LAYER = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
QWEN_LAYER = ("Eagle3Qwen3ForCausalLM",)
"""vLLM's class for a layer that norms queries and keys, as Qwen3's do."""
ARCHITECTURES = (*LLAMA_LAYER, *LATENT_LAYER, *QWEN_LAYER)
LAYER_TYPES = {"llama": LLAMA_LAYER[0], "qwen3": QWEN_LAYER[0]}
"""``model_type`` of a decoder layer in speculators' configs -> architecture in a flat config."""
LAYERS = "num_hidden_layers"
OUTPUT_WEIGHT = ".self_attn.o_proj.weight"
OUTPUT_BIAS = ".self_attn.o_proj.bias"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
"""Key of ``eagle_config`` for the captured layers."""
CONVENTION = "eagle_aux_hidden_state_convention"
"""Key of ``eagle_config`` for their convention, a key of :data:`CONVENTION_OFFSETS`."""
CONVENTION_OFFSETS = {"input": 0, "output": 1}
"""Convention of layer ids -> number to add for "input of layer i"."""
NORM_BEFORE_FC = "norm_before_fc"
FLAGS = ("fc_norm", "norm_output", "norm_before_residual", NORM_BEFORE_FC)
"""Fields of :class:`~eagle_kit.drafts.eagle3.head.Eagle3Config` that choose norms."""
ATTENTION = "midlayer.self_attn."

Config = TypeVar("Config", bound=Eagle3Config)
Head = TypeVar("Head", bound=Eagle3Head)
Settings = TypeVar("Settings", bound=FusedStatesHeadConfig)


class FusedStatesKind(HeadKind[Config, Head, Settings]):
    """Base of the kinds ``eagle3`` and ``p-eagle``.

    Attributes:
        speculators_model_type: name of the kind in configs of the speculators project.
        has_many_layers: True if a head may have more than one decoder layer.
    """

    speculators_model_type: ClassVar[str]
    has_many_layers: ClassVar[bool] = False
    may_own_embedding = True

    def read_config(self, files: DraftFiles, target: TargetConfig | None = None) -> Config:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`. A config without layer ids, as of the
        first EAGLE-3 heads, gets the default layer ids of ``target``."""
        return self.config_class(**self.read_fields(files, target))

    def read_fields(self, files: DraftFiles, target: TargetConfig | None) -> dict[str, Any]:
        """Fields of the architecture by name. Arguments and errors are those of
        :meth:`read_config`."""
        # The config in the flat layout, and the names of the tensors.
        where = files.where
        config = flatten_config(files.config, where, self.speculators_model_type)
        refuse_unused_layer_ids(config, where)
        names = canonical_names(files)
        architecture = read_architecture(config, where)
        if architecture not in ARCHITECTURES and not fuses_states(files):
            raise UserError(
                f"The draft in {where} has the architecture {architecture}, not EAGLE-3.",
                f"Use one of {', '.join(ARCHITECTURES)}.",
            )

        # The decoder layer. Its parts are read from the names of tensors, or from the config without tensors.
        is_latent = architecture in LATENT_LAYER
        norms_heads = architecture in QWEN_LAYER
        if names:
            is_latent = f"{ATTENTION}kv_a_proj_with_mqa.weight" in names
            norms_heads = f"{ATTENTION}q_norm.weight" in names
        mla = read_mla(config, where) if is_latent else None
        layers = self.num_layers(files, config, target)
        sizes = read_layer(config, where, mla, layers)
        slides = sliding_layers(config, layers, where)
        has_bias = f"{ATTENTION}q_proj.bias" in names or read_flag(config, "attention_bias", where)

        # The captured states that fc reads.
        width = _fc_width(files, names)
        ids = _layer_ids(config, where, target, width)
        target_size = _target_hidden_size(config, width, ids, sizes["hidden_size"], where)

        # The norms. ``use_aux_norm`` is another project's name of fc_norm.
        has_fc_norm = _has_norm(config, names, "fc_norm", "fc_norm.0.weight", where)
        has_fc_norm = has_fc_norm or read_flag(config, "use_aux_norm", where)
        return {
            **sizes,
            "target_hidden_size": target_size,
            "draft_vocab_size": _draft_vocab_size(config, files, names, sizes["vocab_size"]),
            "max_position_embeddings": read_size(
                config, "max_position_embeddings", where, 2048, most=MAX_POSITIONS
            ),
            "aux_layer_ids": ids,
            "fc_norm": has_fc_norm,
            "norm_before_fc": _has_norm(config, names, NORM_BEFORE_FC, "input_norm.weight", where),
            "norm_output": read_flag(config, "norm_output", where),
            "norm_before_residual": read_flag(config, "norm_before_residual", where),
            "attention_bias": has_bias,
            "qk_norm": norms_heads,
            "mla": mla,
            "sliding_window": _sliding_window(config, bool(slides), where),
            "own_embedding": self._owns_embedding(files, names, sizes["hidden_size"], target_size),
            **files.about,
        }

    @staticmethod
    def _owns_embedding(files: DraftFiles, names: dict[str, str], size: int, target_size: int) -> bool:
        """True if a head has its own embedding, as far as sizes and config show it. Whether the
        values are the target's is compared later, in :meth:`with_own_embedding`."""
        has_other_width = EMBEDDING in names and size != target_size
        return has_other_width or read_flag(files.own, OWN_EMBEDDING, files.where)

    def num_layers(self, files: DraftFiles, config: dict[str, Any], target: TargetConfig | None) -> int:
        """Number of decoder layers: counted in the names of tensors, or else as the flat ``config``
        says. Raises UserError for more layers than the kind has."""
        stated = read_size(config, LAYERS, files.where, 1, most=MAX_LAYERS)
        if self.has_many_layers:
            return num_layers(files, stated, (None if target is None else target.num_layers,))
        found = count_layers(files) or stated
        if found != 1:
            raise UserError(
                f"The draft in {files.where} has {found} decoder layers, and an {self.title} here has one.",
                "Use a head of one layer.",
            )
        return found

    def write_config(self, config: Config) -> dict[str, Any]:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        # Norms; norm_before_fc is written only where it is set.
        flags = {flag: getattr(config, flag) for flag in FLAGS if flag != NORM_BEFORE_FC}
        if config.norm_before_fc:
            flags[NORM_BEFORE_FC] = True

        # Captured layers.
        eagle: dict[str, Any] = {}
        if config.aux_layer_ids:
            eagle[LAYER_IDS] = list(config.aux_layer_ids)
        eagle[CONVENTION] = "input"
        eagle["use_aux_hidden_state"] = bool(config.aux_layer_ids)

        return {
            "architectures": [_architecture(config)],
            "model_type": _model_type(config),
            LAYERS: 1,
            "target_hidden_size": config.target_hidden_size,
            **layer_to_dict(config, config.rms_norm_eps),
            "attention_bias": config.attention_bias,
            "draft_vocab_size": config.draft_vocab_size,
            **flags,
            **_window_to_dict(config),
            "eagle_config": eagle,
        }

    def write(self, head: Head, dtype: torch.dtype) -> DraftFiles:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`. ``d2t`` and ``t2d`` are tensors of the
        file, and their fingerprint is in the config."""
        files = super().write(head, dtype)
        files.config[OWN] |= {"vocab_map": map_fingerprint(head.d2t)}
        return DraftFiles(files.config, {**files.tensors, "d2t": head.d2t.cpu(), "t2d": head.t2d.cpu()})

    def names(self, files: DraftFiles) -> dict[str, str]:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        return our_names(((canonical_name(name), name) for name in files.tensors), files.where)

    def sort_tensors(self, files: DraftFiles, config: Config, target: Target | None) -> HeadTensors:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`.

        A bias of ``o_proj`` must be zero and is left out: vLLM and speculators have one wherever
        queries have one. Without ``lm_head.weight`` and with Vd = V the output layer is the
        embedding (``tie_word_embeddings``) or the target's output layer.
        """
        found = super().sort_tensors(files, config, target)
        tensors = found.tensors

        # The bias of o_proj.
        for name in [name for name in tensors if name.endswith(OUTPUT_BIAS)]:
            if bool(tensors.pop(name).any()):
                raise UserError(
                    f"The draft in {files.where} has a bias after its attention ({name}), which our "
                    f"{self.title} does not have.",
                    "Serve it with the engine it was made for.",
                )

        # The draft vocabulary.
        d2t, t2d = complete_map(tensors.pop("d2t", None), tensors.pop("t2d", None), config, files.where)
        fingerprint = files.own.get("vocab_map")
        if fingerprint is not None and fingerprint != map_fingerprint(d2t):
            raise UserError(
                f"The vocabulary map of the draft in {files.where} is not the one it was saved with.",
                "Use config.json and model.safetensors of one checkpoint.",
            )

        # The output layer.
        lacks_output = config.draft_vocab_size == config.vocab_size and OUTPUT not in tensors
        is_tied = read_flag(files.config, "tie_word_embeddings", files.where)
        return found._replace(
            buffers={"d2t": d2t, "t2d": t2d},
            borrows_output=lacks_output and not is_tied,
            ties_output=lacks_output and is_tied,
        )

    def check(self, files: DraftFiles, config: Config, target: TargetConfig) -> list[Finding]:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`. Embedding and captured layers are
        checked too."""
        raw = flatten_config(files.config, files.where, self.speculators_model_type)
        return [
            *super().check(files, config, target),
            *_check_embedding(files, config, target),
            _check_layers(raw, config, target),
        ]

    def start_from_config(self, settings: Settings, target: TargetConfig) -> Config:
        """Architecture of the head in ``head.start_from``, whose training is continued.

        Raises:
            UserError: the head is of another target or kind, or its layer ids do not follow the
                convention "input of layer i".
        """
        folder = str(settings.start_from)
        files = open_draft(folder)
        found = self.read_config(files, target)
        is_foreign = OWN not in files.config and "speculators_model_type" not in files.config
        if is_foreign and layer_id_convention(files) != "input":
            raise UserError(
                f"The head of head.start_from, {folder}, numbers the layers it reads as other projects do.",
                f"Give the folder that eagle-kit import {folder} --out DIR writes.",
            )
        kind = f"{self.name}-mla" if found.mla is not None else self.name
        sizes = (
            ("kind", kind, settings.kind),
            ("target_hidden_size", found.target_hidden_size, target.hidden_size),
            ("vocab_size", found.vocab_size, target.vocab_size),
        )
        check_start_from(folder, sizes)
        return found

    def start_from_head(self, settings: Settings, config: Config, start: InitContext) -> Head:
        """The head in ``head.start_from``, of the architecture ``config``. An embedding that is not
        the target's is the head's own and is trained."""
        assert settings.start_from is not None
        head = self.read(open_draft(settings.start_from), start.target, device=start.device)
        head.config = replace(config, own_embedding=head.config.own_embedding)
        return head

    def joint_layers(self, head: Head) -> list[str]:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        config = head.config
        names = ["qkv_proj"]
        if config.mla is not None:
            first = "q_proj" if config.mla.q_lora_rank is None else "q_a_proj"
            names = [first, "kv_a_proj_with_mqa"]
        return [f"midlayer.self_attn.{name}" for name in names]

    def saved_activation_bytes(self, config: Config, width: int, *, is_gpu: bool) -> tuple[float, float]:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`. On a CPU in half precision both
        projections of latent attention save a copy of their input ``[T, 2 H]``."""
        before_attention, after_attention = super().saved_activation_bytes(config, width, is_gpu=is_gpu)
        if config.mla and width < 4 and not is_gpu:
            before_attention += 2 * width
        return before_attention, after_attention


def sliding_layers(config: dict[str, Any], num_layers: int, where: str) -> tuple[int, ...]:
    """Indices of the layers with a sliding window: by ``layer_types``, or all with
    ``use_sliding_window``. The key ``sliding_window`` alone does not switch a window on. Raises
    UserError for too short ``layer_types``."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or not kinds:
        return tuple(range(num_layers)) if read_flag(config, "use_sliding_window", where) else ()
    if len(kinds) < num_layers:
        raise wrong_value("layer_types", kinds, where, f"{num_layers} kinds of layers")
    return tuple(i for i in range(num_layers) if kinds[i] == "sliding_attention")


def _sliding_window(config: dict[str, Any], slides: bool, where: str) -> int | None:
    """Window of the layers that have one; None where none does."""
    if not slides:
        return None
    if config.get("kv_lora_rank"):
        raise UserError(
            f"The draft in {where} has latent attention with a sliding window, which is not supported.",
            "Use a head without one.",
        )
    return read_size(config, "sliding_window", where, most=MAX_POSITIONS)


def _architecture(config: Eagle3Config) -> str:
    if config.mla is not None:
        return LATENT_LAYER[0]
    return QWEN_LAYER[0] if config.qk_norm else LLAMA_LAYER[0]


def _model_type(config: Eagle3Config) -> str:
    if config.mla is not None:
        return "deepseek_v3"
    return "qwen3" if config.qk_norm else "llama"


def _window_to_dict(config: Eagle3Config) -> dict[str, Any]:
    if config.sliding_window is None:
        return {}
    windows = [variant.limits.window or None for variant in config.variants]
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {"sliding_window": config.sliding_window, "use_sliding_window": True, "layer_types": kinds}


def flatten_config(config: dict[str, Any], where: str, kind: str = "eagle3") -> dict[str, Any]:
    """Convert a ``config.json`` of any layout to the flat layout of EAGLE, SGLang and vLLM.

    Speculators nests the decoder layer in ``transformer_layer_config``. In the flat layout its keys
    are at the top level, and layer ids are in ``eagle_config``.

    Args:
        config: is not changed.
        kind: the ``speculators_model_type`` that is read.

    Raises:
        UserError: another ``speculators_model_type``, a decoder layer that is neither Llama's nor
            Qwen3's, a missing ``norm_before_residual``, or layer ids that contradict each other.
    """
    # A flat config: layer ids of the top level go into eagle_config.
    algorithm = config.get("speculators_model_type")
    if algorithm is None:
        return _with_nested_layer_ids(config, where)

    # A config of speculators: what cannot be converted is refused.
    if algorithm != kind:
        raise UserError(
            f"The draft in {where} is a speculators model of the kind {shown(algorithm)}, which we have no "
            "head for.",
            f"Use one of the kind {kind}.",
        )
    layer = read_table(config, "transformer_layer_config", where)
    model_type = layer.get("model_type")
    if not isinstance(model_type, str) or model_type not in LAYER_TYPES:
        raise UserError(
            f"The draft in {where} has a decoder layer of the kind {shown(model_type)}, which "
            "eagle-kit does not have.",
            "Train it again with --draft-arch llama or qwen3.",
        )
    if "norm_before_residual" not in config:
        raise UserError(
            f"The config.json in {where} does not say norm_before_residual, which speculators then takes for "
            "false and vLLM for true.",
            "Write the one that the head was trained with into it.",
        )
    _check_rope_of_speculators(layer, where)

    # The same config in the flat layout.
    extra = read_table(read_table(config, OWN, where), "extra", where)
    flags = (*FLAGS, "target_hidden_size", "mask_token_id")
    ids = config.get(LAYER_IDS)
    return {
        **extra,
        **layer,
        **{key: config[key] for key in flags if key in config},
        "architectures": [LAYER_TYPES[model_type]],
        "draft_vocab_size": config.get("draft_vocab_size"),
        "eagle_config": _as_input_ids(ids),
        **{key: config[key] for key in ("dtype", "torch_dtype", "eagle_kit") if key in config},
    }


def _check_rope_of_speculators(layer: dict[str, Any], where: str) -> None:
    """Raise UserError for a layer of full attention whose config has another RoPE for sliding
    windows: the trainer of speculators uses that one for both."""
    rope = read_table(layer, "rope_parameters", where)
    trained = rope.get("sliding_attention")
    named = rope.get("full_attention")
    kinds = layer.get("layer_types") or ["full_attention"]
    if "full_attention" in kinds and trained is not None and trained != named:
        raise UserError(
            f"The draft in {where} has a layer of full attention, and speculators trains it with the "
            f"rotation of sliding windows, {shown(trained)}, where its config names {shown(named)}.",
            "Write the rotation that it was trained with as the only one into rope_parameters.",
        )


def _with_nested_layer_ids(config: dict[str, Any], where: str) -> dict[str, Any]:
    """A flat config whose layer ids of the top level, which vLLM reads first, are moved into
    ``eagle_config``. Raises UserError if both places have ids of different layers."""
    ids = config.get(LAYER_IDS)
    if ids is None:
        return config
    eagle = read_table(config, "eagle_config", where)
    nested = eagle.get(LAYER_IDS)
    stated = eagle.get(CONVENTION)
    if nested and _is_list_of_layers(nested) and _is_list_of_layers(ids):
        offsets = list(CONVENTION_OFFSETS.values())
        if stated in CONVENTION_OFFSETS:
            offsets = [CONVENTION_OFFSETS[stated]]
        if not any([layer + offset for layer in nested] == ids for offset in offsets):
            raise UserError(
                f"The config.json in {where} names the layers {shown(ids)} at its top level and "
                f"{shown(nested)} in eagle_config.",
                f"Leave the {LAYER_IDS} that the head was trained with, and remove the others.",
            )
    return {**without_keys(config, (LAYER_IDS,)), "eagle_config": {**eagle, **_as_input_ids(ids)}}


def _as_input_ids(ids: object) -> dict[str, Any]:
    """``eagle_config`` for layer ids at the top level, which vLLM and speculators take for inputs of layers.

    Ids that look like outputs of the default layers get no convention, so that
    :func:`_check_layers` warns.
    """
    if ids is None:
        return {}
    offset = CONVENTION_OFFSETS["output"]
    is_doubtful = _is_list_of_layers(ids) and are_default_layer_ids(ids, offset)  # type: ignore[arg-type]
    return {LAYER_IDS: ids, CONVENTION: None if is_doubtful else "input"}


def _is_list_of_layers(ids: object) -> bool:
    return isinstance(ids, list) and len(ids) <= MAX_LAYERS and all(type(layer) is int for layer in ids)


def refuse_unused_layer_ids(config: dict[str, Any], where: str) -> None:
    """Raise UserError for a head with ``use_aux_hidden_state: false``, which reads the target's
    final hidden states, whose config has layer ids all the same."""
    eagle = read_table(config, "eagle_config", where)
    if eagle.get("use_aux_hidden_state") is False and eagle.get(LAYER_IDS):
        raise UserError(
            f"The draft in {where} names the layers {shown(eagle[LAYER_IDS])} and says that it reads none "
            "(use_aux_hidden_state is false).",
            "Remove the one of both that it was not trained with.",
        )


def _has_norm(config: dict[str, Any], names: dict[str, str], flag: str, tensor: str, where: str) -> bool:
    """True if a head has a norm in front of ``fc``, by its tensor or its config.

    Args:
        flag: key of the config.
        tensor: name of the norm's weight.

    Raises:
        UserError: the tensor exists, and the config says false.
    """
    eagle = read_table(config, "eagle_config", where)
    stated = config.get(flag, eagle.get(flag))
    if stated is not None and type(stated) is not bool:
        raise wrong_value(flag, stated, where, "true or false")
    if tensor in names and stated is False:
        raise UserError(
            f"The draft in {where} has the tensor {names[tensor]}, and its config says {flag} false.",
            f"Set {flag} to true, or remove the tensor if the head was trained without it.",
        )
    return bool(stated) or tensor in names


def _fc_width(files: DraftFiles, names: dict[str, str]) -> int | None:
    """Input size of ``fc``; None if the tensor's shape is not available."""
    shape = files.shape_of(names["fc.weight"]) if "fc.weight" in names else None
    return shape[1] if shape is not None and len(shape) == 2 else None


def _target_hidden_size(
    config: dict[str, Any], width: int | None, ids: tuple[int, ...], hidden_size: int, where: str
) -> int:
    """Hidden size of the target: of the config, or else ``width``, the input size of ``fc``,
    divided by the number of captured layers."""
    default = hidden_size
    if ids and width is not None and width % len(ids) == 0:
        default = width // len(ids)
    return read_size(config, "target_hidden_size", where, default)


def _draft_vocab_size(
    config: dict[str, Any], files: DraftFiles, names: dict[str, str], vocab_size: int
) -> int:
    """Size of the draft vocabulary: of the config, or else the length of ``d2t`` or of
    ``lm_head``."""
    for name in ("d2t", OUTPUT):
        shape = files.shape_of(names[name]) if name in names else None
        if shape:
            vocab_size = shape[0]
            break
    return read_size(config, "draft_vocab_size", files.where, vocab_size)


def _layer_ids(
    config: dict[str, Any], where: str, target: TargetConfig | None, width: int | None
) -> tuple[int, ...]:
    """Captured layers as "input of layer i", converted from the stored convention.

    Args:
        target: its default layers are taken if the config has no layer ids.
        width: input size of ``fc``.

    Returns:
        Layer ids; none for a head that reads the target's final hidden states.
    """
    if read_table(config, "eagle_config", where).get("use_aux_hidden_state") is False:
        return ()
    ids, convention = stored_layer_ids(config, where)

    # No layer ids: the default layers of the target, as many as fc reads.
    if ids is None and target is not None:
        default = target.default_aux_layer_ids
        count, rest = divmod(width or len(default) * target.hidden_size, target.hidden_size)
        if count != len(default) and not rest:
            raise UserError(
                f"The fc of the draft in {where} reads {count} states of the target, and its config does not "
                "say of which layers.",
                f"Add eagle_config.{LAYER_IDS} to its config.json.",
            )
        return default
    if ids is None:
        raise UserError(
            f"The draft in {where} does not say which target layers it reads.",
            f"Load it together with its target, or add eagle_config.{LAYER_IDS} to its config.json.",
        )

    # Layer ids of the config.
    if not ids:
        raise layer_ids_error(ids, where)
    return tuple(layer + CONVENTION_OFFSETS[convention or "input"] for layer in ids)


def stored_layer_ids(config: dict[str, Any], where: str) -> tuple[list[int] | None, str | None]:
    """Layer ids and their convention as a flat config has them, each None if it is missing. Raises
    UserError for values that are no layer ids or no known convention."""
    eagle = read_table(config, "eagle_config", where)
    ids = eagle.get(LAYER_IDS)
    convention = eagle.get(CONVENTION)
    if ids is not None and not (_is_list_of_layers(ids) and all(abs(layer) <= MAX_LAYERS for layer in ids)):
        raise layer_ids_error(ids, where)
    if convention not in (None, *CONVENTION_OFFSETS):
        raise UserError(
            f"The draft in {where} numbers its layers by the unknown convention {shown(convention)}.",
            f'Set {CONVENTION} to "input" or "output".',
        )
    return ids, convention


def layer_ids_without_convention(files: DraftFiles, kind: FusedStatesKind[Any, Any, Any]) -> list[int] | None:
    """Layer ids of a head of ``kind``, as they are stored, if their convention is not stated; else
    None. Raises UserError."""
    flat = flatten_config(files.config, files.where, kind.speculators_model_type)
    eagle = read_table(flat, "eagle_config", files.where)
    ids, convention = stored_layer_ids({"eagle_config": eagle}, files.where)
    return ids if convention is None else None


def layer_ids_error(ids: object, where: str) -> UserError:
    """Error for a value that is not a list of layer ids."""
    return UserError(
        f"The draft in {where} has the layer ids {shown(ids)}.",
        f"Make {LAYER_IDS} a list such as [2, 15, 27].",
    )


def are_default_layer_ids(ids: list[int], offset: int = 0) -> bool:
    """True if ``ids`` plus ``offset`` are 2, L//2, L-3, EAGLE's default for L layers."""
    ids = [layer + offset for layer in ids]
    return len(ids) == 3 and ids[0] == 2 and ids[1] == (ids[2] + 3) // 2


def layer_id_convention(files: DraftFiles) -> str | None:
    """Convention of a head's layer ids, a key of :data:`CONVENTION_OFFSETS`; None if unknown.

    It is stated in the config, or follows from the place of the ids, or from ids of the default
    layers.
    """
    # Ids at the top level are inputs of layers for vLLM and speculators.
    if LAYER_IDS in files.config:
        return "input"
    ids, convention = stored_layer_ids(files.config, files.where)
    if convention is not None:
        return convention
    if not ids:
        return "input"
    for name, offset in CONVENTION_OFFSETS.items():
        if are_default_layer_ids(ids, offset):
            return name
    return None


def _check_layers(raw: dict[str, Any], draft: Eagle3Config, target: TargetConfig) -> Finding:
    """Check layer ids: out of range, missing, or of the default layers in the other convention."""
    eagle = raw.get("eagle_config") or {}
    ids = list(draft.aux_layer_ids)
    count = target.num_layers
    usual = list(target.default_aux_layer_ids)
    if not ids:
        return Finding("ok", "layer ids", "none: the draft reads the target's final states.")
    if not all(0 <= layer <= count for layer in ids):
        cause = f"the draft reads the inputs of layers {ids}, the target has {count} layers."
        return Finding("error", "layer ids", cause, OWN_TARGET)
    if eagle.get(LAYER_IDS) is None:
        cause = (
            f"the draft does not say which layers it reads, so the usual inputs of layers {usual} are taken."
        )
        return Finding("warning", "layer ids", cause, f"Add eagle_config.{LAYER_IDS} to its config.json.")
    if eagle.get(CONVENTION) is None and ids != usual and [layer + 1 for layer in ids] == usual:
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


def _check_embedding(files: DraftFiles, draft: Eagle3Config, target: TargetConfig) -> list[Finding]:
    """Check a head of another hidden size than the target's: it needs an embedding of its own, and
    cannot read final hidden states."""
    if not draft.aux_layer_ids and draft.hidden_size != target.hidden_size:
        return findings.check_sizes({"final states": (draft.hidden_size, target.hidden_size)})
    if EMBEDDING in canonical_names(files) and draft.hidden_size != target.hidden_size:
        return [Finding("ok", "embedding size", f"{draft.hidden_size}, of an embedding of its own.")]
    return findings.check_sizes({"embedding size": (draft.hidden_size, target.hidden_size)})


def describe_inputs(config: Eagle3Config) -> str:
    """The hidden states that a head reads, in words, for its model card. The layers are in ascending order,
    as an export has them."""
    if not config.aux_layer_ids:
        return "the target's final states"
    return f"the inputs of target layers {', '.join(map(str, sorted(config.aux_layer_ids)))}"


def config_overrides(settings: FusedStatesHeadConfig, target: TargetConfig) -> dict[str, Any]:
    """Fields of :class:`Eagle3Config` that ``head:`` of a training config sets. Raises UserError
    for a draft vocabulary or layer ids that the target does not have."""
    check_vocab_size(settings.effective_draft_vocab_size, target)
    flags = ("fc_norm", "norm_before_residual", NORM_BEFORE_FC, "own_embedding")
    fields: dict[str, Any] = {flag: getattr(settings, flag) for flag in flags}
    if settings.intermediate_size is not None:
        fields["intermediate_size"] = settings.intermediate_size
    ids = settings.aux_layer_ids
    if ids is not None:
        if not all(0 <= layer <= target.num_layers for layer in ids):
            raise UserError(
                f"head.aux_layer_ids is {list(ids)}, but the target has layers 0 to {target.num_layers - 1}.",
                f"Name inputs of layers, for example {list(target.default_aux_layer_ids)}.",
            )
        fields["aux_layer_ids"] = ids
    return fields


def init_new_head(head: Head, settings: CapturedStatesHeadConfig, start: InitContext) -> Head:
    """Set the first weights of a new head in place, in fp32.

    These are the draft vocabulary, the output layer, and with ``own_embedding`` a copy of the target's
    embedding. With ``lm_head_init: target`` the output layer is a copy of the target's rows, and the final
    norm is the target's, scaled down (:func:`scale_final_norm`). The published code begins with a random
    output layer and a norm of ones.
    """
    head.to(device=start.device, dtype=torch.float32)
    if head.embed_tokens is not None:
        with torch.no_grad():
            head.embed_tokens.weight.copy_(start.target.embed_tokens.weight)
    init_output_layer(head, settings, start)
    if settings.lm_head_init == "target":
        scale_final_norm(head.norm, start.target)
    return head
