"""Conversion of EAGLE-3 heads to and from the layouts of SGLang, vLLM, speculators and EAGLE.

Tensor layouts differ in names (``midlayer.*`` or ``layers.0.*``) and in the presence of ``t2d``. The
meaning of a layer id differs:

    EAGLE, vLLM, speculators    input of layer i, as in this package
    SGLang                      output of layer i: SGLang adds 1 to each id
    SGLang, DeepSeek targets    input of layer i, unless the first id is 1: then SGLang adds 1 to each id

All of them capture layers in ascending order, whatever the order of the list. A head of another order
is written with its columns in ascending order.
"""

import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from eagle_kit.drafts.eagle3.fused_states_kind import (
    CONVENTION,
    FLAGS,
    LATENT_LAYER,
    LAYER_IDS,
    LLAMA_LAYER,
    NORM_BEFORE_FC,
    OUTPUT_BIAS,
    OUTPUT_WEIGHT,
    QWEN_LAYER,
    FusedStatesKind,
    are_default_layer_ids,
    flatten_config,
    layer_id_convention,
    refuse_unused_layer_ids,
)
from eagle_kit.drafts.eagle3.head import Eagle3Config
from eagle_kit.drafts.files.config_json import layer_to_dict
from eagle_kit.drafts.files.copies import is_copy
from eagle_kit.drafts.files.draft_files import EMBEDDING, OUTPUT, OWN, DraftFiles, without_keys
from eagle_kit.drafts.files.formats import (
    CHECKED_VERSIONS,
    DraftFormat,
    Format,
    Served,
    refuse,
    with_dtype,
    zeros_for,
)
from eagle_kit.drafts.files.vocab import map_fingerprint
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.loading.fp8_layout import read_fp8_layout
from eagle_kit.models.loading.loader import check_tensors

MODELOPT_KEYS = ("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm")
DEEPSEEK = ("deepseek_v2", "deepseek_v3", "kimi_k2")
WINDOW_KEYS = ("sliding_window", "use_sliding_window", "layer_types")
TIED = "tie_word_embeddings"
HAS_OWN_EMBEDDING = "it takes the target's embedding, and this head has its own"
FC = "fc.weight"
READS_CAPTURED = (FC, "input_norm.weight", "mask_hidden")
"""Tensors whose columns are those of the captured states side by side, ``[..., L * Ht]``."""
FC_NORM = "fc_norm.{}.weight"
SPECULATOR_KEYS = ("target_hidden_size", "draft_vocab_size", *FLAGS)


