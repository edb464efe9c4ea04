"""Loading of a target whose layers are on several devices, or sharded over processes by FSDP2.

The files are mapped. A weight goes to its device part by part, and a process reads the rows of its shards
alone, so no process has the whole target in main memory.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from eagle_kit.models.blocks.layers import Rope
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.loading.arrangement import arrangement_of
from eagle_kit.models.loading.fp8_layout import FP8Layout, read_fp8_layout
from eagle_kit.models.loading.loader import (
    check_tensors,
    parameter_dtype,
    read_published,
    read_raw_config,
    read_target_config,
    set_parameter,
    with_progress,
)
from eagle_kit.models.loading.published import Part, expected_shapes, is_mtp, published_parts, take_rows
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.models.targets.target import Target

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class _Checkpoint(NamedTuple):
    """A target on the meta device, and the published tensors of its weights.

    Attributes:
        model: the target.
        config: its architecture.
        parts: published tensors that each parameter is stacked from.
        tensors: mapped tensors by our names, in groups: those of a layer by the layer's prefix, all others
            by "". The tensors of a group are not arranged yet.
        layout: layout of fp8 weights; None where fp8 is not expected.
        folder: folder of the weights.
    """

    model: LlamaModel
    config: TargetConfig
    parts: dict[str, list[Part]]
    tensors: dict[str, dict[str, torch.Tensor]]
    layout: FP8Layout | None
    folder: Path


class _Weight(NamedTuple):
    """A parameter that has no values yet.

    Attributes:
        name: its name in the model.
        parameter: the parameter, on the meta device.
        tensors: arranged published tensors of its layer, which are removed as they are read.
    """

    name: str
    parameter: torch.nn.Parameter
    tensors: dict[str, torch.Tensor]


def load_spread(
    folder: Path,
    dtype: torch.dtype,
    devices: Sequence[torch.device],
    choose: Callable[[Sequence[int], Sequence[torch.device]], list[torch.device]],
) -> Target:
    """Load a target of our own layers, each layer to its device; frozen and in eval mode.

    Args:
        folder: folder of the model.
        dtype: see :func:`~eagle_kit.models.loading.loader.load_target`.
        devices: devices of the layers. Embedding, norms and output layer are on the first one.
        choose: function from the bytes of every layer and ``devices`` to the device of every layer.

    Raises:
        UserError: as ``load_target``; the target cannot be split.
    """
    checkpoint = _open(folder)
    model = checkpoint.model

    # The device of each layer.
    sizes = []
    for i, layer in enumerate(model.layers):
        named = layer.named_parameters(f"layers.{i}")
        sizes.append(sum(p.numel() * parameter_dtype(model, name, dtype).itemsize for name, p in named))
    layer_devices = choose(sizes, devices)
    if len(devices) > 1:
        model.place_layers([*layer_devices, devices[0]])

    # Its weights.
    for weight in _weights(checkpoint):
        device = devices[0]
        if weight.name.startswith("layers."):
            device = layer_devices[int(weight.name.split(".")[1])]
        shape = weight.parameter.shape
        value = _read_rows(checkpoint, weight, range(shape[0]), dtype, device)
        set_parameter(model, weight.name, value.view(shape))
    return _finished(checkpoint, devices[0])


def load_sharded(folder: Path, dtype: torch.dtype, mesh: "DeviceMesh", device: torch.device) -> Target:
    """Load a process's shards of a target of our own layers, as :func:`shard_layers` makes them.

    The target is frozen and in eval mode. All processes call its forward together.

    Args:
        folder: folder of the model.
        dtype: see :func:`~eagle_kit.models.loading.loader.load_target`.
        mesh: the processes, in one dimension.
        device: device of this process.

    Raises:
        UserError: as ``load_target``.
    """
    from torch.distributed.tensor import DTensor

    # Shards without values.
    checkpoint = _open(folder)
    model = checkpoint.model
    shard_layers(model, mesh)

    # Values of this process's rows; of what is not sharded, all of them.
    for weight in _weights(checkpoint):
        parameter = weight.parameter
        shape = parameter.shape
        if not isinstance(parameter, DTensor):
            value = _read_rows(checkpoint, weight, range(shape[0]), dtype, device)
            set_parameter(model, weight.name, value.view(shape))
            continue
        rows = shard_rows(shape[0], mesh.get_local_rank(), mesh.size())
        local = _read_rows(checkpoint, weight, rows, dtype, device)
        shard = DTensor.from_local(
            local.view(len(rows), *shape[1:]),
            mesh,
            parameter.placements,
            run_check=False,
            shape=shape,
            stride=parameter.stride(),
        )
        set_parameter(model, weight.name, shard)
    return _finished(checkpoint, device)


def shard_layers(target: Target, mesh: "DeviceMesh") -> None:
    """Shard the matrices of the layers over processes by FSDP2, which gathers one layer at a time.

    Norms and biases stay whole, because some are used outside of their layer. So do the embedding and the
    output layer.

    Args:
        target: frozen target, changed in place. Matrices of its layers are on the meta device or, whole, on
            the CPU.
        mesh: the processes, in one dimension.
    """
    from torch.distributed.fsdp import fully_shard

    sharded = {parameter for parameter in target.layers.parameters() if parameter.ndim > 1}
    whole = set(target.parameters()) - sharded
    for layer in target.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    fully_shard(target, mesh=mesh, reshard_after_forward=True, ignored_params=whole)


def shard_rows(num_rows: int, rank: int, size: int) -> range:
    """Rows of a process's shard of a matrix of ``num_rows``, as FSDP2 chooses them: equal shards, of which
    the last ones may be shorter or empty."""
    each = -(-num_rows // size)
    start = min(rank * each, num_rows)
    return range(start, min(start + each, num_rows))


def _open(folder: Path) -> _Checkpoint:
    """Map the tensors of a model folder, and check their names, shapes and types.

    Raises:
        UserError: as :func:`~eagle_kit.models.loading.loader.load_target`.
    """
    config = read_target_config(folder)
    layout = read_fp8_layout(read_raw_config(folder), str(folder))
    with torch.device("meta"):
        model = LlamaModel(config)
    model.eval().requires_grad_(False)

    # Mapped tensors by our names.
    arrangement = arrangement_of(config)
    renamed = arrangement.renamed(read_published(folder))
    published = {name: tensor for name, tensor in renamed.items() if not is_mtp(name, config)}
    if config.tie_word_embeddings:
        published.pop("lm_head.weight", None)

    # Names and shapes must be exactly the expected ones.
    outline = {name: torch.empty_like(tensor, device="meta") for name, tensor in published.items()}
    arrangement.arrange(outline, config, layout)
    parts = published_parts(model.named_parameters(), config, outline)
    all_parts = [part for group in parts.values() for part in group]
    check_tensors(outline, expected_shapes(all_parts, outline, layout), str(folder))

    # Tensors of each layer.
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in published.items():
        tensors.setdefault(_layer_prefix(name), {})[name] = tensor
    return _Checkpoint(model, config, parts, tensors, layout, folder)


def _weights(checkpoint: _Checkpoint) -> Iterator[_Weight]:
    """Parameters of the model that are on the meta device, with a progress bar."""
    arrangement = arrangement_of(checkpoint.config)
    arranged: dict[str, dict[str, torch.Tensor]] = {}
    missing = [(name, each) for name, each in checkpoint.model.named_parameters() if each.is_meta]
    for name, parameter in with_progress(missing):
        prefix = _layer_prefix(name)
        if prefix not in arranged:
            group = checkpoint.tensors.pop(prefix)
            arrangement.arrange(group, checkpoint.config, checkpoint.layout)
            arranged[prefix] = group
        yield _Weight(name, parameter, arranged[prefix])


def _read_rows(
    checkpoint: _Checkpoint,
    weight: _Weight,
    rows: range,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Read rows of a parameter, from the published tensors that it is stacked from.

    Args:
        weight: the parameter. Its tensors are removed.
        rows: indices of its first dimension.
        dtype: dtype of the model.
        device: device of the result.

    Returns:
        The rows, end to end in dimensions that are those of the published tensors.
    """
    parts = checkpoint.parts[weight.name]
    stored_dtype = parameter_dtype(checkpoint.model, weight.name, dtype)

    # One index of the parameter is one row of the published tensors, or all rows of an expert.
    rows_per_index = sum(part.shape[0] for part in parts) // weight.parameter.shape[0]
    first = rows.start * rows_per_index
    last = rows.stop * rows_per_index

    # Rows of each published tensor.
    pieces = []
    offset = 0
    for part in parts:
        start = max(first - offset, 0)
        stop = min(last - offset, part.shape[0])
        offset += part.shape[0]
        wanted = range(start, max(start, stop))
        piece = take_rows(weight.tensors, part.name, wanted, stored_dtype, checkpoint.layout)
        if wanted or len(parts) == 1:
            pieces.append(piece.to(device))
    if not pieces:
        return torch.empty(0, dtype=stored_dtype, device=device)
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces)


def _finished(checkpoint: _Checkpoint, device: torch.device) -> Target:
    """The model, whose weights have values, with its other tensors on ``device``."""
    model = checkpoint.model
    config = checkpoint.config
    model.rope = Rope(config.rope_dim, config.rope_theta, config.rope_scaling).to(device)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model


def _layer_prefix(name: str) -> str:
    """``layers.N.`` of a name inside a layer, "" of another."""
    if not name.startswith("layers."):
        return ""
    return ".".join(name.split(".")[:2]) + "."
