"""`eagle-kit bench train`: time and memory of the trainer's step against doing it the plain way, as ratios.

All ways run in turn on the same row in the same process, so that a machine that is busy slows all of them.

Legend: T packed tokens, K steps, Vd draft vocabulary.
"""

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from eagle_kit.bench.train.dense import DenseInputs, dense_way, every_row, kept_logits_way, our_way
from eagle_kit.config.train import DataConfig, TrainingConfig
from eagle_kit.core.errors import UserError
from eagle_kit.kernels.cpu_memory import keep_large_blocks
from eagle_kit.models.config import DraftConfig, TargetConfig
from eagle_kit.models.heads.eagle3 import Eagle3Head
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.train.algorithm.row_plan import plan_row

SHARE_OF_SHAREGPT = 0.75
"""Supervised tokens of a packed row of ShareGPT, about."""
MOST = 0.5
"""What the ratios are to reach."""


@dataclass(frozen=True)
class RatioOptions:
    """What is measured.

    Attributes:
        model: random weights of these shapes (a name of ``serve.bench_models``) instead of the target's.
        length: T; by default as EAGLE-3 was trained.
        supervised_share: of the tokens, in made-up conversations; exclusive with ``data``.
        data: source whose first packed row is taken, as ``data.source`` of a run.
        ttt_length: K.
        draft_vocab_size: Vd; None is 8,192, or the model's.
        precision: ``float32`` or ``bfloat16`` (autocast).
        device: such as ``cpu`` or ``cuda``.
        repeats: rounds; medians are reported.
    """

    model: str | None = None
    length: int = 2048
    supervised_share: float | None = None
    data: str | None = None
    ttt_length: int = 7
    draft_vocab_size: int | None = None
    precision: str = "float32"
    device: str = "cpu"
    repeats: int = 3


def measure_ratios(options: RatioOptions, target: LlamaModel | None, tokenizer: Any = None) -> dict[str, Any]:
    """Time and peak memory of one forward and backward of the head by every way, and their ratios.

    Args:
        target: a real target; None with ``options.model``.
        tokenizer: the target's, for ``options.data``.

    Returns:
        ``seconds`` and ``peak_bytes`` by way, ``losses`` and their largest relative difference, ``ratios``,
        and what the row is like.

    Raises:
        UserError: options that exclude each other, or data without a row that long.
    """
    keep_large_blocks()
    if options.data is not None and options.supervised_share is not None:
        raise UserError("--data and --supervised-share exclude each other.", "Give one of them.")
    if options.data is not None and tokenizer is None:
        raise UserError("--data needs a target with a tokenizer.", "Leave out --model, or --data.")
    device = torch.device(options.device)
    config, size = _shapes(options, target)
    torch.manual_seed(0)
    head = Eagle3Head(DraftConfig.for_target(config, size)).to(device)
    ids, doc_start, reply = _row(options, config, tokenizer)
    work = _work(options, head, config, target, ids.to(device), doc_start.to(device), reply.to(device))
    if work.plan.counts[-1] == 0:
        raise UserError("No row carries loss at the last step.", "Raise --length or --supervised-share.")
    everything = every_row(work)
    ways: dict[str, Callable[[], float]] = {
        "ours": lambda: our_way(head, work),
        "every row": lambda: our_way(head, everything),
        "published": lambda: dense_way(head, work),
        "kept logits": lambda: kept_logits_way(head, work),
    }
    with torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bfloat16"):
        optimizer = torch.optim.AdamW(head.parameters(), lr=0.0, fused=True)
        peaks, losses, gradients = {}, {}, {}
        for name, run in ways.items():
            losses[name] = _clean(head, run)
            gradients[name] = _gradient(head)
            peaks[name] = peak_bytes(run, device)
        rounds: dict[str, list[float]] = {name: [] for name in (*ways, "optimizer")}
        busy: dict[str, list[float]] = {name: [] for name in rounds}
        for _ in range(options.repeats):
            for name, run in (*ways.items(), ("optimizer", optimizer.step)):
                started = time.process_time()
                rounds[name].append(_seconds(run, device))
                busy[name].append(time.process_time() - started)
    ours = gradients["ours"]
    others = [name for name in ways if name != "ours"]
    return {
        "row": {
            "tokens": len(ids),
            "documents": int(torch.unique(doc_start).numel()),
            "supervised_share": float((reply >= 0).float().mean()),
            "rows_of_steps": work.plan.counts,
            "source": options.data or "made up",
        },
        "ttt_length": options.ttt_length,
        "draft_vocab_size": size,
        "model": options.model or "the target",
        "precision": options.precision,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "repeats": options.repeats,
        "losses": losses,
        "loss_difference": max(abs(losses[name] / losses["ours"] - 1) for name in others),
        "gradient_difference": max(float((gradients[n] - ours).norm() / ours.norm()) for n in others),
        "seconds": {name: statistics.median(times) for name, times in rounds.items()},
        "peak_bytes": peaks,
        "ratios": {
            "time": {name: _ratio(rounds["ours"], rounds[name]) for name in others},
            "cpu_time": {name: _ratio(busy["ours"], busy[name]) for name in others},
            "memory": {name: peaks["ours"] / peaks[name] for name in others},
        },
    }


