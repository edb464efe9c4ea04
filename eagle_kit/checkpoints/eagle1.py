"""Save, load and check EAGLE-1/2 heads: ``fc``, one layer named ``layers.0``, no output layer.

Releases bring a copy of the target's embedding, some of its output layer too; both were frozen in training.
As in SGLang the target's own are used, and a copy that is not the target's is only reported: the head was
made for other weights then. Whether ``fc`` and attention have biases is known by the tensors, since many
configs do not say it.

Ours bring neither copy and are called ``LlamaForCausalLMEagle``, as SGLang wants it. SGLang's ``fc`` always
has a bias, vLLM's never; EAGLE's key for it, ``bias``, is written only where there is none, because SGLang
and vLLM take it for biases of attention.
"""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eagle_kit.checkpoints.copies import is_copy
from eagle_kit.checkpoints.draft import read_draft_tensors
from eagle_kit.checkpoints.layout import ARCHITECTURES as EAGLE3_ARCHITECTURES
from eagle_kit.checkpoints.layout import rope_to_dict
from eagle_kit.checkpoints.validate import OWN_TARGET, Finding, check_name, check_template
from eagle_kit.core.errors import UserError
from eagle_kit.models.config import TargetConfig, read_rope
from eagle_kit.models.heads.eagle1 import Eagle1Config, Eagle1Head
from eagle_kit.models.loading.loader import (
    IGNORED_SUFFIXES,
    check_activation,
    check_tensors,
    read_json,
    read_target_config,
)
from eagle_kit.models.loading.published import FUSED, published_names
from eagle_kit.models.loading.source import resolve_target
from eagle_kit.models.targets.llama import LlamaModel

ARCHITECTURE = "LlamaForCausalLMEagle"
EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
LAYER = "layers.0."
BIASES = {"bias": "fc.bias", "qkv_bias": f"{LAYER}self_attn.q_proj.bias"}
"""EAGLE's config keys, and the tensors that they promise."""


class Eagle1Files(NamedTuple):
    """A checked checkpoint: ``tensors`` by published names without ``layers.0.``, in the dtypes of the file;
    ``copies`` of the target's embedding and output layer, where it brings them."""

    config: Eagle1Config
    tensors: dict[str, torch.Tensor]
    copies: dict[str, torch.Tensor]


def load_eagle1(folder: str | Path, target: LlamaModel | None = None) -> Eagle1Head:
    """Load an EAGLE-1/2 head, in fp32 on the CPU. Warns when it was made for other weights than ``target``'s.

    Args:
        target: whose output layer is used; without it, the head must be bound before it runs.

    Raises:
        UserError: a corrupt file, another size than the target's, or tensors that are missing, unexpected or
            misshapen, by name.
    """
    config, tensors, copies = read_eagle1(folder)
    head = Eagle1Head(config)
    head.load_state_dict(_fuse({name: value.float() for name, value in tensors.items()}))
    head.eval().requires_grad_(False)
    if target is None:
        return head
    ours = target.config
    if (config.hidden_size, config.vocab_size) != (ours.hidden_size, ours.vocab_size):
        raise UserError(
            f"The draft was made for hidden size {config.hidden_size} and vocabulary {config.vocab_size}, "
            f"the target has {ours.hidden_size} and {ours.vocab_size}.",
            OWN_TARGET,
        )
    own = {EMBEDDING: target.embed_tokens.weight, OUTPUT: target.head_weight}
    for name, copy in copies.items():
        if not is_copy(copy, own[name]):
            warnings.warn(
                f"The {name} in {folder} is not the target's, so the draft was trained for other weights. "
                "The target's is used, and fewer tokens may be accepted.",
                stacklevel=2,
            )
    return head.bind(target.lm_head)


