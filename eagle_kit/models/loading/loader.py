"""Loading of target weights from safetensors, with a check of every tensor."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from eagle_kit.core.errors import UserError, first_line, shown
from eagle_kit.core.files import COPY_AGAIN, check_name, read_object, read_text
from eagle_kit.models.blocks.layers import Rope
from eagle_kit.models.bridge.config import BridgedConfig, read_bridged_config
from eagle_kit.models.bridge.load import load_bridged, load_ends
from eagle_kit.models.config import FAMILIES, TargetConfig, text_config
from eagle_kit.models.config_values import read_architecture, read_table
from eagle_kit.models.loading.arrangement import arrangement_of
from eagle_kit.models.loading.fp8_layout import UNUSED, FP8Layout, read_fp8_layout
from eagle_kit.models.loading.published import (
    Part,
    expected_shapes,
    is_mtp,
    published_parts,
    take,
)
from eagle_kit.models.loading.quantize import Quantization, fill_fp8
from eagle_kit.models.loading.qwen_hybrid import is_exact
from eagle_kit.models.loading.source import resolve_target
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.models.targets.target import Target

SAMPLE = 4096
"""Bytes hashed of each tensor in a fingerprint."""
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", *UNUSED)
EXACT_SUFFIXES = ("e_score_correction_bias",)
"""Suffixes of parameters that stay in fp32: rounded, they would choose other experts."""
LAYER_NAME = re.compile(r"(^|\.)(layers|h|blocks|decoder_layers)\.\d+\.")
_Model = TypeVar("_Model", bound=torch.nn.Module)


def read_target_config(folder: Path) -> TargetConfig:
    """Read the config of a model folder; end tokens of ``generation_config.json`` take precedence.

    Raises:
        UserError: an unsupported architecture, activation or quantisation, or a value that is missing or
            impossible.
    """
    config = read_raw_config(folder)
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = read_object(generation).get("eos_token_id")
        config["eos_token_id"] = config.get("eos_token_id") if eos is None else eos
    if read_architecture(config, str(folder)) in FAMILIES:
        read_fp8_layout(config, str(folder))
        check_activation(text_config(config, str(folder)), str(folder))
    return parse_target(config, str(folder))


def read_raw_config(folder: Path) -> dict[str, Any]:
    """``config.json``, with the quantisation that ModelOpt writes into a file of its own."""
    config, beside = read_object(folder / "config.json"), folder / "hf_quant_config.json"
    if not config.get("quantization_config") and beside.is_file():
        given = read_object(beside).get("quantization")
        algorithm = given.get("quant_algo") if isinstance(given, dict) else given
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": algorithm}
    return config


def parse_target(config: dict[str, Any], where: str = "the model's folder") -> TargetConfig:
    """Parse a Hugging Face config: of an architecture that is written here, or bridged."""
    if read_architecture(config, where) in FAMILIES:
        return TargetConfig.from_dict(config, where)
    return read_bridged_config(config, where)


def check_activation(config: dict[str, Any], where: str) -> None:
    """Raise UserError unless ``hidden_act`` is SwiGLU's SiLU."""
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise UserError(
            f"The config in {where} asks for the activation {shown(activation)}, which is not supported.",
            "Use a model with hidden_act silu.",
        )


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open a file whose tensors are read by name. Raises UserError, now or while they are read, when it is
    missing, truncated or corrupt, or is no file, such as a pipe, which would never end."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file.", "Give a complete model folder.")
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except UserError:  # of what is done with the tensors
        raise
    except FileNotFoundError:
        raise UserError(f"The file {path} is missing.", "Give a complete model folder.") from None
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        reason = first_line(error)
        raise UserError(
            f"The file {path} is corrupt or truncated ({reason}).", "Copy or download it again."
        ) from error


