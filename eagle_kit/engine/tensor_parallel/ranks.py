"""Processes of tensor parallelism: their start, their devices, and what happens when one of them is lost.

Either ``torchrun`` starts all of them with the same program, or the program is rank 0 and starts the others
on its own machine (:mod:`~eagle_kit.engine.tensor_parallel.worker`).
"""

import atexit
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.loading.command_line import print_error
from eagle_kit.core.errors import RankLost, UserError
from eagle_kit.core.process import num_cores
from eagle_kit.distributed.collectives import Ranks, connect
from eagle_kit.distributed.heartbeat import Heartbeat, launched_store
from eagle_kit.engine.options import devices_of

WORKER = "eagle_kit.engine.tensor_parallel.worker"
"""Module that a worker process runs."""
EXIT_TIMEOUT_S = 10.0
"""Seconds that a worker process gets to end after rank 0 has left."""
EXIT_REPORT_S = 2.0
"""Seconds to wait for the exit of a process after a collective has failed, to name it in the error."""
CONNECT_TIMEOUT = timedelta(minutes=2)
"""Time to connect once all processes have announced themselves."""


@dataclass(frozen=True)
class WorkerArgs:
    """Arguments of a rank that is started by rank 0.

    Attributes:
        rank: its number.
        folder: where each rank announces itself with a file; None if the ranks are connected already.
        target, draft, config: arguments of ``LLM``.
    """

    rank: int
    folder: Path | None
    target: Path
    draft: Any
    config: EngineConfig

    def announce(self) -> str | None:
        """Announce this rank. Returns the address at which the ranks connect; None if they are connected."""
        if self.folder is None:
            return None
        (self.folder / f"{self.rank}").touch()
        return f"file://{self.folder / 'store'}"

    def missing_ranks(self) -> list[int]:
        """Ranks other than rank 0 that have not announced themselves."""
        assert self.folder is not None
        ranks = range(1, self.config.tensor_parallel)
        return [rank for rank in ranks if not (self.folder / f"{rank}").exists()]


class WorkerProcesses:
    """The ranks that rank 0 has started, as child processes. They end when rank 0 ends.

    Args:
        worker: the arguments with rank 0's number; each process gets its own.
    """

    def __init__(self, worker: WorkerArgs) -> None:
        self._callbacks: list[Callable[[str], None]] = []
        self._exit_message: str | None = None
        self._has_exited = threading.Event()
        self._expects_exit = threading.Event()
        self._lock = threading.Lock()
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        size = worker.config.tensor_parallel
        environ = {"OMP_NUM_THREADS": str(threads_per_rank(size)), **os.environ}
        for rank in range(1, size):
            self._children[rank] = self._start(replace(worker, rank=rank), environ)
        atexit.register(self.kill)

    def _start(self, worker: WorkerArgs, environ: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        """Start a process, give it its arguments, and watch it in a thread."""
        child = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # it belongs to rank 0's program
            env=environ,
            start_new_session=True,  # Ctrl-C reaches rank 0 alone
        )
        assert child.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended, which the thread below reports
            child.stdin.write(pickle.dumps(worker))
            child.stdin.flush()  # stays open: the process ends when it is closed
        threading.Thread(target=self._watch, args=(worker.rank, child), daemon=True).start()
        return child

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks from 1 on."""
        return [child.pid for child in self._children.values()]

    def on_exit(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` with a sentence, in another thread, when a process exits too early."""
        with self._lock:
            self._callbacks.append(callback)
            message = self._exit_message
        if message is not None:
            callback(message)

    def exit_message(self, timeout_s: float = 0.0) -> str | None:
        """Sentence that names the process that has exited too early; None if none has within the time."""
        self._has_exited.wait(timeout_s)
        return self._exit_message

    def expect_exit(self) -> None:
        """Report no exit from now on."""
        self._expects_exit.set()

    def close(self) -> None:
        """Wait for the processes to end, and kill those that do not."""
        self.expect_exit()
        timeout_s = EXIT_TIMEOUT_S if self._exit_message is None else 0.1
        for child in self._children.values():
            try:
                child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                child.kill()
        atexit.unregister(self.kill)

    def kill(self) -> None:
        """Kill the processes."""
        self.expect_exit()
        for child in self._children.values():
            child.kill()

    def _watch(self, rank: int, child: "subprocess.Popen[bytes]") -> None:
        """Wait for the exit of a process, and report it if it was not expected and is the first."""
        code = child.wait()
        if self._expects_exit.is_set():
            return
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"
        message = f"Rank {rank} of tensor parallelism (process {child.pid}) {how}."
        with self._lock:
            if self._exit_message is not None:
                return
            self._exit_message = message
            callbacks = list(self._callbacks)
        self._has_exited.set()
        for callback in callbacks:
            callback(message)


