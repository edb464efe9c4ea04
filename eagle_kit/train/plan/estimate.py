"""Estimate before step one, printed by every run and by ``--dry-run``: memory, disk, time on this machine."""

import math
import time
from dataclasses import dataclass
from functools import cache

import torch

from eagle_kit.drafts.registry import training_kind
from eagle_kit.ops.linear import linear
from eagle_kit.train.plan.costs import Costs, Layout, Rates, Workload, capture_flops, head_flops
from eagle_kit.train.run.progress import format_seconds

EXPECTED_EFFICIENCY = 0.55
"""Share of the measured matmul rate that a training step is expected to reach."""


@dataclass(frozen=True)
class Session:
    """Work of one session of a run.

    Attributes:
        work: one forward of one process.
        micro_batches_per_step: forwards of one process in an optimiser step.
        rows_per_micro_batch: packed rows of one forward.
        num_rows: packed rows of the data set, for the state cache.
        num_captures: those of them that this session visits and the cache lacks; 0 without a cache.
        num_steps: optimiser steps still to do.
        flops_per_s: see :func:`measure_matmul_rate`.
        free_disk: bytes free where the run folder goes.
        mapped: bytes of weight files that are mapped into memory while the target is read.
    """

    work: Workload
    micro_batches_per_step: int
    rows_per_micro_batch: int
    num_rows: int
    num_captures: int
    num_steps: int
    flops_per_s: float
    free_disk: float
    mapped: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """Sizes in bytes, times in seconds, both of one process except where it says otherwise.

    Attributes:
        session: the work that is estimated.
        memory: of weights, optimiser and activations by name.
        peak: memory at the worst moment.
        disk: of the run folder and the cache by name.
        flops_per_step: of one optimiser step, over all processes.
        seconds_per_step: expected, once the states that are kept on disk are there.
        capture_seconds: expected for the states that are captured once and kept.
        num_parameters: trained weights.
    """

    session: Session
    memory: dict[str, float]
    peak: float
    disk: dict[str, float]
    flops_per_step: float
    seconds_per_step: float
    capture_seconds: float
    num_parameters: int

    @property
    def of_step(self) -> float:
        """Bytes that a step takes beside the models and the optimiser."""
        return self.memory["states and activations"] + self.memory["teacher and logits"]

    @property
    def seconds(self) -> float:
        """Expected duration without judging."""
        return self.seconds_per_step * self.session.num_steps + self.capture_seconds

    def report(self) -> str:
        """A few lines for people."""
        session = self.session
        memory, disk = (
            ", ".join(f"{name} {size / 1e9:.2f}" for name, size in sizes.items())
            for sizes in (self.memory, self.disk)
        )
        mapped = ""
        if session.mapped:
            mapped = (
                f"; besides, {session.mapped / 1e9:.2f} GB of weight files are mapped, which count as "
                "resident until the system needs the memory"
            )
        captures = ""
        if session.num_captures:
            seconds = format_seconds(self.capture_seconds)
            captures = f" + {seconds} for the states of {session.num_captures} rows"
        return "\n".join(
            (
                f"head    {self.num_parameters / 1e6:.2f} M trained weights",
                f"memory  {self.peak / 1e9:.2f} GB per process at the peak ({memory}){mapped}",
                f"disk    {sum(self.disk.values()) / 1e9:.2f} GB ({disk}), "
                f"{session.free_disk / 1e9:.1f} free",
                f"time    {session.num_steps} steps of {self.seconds_per_step:.2f} s{captures} = "
                f"{format_seconds(self.seconds)}, judging not counted ({self.flops_per_step / 1e9:.0f} GFLOP "
                f"a step at {EXPECTED_EFFICIENCY:.0%} of {session.flops_per_s / 1e9:.0f} GFLOP/s, measured "
                "now)",
            )
        )


def make_estimate(costs: Costs, session: Session, num_processes: int = 1, sharding: str = "none") -> Estimate:
    """Estimate of ``session`` in ``num_processes`` processes.

    Args:
        sharding: of the head, see :func:`eagle_kit.train.parallel.launch.sharding_asked_for`.
    """
    config, work = costs.config, session.work
    kept = config.training.cache_hidden_states == "disk" or config.data.store is not None
    target = "sharded" if config.training.shares_target else "whole"
    layout = Layout(
        num_processes, target if training_kind(config).runs_target(config) else "stored", sharding
    )
    rates = Rates(session.flops_per_s * EXPECTED_EFFICIENCY)
    per_forward = head_flops(costs.draft, work) + (0.0 if kept else capture_flops(costs.target, work))
    captured = costs.capture_seconds(work, layout, rates) / session.rows_per_micro_batch / num_processes
    memory = costs.memory(layout, work.tokens, work.rows)
    timed = Layout(num_processes, "stored" if kept else layout.target, sharding)
    return Estimate(
        session=session,
        memory=memory,
        peak=costs.peak(memory),
        disk=costs.disk(session.num_rows),
        flops_per_step=per_forward * session.micro_batches_per_step * num_processes,
        seconds_per_step=costs.step_seconds(work, session.micro_batches_per_step, timed, rates),
        capture_seconds=session.num_captures * captured,
        num_parameters=costs.head.total,
    )


@cache
def measure_matmul_rate(
    device: torch.device, dtype: torch.dtype = torch.float32, seconds: float = 0.4
) -> float:
    """Rate of a plain matmul ``[1024, 1024] x [4096, 1024]`` on this device in FLOP/s, measured once a
    process."""
    generator = torch.Generator(device).manual_seed(0)  # the run's own random numbers stay as they are
    x, w = (torch.randn(rows, 1024, device=device, dtype=dtype, generator=generator) for rows in (1024, 4096))
    flops = 2.0 * 1024 * 1024 * 4096

    def timed(repeats: int) -> float:
        started = time.perf_counter()
        for _ in range(repeats):
            linear(x, w)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    timed(2)
    repeats = max(3, math.ceil(seconds / max(timed(3) / 3, 1e-6)))
    return flops * repeats / timed(repeats)
