"""What a run will need, before step one: arithmetic, memory, disk, time.

Legend: T tokens of a forward, R rows with loss at step 0, K steps, H hidden, V / Vd target / draft
vocabulary.
"""

import math
import time
from dataclasses import dataclass
from functools import cache

import torch

from eagle_kit.config.train import TrainConfig
from eagle_kit.data.states.format import bytes_per_token
from eagle_kit.kernels.linear import linear
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.count import layer_weights
from eagle_kit.train.algorithm.ttt import LOSS_BLOCK
from eagle_kit.train.plan.activations import Numerics, training_bytes
from eagle_kit.train.plan.sizes import HeadArchitecture, attended, head_sizes, num_weights
from eagle_kit.train.run.progress import format_seconds

EXPECTED_EFFICIENCY = 0.55
"""Share of the measured matmul rate that a training step is expected to reach."""

BASE_BYTES = 700e6
"""Python, torch and the tokenizer."""


@dataclass(frozen=True)
class Workload:
    """What one forward of the trainer holds.

    Attributes:
        tokens: T, tokens of its packed rows.
        rows: R, rows that carry loss at step 0.
        steps: K.
        mean_context: mean number of keys a token attends to.
    """

    tokens: int
    rows: int
    steps: int
    mean_context: float


def capture_flops(target: TargetConfig, work: Workload) -> float:
    """Floating-point operations of the target over T tokens and of its choice among V at R rows: what
    captured states on disk save."""
    flops = 2.0 * work.tokens * layer_weights(target, active=True)
    flops += 2.0 * work.tokens * work.mean_context * target.num_layers * attended(target)
    return flops + 2.0 * work.rows * target.hidden_size * target.vocab_size


def head_flops(draft: HeadArchitecture, work: Workload) -> float:
    """Floating-point operations that one forward and backward of the head need.

    Counted: the teacher's logits over Vd at R rows once; the head's fusion, keys and values at T tokens and
    everything else at R rows, in each of the K steps (a few rows less carry loss at later steps). Of several
    layers each runs over T tokens. A backward pass is twice its forward, but the fusion's input needs no
    gradient.
    """
    sizes, T, R = head_sizes(draft), work.tokens, work.rows
    flops = 2.0 * R * draft.target_hidden_size * draft.draft_vocab_size + 4.0 * T * sizes.fuse
    attention = 2.0 * work.mean_context * sizes.attended
    row, keys = 2.0 * (sizes.behind + sizes.output) + attention, 2.0 * sizes.before
    if sizes.num_layers > 1:
        everywhere = keys + 2.0 * sizes.behind + attention
        return flops + 3.0 * work.steps * (T * everywhere + R * 2.0 * sizes.output)
    flops += 3.0 * (T * keys + R * row)
    return flops + 3.0 * (work.steps - 1) * R * (keys + row)


@dataclass(frozen=True)
class Estimate:
    """Sizes in bytes, times in seconds, both of one process except where it says otherwise.

    Attributes:
        memory: of weights, optimiser and activations by name.
        disk: of the run folder and the cache by name.
        flops_per_step: of one optimiser step, over all processes.
        flops_per_s: measured matmul rate of this process.
        seconds_per_step: expected, once the states that are kept on disk are there.
        num_steps: optimiser steps this session will do at most.
        num_captures: packed rows whose states are captured once and kept, over all processes.
        capture_seconds: expected for them.
        num_parameters: trained weights.
        free_disk: bytes free where the run folder goes.
    """

    memory: dict[str, float]
    disk: dict[str, float]
    flops_per_step: float
    flops_per_s: float
    seconds_per_step: float
    num_steps: int
    num_captures: int
    capture_seconds: float
    num_parameters: int
    free_disk: float

    @property
    def seconds(self) -> float:
        """Expected duration without judging."""
        return self.seconds_per_step * self.num_steps + self.capture_seconds

    def report(self) -> str:
        """A few lines for people."""
        memory = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in self.memory.items())
        disk = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in self.disk.items())
        captures = (
            f" + {format_seconds(self.capture_seconds)} for the states of {self.num_captures} rows"
            if self.num_captures
            else ""
        )
        return "\n".join(
            (
                f"head    {self.num_parameters / 1e6:.2f} M trained weights",
                f"memory  {sum(self.memory.values()) / 1e9:.2f} GB per process ({memory})",
                f"disk    {sum(self.disk.values()) / 1e9:.2f} GB ({disk}), {self.free_disk / 1e9:.1f} free",
                f"time    {self.num_steps} steps of {self.seconds_per_step:.2f} s{captures} = "
                f"{format_seconds(self.seconds)}, judging not counted ({self.flops_per_step / 1e9:.0f} GFLOP "
                f"a step at {EXPECTED_EFFICIENCY:.0%} of {self.flops_per_s / 1e9:.0f} GFLOP/s, measured now)",
            )
        )