class HeartbeatMonitor:
    """Reports a rank without heartbeat to a process that ``torchrun`` has started.

    A machine without power or network closes no connection. On rank 0 the group is lost then, and callbacks
    are called. The other ranks might wait forever for its next call, so they exit.

    Args:
        ranks: of this process.
        timeout_s: of :class:`~eagle_kit.distributed.heartbeat.Heartbeat`.
    """

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        self._ranks = ranks
        self._callbacks: list[Callable[[str], None]] = []
        self._heartbeat = Heartbeat(launched_store, ranks.rank, ranks.size, timeout_s, self._on_missing)

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` with a sentence, in another thread, when a rank is lost."""
        self._callbacks.append(callback)
        if self._ranks.lost is not None:
            callback(self._ranks.lost)

    def close(self) -> None:
        """Stop the monitor. If the group is lost, the other ranks miss this one's heartbeat."""
        if self._ranks.lost is None:
            self._heartbeat.leave()
        else:
            self._heartbeat.close()

    def _on_missing(self, message: str) -> None:
        """Give the group up after a heartbeat was missed."""
        self._ranks.lose(message)
        if not self._ranks.is_first:
            print_error(
                UserError(message, "See whether its machine runs, and start all ranks again."),
                f"rank {self._ranks.rank}",
            )
            os._exit(1)
        for callback in self._callbacks:
            callback(message)


@dataclass
class RankGroup:
    """The ranks that share a model.

    Attributes:
        ranks: collectives and messages among them.
        workers: the processes that this one has started; None under ``torchrun`` and in a worker.
        folder: in which the workers have announced themselves.
        monitor: heartbeats under ``torchrun``.
    """

    ranks: Ranks
    workers: WorkerProcesses | None = None
    folder: "tempfile.TemporaryDirectory[str] | None" = None
    monitor: HeartbeatMonitor | None = None

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` with a sentence, in another thread, when another rank is lost."""
        if self.workers is not None:
            self.workers.on_exit(callback)
        elif self.monitor is not None:
            self.monitor.on_lost(callback)

    @contextmanager
    def keep_in_step(self) -> Iterator[None]:
        """Context manager for work that all ranks do.

        A UserError passes, since all ranks raise it alike. After any other error, Ctrl-C included, ranks may
        be out of step, and the group is given up.

        Raises:
            RankLost: the group was given up, or another rank has ended or does not answer. Its cause is the
                error, also one of this rank's device, which may come of reading the other's memory.
        """
        ranks = self.ranks
        try:
            yield
        except UserError:
            raise
        except BaseException as error:
            # A graph that reads the memory of an ended process fails on this rank's device.
            if isinstance(error, torch.AcceleratorError):
                message = self._exit_message()
                if message is not None:
                    ranks.lose(message)

            # No other rank is lost: this rank's error puts it out of step.
            if ranks.lost is None:
                self.give_up(f"A call of several ranks was interrupted ({type(error).__name__}).")
                raise

            # Recorded cycles raise errors of their own for a lost rank.
            raise RankLost(self._exit_message() or ranks.lost) from error

    def _exit_message(self) -> str | None:
        """Sentence that names the process that has exited, if it is known soon."""
        return None if self.workers is None else self.workers.exit_message(EXIT_REPORT_S)

    def give_up(self, why: str) -> None:
        """Kill the workers; every call from now on raises RankLost with the reason."""
        self.ranks.give_up(f"{why} Make the LLM anew.")
        if self.workers is not None:
            self.workers.kill()

    def close(self, last_message: Any = None) -> None:
        """Leave the group, and end the workers.

        Args:
            last_message: what rank 0 broadcasts before, by which the others leave too; not sent if a rank is
                lost.
        """
        # Let the others leave.
        if last_message is not None and self.ranks.is_first and self.ranks.lost is None:
            if self.workers is not None:
                self.workers.expect_exit()
            with suppress(RankLost):
                self.ranks.broadcast(last_message)

        # Leave the group.
        if self.monitor is not None:
            self.monitor.close()
        self.ranks.close()

        # End the workers.
        if self.workers is not None:
            self.workers.close()
        if self.folder is not None:
            self.folder.cleanup()


def launched_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Rank of this process among those that ``torchrun`` has started; None without ``torchrun``."""
    return int(environ["RANK"]) if "RANK" in environ and "WORLD_SIZE" in environ else None


def join_ranks(target: Path, draft: Any, config: EngineConfig, worker: WorkerArgs | None = None) -> RankGroup:
    """Connect to the other ranks. Without ``torchrun`` rank 0 starts them.

    Args:
        target, draft, config: arguments of ``LLM``, which the workers get.
        worker: the arguments of this process if rank 0 has started it.

    Raises:
        UserError: ``torchrun`` has started another number of processes, two ranks have the same GPU, or a
            worker ends.
    """
    if worker is not None:
        return _join_as_worker(config, worker)
    rank = launched_rank()
    if rank is not None:
        return _join_launched(config, rank)
    return _start_and_join(target, draft, config)


