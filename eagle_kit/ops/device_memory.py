"""Memory of a GPU: its figures, and errors in words for users where it has too little."""

import logging
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch

from eagle_kit.core.errors import UserError

UNRESERVED_BYTES = 512 << 20
"""Bytes of a GPU that :func:`reserve_segment` leaves to libraries with allocators of their own: workspaces of
cuBLAS, buffers of NCCL, and modules of kernels, which the driver loads on first use."""

_ASKED = re.compile(r"Tried to allocate ([\d.]+ \w+)")
_FREE = re.compile(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")


@contextmanager
def out_of_memory(activity: str, remedy: str) -> Iterator[None]:
    """Context manager that raises UserError in place of torch's error when a GPU has too little memory.

    Local variables of the frames that torch's error came through are cleared, since they hold tensors.

    Args:
        activity: what needed the memory, such as ``"loading the target"``.
        remedy: one sentence with the settings to change.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        cause = out_of_memory_cause(error, activity)
        clear_frames(error)
        release_cached_memory()
        raise UserError(cause, remedy) from None


def memory_failure(call: Callable[[], None], activity: str) -> str | None:
    """Call ``call``. If the GPU has too little memory for it, return a sentence of cause, else None.

    All tensors of the call are freed then, and so is the memory that torch keeps of freed tensors.
    """
    try:
        call()
        return None
    except torch.OutOfMemoryError as error:
        cause = out_of_memory_cause(error, activity)
        clear_frames(error)
    # Outside the handler, so that the frames of the error hold no tensors any more.
    release_cached_memory()
    return cause


def clear_frames(error: BaseException) -> None:
    """Clear the local variables of the frames that an error and its causes came through.

    They hold tensors.
    """
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__


def out_of_memory_cause(error: torch.OutOfMemoryError, activity: str) -> str:
    """One sentence about ``error``: the activity, the bytes that were asked for, and those that are free.

    The error itself, whose text also names the settings of torch's allocator, goes to the log.
    """
    text = str(error)
    logging.getLogger(__name__).info("Out of memory while %s: %s", activity, text)
    cause = f"The GPU ran out of memory while {activity}"
    asked = _ASKED.search(text)
    if asked is None:
        return f"{cause}."
    cause += f": {asked[1]} were asked for"
    free = _FREE.search(text)
    if free is None:
        return f"{cause}."
    return f"{cause}, and {free[2]} of {free[1]} are free."


def reserve_segment(device: torch.device, num_bytes: float) -> None:
    """Let torch's allocator take ``num_bytes`` of a GPU as one free segment.

    The allocator gives parts of a free segment to tensors of any size. Without such a segment each size gets
    segments of its own, which together are up to twice as large. A GPU with less free memory gets a smaller
    segment, and none if fewer than ``UNRESERVED_BYTES`` are free.
    """
    if device.type != "cuda":
        return
    num_free = torch.cuda.mem_get_info(device)[0]
    size = min(int(num_bytes), num_free - UNRESERVED_BYTES)
    if size <= 0:
        return
    with suppress(torch.OutOfMemoryError):  # tensors may still fit one by one
        torch.empty(size, dtype=torch.uint8, device=device)


@contextmanager
def reserved_again(device: torch.device) -> Iterator[None]:
    """Context manager: cached memory of a GPU may be given back to the driver within; at the end as much is
    reserved as at the beginning, what is missing as one segment."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.memory_reserved(device)
    yield

    # Segments of what was done within have other sizes than those that are needed now.
    torch.cuda.empty_cache()
    reserve_segment(device, max(0, before - torch.cuda.memory_reserved(device)))


class GpuMemory(NamedTuple):
    """Bytes of a GPU.

    Attributes:
        total: memory of the GPU.
        free: bytes that no process has.
        reserved: bytes that torch's allocator of this process has.
        allocated: those of them that are tensors.
    """

    total: int
    free: int
    reserved: int
    allocated: int


def gpu_memory(device: torch.device) -> GpuMemory | None:
    """Read the memory of a GPU. None for a CPU, and for a GPU that does not answer after an error."""
    if device.type != "cuda":
        return None
    try:
        free, total = torch.cuda.mem_get_info(device)
        return GpuMemory(
            total=total,
            free=free,
            reserved=torch.cuda.memory_reserved(device),
            allocated=torch.cuda.memory_allocated(device),
        )
    except RuntimeError:
        return None


def release_cached_memory() -> None:
    """Give the driver back the memory that torch keeps of freed tensors."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