def read_safetensors(path: Path, wanted: Callable[[str], bool] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a file, all or those with ``wanted`` names. Raises UserError as
    :func:`open_safetensors`."""
    with open_safetensors(path) as file:
        names = [name for name in file.keys() if wanted is None or wanted(name)]  # noqa: SIM118
        return {name: file.get_tensor(name) for name in names}


def target_fingerprint(folder: Path) -> str:
    """Hash of a model folder's config and weights: the tensor table of each file and the first bytes of every
    tensor, so that a fine-tuned copy with the same names and sizes has another fingerprint. Raises UserError
    for a corrupt file."""
    digest = hashlib.sha256(read_text(folder / "config.json").encode())
    for path in sorted(folder.glob("*.safetensors")):
        with open_safetensors(path), path.open("rb") as file:  # which checks the table of tensors
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            size = file.read(8)
            header = file.read(int.from_bytes(size, "little"))
            digest.update(header)
            tensors = {name: about for name, about in json.loads(header).items() if name != "__metadata__"}
            for name in sorted(tensors):
                start, stop = tensors[name]["data_offsets"]
                file.seek(8 + len(header) + start)
                digest.update(file.read(min(SAMPLE, stop - start)))
    return digest.hexdigest()[:16]


def weight_files(folder: Path, wanted: Callable[[str], bool] | None = None) -> list[Path]:
    """Safetensors files of a model folder; with an index, only those that contain ``wanted`` tensors."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = read_table(read_object(index), "weight_map", str(index))
        if not shards or not all(isinstance(file, str) for file in shards.values()):
            raise UserError(f"The index {index} names no shards.", COPY_AGAIN)
        for file in shards.values():
            check_name(file, index)
        return [
            folder / file
            for file in sorted({file for name, file in shards.items() if wanted is None or wanted(name)})
        ]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if unlisted := sorted(folder.glob("*-of-*.safetensors")):
        raise UserError(
            f"The folder {folder} has shards, such as {unlisted[0].name}, and no {index.name}.",
            "Copy the index of the same repository to them.",
        )
    raise UserError(
        f"The folder {folder} has no model.safetensors and no index of shards.",
        "Convert its weights to safetensors.",
    )


def weight_bytes(folder: Path) -> int:
    """Bytes of the safetensors files of a model folder."""
    return sum(path.stat().st_size for path in weight_files(folder))


def load_target(
    name_or_path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    with_layers: bool = True,
    quantization: Quantization = "none",
) -> Target:
    """Load a frozen target in eval mode.

    Args:
        name_or_path: see :func:`~eagle_kit.models.loading.source.resolve_target`.
        dtype: dtype of the weights in memory, also of those stored in fp8 that ``quantization`` does not
            keep; RoPE frequencies and gate biases stay fp32.
        with_layers: False loads embedding, final norm and output layer only, for training on captured states
            of a target that is too large for this machine; such a model cannot run.
        quantization: which linear layers and routed experts are kept in fp8
            (:mod:`~eagle_kit.models.loading.quantize`): auto keeps those that are stored so, fp8 casts the
            others as well, none widens all.

    Raises:
        UserError: a file that is missing, corrupt or truncated; every missing, unexpected or misshapen tensor
            by name.
    """
    folder = resolve_target(str(name_or_path))
    config = read_target_config(folder)
    if isinstance(config, BridgedConfig):
        if quantization == "fp8":
            raise UserError(
                f"The layers of {config.model_type} are those of transformers, which are not cast to fp8.",
                "Leave the quantization out.",
            )
        if with_layers:
            weight_files(folder)  # transformers would follow an index out of the folder
            return load_bridged(folder, config, dtype, device)
        return load_ends(folder, config, read_published(folder, _is_outside_layers), dtype).to(device)
    published = read_published(folder, None if with_layers else _is_outside_layers)
    layout = read_fp8_layout(read_raw_config(folder), str(folder))
    return assemble(
        config,
        layout,
        published,
        str(folder),
        dtype,
        device,
        with_layers=with_layers,
        quantization=quantization,
    )


def assemble(
    config: TargetConfig,
    layout: FP8Layout | None,
    tensors: dict[str, torch.Tensor],
    where: str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    with_layers: bool = True,
    quantization: Quantization = "none",
) -> LlamaModel:
    """Make a target of our own layers from published tensors.

    Args:
        layout: of fp8 weights; None where none are expected.
        tensors: by published name without ``model.``; emptied, since they are removed as they are used.
        where: of the weights, for errors.
        dtype, device, with_layers, quantization: see :func:`load_target`.

    Raises:
        UserError: every missing, unexpected or misshapen tensor by name.
    """
    # The parameters that are to be filled.
    with torch.device("meta"):
        model = LlamaModel(config)
    if not with_layers:
        model.layers = torch.nn.ModuleList()

    # The published tensors by our names and in our layout.
    arrangement = arrangement_of(config)
    renamed = arrangement.renamed(tensors)
    tensors.clear()
    published = {name: value for name, value in renamed.items() if not is_mtp(name, config)}
    renamed.clear()
    arrangement.arrange(published, config, layout)
    if config.tie_word_embeddings:
        published.pop("lm_head.weight", None)

    # Their names and shapes must be exactly the expected ones.
    parts = published_parts(model.named_parameters(), config, published)
    expected = expected_shapes((part for group in parts.values() for part in group), published, layout)
    check_tensors(published, expected, where)

    # The values.
    model.rope = Rope(config.rope_dim, config.rope_theta, config.rope_scaling).to(device)
    if quantization != "none":
        fill_fp8(model, parts, published, layout, dtype, device, casts=quantization == "fp8")
    fill(model, parts, published, layout, dtype, device)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model.eval().requires_grad_(False)


def _is_outside_layers(name: str) -> bool:
    return not LAYER_NAME.search(name)


def fill(
    model: torch.nn.Module,
    parts: Mapping[str, list[Part]],
    published: dict[str, torch.Tensor],
    layout: FP8Layout | None,
    dtype: torch.dtype,
    device: torch.device | str,
) -> None:
    """Assign to ``model`` the parameters that are on the meta device, assembled from ``parts`` of
    ``published``, which are removed from it; they require gradients like those they replace."""
    for name, parameter in list(model.named_parameters()):
        if not parameter.is_meta:
            continue
        kind = torch.float32 if stays_exact(model, name) else dtype
        pieces = [take(published, part.name, kind, layout).to(device) for part in parts[name]]
        value = (torch.cat(pieces) if len(pieces) > 1 else pieces[0]).view(parameter.shape)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(value, parameter.requires_grad))