def _join_as_worker(config: EngineConfig, worker: WorkerArgs) -> RankGroup:
    """Connect as a rank that rank 0 has started."""
    size = config.tensor_parallel
    device = _take_device(config, worker.rank, size)
    address = worker.announce()
    start_timeout = timedelta(seconds=config.load_timeout_s)
    ranks = connect(worker.rank, size, device, config.rank_timeout_s, address, CONNECT_TIMEOUT, start_timeout)
    return RankGroup(ranks)


def _join_launched(config: EngineConfig, rank: int) -> RankGroup:
    """Connect as a rank that ``torchrun`` has started."""
    size = config.tensor_parallel
    num_launched = int(os.environ["WORLD_SIZE"])
    if num_launched != size:
        raise UserError(
            f"torchrun has started {num_launched} processes, and tensor_parallel is {size}.",
            f"Give --nproc-per-node {size}, or tensor_parallel={num_launched}.",
        )

    # Some launchers show each process its own GPU only, as number 0.
    if config.device in ("auto", "cuda") and _num_gpus() == 1:
        device = _take_device(config.replace(device="cuda:0"), 0, 1)
    else:
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        device = _take_device(config, local_rank, local_size)

    start_timeout = timedelta(seconds=config.load_timeout_s)
    ranks = connect(rank, size, device, config.rank_timeout_s, start_timeout=start_timeout)
    if device.type == "cuda":
        _check_distinct_gpus(ranks, device)

    # Heartbeats go through the launcher's store.
    monitor = None
    if "MASTER_ADDR" in os.environ:
        monitor = HeartbeatMonitor(ranks, config.rank_timeout_s)
    return RankGroup(ranks, monitor=monitor)


def _start_and_join(target: Path, draft: Any, config: EngineConfig) -> RankGroup:
    """Start the other ranks on this machine, and connect as rank 0."""
    size = config.tensor_parallel
    if dist.is_initialized():
        raise UserError(
            "This process is a member of a process group already, of another model with tensor parallelism.",
            "Close that one first, or use another process.",
        )
    device = _take_device(config, 0, size)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_per_rank(size))

    # Start the workers.
    folder = tempfile.TemporaryDirectory(prefix="eagle-kit-ranks-")
    worker = WorkerArgs(0, Path(folder.name), target, draft, config)
    workers = WorkerProcesses(worker)

    # Connect; where that fails, leave nothing behind.
    try:
        _wait_for_workers(worker, workers)
        start_timeout = timedelta(seconds=config.load_timeout_s)
        ranks = connect(
            0, size, device, config.rank_timeout_s, worker.announce(), CONNECT_TIMEOUT, start_timeout
        )
    except BaseException as error:
        is_failure = isinstance(error, RuntimeError)
        message = workers.exit_message(EXIT_REPORT_S if is_failure else 0.0)
        workers.kill()
        folder.cleanup()
        if dist.is_initialized():
            dist.destroy_process_group()
        if not is_failure:
            raise
        cause = message or "The other ranks were not there in time."
        raise UserError(cause, "See what they say.") from error

    workers.on_exit(ranks.lose)
    return RankGroup(ranks, workers, folder)


def _wait_for_workers(worker: WorkerArgs, workers: WorkerProcesses) -> None:
    """Wait until all workers have announced themselves. Raise RankLost if one ends or does not in time."""
    deadline = time.monotonic() + worker.config.load_timeout_s
    while True:
        missing = worker.missing_ranks()
        if not missing:
            return
        message = workers.exit_message(0.02)
        if message is not None:
            raise RankLost(message)
        if time.monotonic() > deadline:
            raise RankLost(f"Rank {missing[0]} of tensor parallelism was not there in time.")


def _take_device(config: EngineConfig, local_rank: int, local_size: int) -> torch.device:
    """Make the device of a rank the current one: the rank's number and the number of ranks are those of its
    machine."""
    device = devices_of(config.device, local_size)[local_rank]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _num_gpus() -> int:
    """Number of GPUs that this process can see."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _check_distinct_gpus(ranks: Ranks, device: torch.device) -> None:
    """Check that no two ranks have the same GPU: a launcher may show each rank its own one, or all of them
    the only one.

    Raises:
        UserError: two ranks have the same GPU. All ranks raise it, after they have left the group.
    """
    try:
        gpus = ranks.all(str(torch.cuda.get_device_properties(device).uuid))
        if len(set(gpus)) < len(gpus):
            shared = next(gpu for gpu in gpus if gpus.count(gpu) > 1)
            raise UserError(
                f"Two of {ranks.size} ranks were given the same GPU ({shared}).",
                "Give each process its own CUDA_VISIBLE_DEVICES, or set LOCAL_RANK and LOCAL_WORLD_SIZE.",
            )
    except BaseException:
        ranks.close()
        raise


def threads_per_rank(size: int) -> int:
    """Threads of each of ``size`` processes that share the cores of a machine."""
    return max(1, num_cores() // size)
