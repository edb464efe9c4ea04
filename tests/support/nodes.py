"""Machines that are process groups of this one: a launcher each, as on several, which meet at 127.0.0.1."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]


class Ended(NamedTuple):
    """A launcher that has ended: its exit code, and what it and its processes said."""

    code: int
    said: str


def start_nodes(count: int, per_node: int, *command: str) -> "list[subprocess.Popen[str]]":
    """Start ``torchrun`` as on ``count`` machines, each with ``per_node`` processes of ``command``."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nnodes", str(count))
    meet = ("--nproc_per_node", str(per_node), "--master_addr", "127.0.0.1", "--master_port", str(port))
    return [
        subprocess.Popen(
            [*launcher, "--node_rank", str(rank), *meet, *command],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
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


def run_nodes(count: int, per_node: int, *command: str) -> list[Ended]:
    """Start, and wait; every machine's launcher must succeed."""
    ended = finish(start_nodes(count, per_node, *command))
    assert all(node.code == 0 for node in ended), "\n".join(node.said for node in ended)
    return ended
