"""Processes of tensor parallelism: started by ``torchrun``, or by the first of them on its own machine.

Under ``torchrun`` all processes run the same program; those that are not the first stay in the constructor of
``LLM``, where they do what the first one says, and end there. Otherwise the program is the first rank, and
starts the others as ``python -m eagle_kit.engine.tensor_parallel.ranks``, which read what to load from their
standard input.
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
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.loading.command_line import print_error
from eagle_kit.core.errors import RankLost, UserError
from eagle_kit.core.process import num_cores
from eagle_kit.distributed.collectives import START_TIMEOUT, Ranks, connect
from eagle_kit.distributed.heartbeat import Heartbeat, launched_store
from eagle_kit.engine.options import devices_of

if TYPE_CHECKING:
    from eagle_kit.engine.llm import LLM

LEAVE_S = 10.0
"""Seconds that other ranks get to end after the first one has left."""
NAMING_S = 2.0
"""Seconds to find out which process has ended, once a collective has failed."""
MEETING = timedelta(minutes=2)
"""Time to connect, once all processes are there."""


@dataclass(frozen=True)
class Start:
    """What a rank is started with: the arguments of ``LLM``, and the folder in which all meet; None where
    they have met."""

    rank: int
    folder: Path | None
    target: Path
    draft: Any
    config: EngineConfig

    def come(self) -> str | None:
        """Say that this rank is there; returns the address at which it meets the others."""
        if self.folder is None:
            return None
        (self.folder / f"{self.rank}").touch()
        return f"file://{self.folder / 'store'}"

    def missing(self) -> list[int]:
        """Other ranks that are not there yet."""
        assert self.folder is not None
        return [
            rank for rank in range(1, self.config.tensor_parallel) if not (self.folder / f"{rank}").exists()
        ]


class Workers:
    """The other ranks of this machine, as child processes, which end when this one has ended.

    Args:
        start: of the first rank; the others get their own numbers.
    """

    def __init__(self, start: Start) -> None:
        self._is_closing, self._tell = threading.Event(), list[Callable[[str], None]]()
        self._ended: str | None = None
        self._has_ended = threading.Event()
        self._lock = threading.Lock()
        ranks = range(1, start.config.tensor_parallel)
        environ = {"OMP_NUM_THREADS": str(own_threads(len(ranks) + 1)), **os.environ}
        self._children = {}
        for rank in ranks:
            child = subprocess.Popen(
                [sys.executable, "-m", "eagle_kit.engine.tensor_parallel.ranks"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # the first rank's program has it
                env=environ,
                start_new_session=True,  # Ctrl-C is the first rank's
            )
            self._children[rank] = child
            assert child.stdin is not None
            with suppress(BrokenPipeError):  # it has ended
                child.stdin.write(pickle.dumps(replace(start, rank=rank)))
                child.stdin.flush()  # and stays open as long as this process lives
            threading.Thread(target=self._watch, args=(rank, child), daemon=True).start()
        atexit.register(self.kill)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, from rank 1 on."""
        return [child.pid for child in self._children.values()]

    def on_end(self, tell: Callable[[str], None]) -> None:
        """Call ``tell`` with a sentence, in another thread, when a process ends before it should."""
        with self._lock:
            self._tell.append(tell)
            ended = self._ended
        if ended is not None:
            tell(ended)

    def ended(self, timeout_s: float = 0.0) -> str | None:
        """Which process has ended, as a sentence; None if none has within the time."""
        self._has_ended.wait(timeout_s)
        return self._ended

    def expect_end(self) -> None:
        """Take no end of a process for one before it should any more."""
        self._is_closing.set()

    def close(self) -> None:
        """End the processes: they have been told to leave, or have no use any more."""
        self.expect_end()
        for child in self._children.values():
            try:
                child.wait(LEAVE_S if self._ended is None else 0.1)
            except subprocess.TimeoutExpired:
                child.kill()
        atexit.unregister(self.kill)

    def kill(self) -> None:
        """End the processes at once."""
        self.expect_end()
        for child in self._children.values():
            child.kill()

    def _watch(self, rank: int, child: "subprocess.Popen[bytes]") -> None:
        code = child.wait()
        if self._is_closing.is_set():
            return
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"
        with self._lock:
            if self._ended is not None:
                return
            self._ended = f"Rank {rank} of tensor parallelism (process {child.pid}) {how}."
            tell = list(self._tell)
        self._has_ended.set()
        for each in tell:
            each(self._ended)