def make_estimate(
    config: TrainConfig,
    target: TargetConfig,
    draft: HeadArchitecture,
    *,
    work: Workload,
    forwards_per_step: int,
    rows_per_forward: int,
    num_processes: int,
    num_rows: int,
    num_captures: int,
    num_steps: int,
    flops_per_s: float,
    free_disk: float,
    sharding: str = "none",
) -> Estimate:
    """Put the pieces together.

    Args:
        work: of one forward of one process.
        forwards_per_step: forwards of one process in an optimiser step.
        rows_per_forward: packed rows of one forward.
        num_rows: packed rows of the data set, for the state cache.
        num_captures: those of them that this session visits and the cache lacks; 0 without a cache.
        num_steps: optimiser steps still to do.
        flops_per_s: see :func:`measure_matmul_rate`.
        free_disk: bytes.
        sharding: how processes share the head, see :func:`eagle_kit.train.parallel.strategy.make_strategy`.
    """
    training = config.training
    cached = training.cache_hidden_states == "disk"
    kept = cached or config.data.store is not None
    params = num_draft_weights(draft)
    number = 2.0 if training.precision == "bfloat16" else 4.0
    target_bytes = number * _held_weights(config, target, num_processes)
    per_weight = head_bytes(sharding, num_processes) + 4.0 * (training.ema_decay is not None)
    memory = {
        "target": target_bytes,
        "head, gradient and optimiser": per_weight * params,
        **_activation_bytes(config, target, draft, work),
        "runtime": BASE_BYTES,
    }
    if config.judge.every:
        memory["judging"] = _judge_bytes(config, target, draft, target_bytes)
    copies = 3 + (training.ema_decay is not None)  # weights, two moments, the average
    disk = {
        f"{training.keep_last + 1} checkpoints": 4.0 * copies * params * (training.keep_last + 1),
        "best": 4.0 * params,
    }
    if cached:
        per_token = bytes_per_token(
            training.state_format, training.precision, len(draft.aux_layer_ids), target.hidden_size
        )
        disk["captured states"] = float(per_token * config.data.max_length * num_rows)
    capture, rate = capture_flops(target, work), flops_per_s * EXPECTED_EFFICIENCY
    needed = (head_flops(draft, work) + (0.0 if kept else capture)) * forwards_per_step
    return Estimate(
        memory=memory,
        disk=disk,
        flops_per_step=needed * num_processes,
        flops_per_s=flops_per_s,
        seconds_per_step=needed / rate,
        num_steps=num_steps,
        num_captures=num_captures,
        capture_seconds=num_captures / rows_per_forward * capture / rate / num_processes,
        num_parameters=params,
        free_disk=free_disk,
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


def head_bytes(sharding: str, num_processes: int) -> float:
    """Bytes per weight of the head between steps: fp32 weight, gradient and two moments. ZeRO keeps a second
    fp32 copy of the weights in shards; FSDP2 and ZeRO-3 gather the weights, 4 bytes each, for a step."""
    if sharding == "fsdp2":
        return 4.0 + 16.0 / num_processes
    if sharding == "zero2":
        return 8.0 + 12.0 / num_processes
    return 4.0 + 20.0 / num_processes if sharding == "zero3" else 16.0


def num_target_weights(target: TargetConfig) -> int:
    """Matrices of the target, embeddings included."""
    return num_weights(target)[1]


def _held_weights(config: TrainConfig, target: TargetConfig, num_processes: int) -> float:
    """Those of them that a process holds: embedding and output layer are always whole."""
    ends = (1 if target.tie_word_embeddings else 2) * target.vocab_size * target.hidden_size
    layers = num_target_weights(target) - ends if config.runs_target else 0
    return ends + layers / (num_processes if config.training.target_placement == "fsdp" else 1)


def num_draft_weights(draft: HeadArchitecture) -> int:
    """Weights of the head; those that it shares with the target are not counted."""
    return head_sizes(draft).total


def _activation_bytes(
    config: TrainConfig, target: TargetConfig, draft: HeadArchitecture, work: Workload
) -> dict[str, float]:
    """Captured states, and what the K steps and the loss hold at their peak; on a CPU, where it is a little
    more than on a GPU."""
    numerics = Numerics(2 if config.training.precision == "bfloat16" else 4, is_gpu=False)
    layers, loss = training_bytes(draft, work.tokens, work.rows, work.steps, LOSS_BLOCK, numerics)
    captured = work.tokens * (len(draft.aux_layer_ids) + 1) * target.hidden_size * numerics.operand
    weights = numerics.operand * num_draft_weights(draft) if numerics.operand == 2 else 0
    return {"activations": captured + layers + weights, "teacher and logits": loss}


def _judge_bytes(
    config: TrainConfig, target: TargetConfig, draft: HeadArchitecture, target_bytes: float
) -> float:
    """The engine's packed copy of the weights and its key-value pool, prompts half a row long."""
    context = config.data.max_length // 2 + config.judge.max_tokens
    per_token = target.cache.values_per_token + draft.cache.values_per_token
    return target_bytes + 4.0 * num_draft_weights(draft) + 4.0 * config.judge.batch_size * context * per_token
