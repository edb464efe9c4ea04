"""Processes of one thread that share a model, over gloo on this machine."""

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eagle_kit.distributed.collectives import connect

FORKED = multiprocessing.get_context("fork")
"""Ranks have the memory of the test's process, so ``work`` may be a closure. A lock that a thread of that
process holds at the fork stays locked in them: ranks that train come from :data:`fork_server.FORK_SERVER`,
since autograd, accelerate and trackers of earlier tests have threads."""


def run_ranks(
    size: int,
    work: Callable[..., Any],
    *args: Any,
    timeout_s: float = 180,
    processes: multiprocessing.context.BaseContext = FORKED,
    **options: Any,
) -> list[Any]:
    """What ``work(ranks, *args, **options)`` returns in each of ``size`` processes, which look as those of
    ``torchrun``; None where it exits. Raises AssertionError where one fails, with its traceback."""
    task = partial(work, **options)
    with tempfile.TemporaryDirectory() as folder:
        pipes = [processes.Pipe(duplex=False) for _ in range(size)]
        children = [
            processes.Process(target=_child, args=(rank, size, folder, pipes[rank][1], task, args))
            for rank in range(size)
        ]
        for child in children:
            child.start()
        for _, sender in pipes:
            sender.close()
        try:
            found = []
            for rank, (receiver, _) in enumerate(pipes):
                assert receiver.poll(timeout_s), f"rank {rank} gave no answer in {timeout_s} s"
                found.append(pickle.loads(receiver.recv_bytes()))
        finally:
            for child in children:
                child.join(5)
                child.kill()
    errors = [f"rank {rank}:\n{error}" for rank, (error, _) in enumerate(found) if error]
    assert not errors, "\n".join(errors)
    return [result for _, result in found]


def _child(
    rank: int, size: int, folder: str, pipe: Any, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    address = f"file://{Path(folder) / 'store'}"
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    try:
        ranks = connect(rank, size, torch.device("cpu"), timeout_s=20, address=address)
        result = work(ranks, *args)
        pipe.send_bytes(pickle.dumps(("", result)))  # tensors by value
        ranks.all(None)  # nobody leaves before all are done
    except SystemExit:  # of ranks that followed the first one to its end
        pipe.send_bytes(pickle.dumps(("", None)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
    finally:
        pipe.close()
        os._exit(0)  # nothing of the parent's is to be cleaned up here