def _shapes(options: RatioOptions, target: LlamaModel | None) -> tuple[TargetConfig, int]:
    if options.model is None:
        assert target is not None
        return target.config, options.draft_vocab_size or min(8192, target.config.vocab_size)
    from eagle_kit.bench.engine.models import preset_named

    config, size = preset_named(options.model)
    return config, options.draft_vocab_size or size


def _row(
    options: RatioOptions, config: TargetConfig, tokenizer: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, document starts and replies of one packed row, int64 ``[T]`` each."""
    if options.data is not None:
        return _real_row(options, tokenizer)
    share = SHARE_OF_SHAREGPT if options.supervised_share is None else options.supervised_share
    if not 0.0 < share <= 1.0:
        raise UserError(f"--supervised-share is {share}.", "Give a number above 0 and at most 1.")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (options.length,), generator=generator)
    doc_start, reply = torch.zeros_like(ids), torch.full_like(ids, -1)
    # Three conversations of a prompt and a reply, as packing makes them.
    bounds = [round(options.length * part) for part in (0.0, 0.3, 0.63, 1.0)]
    for number, (start, stop) in enumerate(pairwise(bounds)):
        doc_start[start:stop] = start
        reply[stop - round(share * (stop - start)) : stop] = number
    return ids, doc_start, reply


def _real_row(options: RatioOptions, tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first packed row of the source that is at least 95 % full, of ordinary supervised share."""
    from eagle_kit.data.chat.dataset import prepare_dataset

    settings = DataConfig(
        source=str(options.data), limit=400, max_length=options.length, eval_conversations=0
    )
    data = prepare_dataset(settings, tokenizer, None, progress=False)
    usual = data.num_supervised_tokens / data.num_tokens
    full = [row for row in map(data.row, range(len(data))) if len(row.ids) >= 0.95 * options.length]
    if not full:
        raise UserError(
            f"The first 400 conversations of {options.data} fill no row of {options.length} tokens.",
            "Lower --length.",
        )
    row = min(full, key=lambda row: abs(float((row.reply >= 0).mean()) - usual))
    ids, doc_start, reply = (
        torch.from_numpy(part.astype("int64")) for part in (row.ids, row.doc_start, row.reply)
    )
    return ids, doc_start, reply


def _work(
    options: RatioOptions,
    head: Eagle3Head,
    config: TargetConfig,
    target: LlamaModel | None,
    ids: torch.Tensor,
    doc_start: torch.Tensor,
    reply: torch.Tensor,
) -> DenseInputs:
    """States of the target over the row, or random ones; weights of the steps as the trainer's."""
    from eagle_kit.train.algorithm.teacher import capture_features

    plan = plan_row(reply, doc_start, options.ttt_length)
    if target is not None:
        found = capture_features(target, ids, doc_start, head.capture, torch.zeros_like(plan.needed))
        aux, hidden, embed, output = found.aux, found.hidden, target.embed_tokens.weight, target.head_weight
    else:
        width, device = config.hidden_size, ids.device
        aux, hidden = (torch.randn(len(ids), n * width, device=device) for n in (len(head.capture), 1))
        embed = torch.randn(config.vocab_size, width, device=device) * 0.02
        output = embed if config.tie_word_embeddings else torch.randn_like(embed) * 0.02
    choices = torch.zeros(config.vocab_size, dtype=torch.bool)
    # The draft can say what the target would choose here most often, so that rows carry loss.
    with torch.no_grad():
        wanted = torch.unique((hidden[plan.needed] @ output.T).argmax(-1)).cpu()[: head.lm_head.out_features]
        choices[wanted] = True
        choices[torch.nonzero(~choices)[: head.lm_head.out_features - len(wanted), 0]] = True
        hot = torch.nonzero(choices)[:, 0]
        head.set_vocab_map(hot - torch.arange(len(hot)), choices)
        head.lm_head.weight.copy_(output[head.target_ids])
        head.norm.weight.fill_(0.1)
    weights = TrainingConfig(ttt_length=options.ttt_length).weights
    row_weights = [
        torch.full(rows.shape, weight / sum(weights) / max(1, len(rows)), device=ids.device)
        for rows, weight in zip(plan.rows, weights, strict=True)
    ]
    return DenseInputs(
        embed, output, output[head.target_ids].contiguous(), ids, aux, hidden, plan, row_weights
    )


def _clean(head: Eagle3Head, run: Callable[[], float]) -> float:
    """Run with gradients at zero, so that what is left in them is this run's."""
    for parameter in head.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return run()


def _gradient(head: Eagle3Head) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None])


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


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