def stays_exact(model: torch.nn.Module, name: str) -> bool:
    """True for a parameter of ``model`` that stays in fp32."""
    config = getattr(model, "config", None)
    layer = getattr(config, "layer", config)
    return name.endswith(EXACT_SUFFIXES) or (getattr(layer, "norms_in_fp32", False) and is_exact(name))


def in_dtype(model: _Model, dtype: torch.dtype) -> _Model:
    """Convert the parameters of ``model`` to ``dtype``, except those that stay in fp32."""
    for name, parameter in model.named_parameters():
        if not stays_exact(model, name):
            parameter.data = parameter.data.to(dtype)
    return model


def read_published(folder: Path, wanted: Callable[[str], bool] | None = None) -> dict[str, torch.Tensor]:
    """Read all tensors of a model folder, or those with ``wanted`` names, by their published names without
    ``model.``. Raises UserError."""
    published: dict[str, torch.Tensor] = {}
    for path in weight_files(folder, wanted):
        for name, tensor in read_safetensors(path, wanted).items():
            if not name.endswith(IGNORED_SUFFIXES):
                published[name.removeprefix("model.")] = tensor
    return published


def check_tensors(found: dict[str, torch.Tensor], expected: dict[str, tuple[int, ...]], where: str) -> None:
    """Raise UserError naming the tensors that are missing, unexpected, misshapen or not floating point."""
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
