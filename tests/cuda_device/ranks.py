"""One rank of several in one process: its share of a target, its plan, its memory and its collectives.

torch's process group "fake" stands for the other ranks. A sum is this rank's own summand. A gather repeats
this rank's tensor for each rank. Tensors have the sizes of a real group; buffers inside of NCCL are missing.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from eagle_kit.distributed.collectives import Ranks


@contextmanager
def fake_group(rank: int, size: int) -> Iterator[None]:
    """Within, this process is one of ``size`` in groups of torch's backend "fake", whatever is asked for."""
    new_group = dist.new_group

    def new_fake_group(backend: str, timeout: Any) -> Any:
        return new_group(backend="fake", timeout=timeout)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with mock.patch.object(dist, "new_group", new_fake_group):
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def first_of(size: int) -> Iterator[None]:
    """Within, this process is the first of ``size`` that ``torchrun`` has started, and alone on its device.

    Left out are the comparison of the processes' devices, and the buffers in symmetric memory of the one-shot
    all-reduce (1 MiB), so that all sums go to the group.
    """
    launched = {
        "RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(size),
    }
    with ExitStack() as stack:
        stack.enter_context(fake_group(0, size))
        stack.enter_context(mock.patch.dict(os.environ, launched))
        comparison = "eagle_kit.engine.tensor_parallel.ranks._check_distinct_gpus"
        stack.enter_context(mock.patch(comparison, _not_compared))
        stack.enter_context(mock.patch.object(Ranks, "_make_buffers", _no_buffers))
        yield


def _not_compared(ranks: Ranks, device: Any) -> None:
    """In place of the check that ranks have devices of their own."""


def _no_buffers(ranks: Ranks) -> dict[Any, Any]:
    return {}
