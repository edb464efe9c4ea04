"""Time and memory of the trainer's step against doing it the plain way, as ratios.

All ways run in turn on the same row in the same process, so that a machine that is busy slows all of them.

Legend: T packed tokens, K steps, Vd draft vocabulary.
"""

import gc
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.case import wall_seconds
from benchmarks.models import preset_named
from benchmarks.train.dense import DenseInputs, dense_way, every_row, kept_logits_way, our_way
from eagle_kit.config.train import TrainingConfig
from eagle_kit.core.errors import UserError
from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.targets.target import Target
from eagle_kit.objective.row_plan import make_row_plan
from eagle_kit.objective.target_features import capture_features
from eagle_kit.ops.cpu.memory import keep_large_blocks
from eagle_kit.ops.timing import Timing


@dataclass(frozen=True)
class RatioOptions:
    """Row and head on which the ways are compared.

    Attributes:
        model: random weights of these shapes (a name of ``benchmarks.models``) instead of the target's.
        length: T; by default as EAGLE-3 was trained.
        supervised_share: of the tokens of the made-up conversations; by default about that of ShareGPT.
        ttt_length: K.
        draft_vocab_size: Vd; None is 8,192, or the model's.
        precision: ``float32`` or ``bfloat16`` (autocast).
        device: such as ``cpu`` or ``cuda``.
    """

    model: str | None = None
    length: int = 2048
    supervised_share: float = 0.75
    ttt_length: int = 7
    draft_vocab_size: int | None = None
    precision: str = "float32"
    device: str = "cpu"


class Row(NamedTuple):
    """One packed sequence: tokens, document starts and responses (-1 where there is none), int64 ``[T]``
    each."""

    ids: torch.Tensor
    doc_start: torch.Tensor
    response: torch.Tensor


def measure_ratios(options: RatioOptions, target: Target | None, repeats: int = 3) -> dict[str, Any]:
    """Time and peak memory of one forward and backward of the head by every way, and their ratios.

    Args:
        target: a real target; None with ``options.model``.
        repeats: rounds; medians are reported.

    Returns:
        ``times_us`` and ``peak_bytes`` by way, ``losses``, what the row is like, and as ``figures`` the
        ratios ours / theirs of time and memory, and the largest relative differences.

    Raises:
        UserError: a share out of range, or a row without loss at the last step.
    """
    # One head and one packed sequence, on which all forms compute.
    keep_large_blocks()
    device = torch.device(options.device)
    config, size = _shapes(options, target)
    torch.manual_seed(0)
    head = Eagle3Head(Eagle3Config.for_target(config, size)).to(device)
    row = Row(*(part.to(device) for part in made_up_row(options, config.vocab_size)))
    work = _work(options, head, config, target, row)
    if work.plan.counts[-1] == 0:
        raise UserError("No row carries loss at the last step.", "Raise --length or --supervised-share.")
    everything = every_row(work)
    runs: dict[str, Callable[[], float]] = {
        "ours": lambda: our_way(head, work),
        "every row": lambda: our_way(head, everything),
        "published": lambda: dense_way(head, work),
        "kept logits": lambda: kept_logits_way(head, work),
    }
    others = [name for name in runs if name != "ours"]

    # Losses, gradients and memory once, then times in turns.
    with torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bfloat16"):
        optimizer = torch.optim.AdamW(head.parameters(), lr=0.0, fused=True)
        peaks = {}
        losses = {}
        gradients = {}
        for name, run in runs.items():
            for parameter in head.parameters():
                parameter.grad = torch.zeros_like(parameter)
            losses[name] = run()
            gradients[name] = torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None])
            peaks[name] = peak_bytes(run, device)
        wall: dict[str, list[float]] = {name: [] for name in (*runs, "optimizer")}
        for _ in range(repeats):
            for name, run in (*runs.items(), ("optimizer", optimizer.step)):
                wall[name].append(wall_seconds(run, device))

    # Differences from the others, and ratios to them.
    ours = gradients["ours"]
    figures = {
        "loss difference": max(abs(losses[name] / losses["ours"] - 1) for name in others),
        "gradient difference": max(float((gradients[n] - ours).norm() / ours.norm()) for n in others),
    }
    for name in others:
        figures[f"time ours/{name}"] = _ratio(wall["ours"], wall[name])
        figures[f"memory ours/{name}"] = peaks["ours"] / peaks[name]
    return {
        "documents": int(torch.unique(row.doc_start).numel()),
        "supervised_share": float((row.response >= 0).float().mean()),
        "rows_of_steps": work.plan.counts,
        "draft_vocab_size": size,
        "times_us": {name: Timing.of(seconds, "in turns").in_us() for name, seconds in wall.items()},
        "peak_bytes": peaks,
        "losses": losses,
        "figures": figures,
    }


