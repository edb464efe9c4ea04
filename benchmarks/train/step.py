"""``python benchmarks train``: share of the machine's matmul rate that the needed arithmetic of online
training reaches, and the trainer's step against plain forms.

Only arithmetic that the algorithm needs is counted: the target forward, its choice at positions that are
learned from, its distribution over the draft vocabulary, and forward and backward of the head, at rows that
carry loss from step 1 on.

Legend: T packed tokens, K steps, R_k rows of step k, H hidden, Vd draft vocabulary.
"""

from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from typing import Any

import torch

from benchmarks.case import Case, Machine
from benchmarks.train.ratios import RatioOptions, made_up_row, measure_ratios
from benchmarks.verdict import Rows, Verdict, at_most
from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.source import resolve_target
from eagle_kit.models.targets.target import Target
from eagle_kit.objective.loss import TTTBatch
from eagle_kit.objective.row_plan import RowPlan, make_row_plan
from eagle_kit.objective.target_features import TargetFeatures, capture_features
from eagle_kit.objective.ttt import ttt_forward_backward
from eagle_kit.ops.cpu.memory import keep_large_blocks
from eagle_kit.ops.timing import Timer, matmul_rates
from eagle_kit.report.environment import peak_memory_gb
from eagle_kit.train.plan.costs import Workload, capture_flops, head_flops

MOST = 0.5
"""Most that the ratios are to be."""
ROW = RatioOptions(length=1024, supervised_share=0.85, draft_vocab_size=8192)
"""The packed sequence whose rate is measured."""


def cases(target: str, compare: RatioOptions | None = None) -> Iterator[Case]:
    """Rate of online training of a fresh head on the CPU, and the ratios that are asked for.

    Args:
        target: folder, hub id or known name.
        compare: row and head for the ratios; with random weights, nothing else is measured.
    """

    @cache
    def model(device: str) -> Target:
        return load_target(resolve_target(target), device=device)

    def ratios(machine: Machine) -> dict[str, Any]:
        assert compare is not None
        return measure_ratios(compare, None if compare.model else model(compare.device))

    if compare is None or (compare.model is None and compare.device == "cpu"):
        yield Case("training", "rate", lambda machine: measure_rate(model("cpu")))
    if compare is not None:
        name = f"{compare.length} tokens, K = {compare.ttt_length}, {compare.precision} on {compare.device}"
        yield Case("training step", name, ratios, asdict(compare))


def training_targets(rows: Rows, counts: bool) -> list[Verdict]:
    """At most half the time of the published step, and half the memory of kept logits."""
    found = [row for row in rows if row["group"] == "training step" and "figures" in row]

    def of(name: str) -> list[tuple[float, str]]:
        return [(row["figures"][name], row["case"]) for row in found]

    return [
        at_most("at most half the time of the published step", MOST, of("time ours/published")),
        at_most("at most half the memory of kept logits", MOST, of("memory ours/kept logits")),
    ]


def measure_rate(target: Target, options: RatioOptions = ROW) -> dict[str, Any]:
    """Time capture and training of a fresh head on one packed sequence of random tokens, on the CPU: needed
    operations as ``eagle_kit.train.plan.costs`` counts them, seconds, tokens/s, shares of the machine's
    matmul rates, and peak memory."""
    keep_large_blocks()
    rates = matmul_rates()
    torch.manual_seed(0)
    size = min(options.draft_vocab_size or 8192, target.config.vocab_size)
    head = Eagle3Head(Eagle3Config.for_target(target.config, size))
    ids, doc_start, response = made_up_row(options, size)
    plan = make_row_plan(response, doc_start, options.ttt_length)
    features = capture_features(target, ids, doc_start, head.config.aux_layer_ids, plan.is_teacher)
    # Random text makes the target choose words outside the map; here every row is to carry loss.
    features = features._replace(argmax=torch.randint(0, size, ids.shape))
    timer = Timer(torch.device("cpu"), budget_s=0.0, least=5)
    times = {
        "capture": timer.time(
            lambda: capture_features(target, ids, doc_start, head.config.aux_layer_ids, plan.is_teacher)
        ),
        "head": timer.time(lambda: _train_once(head, target, ids, features, plan)),
    }
    context = float((torch.arange(len(ids)) - doc_start + 1).float().mean())
    work = Workload(len(ids), plan.counts[0], options.ttt_length, context)
    flops = {"capture": capture_flops(target.config, work), "head": head_flops(head.config, work)}
    peak = peak_memory_gb("cpu")
    total_s, total_flops = sum(time.median for time in times.values()), sum(flops.values())
    return {
        "threads": torch.get_num_threads(),
        "ttt_length": options.ttt_length,
        "supervised_rows": plan.counts,
        "times_us": {name: time.in_us() for name, time in times.items()},
        "figures": {
            "tokens/s": ids.shape[0] / total_s,
            "needed GFLOP/s": total_flops / total_s / 1e9,
            **{f"share of {name}": total_flops / total_s / rate for name, rate in rates.items()},
            **{f"{name} GFLOP/s": flops[name] / time.median / 1e9 for name, time in times.items()},
            **({} if peak is None else {"peak memory GB": peak}),
        },
    }


def _train_once(
    head: Eagle3Head, target: Target, ids: torch.Tensor, features: TargetFeatures, plan: RowPlan
) -> None:
    weights = [torch.full((count,), 1.0 / max(count, 1)) for count in plan.counts]
    rows = target.head_weight[head.token_map]
    batch = TTTBatch(ids, plan, weights, features, target.embed_tokens.weight, rows)
    ttt_forward_backward(head, batch)
