"""Memory of processes with large tensors: settings of glibc's allocator, zeros that cost nothing yet, and
large pages for weights."""

import ctypes
import mmap
import sys
import threading
from collections.abc import Sequence
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_ODD = bytes(range(1, 256, 2))
_addresses: "WeakKeyDictionary[mmap.mmap, int]" = WeakKeyDictionary()
"""Of the zeros that are in use somewhere."""
_LARGE_PAGE = 2 << 20
_LINE = 64
_CHUNK = 16 * _LARGE_PAGE


class _Chunk(mmap.mmap):
    """Memory in which tensors lie one behind another; it is there as long as one of them is."""

    used = 0


_chunks: "WeakSet[_Chunk]" = WeakSet()
_chunks_lock = threading.Lock()


def keep_large_blocks() -> bool:
    """Make ``malloc`` reuse large freed blocks instead of unmapping them; returns whether this was possible.

    Every tensor above 32 MiB is otherwise a fresh mapping whose pages fault in one by one, which costs more
    than the matmul that fills it. Affects the whole process, so programs call it at their start (trainer,
    engine, benchmark) and libraries do not. Does nothing outside Linux with glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL("libc.so.6")
        return bool(libc.mallopt(_M_MMAP_MAX, 0)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
    except (OSError, AttributeError):
        return False


def release_free_memory() -> bool:
    """Return free heap memory to the kernel, which takes tens of milliseconds; returns whether any was
    released.

    With :func:`keep_large_blocks` a program whose tensors change size from step to step slowly fills its heap
    with free gaps. Calling this every few steps bounds them.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL("libc.so.6").malloc_trim(0))
    except (OSError, AttributeError):
        return False


def zeros_when_used(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Allocate zeros. On a CPU their pages take memory, and time, when they are first read or written:
    ``torch.zeros`` writes them all, which takes a third of a second per GB and more on a busy machine.

    Raises:
        OSError: the system refuses so much memory.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    is_plain = torch.device(device).type != "cpu" or sys.platform == "win32" or size < mmap.PAGESIZE
    if is_plain or is_in_torch_dispatch_mode():
        return torch.zeros(*shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    zeros = torch.frombuffer(pages, dtype=dtype).view(*shape)
    _addresses[pages] = zeros.data_ptr()
    return zeros


def promised_memory() -> int:
    """Bytes of :func:`zeros_when_used` in this process that were not used yet, and so count as free in the
    system's books; all of them where the system does not tell."""
    return sum(len(pages) - _resident(address, len(pages)) for pages, address in list(_addresses.items()))


def _resident(address: int, size: int) -> int:
    """Bytes of a mapping that are in memory."""
    flags = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    try:
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), flags)
    except (OSError, AttributeError):
        return 0
    absent = flags.raw.translate(None, _ODD)  # the lowest bit tells, the others are reserved
    return 0 if failed else min(size, (len(flags) - len(absent)) * mmap.PAGESIZE)


def in_large_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor of a CPU, contiguous, to memory that Linux may give in pages of 2 MiB
    (``transparent_hugepage`` ``madvise`` or ``always``), beside others that were copied before: few
    addresses of pages have to be looked up, and hardware that fetches ahead does not stop every 4 KiB. The
    tensor itself where the system gives no such memory.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or tensor.device.type != "cpu" or not tensor.numel() or is_in_torch_dispatch_mode():
        return tensor
    with _chunks_lock:
        chunk = next((each for each in _chunks if len(each) - each.used >= tensor.nbytes), None)
        if chunk is None:
            is_shared = tensor.nbytes <= _CHUNK // 2  # or it would be kept by a small one behind it
            size = _CHUNK if is_shared else -(-tensor.nbytes // _LARGE_PAGE) * _LARGE_PAGE
            try:
                chunk = _Chunk(-1, size + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                chunk.madvise(advice)
            except OSError:
                return tensor
            chunk.used = -torch.frombuffer(chunk, dtype=torch.uint8).data_ptr() % _LARGE_PAGE
            if is_shared:
                _chunks.add(chunk)
        place = chunk.used
        chunk.used = chunk.used + -(-tensor.nbytes // _LINE) * _LINE
    numbers = torch.frombuffer(chunk, dtype=tensor.dtype, count=tensor.numel(), offset=place)
    return numbers.view(tensor.shape).copy_(tensor)
