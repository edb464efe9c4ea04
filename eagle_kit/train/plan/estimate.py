"""Estimate before step one, printed by every run and by ``--dry-run``: memory, disk, time on this machine."""

import math
import time
from dataclasses import dataclass
from functools import cache

import torch

from eagle_kit.drafts.registry import training_kind
from eagle_kit.ops.linear import linear
from eagle_kit.train.plan.costs import ProcessLayout, Rates, RunCosts, Workload, capture_flops, head_flops
from eagle_kit.train.run.progress import format_seconds

EXPECTED_EFFICIENCY = 0.55
"""Share of the measured matmul rate that a training step is expected to reach."""


@dataclass(frozen=True)
class Session:
    """Work of one session of a run.

    Attributes:
        work: one forward of one process.
        micro_batches_per_step: forwards of one process in an optimiser step.
        rows_per_micro_batch: packed sequences of one forward.
        num_rows: packed sequences of the data, for the cache of captured hidden states.
        num_captures: packed sequences that this session visits and the cache lacks; 0 without a cache.
        num_steps: optimiser steps of the session.
        flops_per_s: see :func:`measure_matmul_rate`.
        free_disk: free bytes on the disk of the run folder.
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
class RunEstimate:
    """Expected memory, disk and time of a session, in bytes and seconds of one process.

    Attributes:
        session: the work.
        memory: bytes by name, see :meth:`RunCosts.memory`.
        peak: bytes at the worst moment.
        disk: bytes of the run folder and the cache by name.
        flops_per_step: floating-point operations of an optimiser step, over all processes.
        seconds_per_step: time of an optimiser step; with a cache, once its hidden states are captured.
        capture_seconds: time of the captures into the cache.
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
        """Bytes that a step needs besides the models and the optimiser."""
        return self.memory["states and activations"] + self.memory["teacher and logits"]

    @property
    def seconds(self) -> float:
        """Time of the session without validation."""
        return self.seconds_per_step * self.session.num_steps + self.capture_seconds

    def report(self) -> str:
        """Lines about the head, memory, disk and time, for the user."""
        session = self.session
        memory = _list_sizes(self.memory)
        disk = _list_sizes(self.disk)
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


def _list_sizes(sizes: dict[str, float]) -> str:
    """Names with their sizes in gigabytes."""
    return ", ".join(f"{name} {size / 1e9:.2f}" for name, size in sizes.items())


def make_estimate(
    costs: RunCosts, session: Session, num_processes: int = 1, sharding: str = "none"
) -> RunEstimate:
    """Estimate a session in ``num_processes`` processes.

    Args:
        sharding: sharding of the head, see :func:`~eagle_kit.train.parallel.launch.sharding_asked_for`.
    """
    config = costs.config
    work = session.work
    forwards = session.micro_batches_per_step

    # Memory, with the target where the run needs its layers.
    target = "stored"
    if training_kind(config).runs_target(config):
        target = "sharded" if config.training.shares_target else "whole"
    layout = ProcessLayout(num_processes, target, sharding)
    memory = costs.memory(layout, work.tokens, work.rows)

    # An optimiser step. It does not run the target if hidden states are stored.
    is_stored = config.training.cache_hidden_states == "disk" or config.data.store is not None
    rates = Rates(session.flops_per_s * EXPECTED_EFFICIENCY)
    flops = head_flops(costs.draft, work)
    step_layout = ProcessLayout(num_processes, "stored", sharding)
    if not is_stored:
        flops += capture_flops(costs.target, work)
        step_layout = layout
    seconds_per_step = costs.step_seconds(work, forwards, step_layout, rates)

    # Captures of packed sequences, which the processes share.
    seconds_per_row = costs.capture_seconds(work, layout, rates) / session.rows_per_micro_batch
    return RunEstimate(
        session=session,
        memory=memory,
        peak=costs.peak(memory),
        disk=costs.disk(session.num_rows),
        flops_per_step=flops * forwards * num_processes,
        seconds_per_step=seconds_per_step,
        capture_seconds=session.num_captures * (seconds_per_row / num_processes),
        num_parameters=costs.head.total,
    )


@cache
def measure_matmul_rate(
    device: torch.device, dtype: torch.dtype = torch.float32, seconds: float = 0.4
) -> float:
    """Measure the rate of a matmul ``[1024, 1024] x [4096, 1024]`` on a device, once in a process.

    Args:
        seconds: duration of the measurement.

    Returns:
        Floating-point operations per second.
    """
    # A generator of its own leaves the run's random numbers as they are.
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(1024, 1024, device=device, dtype=dtype, generator=generator)
    weight = torch.randn(4096, 1024, device=device, dtype=dtype, generator=generator)
    flops = 2.0 * 1024 * 1024 * 4096

    def run(repeats: int) -> float:
        """Seconds of several matmuls."""
        started = time.perf_counter()
        for _ in range(repeats):
            linear(x, weight)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    # Warm up, choose the number of matmuls, and measure them.
    run(2)
    seconds_per_matmul = max(run(3) / 3, 1e-6)
    repeats = max(3, math.ceil(seconds / seconds_per_matmul))
    return flops * repeats / run(repeats)
