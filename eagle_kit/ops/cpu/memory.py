"""Memory of processes with large tensors: settings of glibc's allocator, zeros whose pages are allocated at
first use, and large pages for weights."""

import ctypes
import mmap
import sys
import threading
from collections.abc import Sequence
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

# Parameters of glibc's mallopt.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_ODD = bytes(range(1, 256, 2))
_addresses: "WeakKeyDictionary[mmap.mmap, int]" = WeakKeyDictionary()
"""Addresses of the mappings of :func:`zeros_when_used` that are alive."""
_LARGE_PAGE = 2 << 20
_LINE = 64
"""Bytes of a line of the cache."""
_CHUNK = 16 * _LARGE_PAGE
"""Bytes of a mapping that several tensors share."""


class _Chunk(mmap.mmap):
    """Memory in which tensors lie one behind another, alive as long as one of them is.

    Attributes:
        used: bytes that are taken, from the beginning.
    """

    used = 0


_chunks: "WeakSet[_Chunk]" = WeakSet()
"""Chunks that may have room for another tensor."""
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
    """Allocate zeros. On a CPU their pages take memory and time when they are first read or written.

    ``torch.zeros`` writes all pages at once, which takes a third of a second per GB, and more on a busy
    machine.

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
    """Bytes of :func:`zeros_when_used` in this process that were not used yet, and that the system therefore
    counts as free; all of them if the system does not say which were used."""
    return sum(len(pages) - _resident(address, len(pages)) for pages, address in list(_addresses.items()))


def _resident(address: int, size: int) -> int:
    """Bytes of a mapping that are in memory."""
    flags = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    try:
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), flags)
    except (OSError, AttributeError):
        return 0
    if failed:
        return 0
    absent = flags.raw.translate(None, _ODD)  # the lowest bit of a page's byte is set if it is resident
    return min(size, (len(flags) - len(absent)) * mmap.PAGESIZE)


def in_large_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a contiguous tensor on a CPU to memory that Linux may give in pages of 2 MiB
    (``transparent_hugepage`` ``madvise`` or ``always``). Tensors that fit share such memory.

    With large pages there are fewer address translations, and hardware prefetching does not stop every
    4 KiB. Returns the tensor itself if the system gives no such memory.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or tensor.device.type != "cpu" or not tensor.numel() or is_in_torch_dispatch_mode():
        return tensor
    with _chunks_lock:
        chunk = next((each for each in _chunks if len(each) - each.used >= tensor.nbytes), None)
        if chunk is None:
            # A large tensor gets memory of its own: a small one behind it would keep it alive.
            is_shared = tensor.nbytes <= _CHUNK // 2
            size = _CHUNK if is_shared else -(-tensor.nbytes // _LARGE_PAGE) * _LARGE_PAGE
            try:
                chunk = _Chunk(-1, size + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                chunk.madvise(advice)
            except OSError:
                return tensor
            # Tensors begin at a large page.
            chunk.used = -torch.frombuffer(chunk, dtype=torch.uint8).data_ptr() % _LARGE_PAGE
            if is_shared:
                _chunks.add(chunk)
        offset = chunk.used
        chunk.used += -(-tensor.nbytes // _LINE) * _LINE
    copy = torch.frombuffer(chunk, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    return copy.view(tensor.shape).copy_(tensor)
