"""Placement of the target: with the head, on another device, its layers over several devices, or shared.

Only captured states leave the target, so the head need not know. The embedding and the output layer, which
every step of training-time test reads, stay whole wherever the layers are.
"""

import copy
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.distributed.collectives import Ranks
from eagle_kit.models.bridge.config import BridgedConfig
from eagle_kit.models.loading.loader import load_target, read_target_config
from eagle_kit.models.loading.sharded import load_sharded, load_spread, shard_layers
from eagle_kit.models.loading.share import load_share
from eagle_kit.models.targets.target import Target
from eagle_kit.ops.linear import Linear

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState
    from torch.distributed.device_mesh import DeviceMesh

PATIENCE = timedelta(hours=3)
"""Time that a process waits for another one, which may convert a model and tokenise a data set meanwhile."""


def load_placed(
    folder: Path,
    placement: str,
    accelerator: "Accelerator | PartialState",
    dtype: torch.dtype,
    *,
    validates: bool = False,
) -> Target:
    """Load a target to where it runs: whole, its layers spread over devices, or this process's shards.

    Each process reads what it holds. A target of transformers' own layers is read whole into main memory
    first, which is printed.

    Args:
        folder: folder of the model.
        placement: ``training.target_placement``, but not ``tensor-parallel`` (:func:`load_cut`).
        dtype: dtype of the weights.
        validates: True if the run decodes with the target.

    Raises:
        UserError: as :func:`~eagle_kit.models.loading.loader.load_target`; a missing GPU; validation with a
            target that is on several devices.
    """
    is_bridged = isinstance(read_target_config(folder), BridgedConfig)
    cpu = torch.device("cpu")

    # Shards of all processes.
    if placement == "fsdp":
        mesh = _mesh(accelerator.device)
        if not is_bridged:
            return load_sharded(folder, dtype, mesh, accelerator.device)
        if accelerator.is_local_main_process:
            print(f"Every process reads the whole target into main memory: {folder} has no layers here.")
        target = load_target(folder, dtype=dtype, device=cpu)
        shard_whole(target, mesh, accelerator.device)
        return target

    # Layers over the devices of this process.
    if placement == "auto":
        devices = visible_devices(accelerator)
        if len(devices) > 1 and validates:
            raise UserError(
                f"training.target_placement=auto spreads the target over {len(devices)} devices, and the "
                "validation decodes on one.",
                "Set validation.every=0, or training.target_placement=same.",
            )
        if not is_bridged:
            return load_spread(folder, dtype, devices, layer_devices)
        target = load_target(folder, dtype=dtype, device=devices[0] if len(devices) == 1 else cpu)
        if len(devices) > 1:
            target.place_layers([*layer_devices([1] * len(target.layers), devices), devices[0]])
        return target

    # One device.
    return load_target(folder, dtype=dtype, device=loading_device(placement, accelerator))


def loading_device(placement: str, accelerator: "Accelerator | PartialState") -> torch.device:
    """Device of a target that is whole on one. Raises UserError for a missing GPU."""
    if placement == "same":
        return accelerator.device
    device = torch.device(placement)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UserError(
            f"training.target_placement is {placement}, but there are {count} CUDA devices.",
            "Name one of them, or set training.target_placement=same.",
        )
    return device


def check_shared(placement: str, accelerator: "Accelerator | PartialState") -> None:
    """Raise UserError if a target that processes share would have a single process."""
    if accelerator.num_processes == 1:
        raise UserError(
            f"training.target_placement is {placement}, but there is one process.",
            "Start several with accelerate launch, or set training.target_placement=same.",
        )


def load_cut(
    folder: Path, accelerator: "Accelerator | PartialState", dtype: torch.dtype, remedy: str
) -> Target:
    """Load this process's shard of a target, by tensor parallelism over all processes.

    Only the shard is read from the files. All processes call a forward together.

    Args:
        remedy: remedy in the error if the target cannot be sharded.

    Raises:
        UserError: see :func:`~eagle_kit.models.loading.share.load_share`.
    """
    ranks = Ranks(
        accelerator.process_index,
        accelerator.num_processes,
        accelerator.device,
        PATIENCE.total_seconds(),
        PATIENCE,
    )
    try:
        return load_share(folder, ranks, dtype, accelerator.device)
    except UserError as error:
        raise UserError(error.cause, remedy) from error


def between_whole_ends(cut: Target, folder: Path) -> Target:
    """A target with the layers of ``cut``, and the whole embedding and output layer.

    Every process reads these by itself. ``cut`` is changed: it uses the whole embedding, and a tied output
    layer uses its rows.
    """
    whole = cut.with_whole_ends()
    cut.take_embedding(whole.embed_tokens)
    whole.config = read_target_config(folder)
    whole.ranks = None
    return whole


def visible_devices(accelerator: "Accelerator | PartialState") -> list[torch.device]:
    """Devices of this process, its own first.

    The P processes of a machine take its GPUs in turn, so that each has every P-th.
    """
    if accelerator.device.type != "cuda":
        return [accelerator.device]
    num_gpus = max(1, int(torch.cuda.device_count()))
    num_processes = min(accelerator.num_processes, num_gpus)
    return [torch.device("cuda", i) for i in range(accelerator.local_process_index, num_gpus, num_processes)]


def layer_devices(sizes: Sequence[int], devices: Sequence[torch.device]) -> list[torch.device]:
    """Spread layers over devices: each gets consecutive layers with an equal share of the bytes.

    Args:
        sizes: bytes of each layer.

    Returns:
        The device of each layer, which is that of its middle byte.
    """
    total = sum(sizes)
    before = 0
    chosen = []
    for size in sizes:
        index = int((before + size / 2) / total * len(devices))
        chosen.append(devices[min(len(devices) - 1, index)])
        before += size
    return chosen


def shard_whole(target: Target, mesh: "DeviceMesh", device: torch.device) -> None:
    """Shard a target that is whole in the main memory of every process, see
    :func:`~eagle_kit.models.loading.sharded.shard_layers`."""
    sharded = {parameter for parameter in target.layers.parameters() if parameter.ndim > 1}
    for tensor in (*target.parameters(), *target.buffers()):
        if tensor not in sharded:
            tensor.data = tensor.data.to(device)
    shard_layers(target, mesh)


def _mesh(device: torch.device) -> "DeviceMesh":
    """All processes in one dimension."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (torch.distributed.get_world_size(),))


def output_layer(target: Target, device: torch.device) -> Linear:
    """The target's output layer if it is on ``device``, else a copy there."""
    # With one process, accelerate's device is ``cuda`` and means ``cuda:0``.
    device = torch.empty(0, device=device).device
    if target.lm_head.weight.device == device:
        return target.lm_head
    return copy.deepcopy(target.lm_head).to(device)
