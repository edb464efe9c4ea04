"""Machines that are process groups of this one: a launcher each, as on several, which meet at 127.0.0.1."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fork_server import FORK_SERVER

REPOSITORY = Path(__file__).parents[2]


class Ended(NamedTuple):
    """A launcher that has ended: its exit code, and what it and its processes said."""

    code: int
    said: str


Launcher = Callable[[int, int, int, int], Sequence[str]]
"""Machines, processes of each, number of this machine, port -> Python's arguments before the command."""


def torchrun(count: int, per_node: int, node: int, port: int) -> Sequence[str]:
    """``torchrun`` of machine ``node``."""
    launcher = ("-m", "torch.distributed.run", "--nnodes", str(count), "--nproc_per_node", str(per_node))
    return (*launcher, "--node_rank", str(node), "--master_addr", "127.0.0.1", "--master_port", str(port))


def accelerate(count: int, per_node: int, node: int, port: int) -> Sequence[str]:
    """``accelerate launch`` of machine ``node``, as the documentation has it."""
    file = str(REPOSITORY / "train" / "accelerate" / "multi-gpu.yaml")
    launcher = ("-m", "accelerate.commands.launch", "--config_file", file, "--num_machines", str(count))
    meet = ("--main_process_ip", "127.0.0.1", "--main_process_port", str(port))
    return (*launcher, "--num_processes", str(count * per_node), "--machine_rank", str(node), *meet)


def bound_socket() -> socket.socket:
    """A socket at a free port, at which somebody else may listen who reuses addresses."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    return sock


def start_nodes(
    count: int, per_node: int, *command: str, launcher: Launcher = torchrun
) -> "list[subprocess.Popen[str]]":
    """Start ``launcher`` as on ``count`` machines, each with ``per_node`` processes of ``command``.

    The launchers inherit a socket that is bound to their port and never listens: as long as they run, no
    other process is given that port, and with ``SO_REUSEADDR`` the rendezvous may listen at it.
    """
    with bound_socket() as sock:
        port = sock.getsockname()[1]
        return [
            subprocess.Popen(
                [sys.executable, *launcher(count, per_node, node, port), *command],
                cwd=REPOSITORY,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=(sock.fileno(),),
            )
            for node in range(count)
        ]


def finish(nodes: "Sequence[subprocess.Popen[str]]", timeout_s: float = 300) -> list[Ended]:
    """Wait for all of them."""
    try:
        ended = [
            Ended(node.returncode, said)
            for node in nodes
            for said in [node.communicate(timeout=timeout_s)[0]]
        ]
    finally:
        for node in nodes:
            node.kill()
    return ended


def run_nodes(count: int, per_node: int, *command: str, launcher: Launcher = torchrun) -> list[Ended]:
    """Start, and wait; every machine's launcher must succeed."""
    ended = finish(start_nodes(count, per_node, *command, launcher=launcher))
    assert all(node.code == 0 for node in ended), "\n".join(node.said for node in ended)
    return ended


def train_on_forked_nodes(count: int, arguments: Sequence[str], timeout_s: float = 180) -> list[int | None]:
    """Run ``eagle-kit train`` on ``count`` machines with one process each, which are forked and not launched.

    They have the environment that ``torchrun`` gives, and cost no imports.

    Returns:
        The exit code of each; None for one that has not ended in time.
    """
    with bound_socket() as sock:
        port = sock.getsockname()[1]
        nodes = [
            FORK_SERVER.Process(target=_train_on_node, args=(node, count, port, list(arguments)), daemon=True)
            for node in range(count)
        ]
        for node in nodes:
            node.start()
        for node in nodes:
            node.join(timeout_s)
        codes = [node.exitcode for node in nodes]
        for node in nodes:
            node.kill()
    return codes


def _train_on_node(node: int, count: int, port: int, arguments: list[str]) -> None:
    import torch

    from eagle_kit.train.__main__ import main

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(node),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    sys.exit(main(arguments))
