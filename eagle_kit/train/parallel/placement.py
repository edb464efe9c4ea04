"""Placement of the target: with the head, on another device, its layers over several devices, or shared.

Only captured states leave the target, so the head need not know. The embedding and the output layer, which
every step of training-time test reads, stay whole wherever the layers are.
"""

import copy
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.distributed.collectives import Ranks
from eagle_kit.models.loading.loader import read_target_config
from eagle_kit.models.loading.share import load_share
from eagle_kit.models.targets.target import Target
from eagle_kit.ops.linear import Linear

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState

PATIENCE = timedelta(hours=3)
"""Time that a process waits for another one, which may convert a model and tokenise a data set meanwhile."""


def loading_device(placement: str, accelerator: "Accelerator | PartialState") -> torch.device:
    """Device that the target is loaded to, before :func:`place_target`. Raises UserError for a missing
    GPU."""
    if placement in ("same", "tensor-parallel"):
        return accelerator.device
    if placement in ("cpu", "auto", "fsdp"):
        return torch.device("cpu")
    device = torch.device(placement)
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
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


def place_target(target: Target, config: TrainConfig, accelerator: "Accelerator | PartialState") -> None:
    """Place a target that was loaded to :func:`loading_device`, after the head was made from it.

    Raises:
        UserError: validation with a target that is on several devices.
    """
    # Embedding and output layer alone.
    if not target.layers:
        target.to(accelerator.device)
        return

    placement = config.training.target_placement
    if placement == "fsdp":
        shard_target(target, accelerator.device)
    elif placement == "auto":
        devices = visible_devices(accelerator)
        if len(devices) > 1 and config.judge.every:
            raise UserError(
                f"training.target_placement=auto spreads the target over {len(devices)} devices, and the "
                "judge decodes on one.",
                "Set judge.every=0, or training.target_placement=same.",
            )
        spread_layers(target, devices)


def visible_devices(accelerator: "Accelerator | PartialState") -> list[torch.device]:
    """Devices of this process, its own first.

    The P processes of a machine take its GPUs in turn, so that each has every P-th.
    """
    if accelerator.device.type != "cuda":
        return [accelerator.device]
    num_gpus = max(1, int(torch.cuda.device_count()))
    num_processes = min(accelerator.num_processes, num_gpus)
    return [torch.device("cuda", i) for i in range(accelerator.local_process_index, num_gpus, num_processes)]


def spread_layers(target: Target, devices: list[torch.device]) -> None:
    """Spread the layers over devices: each gets consecutive layers with an equal share of the bytes.

    Embedding, norms and output layer are on the first device.
    """
    # A layer goes to the device of its middle byte.
    sizes = [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in target.layers]
    total = sum(sizes)
    before = 0
    layer_devices = []
    for size in sizes:
        index = int((before + size / 2) / total * len(devices))
        layer_devices.append(devices[min(len(devices) - 1, index)])
        before += size

    # Move everything.
    target.to(devices[0])
    for layer, device in zip(target.layers, layer_devices, strict=True):
        layer.to(device)
    target.place_layers([*layer_devices, devices[0]] if len(devices) > 1 else None)


def shard_target(target: Target, device: torch.device) -> None:
    """Shard a target over all processes by FSDP2.

    Each process has a shard of every matrix of the layers, and gathers one layer at a time. Norms and biases
    stay whole, because some are used outside of their layer.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    sharded = {parameter for parameter in target.layers.parameters() if parameter.ndim > 1}
    whole = set(target.parameters()) - sharded
    for tensor in (*whole, *target.buffers()):
        tensor.data = tensor.data.to(device)
    for layer in target.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    fully_shard(target, mesh=mesh, reshard_after_forward=True, ignored_params=whole)


def output_layer(target: Target, device: torch.device) -> Linear:
    """The target's output layer if it is on ``device``, else a copy there."""
    # With one process, accelerate's device is ``cuda`` and means ``cuda:0``.
    device = torch.empty(0, device=device).device
    if target.lm_head.weight.device == device:
        return target.lm_head
    return copy.deepcopy(target.lm_head).to(device)
