"""Target weights from safetensors, every tensor accounted for."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eagle_kit.core.errors import UserError
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.layers import Rope
from eagle_kit.models.llama import LlamaModel
from eagle_kit.models.source import resolve_target

FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Our fused parameters and the published ones they are made of, in order."""
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises UserError when it is missing or not one."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"The file {path} is missing.", "Give a complete model folder.") from None
    except ValueError as error:
        raise UserError(
            f"The file {path} is not valid JSON ({error}).", "Copy it again from its source."
        ) from None
    if not isinstance(value, dict):
        raise UserError(f"The file {path} does not hold a JSON object.", "Copy it again from its source.")
    return value


def read_target_config(folder: Path) -> TargetConfig:
    """The config of a model folder; ``generation_config.json`` decides on end tokens where it names some.

    Raises:
        UserError: an architecture, activation or quantisation that we do not run, or a missing key.
    """
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = read_json(generation).get("eos_token_id")
        config["eos_token_id"] = config.get("eos_token_id") if eos is None else eos
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "an unknown method")
        raise UserError(
            f"The weights in {folder} are quantised ({method}), which cannot be run here.",
            "Use the model's unquantised checkpoint.",
        )
    check_activation(config, str(folder))
    try:
        return TargetConfig.from_dict(config)
    except KeyError as key:
        raise UserError(
            f"The config.json in {folder} has no {key}.", "Copy it again from its source."
        ) from None


def check_activation(config: dict[str, Any], where: str) -> None:
    """Raises UserError when ``hidden_act`` is something else than SwiGLU's SiLU."""
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise UserError(
            f"The config in {where} asks for the activation {activation!r}, which is not supported.",
            "Use a model with hidden_act silu.",
        )


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file. Raises UserError when it is missing, truncated or corrupt."""
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise UserError(f"The file {path} is missing.", "Give a complete model folder.") from None
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"The file {path} is corrupt or truncated ({reason[0]}).", "Copy or download it again."
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, by its index when it has one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise UserError(f"The index {index} names no shards.", "Copy it again from its source.")
        return [folder / name for name in sorted(set(shards.values()))]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    raise UserError(
        f"The folder {folder} has no model.safetensors and no index of shards.",
        "Convert its weights to safetensors.",
    )


def load_target(
    name_or_path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> LlamaModel:
    """A frozen target in eval mode.

    Args:
        name_or_path: whatever :func:`~eagle_kit.models.source.resolve_target` knows.
        dtype: of the weights in memory; RoPE frequencies stay fp32.

    Raises:
        UserError: a file that is missing, corrupt or truncated; every missing, unexpected or misshapen tensor
            by name.
    """
    folder = resolve_target(str(name_or_path))
    with torch.device("meta"):
        model = LlamaModel(read_target_config(folder))
    config = model.config
    published = read_published(folder)
    if config.tie_word_embeddings:
        published.pop("lm_head.weight", None)
    check_tensors(published, published_shapes(model), str(folder))
    model.rope = Rope(config.head_dim, config.rope_theta, config.rope_scaling).to(device)
    for name, _ in list(model.named_parameters()):
        parts = [published.pop(part).to(device=device, dtype=dtype) for part in published_names(name)]
        value = torch.cat(parts) if len(parts) > 1 else parts[0]
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(value, requires_grad=False))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model.eval().requires_grad_(False)


def read_published(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a model folder by its published name without ``model.``. Raises UserError."""
    published: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        for name, tensor in read_safetensors(path).items():
            if not name.endswith(IGNORED_SUFFIXES):
                published[name.removeprefix("model.")] = tensor
    return published


def published_names(name: str) -> list[str]:
    """The published tensors behind one of our parameters, in the order they are stacked."""
    for fused, parts in FUSED.items():
        if f"{fused}." in name:
            return [name.replace(fused, part) for part in parts]
    return [name]


def published_shapes(model: LlamaModel) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the published checkpoint must have."""
    config = model.config
    sizes = {
        "q_proj": config.num_heads * config.head_dim,
        "k_proj": config.num_kv_heads * config.head_dim,
        "v_proj": config.num_kv_heads * config.head_dim,
        "gate_proj": config.intermediate_size,
        "up_proj": config.intermediate_size,
    }
    shapes = {}
    for name, parameter in model.named_parameters():
        for part in published_names(name):
            rows = sizes.get(part.split(".")[-2], parameter.shape[0])
            shapes[part] = (rows, *parameter.shape[1:])
    return shapes


def check_tensors(found: dict[str, torch.Tensor], expected: dict[str, tuple[int, ...]], where: str) -> None:
    """Raises UserError naming tensors that are missing, unexpected, misshapen or not floating point."""
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is unexpected" for name in found if name not in expected]
    problems += [
        f"{name} has shape {list(found[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name].shape) != tuple(shape)
    ]
    problems += [
        f"{name} holds {str(found[name].dtype).removeprefix('torch.')} instead of floating-point numbers"
        for name in expected
        if name in found and not found[name].is_floating_point()
    ]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise UserError(
            f"The weights in {where} do not fit their config: {shown}.",
            "Use a complete, matching checkpoint.",
        )
