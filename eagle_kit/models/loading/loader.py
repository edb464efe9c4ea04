"""Loading of target weights from safetensors, with a check of every tensor."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
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

SAMPLE_BYTES = 4096
"""Number of bytes of each tensor that a fingerprint is computed from."""
MAX_NAMED = 8
"""Largest number of tensors that an error names."""
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", *UNUSED)
"""Suffixes of tensors that are not read."""
EXACT_SUFFIXES = ("e_score_correction_bias",)
"""Suffixes of parameters that stay fp32, because rounded ones would choose other experts."""
LAYER_NAME = re.compile(r"(^|\.)(layers|h|blocks|decoder_layers)\.\d+\.")
"""Tensors of decoder layers."""
SHOW_AFTER_S = 3.0
"""Seconds of loading after which a terminal gets a progress bar."""
_Model = TypeVar("_Model", bound=torch.nn.Module)
_Item = TypeVar("_Item")


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
        if eos is None:
            eos = config.get("eos_token_id")
        config["eos_token_id"] = eos
    if read_architecture(config, str(folder)) in FAMILIES:
        read_fp8_layout(config, str(folder))
        check_activation(text_config(config, str(folder)), str(folder))
    return parse_target(config, str(folder))


def read_raw_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json``, with the quantisation that ModelOpt writes into a file of its own."""
    config = read_object(folder / "config.json")
    modelopt = folder / "hf_quant_config.json"
    if not config.get("quantization_config") and modelopt.is_file():
        algorithm = read_object(modelopt).get("quantization")
        if isinstance(algorithm, dict):
            algorithm = algorithm.get("quant_algo")
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": algorithm}
    return config


def parse_target(config: dict[str, Any], where: str = "the model's folder") -> TargetConfig:
    """Parse a Hugging Face config, of one of our families or of a bridged model."""
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
    """Open a safetensors file, whose tensors are read by name.

    Raises:
        UserError: the file is missing, truncated or corrupt; also raised while tensors are read.
    """
    # A pipe would block.
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file.", "Give a complete model folder.")
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except UserError:  # of the caller
        raise
    except FileNotFoundError:
        raise UserError(f"The file {path} is missing.", "Give a complete model folder.") from None
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        reason = first_line(error)
        raise UserError(
            f"The file {path} is corrupt or truncated ({reason}).", "Copy or download it again."
        ) from error


def read_safetensors(path: Path, wanted: Callable[[str], bool] | None = None) -> dict[str, torch.Tensor]:
    """Read the tensors of a file, all or those whose names are ``wanted``. Raises UserError as
    :func:`open_safetensors`."""
    with open_safetensors(path) as file:
        names = [name for name in file.keys() if wanted is None or wanted(name)]  # noqa: SIM118
        return {name: file.get_tensor(name) for name in names}


def target_fingerprint(folder: Path) -> str:
    """Hash the config and the weights of a model folder.

    Of each tensor only the first bytes are read, so that a fine-tuned copy with the same names and sizes
    has another fingerprint.

    Raises:
        UserError: a corrupt file.
    """
    digest = hashlib.sha256(read_text(folder / "config.json").encode())
    for path in sorted(folder.glob("*.safetensors")):
        # Opening it as safetensors checks the header.
        with open_safetensors(path), path.open("rb") as file:
            digest.update(f"{path.name} {path.stat().st_size}".encode())

            # Header: its length in 8 bytes, then a JSON table of tensors.
            header_size = int.from_bytes(file.read(8), "little")
            header = file.read(header_size)
            digest.update(header)

            # First bytes of each tensor.
            tensors = json.loads(header)
            tensors.pop("__metadata__", None)
            for name in sorted(tensors):
                start, stop = tensors[name]["data_offsets"]
                file.seek(8 + len(header) + start)
                digest.update(file.read(min(SAMPLE_BYTES, stop - start)))
    return digest.hexdigest()[:16]


