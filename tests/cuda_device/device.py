"""The books of the CUDA device in software, for tests: counters, the log of calls, memory.

The process has to run with the libraries in front (``plugin.py``; :func:`environment` for another process).
"""

import ctypes
import enum
import faulthandler
import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.cuda_device.build import LIBRARIES, NVML, build

IN_FRONT = "EAGLE_KIT_DEVICE_LIBRARIES"
"""Set in a process that has the libraries in front, to their folder."""
ROOT = Path(__file__).parents[2]
_TRACE_SIGNAL = signal.SIGRTMAX - 1


class LogKind(enum.IntFlag):
    """Kinds of entries of the log. The first two, and uncomputed launches, are always logged."""

    ILLEGAL_CALL = 1
    OUT_OF_MEMORY = 2
    SYNCHRONISATION = 4
    ALLOCATION = 8
    CAPTURE = 16
    MODULE = 32
    UNCOMPUTED = 64


class Frame(NamedTuple):
    """A frame of Python's stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        path = Path(self.file)
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
        return f"{name}:{self.line} in {self.function}"


class Call(NamedTuple):
    """A logged call of a function of CUDA, with Python's stack, innermost frame first."""

    kind: LogKind
    error: int
    name: str
    detail: str
    frames: tuple[Frame, ...]

    @property
    def place(self) -> Frame | None:
        """The innermost frame in this repository; None where a thread without Python made the call."""
        ours = [frame for frame in self.frames if _is_ours(frame)]
        return (*ours, *self.frames, None)[0]

    def __str__(self) -> str:
        error = f" -> error {self.error}" if self.error else ""
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.name}{error}{detail} at {self.place}"


class _LogEntry(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int),
        ("error", ctypes.c_int),
        ("call", ctypes.c_char * 64),
        ("detail", ctypes.c_char * 160),
        ("trace", ctypes.c_char * 4096),
    ]


def is_in_front() -> bool:
    """True in a process that runs on the device in software."""
    return IN_FRONT in os.environ


def has_values() -> bool:
    """True in mode "values", where Python computes what kernels would."""
    return os.environ.get("EAGLE_KIT_DEVICE_MODE") == "values"