class FusedStatesFormat(DraftFormat):
    """Layouts of heads of a :class:`~eagle_kit.drafts.eagle3.fused_states_kind.FusedStatesKind`."""

    kind: FusedStatesKind[Any, Any, Any]

    def layout(self, files: DraftFiles) -> tuple[Format | None, str]:
        """See :class:`~eagle_kit.drafts.files.formats.DraftFormat`. The convention of layer ids decides
        between the layouts of vLLM and SGLang."""
        config = flatten_config(files.config, files.where)
        names = files.names
        refuse_unused_layer_ids(config, files.where)
        if "speculators_model_type" in files.config:
            return "speculators", f"speculators {files.config.get('speculators_version', '')}".rstrip()
        eagle = config.get("eagle_config") or {}
        ids = eagle.get(LAYER_IDS)
        convention = layer_id_convention(files)

        # Who wrote the files: by names of tensors and keys of the config.
        is_layers = any(name.removeprefix("model.").startswith("layers.0.") for name in names)
        lacks_t2d = "t2d" not in names and "d2t" in names
        if any(key in eagle for key in MODELOPT_KEYS) or (is_layers and lacks_t2d):
            maker = "ModelOpt (layers.0.*, no t2d)"
        elif is_layers:
            maker = "vLLM (layers.0.*)"
        elif ids:
            maker = "SpecForge or SGLang (midlayer.*, layer ids)"
        else:
            maker = "EAGLE (midlayer.*, no layer ids)"

        # Which layout it is: by the convention of the layer ids.
        if not ids and eagle.get(CONVENTION) is None:
            return "eagle", maker
        if convention is None:
            return None, maker
        peer: Format = "vllm" if convention == "input" else "sglang"
        return peer, f"{maker}, {convention} of layer i"

    def write(self, files: DraftFiles, peer: Format, served: Served) -> DraftFiles:
        """See :class:`~eagle_kit.drafts.files.formats.DraftFormat`."""
        return self.write_fused(self.kind.read_config(files), files, peer, served)

    def write_fused(
        self, config: Eagle3Config, files: DraftFiles, peer: Format, served: Served
    ) -> DraftFiles:
        """:meth:`write` for a head of the architecture ``config``."""
        # Refuse a head that the peer would load with another meaning.
        if len(set(config.aux_layer_ids)) == len(config.aux_layer_ids):
            config, files = _with_ascending_layers(config, files, peer)
        _check(config, files, peer)
        if peer == "sglang" and config.target_hidden_size == config.hidden_size:
            _check_embedding(config, files, served)
        raw = dict(files.config)
        tensors = dict(files.tensors)

        # Layer ids with their convention.
        ids = list(config.aux_layer_ids)
        eagle = {**(raw.get("eagle_config") or {}), CONVENTION: "input"}
        if ids:
            eagle[LAYER_IDS] = ids

        # A tied output layer: only SGLang reads tie_word_embeddings, the others need the tensor.
        if raw.get(TIED) and OUTPUT not in tensors and peer != "sglang":
            embedding = tensors.get(EMBEDDING, served.embedding())
            if embedding is None:
                refuse(peer, "its output layer is the target's embedding", "Give it with --target.")
            tensors[OUTPUT] = embedding.to(tensors["norm.weight"].dtype).clone()
            raw |= {TIED: False, "draft_vocab_size": config.vocab_size}

        # A draft vocabulary of all target tokens needs no map.
        if config.draft_vocab_size == config.vocab_size and peer in ("vllm", "speculators", "eagle"):
            if bool(tensors["d2t"].any()):
                refuse(peer, "its draft vocabulary is the target's in another order")
            del tensors["d2t"], tensors["t2d"]

        # Biases: the peers have one of o_proj wherever queries have one.
        if config.attention_bias:
            for name in [name for name in tensors if name.endswith(OUTPUT_WEIGHT)]:
                bias = name.removesuffix(OUTPUT_WEIGHT) + OUTPUT_BIAS
                tensors |= zeros_for(tensors, bias, config.hidden_size)

        # Names of tensors, and the config.
        if peer in ("vllm", "speculators"):
            tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        own = {**raw[OWN], "format": peer}
        match peer:
            case "sglang" if ids:
                numbers, convention = _sglang_ids(config, served)
                eagle |= {LAYER_IDS: numbers, CONVENTION: convention}
            case "vllm":
                # vLLM takes model_type deepseek_v3 for DeepSeek's own MTP modules.
                latent = {"architectures": [LATENT_LAYER[0]], "model_type": "deepseek_v2"}
                plain = {"architectures": [QWEN_LAYER[0] if config.qk_norm else LLAMA_LAYER[1]]}
                raw |= latent if config.mla else plain
            case "speculators":
                return DraftFiles(_speculators(raw, own, config, files, served), tensors, files.metadata)
        return DraftFiles({**raw, "eagle_config": eagle, OWN: own}, tensors, files.metadata)

    def read(self, files: DraftFiles, peer: Format, target: TargetConfig | None) -> DraftFiles:
        """See :class:`~eagle_kit.drafts.files.formats.DraftFormat`. A config without layer ids gets the
        default layer ids of ``target``."""
        # Layer ids with a stated convention. ModelOpt writes an empty list for the default layers.
        raw = flatten_config(files.config, files.where, self.kind.speculators_model_type)
        eagle = dict(raw.get("eagle_config") or {})
        if eagle.get(LAYER_IDS) == []:
            del eagle[LAYER_IDS]
        if eagle.get(LAYER_IDS) and eagle.get(CONVENTION) is None:
            eagle[CONVENTION] = "output" if peer == "sglang" else "input"

        # The architecture, the tensors, and the config of our layout.
        own = files.own
        is_exported = own.pop("format", None) is not None
        flat = DraftFiles({**raw, "eagle_config": eagle}, files.tensors, files.metadata, files.where)
        config = self.kind.read_config(flat, target)
        found = self.kind.weights(flat, config)
        ours = self.kind.write_config(config)
        if found.borrows_output or found.ties_output:
            ours["draft_vocab_size"] = None
        if found.ties_output:
            ours[TIED] = True

        # A head that this package exported: its other keys are restored.
        if is_exported:
            known = {*ours, NORM_BEFORE_FC, "embed_requires_grad", "eagle_config"}
            ours = without_keys(raw, known) | ours
            ours["eagle_config"] = {**eagle, **own.pop("eagle_config", {}), **ours["eagle_config"]}
            own.pop("extra", None)
            ours[OWN] = {**own, **ours[OWN]}
        ours[OWN] |= {"vocab_map": map_fingerprint(found.buffers["d2t"])}

        tensors = found.tensors | found.copies | found.buffers
        ours = with_dtype(ours, tensors["midlayer.mlp.gate_proj.weight"])
        return DraftFiles(ours, tensors, files.metadata, files.where)