def weight_files(folder: Path, wanted: Callable[[str], bool] | None = None) -> list[Path]:
    """Safetensors files of a model folder; with an index, only those that contain ``wanted`` tensors.

    Raises:
        UserError: there are none, or the index is damaged.
    """
    # Shards with an index.
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = read_table(read_object(index), "weight_map", str(index))
        if not shards or not all(isinstance(file, str) for file in shards.values()):
            raise UserError(f"The index {index} names no shards.", COPY_AGAIN)
        files: set[str] = set()
        for name, file in shards.items():
            check_name(file, index)
            if wanted is None or wanted(name):
                files.add(file)
        return [folder / file for file in sorted(files)]

    # A single file.
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]

    unlisted = sorted(folder.glob("*-of-*.safetensors"))
    if unlisted:
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
        dtype: dtype of the weights in memory, also of published fp8 weights that ``quantization`` widens.
            RoPE frequencies and gate biases stay fp32.
        device: device of the weights.
        with_layers: False loads embedding, final norm and output layer only. Such a model cannot run; it is
            for training on captured hidden states of a target that is too large for this machine.
        quantization: which linear layers and routed experts are fp8
            (:mod:`~eagle_kit.models.loading.quantize`): ``auto`` for those that are published so, ``fp8``
            for all, ``none`` for none.

    Raises:
        UserError: a file that is missing, corrupt or truncated; every missing, unexpected or misshapen tensor
            by name.
    """
    folder = resolve_target(str(name_or_path))
    config = read_target_config(folder)

    # Models of transformers.
    if isinstance(config, BridgedConfig):
        if quantization == "fp8":
            raise UserError(
                f"The layers of {config.model_type} are those of transformers, which are not cast to fp8.",
                "Leave the quantization out.",
            )
        if with_layers:
            weight_files(folder)  # checks the index, with which transformers would read outside of the folder
            return load_bridged(folder, config, dtype, device)
        return load_ends(folder, config, read_published(folder, _is_outside_layers), dtype).to(device)

    # Our own layers.
    wanted = None
    if not with_layers:
        wanted = _is_outside_layers
    published = read_published(folder, wanted)
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
        config: architecture of the target.
        layout: layout of fp8 weights; None where fp8 is not expected.
        tensors: tensors by published name without ``model.``. They are removed as they are used, to free
            their memory.
        where: folder of the weights, for messages.
        dtype: see :func:`load_target`.
        device: device of the weights.
        with_layers: see ``load_target``.
        quantization: see ``load_target``.

    Raises:
        UserError: every missing, unexpected or misshapen tensor by name.
    """
    # Parameters on the meta device.
    with torch.device("meta"):
        model = LlamaModel(config)
    if not with_layers:
        model.layers = torch.nn.ModuleList()

    # Published tensors by our names and in our layout.
    arrangement = arrangement_of(config)
    renamed = arrangement.renamed(tensors)
    tensors.clear()
    published = {name: value for name, value in renamed.items() if not is_mtp(name, config)}
    renamed.clear()
    arrangement.arrange(published, config, layout)
    if config.tie_word_embeddings:
        published.pop("lm_head.weight", None)

    # Names and shapes must be exactly the expected ones.
    parts = published_parts(model.named_parameters(), config, published)
    all_parts = [part for group in parts.values() for part in group]
    check_tensors(published, expected_shapes(all_parts, published, layout), where)

    # Values.
    model.rope = Rope(config.rope_dim, config.rope_theta, config.rope_scaling).to(device)
    if quantization != "none":
        fill_fp8(model, parts, published, layout, dtype, device, casts=quantization == "fp8")
    fill(model, parts, published, layout, dtype, device)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model.eval().requires_grad_(False)


def _is_outside_layers(name: str) -> bool:
    """True for a tensor that is not part of a decoder layer."""
    return not LAYER_NAME.search(name)