def format_ratios(result: dict[str, Any]) -> str:
    """The figures as a table, and whether the ratios reach one half."""
    row, seconds, peaks, ratios = (result[name] for name in ("row", "seconds", "peak_bytes", "ratios"))
    about = {
        "ours": "rows that carry loss, loss in blocks",
        "every row": "our code, every row at every step",
        "published": "every row, T x T scores, logits kept",
        "kept logits": "our rows, logits kept",
    }
    lines = [
        f"one row of {row['tokens']} tokens ({row['source']}), {row['documents']} documents, "
        f"{row['supervised_share']:.0%} supervised; K = {result['ttt_length']}, draft vocabulary "
        f"{result['draft_vocab_size']}, {result['precision']} on {result['device']}",
        f"  {'forward and backward of the head':50}{'seconds':>9}{'ours/it':>9}{'peak GB':>9}{'ours/it':>9}",
    ]
    for name, text in about.items():
        time_ratio, memory_ratio = (ratios[what].get(name, 1.0) for what in ("time", "memory"))
        lines.append(
            f"  {name:12} {text:37}{seconds[name]:9.2f}{time_ratio:9.2f}{peaks[name] / 1e9:9.3f}"
            f"{memory_ratio:9.2f}"
        )
    lines.append(
        f"  AdamW {seconds['optimizer']:.2f} s in all of them; losses differ by "
        f"{result['loss_difference']:.0e}, gradients by {result['gradient_difference']:.0e} (relative)"
    )
    if result["device"] == "cpu":
        shares = ", ".join(f"{value:.2f} of {name}" for name, value in ratios["cpu_time"].items())
        lines.append(f"  CPU time, which other programs disturb less: {shares}")
    for what, value in (
        ("time of the published way, every row at every step", ratios["time"]["published"]),
        ("memory of materialised logits", ratios["memory"]["kept logits"]),
    ):
        verdict = "reached" if value <= MOST else "NOT reached"
        lines.append(f"  at most half the {what}: {value:.2f}, {verdict}")
    return "\n".join(lines)