def _with_ascending_layers(
    config: Eagle3Config, files: DraftFiles, peer: Format
) -> tuple[Eagle3Config, DraftFiles]:
    """The same head with its captured layers in ascending order, as the peers capture them.

    The blocks of Ht columns of :data:`READS_CAPTURED` and the norms of the layers get the same order. The
    given files are not changed.

    Raises:
        UserError: a tensor is missing or has other columns, or an fp8 scale is of columns of two layers.
    """
    ids = list(config.aux_layer_ids)
    order = sorted(range(len(ids)), key=ids.__getitem__)
    if order == list(range(len(ids))):
        return config, files

    # Tensors whose columns are in blocks, and how wide the blocks are.
    size = config.target_hidden_size
    widths = {name: size for name in READS_CAPTURED if name in files.tensors}
    _check_widths(config, files, widths)
    layout = read_fp8_layout(files.config, files.where)
    if layout is not None and layout.block is not None and f"{FC}{layout.suffix}" in files.tensors:
        columns = layout.block[1]
        if columns < size * len(ids):  # one scale of all columns stays
            if size % columns:
                refuse(
                    peer,
                    f"it reads the layers {ids}, and scales of {FC} in fp8 are of two layers at once",
                    "Give --dtype bfloat16.",
                )
            widths[f"{FC}{layout.suffix}"] = size // columns

    tensors = dict(files.tensors)
    for name, width in widths.items():
        blocks = tensors[name].split(width, -1)
        tensors[name] = torch.cat([blocks[i] for i in order], -1)
    if config.fc_norm:
        for new, old in enumerate(order):
            tensors[FC_NORM.format(new)] = files.tensors[FC_NORM.format(old)]
    ordered = replace(config, aux_layer_ids=tuple(ids[i] for i in order))
    return ordered, replace(files, tensors=tensors)


def _check_widths(config: Eagle3Config, files: DraftFiles, names: Iterable[str]) -> None:
    """Raise UserError if the tensors ``names`` do not read the captured states, or a norm is missing."""
    width = config.target_hidden_size * len(config.aux_layer_ids)
    found = {name: files.tensors[name] for name in (FC, *names) if name in files.tensors}
    expected = {name: (*tensor.shape[:-1], width) for name, tensor in found.items()}
    expected.setdefault(FC, (config.hidden_size, width))
    if config.fc_norm:
        norms = [FC_NORM.format(i) for i in range(len(config.aux_layer_ids))]
        found |= {name: files.tensors[name] for name in norms if name in files.tensors}
        expected |= dict.fromkeys(norms, (config.target_hidden_size,))
    check_tensors(found, expected, files.where)


def _check(config: Eagle3Config, files: DraftFiles, peer: Format) -> None:
    """Raise UserError for a part of the head that ``peer`` does not have or reads differently."""
    # Captured layers and hidden sizes.
    ids = list(config.aux_layer_ids)
    if ids != sorted(set(ids)):
        refuse(
            peer,
            f"it reads the layers {ids}, and {peer} captures each once",
            "Train a head whose head.aux_layer_ids differ, such as [1, 2, 3].",
        )
    if EMBEDDING not in files.tensors and config.target_hidden_size != config.hidden_size:
        refuse(peer, "it is narrower or wider than its target and brings no embedding of its own")

    # Norms and attention of the decoder layer.
    no_residual = "its class takes the residual before hidden_norm (norm_before_residual)"
    if peer == "sglang" and config.norm_before_residual:
        refuse(peer, no_residual)
    if peer in ("sglang", "eagle"):
        _check_plain(config, peer)
    if peer in ("speculators", "eagle") and not ids:
        refuse(peer, "it reads the target's final states, and this class captured ones")
    if peer == "speculators" and config.fc_norm and config.norm_before_fc:
        refuse(peer, "its class has one norm of all states or one of each, and this head has both")
    if peer == "sglang" and config.attention_bias:
        refuse(peer, "its EAGLE-3 classes have no biases of attention")

    # Latent attention.
    if config.mla and peer in ("speculators", "eagle"):
        refuse(peer, "it has no EAGLE-3 layer with latent attention", "Export it for sglang or vllm.")
    if config.mla and config.attention_bias:
        refuse(peer, "its latent attention has no biases")
    if config.mla and peer == "sglang" and config.mla.q_lora_rank is None:
        refuse(peer, "its latent attention needs a bottleneck for queries (q_lora_rank)")
    if config.mla and peer == "vllm" and not config.mla.interleaved:
        refuse(peer, "its latent attention rotates pairs that lie side by side (rope_interleave)")

    # Parts that one class alone lacks.
    if peer == "speculators" and config.target_hidden_size != config.hidden_size:
        refuse(peer, "its fc reads states of the head's own width only")
    if peer == "eagle":
        found = [flag for flag in (*FLAGS, "attention_bias") if getattr(config, flag)]
        if found:
            refuse(peer, f"its head has no {found[0]}")
        if config.rope_scaling:
            refuse(peer, f"its RoPE has no scaling of the kind {config.rope_scaling['rope_type']}")
        if not are_default_layer_ids(ids):
            refuse(peer, f"it captures the layers 2, L//2 and L-3, and this head reads {ids}")