class Missed:
    """What happens on a rank that ``torchrun`` has started when another has no heartbeat any more, as on a
    machine without power or network: later calls say so, and so do callbacks of the first rank; others, which
    may wait for its next message for ever, end.

    Args:
        ranks: of this process.
        timeout_s: of :class:`~eagle_kit.distributed.heartbeat.Heartbeat`.
    """

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        self._ranks, self._tell = ranks, list[Callable[[str], None]]()
        self._heartbeat = Heartbeat(launched_store, ranks.rank, ranks.size, timeout_s, self._miss)

    def on_end(self, tell: Callable[[str], None]) -> None:
        """See :meth:`Workers.on_end`."""
        self._tell.append(tell)
        if self._ranks.lost is not None:
            tell(self._ranks.lost)

    def close(self) -> None:
        """Watch no more. The others miss this rank where the group was lost."""
        if self._ranks.lost is None:
            self._heartbeat.leave()
        else:
            self._heartbeat.close()

    def _miss(self, sentence: str) -> None:
        self._ranks.lose(sentence)
        if not self._ranks.is_first:
            print_error(
                UserError(sentence, "See whether its machine runs, and start all ranks again."),
                f"rank {self._ranks.rank}",
            )
            os._exit(1)
        for each in self._tell:
            each(sentence)


@dataclass
class Group:
    """The ranks of a model; and where the first one has started the others, these, and the folder of the file
    by which they met; where ``torchrun`` has, those that are ``missed``."""

    ranks: Ranks
    workers: Workers | None = None
    folder: "tempfile.TemporaryDirectory[str] | None" = None
    missed: Missed | None = None

    def why(self, error: RankLost) -> RankLost:
        """The error, with the name of the process that has ended where it can be known."""
        ended = self._ended()
        return error if ended is None else RankLost(ended)

    def _ended(self) -> str | None:
        return None if self.workers is None else self.workers.ended(NAMING_S)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Context manager: all ranks do what is done within. UserError passes, which all raise alike; after
        any other error, Ctrl-C included, ranks may be out of step, and the group is given up.

        Raises:
            RankLost: it was given up; another rank has ended, or does not answer. Its cause is the error,
                also of this rank's device, which may come of reading the other's memory.
        """
        ranks = self.ranks
        try:
            yield
        except UserError:
            raise
        except BaseException as error:
            if isinstance(error, torch.AcceleratorError) and (ended := self._ended()) is not None:
                ranks.lose(ended)
            if ranks.lost is None:
                self.give_up(f"A call of several ranks was interrupted ({type(error).__name__}).")
                raise
            raise self.why(RankLost(ranks.lost)) from error  # a recording raises errors of its own

    def give_up(self, why: str) -> None:
        """End the other ranks at once; every call from now on says why."""
        self.ranks.give_up(f"{why} Make the LLM anew.")
        if self.workers is not None:
            self.workers.kill()

    def close(self, last: Any = None) -> None:
        """Leave the others, and end child processes.

        Args:
            last: message by which the first rank has the others leave, where they can hear it.
        """
        if last is not None and self.ranks.is_first and self.ranks.lost is None:
            if self.workers is not None:
                self.workers.expect_end()
            with suppress(RankLost):
                self.ranks.tell(last)
        if self.missed is not None:
            self.missed.close()
        self.ranks.close()
        if self.workers is not None:
            self.workers.close()
        if self.folder is not None:
            self.folder.cleanup()


def launched_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Rank of this process among those that ``torchrun`` started; None without it."""
    return int(environ["RANK"]) if "RANK" in environ and "WORLD_SIZE" in environ else None