def environment(settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of a process that runs on the device; the libraries are built if need be.

    Args:
        settings: EAGLE_KIT_DEVICE_MEMORY_GB (80), _CAPABILITY (9.0), _COUNT (1), _MODE (counting), _NVML
            (not set: there is no management library).
    """
    folder = build()
    names = [library.file for library in LIBRARIES]
    if "EAGLE_KIT_DEVICE_NVML" in {**os.environ, **(settings or {})}:
        names.append(NVML)
    front = ":".join(str(folder / name) for name in names)
    return {
        "TRITON_CACHE_DIR": str(folder.parent / "triton"),
        **os.environ,
        "LD_PRELOAD": front,
        "TRITON_LIBCUDA_PATH": str(folder),
        IN_FRONT: str(folder),
        **(settings or {}),
    }


@cache
def _runtime() -> ctypes.CDLL:
    """The runtime of this process, told how to read Python's stack."""
    runtime = ctypes.CDLL(None)
    runtime.device_counter_name.restype = ctypes.c_char_p
    for name in ("device_counter", "device_log_length"):
        getattr(runtime, name).restype = ctypes.c_long
    sizes = ("device_bytes_used", "device_bytes_peak", "device_copy_up_to", "device_set_bytes_of_node")
    for name in sizes:
        getattr(runtime, name).restype = ctypes.c_size_t
    runtime.device_log_entry.argtypes = [ctypes.c_long, ctypes.POINTER(_LogEntry)]
    runtime.device_hold_streams.argtypes = [ctypes.c_bool]
    runtime.device_set_memory.argtypes = [ctypes.c_int, ctypes.c_size_t]
    runtime.device_copy_up_to.argtypes = [ctypes.c_size_t]
    runtime.device_set_bytes_of_node.argtypes = [ctypes.c_size_t]

    # The runtime sends the signal to its own thread, whose stack the handler writes without Python's lock.
    file = os.memfd_create("trace")
    faulthandler.register(_TRACE_SIGNAL, file=file, all_threads=False)
    runtime.device_trace_by(int(_TRACE_SIGNAL), file)
    return runtime


def start() -> None:
    """From now on calls are logged with their Python lines and, in mode "values", operations are computed."""
    _runtime()
    if has_values():
        from tests.cuda_device.values import launches, operations, poison

        operations.install()
        launches.install()
        poison.install()


# ---- Counters ----


def counts() -> dict[str, int]:
    """All counters since the start of the process, by the names of ``native/device.h``."""
    runtime = _runtime()
    found = {}
    while (name := runtime.device_counter_name(len(found))) is not None:
        found[name.decode()] = runtime.device_counter(len(found))
    return found


class Phase:
    """What happened within :func:`phase`: counters, and the calls that were logged."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.calls: list[Call] = []

    def of(self, kind: LogKind) -> list[Call]:
        """The logged calls of one kind."""
        return [call for call in self.calls if call.kind == kind]

    @property
    def launches(self) -> int:
        """Kernels that were launched or captured, of all three ways."""
        names = ("runtime_launches", "driver_launches", "library_launches")
        return sum(self.counts[name] for name in names)


@contextmanager
def phase(watched: int = 0) -> Iterator[Phase]:
    """Count what happens within; calls of the kinds ``watched`` are logged besides those that fail."""
    runtime = _runtime()
    found = Phase()
    before = counts()
    first = runtime.device_log_length()
    runtime.device_watch(watched)
    try:
        yield found
    finally:
        runtime.device_watch(0)
        found.counts = {name: value - before[name] for name, value in counts().items()}
        found.calls = calls(first)


def calls(first: int = 0) -> list[Call]:
    """Logged calls, from the number ``first`` on."""
    runtime = _runtime()
    return [_read(runtime, number) for number in range(first, runtime.device_log_length())]


def num_calls() -> int:
    """Calls that were logged up to now."""
    return _runtime().device_log_length()


def _read(runtime: ctypes.CDLL, number: int) -> Call:
    entry = _LogEntry()
    runtime.device_log_entry(number, ctypes.byref(entry))
    trace = entry.trace.decode(errors="replace")
    frames = re.findall(r'File "(.+)", line (\d+) in (.+)', trace)
    return Call(
        LogKind(entry.kind),
        entry.error,
        entry.call.decode(),
        entry.detail.decode(),
        tuple(Frame(file, int(line), function) for file, line, function in frames),
    )


def _is_ours(frame: Frame) -> bool:
    path = Path(frame.file)
    return path.is_relative_to(ROOT) and "site-packages" not in path.parts and path != Path(__file__)


# ---- Memory ----


def bytes_used(device: int = 0) -> int:
    """Bytes that are allocated on a device, in pages of 2 MiB."""
    return _runtime().device_bytes_used(device)


@contextmanager
def memory_of(size: int, device: int = 0) -> Iterator[None]:
    """Within, the device has ``size`` bytes in all."""
    import torch

    runtime = _runtime()
    before = torch.cuda.mem_get_info(device)[1]
    runtime.device_set_memory(device, size)
    try:
        yield
    finally:
        runtime.device_set_memory(device, before)


@contextmanager
def bytes_of_node(size: int) -> Iterator[None]:
    """Within, a graph takes ``size`` bytes of the device for each of its nodes when it is captured."""
    runtime = _runtime()
    before = runtime.device_set_bytes_of_node(size)
    try:
        yield
    finally:
        runtime.device_set_bytes_of_node(before)


@contextmanager
def copies_up_to(size: int) -> Iterator[None]:
    """Within, copies and fills of more than ``size`` bytes are counted only, in mode "counting".

    Memory that nothing writes takes none of the machine's, so that models of any size fit.
    """
    runtime = _runtime()
    before = runtime.device_copy_up_to(size)
    try:
        yield
    finally:
        runtime.device_copy_up_to(before)


# ---- Streams ----


@contextmanager
def late_streams() -> Iterator[None]:
    """Within, what is enqueued in a stream other than the default one runs when the host, or another stream,
    waits for it, and no earlier."""
    runtime = _runtime()
    runtime.device_hold_streams(True)
    try:
        yield
    finally:
        runtime.device_hold_streams(False)