def _check_embedding(config: Eagle3Config, files: DraftFiles, served: Served) -> None:
    """Raise UserError for a head with an embedding of its own and the target's hidden size: SGLang reads
    the target's embedding. Warns about an embedding that cannot be compared with the target's."""
    if config.own_embedding:
        refuse("sglang", HAS_OWN_EMBEDDING)
    brought = files.tensors.get(EMBEDDING)
    if brought is None:
        return
    theirs = served.embedding()
    if theirs is None:
        warnings.warn(
            f"SGLang reads the target's embedding in place of the {EMBEDDING} that this draft brings. "
            "Give the target with --target to compare them.",
            stacklevel=2,
        )
    elif not is_copy(brought, theirs):
        refuse("sglang", HAS_OWN_EMBEDDING)


def _check_plain(config: Eagle3Config, peer: Format) -> None:
    """Raise UserError for a part that only the classes of vLLM and speculators have."""
    parts = {
        "one norm over all captured states in front of fc (norm_before_fc)": config.norm_before_fc,
        "norms of queries and keys, as Qwen3's layers have": config.qk_norm,
        "heads of which it rotates a part (partial_rotary_factor)": config.rotary_dim is not None,
        "a sliding window": config.sliding_window is not None,
    }
    for part, has in parts.items():
        if has:
            refuse(peer, f"it has {part}, and its class does not", "Export it for vllm or speculators.")


def _sglang_ids(config: Eagle3Config, served: Served) -> tuple[list[int], str]:
    """Layer ids that SGLang converts to the head's layers, and the convention to state beside them."""
    ids = list(config.aux_layer_ids)
    lowered = [layer - 1 for layer in ids]
    if served.config is not None and ids[-1] >= served.config.num_layers:
        refuse("sglang", "it does not capture what the last layer gives")

    # The default layers: SGLang adds 1 for every target.
    if ids[0] == 2:
        return lowered, "output"

    # DeepSeek's targets.
    if not (served.family or config.mla):
        refuse("sglang", "how it numbers layers depends on the target's family", "Give it with --target.")
    if served.family in DEEPSEEK or (config.mla and not served.family):
        if ids[0] == 1:
            refuse("sglang", "its DeepSeek classes cannot be told to capture the input of layer 1 first")
        return ids, "input"

    # Other targets.
    if ids[0] == 0:
        refuse("sglang", "it has no number for the embedding (the input of layer 0)")
    return lowered, "output"


def _speculators(
    raw: dict[str, Any], own: dict[str, Any], config: Eagle3Config, files: DraftFiles, served: Served
) -> dict[str, Any]:
    """The ``config.json`` of an ``Eagle3SpeculatorConfig``."""
    # Keys of the decoder layer, and keys that speculators does not have, which are kept under our own.
    layer = [*layer_to_dict(config, config.rms_norm_eps), "model_type", "num_hidden_layers", "attention_bias"]
    layer += WINDOW_KEYS
    known = {*layer, *SPECULATOR_KEYS, "architectures", "eagle_config", "dtype", "torch_dtype", OWN}
    if extra := without_keys(raw, known):
        own |= {"extra": extra}
    eagle = without_keys(raw.get("eagle_config") or {}, (LAYER_IDS, CONVENTION, "use_aux_hidden_state"))
    if eagle:
        own |= {"eagle_config": eagle}

    # The default proposal: as many tokens as the first measured shape has steps, or 4.
    shapes = files.metadata.get("accept_length") or {}
    steps = next((int(shape.split(",")[0]) for shape in shapes if shape[:1].isdigit()), 4)
    proposal = {"proposal_type": "greedy", "speculative_tokens": steps}
    proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier = {"name_or_path": served.name or config.target, "architectures": list(served.architectures)}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": CHECKED_VERSIONS["speculators"],
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": verifier,
        },
        "transformer_layer_config": {key: raw[key] for key in layer if key in raw and key != OWN},
        **{key: raw[key] for key in SPECULATOR_KEYS if key in raw},
        "draft_vocab_size": config.draft_vocab_size,
        LAYER_IDS: list(config.aux_layer_ids),
        NORM_BEFORE_FC: config.norm_before_fc,
        "embed_requires_grad": config.own_embedding,
        "tie_word_embeddings": False,
        **{key: raw[key] for key in ("dtype", "torch_dtype") if key in raw},
        OWN: own,
    }
