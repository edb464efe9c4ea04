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
    """Raise UserError where one process has nobody to share the target with."""
    if accelerator.num_processes == 1:
        raise UserError(
            f"training.target_placement is {placement}, but there is one process.",
            "Start several with accelerate launch, or set training.target_placement=same.",
        )


def load_cut(
    folder: Path, accelerator: "Accelerator | PartialState", dtype: torch.dtype, remedy: str
) -> Target:
    """This process's part of a target, by tensor parallelism over all processes, for captures and the judge.
    It reads no more of the files than its part; a forward is one call of all processes.

    Args:
        remedy: where it cannot be cut.

    Raises:
        UserError: see :func:`~eagle_kit.models.loading.share.load_share`.
    """
    index, count, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    ranks = Ranks(index, count, device, PATIENCE.total_seconds())
    try:
        return load_share(folder, ranks, dtype, device)
    except UserError as error:
        raise UserError(error.cause, remedy) from error


def between_whole_ends(cut: Target, folder: Path) -> Target:
    """The same layers between the whole embedding and output layer, which every process reads by itself. The
    rows that a tied output layer has in ``cut`` are those of the whole embedding from now on."""
    whole = cut.with_whole_ends()
    cut.take_embedding(whole.embed_tokens)
    whole.config, whole.ranks = read_target_config(folder), None
    return whole


def place_target(target: Target, config: TrainConfig, accelerator: "Accelerator | PartialState") -> None:
    """Spread or shard a target that was loaded to :func:`loading_device`; after the head was made from it.

    Raises:
        UserError: judging with a target that is on several devices.
    """
    placement = config.training.target_placement
    if not target.layers:  # it does not run
        target.to(accelerator.device)
        return
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
    """The devices of this process, its own first: every P-th GPU of the machine's P processes."""
    if accelerator.device.type != "cuda":
        return [accelerator.device]
    local, every = accelerator.local_process_index, max(1, int(torch.cuda.device_count()))
    processes = min(accelerator.num_processes, every)
    return [torch.device("cuda", i) for i in range(local, every, processes)]


def spread_layers(target: Target, devices: list[torch.device]) -> None:
    """Give every device a run of layers with about its share of the bytes; all else goes to the first one."""
    sizes = [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in target.layers]
    total, before, where = sum(sizes), 0, []
    for size in sizes:
        where.append(devices[min(len(devices) - 1, int((before + size / 2) / total * len(devices)))])
        before += size
    target.to(devices[0])
    for layer, device in zip(target.layers, where, strict=True):
        layer.to(device)
    target.place_layers([*where, devices[0]] if len(devices) > 1 else None)


def shard_target(target: Target, device: torch.device) -> None:
    """FSDP2 over all processes: each keeps a part of every matrix of the layers, and gathers one layer at a
    time. Norms and biases stay whole: some are used outside the layer that they belong to."""
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
    """The target's output layer on ``device``: itself where it is there, or a copy."""
    here = torch.empty(0, device=device).device  # accelerate's ``cuda`` of one process is ``cuda:0``
    if target.lm_head.weight.device == here:
        return target.lm_head
    return copy.deepcopy(target.lm_head).to(device)