def to_published(head: Eagle1Head, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by its published name, on the CPU, in ``dtype``; nothing of the target."""
    rows = _rows(head.config)
    out: dict[str, torch.Tensor] = {}
    for name, parameter in head.named_parameters():
        value, names = parameter.detach().to("cpu", dtype), published_names(name)
        pieces = value.split([rows[part.split(".")[-2]] for part in names]) if len(names) > 1 else [value]
        out |= {_published_name(part): piece.clone() for part, piece in zip(names, pieces, strict=True)}
    return out


def config_to_dict(config: Eagle1Config) -> dict[str, Any]:
    """``config.json`` of a head."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": config.attention_out_bias,
        **({} if config.fc_bias else {"bias": False}),
        **({"qkv_bias": True} if config.attention_bias else {}),
        "mlp_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        **rope_to_dict(config.rope_theta, config.rope_scaling),
        **({"max_position_embeddings": n} if (n := config.max_position_embeddings) else {}),
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "eagle_kit": {"target": config.target, "template_hash": config.template_hash},
    }


def read_eagle1(folder: str | Path) -> Eagle1Files:
    """Read a checkpoint and account for every tensor, without a target.

    Raises:
        UserError: a corrupt file, another kind of draft, or tensors that are missing, unexpected or
            misshapen, by name.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"The draft folder {folder} does not exist.", "Give a folder with config.json and weights."
        )
    raw = read_json(folder / "config.json")
    name = (raw.get("architectures") or ["?"])[0]
    if name in EAGLE3_ARCHITECTURES:
        raise UserError(f"The draft in {folder} is an EAGLE-3 head ({name}).", "Load it as EAGLE3.")
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in read_draft_tensors(folder).items()
        if not name.endswith(IGNORED_SUFFIXES)
    }
    config = read_eagle1_config(raw, folder, set(tensors))
    copies = {name: tensors[name] for name in (EMBEDDING, OUTPUT) if name in tensors}
    tensors.pop(OUTPUT, None)  # unused, and vLLM lets it have fewer rows
    expected = published_shapes(config)
    if EMBEDDING in tensors:
        expected[EMBEDDING] = (config.vocab_size, config.hidden_size)
    check_tensors(tensors, expected, str(folder))
    tensors.pop(EMBEDDING, None)
    return Eagle1Files(config, {name.removeprefix(LAYER): value for name, value in tensors.items()}, copies)


def read_eagle1_config(raw: dict[str, Any], folder: Path, names: set[str]) -> Eagle1Config:
    """The architecture in ``config.json``; ``names`` of the tensors tell which biases there are.

    Raises:
        UserError: more than one layer, another activation, a size that is missing or none, or a bias that the
            config promises and the weights lack.
    """
    check_activation(raw, str(folder))
    if (layers := raw.get("num_hidden_layers", 1)) != 1:
        raise UserError(f"The draft in {folder} has {layers} layers.", "Use an EAGLE head of one layer.")
    for key, tensor in BIASES.items():
        if raw.get(key) and tensor not in names:
            raise UserError(
                f"The config.json in {folder} says {key}, but {tensor} is missing in the weights.",
                "Use config.json and weights of one checkpoint.",
            )
    theta, scaling = read_rope(raw)
    hidden, heads = _size(raw, "hidden_size", folder), _size(raw, "num_attention_heads", folder)
    kv_heads = _size(raw, "num_key_value_heads", folder, heads)
    context, own = raw.get("max_position_embeddings"), raw.get("eagle_kit") or {}
    if heads % kv_heads:
        raise UserError(
            f"The draft in {folder} shares {kv_heads} key-value heads among {heads}.",
            "Copy its config.json again from its source.",
        )
    return Eagle1Config(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_size(raw, "head_dim", folder, hidden // heads),
        intermediate_size=_size(raw, "intermediate_size", folder),
        vocab_size=_size(raw, "vocab_size", folder),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        attention_bias=BIASES["qkv_bias"] in names,
        attention_out_bias=f"{LAYER}self_attn.o_proj.bias" in names,
        fc_bias=BIASES["bias"] in names,
        max_position_embeddings=context if isinstance(context, int) else 0,
        target=own.get("target", ""),
        template_hash=own.get("template_hash", ""),
    )


def validate_eagle1(draft_folder: str | Path, target: str | Path) -> list[Finding]:
    """Check an EAGLE-1/2 head against a target: weights, sizes, vocabulary, context, RoPE; template and name
    where they are recorded, as ours are.

    Args:
        draft_folder: a checkpoint; when it cannot be read, that is the only finding.
        target: anything that ``resolve_target`` knows; only its config is read.

    Raises:
        UserError: the target cannot be found or read.
    """
    target_folder = resolve_target(target)
    theirs = read_target_config(target_folder)
    try:
        config, _, copies = read_eagle1(draft_folder)
    except UserError as error:
        return [Finding("error", "checkpoint", error.cause, error.remedy)]
    findings = [
        Finding("ok", subject, f"{ours}, as the target's.")
        if ours == wanted
        else Finding("error", subject, f"the draft was made for {ours}, the target has {wanted}.", OWN_TARGET)
        for subject, ours, wanted in (
            ("hidden size", config.hidden_size, theirs.hidden_size),
            ("vocabulary", config.vocab_size, theirs.vocab_size),
        )
    ]
    findings.append(_context(read_json(Path(draft_folder) / "config.json"), theirs))
    same = (config.rope_theta, config.rope_scaling) == (theirs.rope_theta, theirs.rope_scaling)
    rope = f"base {config.rope_theta:g}, {'as' if same else 'other than'} the target's."
    findings.append(Finding("ok", "rope", rope))
    if config.target:
        findings += [check_template(config, target_folder), check_name(config, target_folder)]
    brought = f" It brings {' and '.join(copies)}; the target's are used." if copies else ""
    findings.append(Finding("ok", "weights", f"every tensor is there and has its shape.{brought}"))
    return findings


def _context(raw: dict[str, Any], target: TargetConfig) -> Finding:
    ours, theirs = raw.get("max_position_embeddings"), target.max_position_embeddings
    if isinstance(ours, int) and ours >= theirs:
        return Finding("ok", "context", f"{ours} positions, enough for the target's {theirs}.")
    said = "does not say how many positions it knows" if ours is None else f"says {ours} positions"
    return Finding(
        "warning",
        "context",
        f"the draft {said}, the target {theirs}.",
        "Expect fewer accepted tokens behind the length of its training.",
    )


def _size(raw: dict[str, Any], key: str, folder: Path, default: int | None = None) -> int:
    """A positive whole number of the config; ``default`` where it is absent or null."""
    value = default if raw.get(key) is None else raw[key]
    if value is None:
        raise UserError(f"The draft's config.json in {folder} has no {key}.", "Copy it from its source.")
    if type(value) is not int or value < 1:
        raise UserError(
            f"The draft's config.json in {folder} says {key} {value!r}.", "Copy it again from its source."
        )
    return value


def published_shapes(config: Eagle1Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter that a checkpoint must have."""
    with torch.device("meta"):
        head = Eagle1Head(config)
    rows = _rows(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in head.named_parameters():
        for part in published_names(name):
            count = rows.get(part.split(".")[-2], parameter.shape[0])
            shapes[_published_name(part)] = (count, *parameter.shape[1:])
    return shapes


def _rows(config: Eagle1Config) -> dict[str, int]:
    """Rows of the published matrices that ours stack."""
    kv = config.num_kv_heads * config.head_dim
    rows = {"q_proj": config.num_heads * config.head_dim, "k_proj": kv, "v_proj": kv}
    return rows | {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}


def _published_name(part: str) -> str:
    return part if part.startswith("fc.") else LAYER + part


def _fuse(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Complete published tensors -> our state dict."""
    state = dict(tensors)
    for module, parts in FUSED.items():
        for leaf in ("weight", "bias"):
            if f"{parts[0]}.{leaf}" in state:
                state[f"{module}.{leaf}"] = torch.cat([state.pop(f"{part}.{leaf}") for part in parts])
    return state