def _shapes(options: RatioOptions, target: Target | None) -> tuple[TargetConfig, int]:
    if options.model is None:
        assert target is not None
        return target.config, options.draft_vocab_size or min(8192, target.config.vocab_size)
    config, size = preset_named(options.model)
    return config, options.draft_vocab_size or size


def made_up_row(options: RatioOptions, vocab_size: int) -> Row:
    """Three conversations of a prompt and a response, as packing makes them, of random tokens.

    Raises:
        UserError: the supervised share is out of range.
    """
    share = options.supervised_share
    if not 0.0 < share <= 1.0:
        raise UserError(f"--supervised-share is {share}.", "Give a number above 0 and at most 1.")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (options.length,), generator=generator)
    doc_start = torch.zeros_like(ids)
    response = torch.full_like(ids, -1)
    bounds = [round(options.length * part) for part in (0.0, 0.3, 0.63, 1.0)]
    for number, (start, stop) in enumerate(pairwise(bounds)):
        doc_start[start:stop] = start
        response[stop - round(share * (stop - start)) : stop] = number
    return Row(ids, doc_start, response)


def _work(
    options: RatioOptions, head: Eagle3Head, config: TargetConfig, target: Target | None, row: Row
) -> DenseInputs:
    """States of the target over the row, or random ones; weights of the steps as the trainer's."""
    ids, device = row.ids, row.ids.device
    plan = make_row_plan(row.response, row.doc_start, options.ttt_length)
    if target is not None:
        found = capture_features(target, ids, row.doc_start, head.capture, torch.zeros_like(plan.is_teacher))
        aux = found.aux_hidden_states
        hidden = found.hidden
        embed = target.embed_tokens.weight
        output = target.head_weight
    else:
        width = config.hidden_size
        aux, hidden = (torch.randn(len(ids), n * width, device=device) for n in (len(head.capture), 1))
        embed = torch.randn(config.vocab_size, width, device=device) * 0.02
        output = embed if config.tie_word_embeddings else torch.randn_like(embed) * 0.02
    choices = torch.zeros(config.vocab_size, dtype=torch.bool)
    # The draft can say what the target would choose here most often, so that rows carry loss.
    with torch.no_grad():
        chosen = torch.unique((hidden[plan.is_teacher] @ output.T).argmax(-1)).cpu()
        wanted = chosen[: head.lm_head.out_features]
        choices[wanted] = True
        choices[torch.nonzero(~choices)[: head.lm_head.out_features - len(wanted), 0]] = True
        hot = torch.nonzero(choices)[:, 0]
        head.set_vocab_map(hot - torch.arange(len(hot)), choices)
        head.lm_head.weight.copy_(output[head.token_map])
        head.norm.weight.fill_(0.1)
    weights = TrainingConfig(ttt_length=options.ttt_length).weights
    row_weights = [
        torch.full(rows.shape, weight / sum(weights) / max(1, len(rows)), device=ids.device)
        for rows, weight in zip(plan.rows, weights, strict=True)
    ]
    return DenseInputs(
        embed, output, output[head.token_map].contiguous(), ids, aux, hidden, plan, row_weights
    )


def _ratio(ours: list[float], theirs: list[float]) -> float:
    """Median over the rounds of the ratio within a round, which a busy machine disturbs least."""
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Most bytes that ``run`` had allocated at a time, over what was there before.

    On CUDA the allocator's own maximum; on a CPU the profiler's record of every allocation of a tensor,
    temporaries inside operations included.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    peak = now = 0
    for event in sorted(changes, key=lambda event: event["ts"]):
        now += event["args"]["Bytes"]
        peak = max(peak, now)
    return peak