def fill(
    model: torch.nn.Module,
    parts: Mapping[str, list[Part]],
    published: dict[str, torch.Tensor],
    layout: FP8Layout | None,
    dtype: torch.dtype,
    device: torch.device | str,
) -> None:
    """Replace the parameters of a model that are on the meta device. Their ``requires_grad`` stays.

    Args:
        model: the model, changed in place.
        parts: published tensors that each parameter is stacked from.
        published: tensors by name. Those that are used are removed.
        layout: layout of fp8 weights; None where fp8 is not expected.
        dtype: dtype of the parameters, but for those of :func:`stays_exact`.
        device: device of the parameters.
    """
    missing = [(name, parameter) for name, parameter in model.named_parameters() if parameter.is_meta]
    for name, parameter in with_progress(missing):
        # Stack the published tensors.
        wanted = parameter_dtype(model, name, dtype)
        pieces = [take(published, part.name, wanted, layout).to(device) for part in parts[name]]
        value = pieces[0]
        if len(pieces) > 1:
            value = torch.cat(pieces)
        set_parameter(model, name, value.view(parameter.shape))


def with_progress(weights: Iterable[_Item]) -> Iterator[_Item]:
    """Iterate over weights that are loaded, with a progress bar on a terminal if it takes long."""
    from tqdm import tqdm

    with tqdm(
        weights,
        desc="loading weights",
        unit="tensor",
        delay=SHOW_AFTER_S,
        leave=False,
        dynamic_ncols=True,
        disable=None,  # no bar without a terminal
    ) as bar:
        yield from bar


def set_parameter(model: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Replace the values of a parameter that is on the meta device. Its ``requires_grad`` stays."""
    owner, _, leaf = name.rpartition(".")
    requires_grad = model.get_parameter(name).requires_grad
    setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(value, requires_grad))


def parameter_dtype(model: torch.nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    """Dtype of a parameter of a model in ``dtype``."""
    if stays_exact(model, name):
        return torch.float32
    return dtype


def stays_exact(model: torch.nn.Module, name: str) -> bool:
    """True for a parameter of ``model`` that stays fp32, whatever the dtype of the model."""
    if name.endswith(EXACT_SUFFIXES):
        return True
    config = getattr(model, "config", None)
    layer = getattr(config, "layer", config)
    return getattr(layer, "norms_in_fp32", False) and is_exact(name)


def in_dtype(model: _Model, dtype: torch.dtype) -> _Model:
    """Convert the parameters of ``model`` to ``dtype``, except those that stay fp32."""
    for name, parameter in model.named_parameters():
        if not stays_exact(model, name):
            parameter.data = parameter.data.to(dtype)
    return model


def read_published(folder: Path, wanted: Callable[[str], bool] | None = None) -> dict[str, torch.Tensor]:
    """Read the tensors of a model folder, all or those whose names are ``wanted``.

    Returns:
        Tensors by published name without ``model.``.

    Raises:
        UserError: a file that is missing, corrupt or truncated.
    """
    published: dict[str, torch.Tensor] = {}
    for path in weight_files(folder, wanted):
        for name, tensor in read_safetensors(path, wanted).items():
            if not name.endswith(IGNORED_SUFFIXES):
                published[name.removeprefix("model.")] = tensor
    return published


def check_tensors(found: dict[str, torch.Tensor], expected: dict[str, tuple[int, ...]], where: str) -> None:
    """Check names, shapes and types of tensors.

    Args:
        found: tensors by name.
        expected: shapes by name.
        where: folder of the tensors, for messages.

    Raises:
        UserError: names the tensors that are missing, unexpected, misshapen or not floating point.
    """
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is unexpected" for name in found if name not in expected]
    both = [name for name in expected if name in found]
    for name in both:
        shape = list(found[name].shape)
        if shape != list(expected[name]):
            problems.append(f"{name} has shape {shape} instead of {list(expected[name])}")
    for name in both:
        if not found[name].is_floating_point():
            dtype = str(found[name].dtype).removeprefix("torch.")
            problems.append(f"{name} holds {dtype} instead of floating-point numbers")
    if not problems:
        return

    listed = "; ".join(problems[:MAX_NAMED])
    if len(problems) > MAX_NAMED:
        listed += f"; and {len(problems) - MAX_NAMED} more"
    raise UserError(
        f"The weights in {where} do not fit their config: {listed}.",
        "Use a complete, matching checkpoint.",
    )