def join_ranks(target: Path, draft: Any, config: EngineConfig, start: Start | None = None) -> Group:
    """Meet the other ranks, starting them where ``torchrun`` has not.

    Args:
        start: of a rank that was started by the first one.

    Raises:
        UserError: ``torchrun`` has started another number of processes, two of them are given the same GPU,
            or one that was started ends.
    """
    size, rank = config.tensor_parallel, launched_rank()
    if start is not None:
        device = _take_device(config, start.rank, size)
        return Group(connect(start.rank, size, device, config.rank_timeout_s, start.come(), MEETING))
    if rank is not None:
        if (launched := int(os.environ["WORLD_SIZE"])) != size:
            raise UserError(
                f"torchrun has started {launched} processes, and tensor_parallel is {size}.",
                f"Give --nproc-per-node {size}, or tensor_parallel={launched}.",
            )
        local, count = os.environ.get("LOCAL_RANK", rank), os.environ.get("LOCAL_WORLD_SIZE", size)
        if config.device in ("auto", "cuda") and _num_gpus() == 1:  # its launcher shows it that one only
            device = _take_device(config.replace(device="cuda:0"), 0, 1)
        else:
            device = _take_device(config, int(local), int(count))
        ranks = connect(rank, size, device, config.rank_timeout_s)
        if device.type == "cuda":
            _check_apart(ranks, device)
        has_store = "MASTER_ADDR" in os.environ
        return Group(ranks, missed=Missed(ranks, config.rank_timeout_s) if has_store else None)
    if dist.is_initialized():
        raise UserError(
            "This process is a member of a process group already, of another model with tensor parallelism.",
            "Close that one first, or use another process.",
        )
    device = _take_device(config, 0, size)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder = tempfile.TemporaryDirectory(prefix="eagle-kit-ranks-")
    start = Start(0, Path(folder.name), target, draft, config)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(own_threads(size))
    workers = Workers(start)
    try:
        _wait_for_others(start, workers)
        ranks = connect(0, size, device, config.rank_timeout_s, start.come(), MEETING)
    except BaseException as error:
        ended = workers.ended(NAMING_S if isinstance(error, RuntimeError) else 0.0)
        workers.kill()
        folder.cleanup()
        if dist.is_initialized():
            dist.destroy_process_group()
        if not isinstance(error, RuntimeError):
            raise
        raise UserError(ended or "The other ranks were not there in time.", "See what they say.") from error
    workers.on_end(ranks.lose)
    return Group(ranks, workers, folder)


def _wait_for_others(start: Start, workers: Workers) -> None:
    """Wait until all processes are there, as long as none has ended. Raise RankLost otherwise."""
    last = time.monotonic() + START_TIMEOUT.total_seconds()
    while missing := start.missing():
        if (ended := workers.ended(0.02)) is not None:
            raise RankLost(ended)
        if time.monotonic() > last:
            raise RankLost(f"Rank {missing[0]} of tensor parallelism was not there in time.")


def _take_device(config: EngineConfig, local: int, count: int) -> torch.device:
    """Make the device of the rank that is number ``local`` of ``count`` on its machine the current one."""
    device = devices_of(config.device, count)[local]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _check_apart(ranks: Ranks, device: torch.device) -> None:
    """Raise UserError, on all ranks, which have left the group then, where two have the same GPU: a launcher
    may show each rank its own one, or all the only one."""
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


def own_threads(size: int) -> int:
    """Threads of each of ``size`` processes that share the cores of a machine."""
    return max(1, num_cores() // size)


def follow(llm: "LLM", group: Group) -> None:
    """Do what the first rank says until it leaves. Signals are the first rank's, which takes its time to end.

    Raises:
        RankLost: it has ended without a word.
    """
    from eagle_kit.engine.tensor_parallel.leading import Follower

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    with group.whole():
        Follower(llm).run(group.ranks)


def _end_with_parent() -> None:
    """End this process when the one that has started it ends, which closes the standard input."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def main() -> int:
    """Run a rank that the first one has started; returns the exit code."""
    start: Start = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.simplefilter("ignore")  # the first rank has the same
    from eagle_kit.engine.llm import LLM

    try:
        LLM(start.target, start.draft, start.config, start=start)
    except (UserError, RankLost):
        return 1  # which the first rank tells
    return 0


if __name__ == "__main__":
    sys.exit(main())
