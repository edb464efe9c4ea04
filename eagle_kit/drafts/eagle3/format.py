"""EAGLE-3 heads for SGLang, vLLM, speculators and EAGLE's repository.

Who numbers layers how: EAGLE and vLLM take "input of layer i", as we do. SGLang adds one to what config.json
says, so there it is "output of layer i"; except for DeepSeek's targets, where it adds one only when the first
id is 1. All of them capture in ascending order, whatever the order of the list.
"""

import warnings
from typing import Any

from eagle_kit.drafts.eagle3.fused_states import (
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

MODELOPT_KEYS = ("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm")
DEEPSEEK = ("deepseek_v2", "deepseek_v3", "kimi_k2")
WINDOW_KEYS = ("sliding_window", "use_sliding_window", "layer_types")
TIED = "tie_word_embeddings"
HAS_OWN_EMBEDDING = "it takes the target's embedding, and this head has its own"
SPECULATOR_KEYS = ("target_hidden_size", "draft_vocab_size", *FLAGS)


class FusedStatesFormat(DraftFormat):
    """Between our layout of heads that read fused states and the others'."""

    kind: FusedStatesKind[Any, Any, Any]

    def layout(self, files: DraftFiles) -> tuple[Format | None, str]:
        """See :class:`~eagle_kit.drafts.files.formats.DraftFormat`. Layouts differ in names; what
        matters is how they number layers."""
        config = flatten_config(files.config, files.where)
        names = files.names
        refuse_unused_layer_ids(config, files.where)
        if "speculators_model_type" in files.config:
            return "speculators", f"speculators {files.config.get('speculators_version', '')}".rstrip()
        eagle = config.get("eagle_config") or {}
        ids, convention = eagle.get(LAYER_IDS), layer_id_convention(files)
        is_layers = any(name.removeprefix("model.").startswith("layers.0.") for name in names)
        has_half_a_map = "t2d" not in names and "d2t" in names
        if any(key in eagle for key in MODELOPT_KEYS) or (is_layers and has_half_a_map):
            maker = "ModelOpt (layers.0.*, no t2d)"
        elif is_layers:
            maker = "vLLM (layers.0.*)"
        elif ids:
            maker = "SpecForge or SGLang (midlayer.*, layer ids)"
        else:
            maker = "EAGLE (midlayer.*, no layer ids)"
        if not ids and eagle.get(CONVENTION) is None:
            return "eagle", maker
        if convention is None:
            return None, maker
        return ("vllm" if convention == "input" else "sglang"), f"{maker}, {convention} of layer i"

    def write(self, files: DraftFiles, peer: Format, served: Served) -> DraftFiles:
        """See :class:`~eagle_kit.drafts.files.formats.DraftFormat`."""
        return self.write_fused(self.kind.read_config(files), files, peer, served)

    def write_fused(
        self, config: Eagle3Config, files: DraftFiles, peer: Format, served: Served
    ) -> DraftFiles:
        """:meth:`write` for a head of ``config``."""
        _check(config, files, peer)
        if peer == "sglang" and config.target_hidden_size == config.hidden_size:
            _check_embedding(config, files, served)
        raw, tensors = dict(files.config), dict(files.tensors)
        ids = list(config.aux_layer_ids)
        eagle = {**(raw.get("eagle_config") or {}), CONVENTION: "input"}
        eagle |= {LAYER_IDS: ids} if ids else {}
        if raw.get(TIED) and OUTPUT not in tensors and peer != "sglang":  # which alone reads this key
            embedding = tensors.get(EMBEDDING, served.embedding())
            if embedding is None:
                refuse(peer, "its output layer is the target's embedding", "Give it with --target.")
            tensors[OUTPUT] = embedding.to(tensors["norm.weight"].dtype).clone()
            raw |= {TIED: False, "draft_vocab_size": config.vocab_size}
        if config.draft_vocab_size == config.vocab_size and peer in ("vllm", "speculators", "eagle"):
            if bool(tensors["d2t"].any()):
                refuse(peer, "its draft vocabulary is the target's in another order")
            del tensors["d2t"], tensors["t2d"]
        if config.attention_bias:
            for name in [name for name in tensors if name.endswith(OUTPUT_WEIGHT)]:
                bias = name.removesuffix(OUTPUT_WEIGHT) + OUTPUT_BIAS
                tensors |= zeros_for(tensors, bias, config.hidden_size)
        if peer in ("vllm", "speculators"):
            tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        own = {**raw[OWN], "format": peer}
        match peer:
            case "sglang" if ids:
                numbers, convention = _sglang_ids(config, served)
                eagle |= {LAYER_IDS: numbers, CONVENTION: convention}
            case "vllm":
                # deepseek_v3 would be taken for DeepSeek's own MTP modules
                latent = {"architectures": [LATENT_LAYER[0]], "model_type": "deepseek_v2"}
                plain = {"architectures": [QWEN_LAYER[0] if config.qk_norm else LLAMA_LAYER[1]]}
                raw |= latent if config.mla else plain
            case "speculators":
                return DraftFiles(_speculators(raw, own, config, files, served), tensors, files.metadata)
        return DraftFiles({**raw, "eagle_config": eagle, OWN: own}, tensors, files.metadata)

    def read(self, files: DraftFiles, peer: Format, target: TargetConfig | None) -> DraftFiles:
        """See :class:`~eagle_kit.drafts.files.formats.DraftFormat`; ``target`` gives the usual layer
        ids to a config that names none."""
        raw = flatten_config(files.config, files.where, self.kind.speculators_model_type)
        eagle = dict(raw.get("eagle_config") or {})
        if eagle.get(LAYER_IDS) == []:  # ModelOpt's word for the usual ones
            del eagle[LAYER_IDS]
        if eagle.get(LAYER_IDS) and eagle.get(CONVENTION) is None:
            eagle[CONVENTION] = "output" if peer == "sglang" else "input"
        own = files.own
        is_ours = own.pop("format", None) is not None
        flat = DraftFiles({**raw, "eagle_config": eagle}, files.tensors, files.metadata, files.where)
        config = self.kind.read_config(flat, target)
        found = self.kind.weights(flat, config)
        ours = self.kind.write_config(config)
        if found.borrows_output or found.ties_output:
            ours["draft_vocab_size"] = None
        if found.ties_output:
            ours[TIED] = True
        if is_ours:  # keys that we do not know were ours already
            known = {*ours, NORM_BEFORE_FC, "embed_requires_grad", "eagle_config"}
            ours = without_keys(raw, known) | ours
            ours["eagle_config"] = {**eagle, **own.pop("eagle_config", {}), **ours["eagle_config"]}
            own.pop("extra", None)
            ours[OWN] = {**own, **ours[OWN]}
        ours[OWN] |= {"vocab_map": map_fingerprint(found.buffers["d2t"])}
        tensors = found.tensors | found.copies | found.buffers
        return DraftFiles(
            with_dtype(ours, tensors["midlayer.mlp.gate_proj.weight"]), tensors, files.metadata, files.where
        )


def _check(config: Eagle3Config, files: DraftFiles, peer: Format) -> None:
    """Raise UserError for what ``peer`` would lose or read otherwise."""
    ids = list(config.aux_layer_ids)
    if ids != sorted(set(ids)):
        refuse(
            peer,
            f"it reads the layers {ids}, and {peer} captures each once, in ascending order",
            "Train a head whose head.aux_layer_ids ascend, such as [1, 2, 3].",
        )
    if EMBEDDING not in files.tensors and config.target_hidden_size != config.hidden_size:
        refuse(peer, "it is narrower or wider than its target and brings no embedding of its own")
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
    if config.mla and peer in ("speculators", "eagle"):
        refuse(peer, "it has no EAGLE-3 layer with latent attention", "Export it for sglang or vllm.")
    if config.mla and config.attention_bias:
        refuse(peer, "its latent attention has no biases")
    if config.mla and peer == "sglang" and config.mla.q_lora_rank is None:
        refuse(peer, "its latent attention needs a bottleneck for queries (q_lora_rank)")
    if config.mla and peer == "vllm" and not config.mla.interleaved:
        refuse(peer, "its latent attention rotates pairs that lie side by side (rope_interleave)")
    if peer == "speculators" and config.target_hidden_size != config.hidden_size:
        refuse(peer, "its fc reads states of the head's own width only")
    if peer == "eagle":
        if found := [flag for flag in (*FLAGS, "attention_bias") if getattr(config, flag)]:
            refuse(peer, f"its head has no {found[0]}")
        if config.rope_scaling:
            refuse(peer, f"its RoPE has no scaling of the kind {config.rope_scaling['rope_type']}")
        if not are_default_layer_ids(ids):
            refuse(peer, f"it captures the layers 2, L//2 and L-3, and this head reads {ids}")


def _check_embedding(config: Eagle3Config, files: DraftFiles, served: Served) -> None:
    """Raise UserError for a head of the target's width with an embedding of its own, which SGLang replaces by
    the target's. Warns where nothing tells whether the one that it brings is its own."""
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
    """Raise UserError for a part that only vLLM's and speculators' classes have."""
    parts = {
        "one norm over all captured states in front of fc (norm_before_fc)": config.norm_before_fc,
        "norms of queries and keys, as Qwen3's layers have": config.qk_norm,
        "heads of which it rotates a part (partial_rotary_factor)": config.rotary_dim is not None,
        "a sliding window": config.sliding_window is not None,
    }
    for part, has in parts.items():
        if has:
            refuse(peer, f"it has {part}, and its class has not", "Export it for vllm or speculators.")


def _sglang_ids(config: Eagle3Config, served: Served) -> tuple[list[int], str]:
    """The numbers that SGLang turns into our layers, and the convention that they are then written in."""
    ids = list(config.aux_layer_ids)
    lowered = [layer - 1 for layer in ids]
    if served.config is not None and ids[-1] >= served.config.num_layers:
        refuse("sglang", "it does not capture what the last layer gives")
    if ids[0] == 2:  # the same in all of its targets
        return lowered, "output"
    if not (served.family or config.mla):
        refuse("sglang", "how it numbers layers depends on the target's family", "Give it with --target.")
    if served.family in DEEPSEEK or (config.mla and not served.family):
        if ids[0] == 1:
            refuse("sglang", "its DeepSeek classes cannot be told to capture the input of layer 1 first")
        return ids, "input"
    if ids[0] == 0:
        refuse("sglang", "it has no number for the embedding (the input of layer 0)")
    return lowered, "output"


def _speculators(
    raw: dict[str, Any], own: dict[str, Any], config: Eagle3Config, files: DraftFiles, served: Served
) -> dict[str, Any]:
    """The config of an ``Eagle3SpeculatorConfig``."""
    layer = [*layer_to_dict(config, config.rms_norm_eps), "model_type", "num_hidden_layers", "attention_bias"]
    layer += WINDOW_KEYS
    known = {*layer, *SPECULATOR_KEYS, "architectures", "eagle_config", "dtype", "torch_dtype", OWN}
    if extra := without_keys(raw, known):
        own |= {"extra": extra}
    eagle = without_keys(raw.get("eagle_config") or {}, (LAYER_IDS, CONVENTION, "use_aux_hidden_state"))
    if eagle:
        own |= {"eagle_config": eagle}
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
