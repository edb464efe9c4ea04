"""CPU cores and threads of the process, and its end."""

import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

INTERRUPTED = 130
"""Exit code of a command that was interrupted and has saved its work so far."""
STOPPED = (INTERRUPTED, -signal.SIGTERM, 128 + signal.SIGTERM)
"""Return codes of a command of ours that a signal stopped, as its parent sees them."""
SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
SPIN_COUNT = "1000"
"""Iterations that a waiting OpenMP thread spins before it sleeps, some microseconds. By default it spins for
milliseconds; while another program runs, two threads are then slower than one. Threads that sleep at once
lose a third of their speed on a quiet machine. Figures are in docs/results/training-speed.md."""
IS_OURS = "EAGLE_KIT_SPINCOUNT"
"""Environment variable that marks ``GOMP_SPINCOUNT`` as set by this package, for processes that it starts."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with the settings of torch's allocator for GPUs. torch reads the second one if both are set."""
NVML = "libnvidia-ml.so.1"
"""Library of NVIDIA's driver that torch asks how expandable segments can be shared."""
ALLOCATOR_IS_OURS = "EAGLE_KIT_ALLOC_CONF"
"""Environment variable that marks ``PYTORCH_ALLOC_CONF`` as set by this package."""
PR_SET_PDEATHSIG = 1
"""Option of Linux's ``prctl``: the signal that a process gets when its parent has ended."""
_is_late = False


def num_cores() -> int:
    """Number of CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def limit_spinning() -> None:
    """Let waiting OpenMP threads sleep soon, unless the user has set one of ``SPIN_VARIABLES``. It has no
    effect on this process after the import of torch."""
    global _is_late
    if any(name in os.environ for name in SPIN_VARIABLES):
        return
    _is_late = "torch" in sys.modules
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    os.environ[IS_OURS] = SPIN_COUNT


def expand_segments() -> None:
    """Let torch's allocator for GPUs use expandable segments, unless the user has set one of
    ``ALLOCATOR_VARIABLES``. To be called before the import of torch.

    It is for training and capture, whose tensors have another size in every micro-batch, so that segments of
    fixed sizes fragment. A server's tensors are planned, and memory of expandable segments cannot be shared
    with other processes by cudaIpcGetMemHandle. Without the library ``NVML`` nothing is set, since torch 2.13
    would call a null pointer.
    """
    if any(name in os.environ for name in ALLOCATOR_VARIABLES):
        return
    try:
        ctypes.CDLL(NVML)
    except OSError:
        return
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    os.environ[ALLOCATOR_IS_OURS] = "1"


def environment_of_others() -> dict[str, str]:
    """Environment for programs of others, without the variables that :func:`limit_spinning` and
    :func:`expand_segments` have set."""
    environment = dict(os.environ)
    if IS_OURS in environment:
        environment.pop(IS_OURS)
        environment.pop("GOMP_SPINCOUNT", None)
    if ALLOCATOR_IS_OURS in environment:
        environment.pop(ALLOCATOR_IS_OURS)
        environment.pop("PYTORCH_ALLOC_CONF", None)
    return environment


def warn_of_spinning(num_threads: int) -> None:
    """Warn when :func:`limit_spinning` came too late for the threads of this process, while other programs
    keep the machine busy."""
    if _is_late and num_threads > 1 and is_busy():
        warnings.warn(
            "torch was imported before eagle_kit, so its threads spin while they wait, which is slow beside "
            f"other programs. Import eagle_kit first, or set GOMP_SPINCOUNT={SPIN_COUNT}.",
            stacklevel=3,
        )


def busy_cores() -> float:
    """Cores that were busy in the last minute, this process included."""
    return os.getloadavg()[0]


def is_busy() -> bool:
    """Return True if more than half of the cores were busy."""
    return busy_cores() > 0.5 * num_cores()


def is_alive(process: int) -> bool:
    """Return True if a process of this machine has the id ``process``."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True


def end_with_parent() -> Callable[[], None] | None:
    """Make a ``preexec_fn`` with which a child gets SIGTERM when the thread that started it ends in any way.
    None if the system is not Linux.

    Without it, a child in a session of its own lives on after ``kill -9`` of its parent and holds its files.
    """
    if not sys.platform.startswith("linux"):
        return None
    set_option = ctypes.CDLL(None).prctl  # found here: a child that was forked may not load libraries
    parent = os.getpid()

    def set_death_signal() -> None:
        set_option(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has ended meanwhile
            os._exit(1)

    return set_death_signal


def end_at_once(code: int) -> NoReturn:
    """Flush the output and end this process without Python's finalisation, which may wait for ever for a GPU
    if another process of the group is lost."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it, or it is closed
            stream.flush()
    os._exit(code)


@contextmanager
def interruptible(seconds: float | None = None) -> Iterator[None]:
    """Raise KeyboardInterrupt in the body at SIGTERM, at a closed terminal and after ``seconds``, as at
    Ctrl-C."""
    handled = [signal.SIGTERM, signal.SIGHUP, signal.SIGALRM]
    handlers = {number: signal.signal(number, signal.default_int_handler) for number in handled}
    signal.setitimer(signal.ITIMER_REAL, seconds or 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
