"""Benchmark of online training: what share of the machine's own matmul rate the needed arithmetic reaches.

Only arithmetic that the algorithm needs is counted: the target forward, its choice at positions that are
learned from, its distribution over the draft vocabulary, and forward and backward of the head, at rows that
carry loss from step 1 on.

Legend: T packed tokens, K steps, R_k rows of step k, H hidden, Vd draft vocabulary.
"""

import resource
import time
from collections.abc import Callable
from typing import Any

import torch

from eagle_kit.bench.decode import matmul_ceiling
from eagle_kit.bench.train.ratios import RatioOptions, format_ratios, measure_ratios
from eagle_kit.kernels.cpu_memory import keep_large_blocks
from eagle_kit.kernels.packed_attention import document_spans
from eagle_kit.models.config import DraftConfig, TargetConfig
from eagle_kit.models.count import attention_flops, layer_weights
from eagle_kit.models.heads.eagle3 import Eagle3Head
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.source import load_tokenizer, resolve_target
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.train.algorithm.loss import TTTBatch
from eagle_kit.train.algorithm.row_plan import RowPlan, plan_row
from eagle_kit.train.algorithm.teacher import TargetFeatures, capture_features
from eagle_kit.train.algorithm.ttt import ttt_forward_backward

DOCUMENTS = (300, 340, 384)
"""Tokens of the three conversations in the packed row of 1,024; the first 50 of each are its prompt."""


def row_capture_flops(target: TargetConfig, plan: RowPlan) -> float:
    """Operations of the target over the row, and of its choices at the positions that are learned from."""
    length = plan.doc_start.shape[0]
    weights = layer_weights(target, active=True)
    pairs = sum((stop - start) * (stop - start + 1) / 2 for start, stop in document_spans(plan.doc_start))
    head = int(plan.needed.sum()) * target.hidden_size * target.vocab_size
    return 2.0 * length * weights + pairs * attention_flops(target) + 2.0 * head


def draft_flops(head: DraftConfig, plan: RowPlan) -> float:
    """Forward and backward of the head over all steps, and the teacher's distribution over the draft
    vocabulary.

    A trained matmul costs three times its forward; the input of ``fc`` needs no gradient.
    """
    length, counts, size = plan.doc_start.shape[0], plan.counts, head.hidden_size
    heads, kv = head.num_heads * head.head_dim, 2 * head.num_kv_heads * head.head_dim
    finish = heads * size + 3 * size * head.intermediate_size
    fuse = 2 / 3 * len(head.aux_layer_ids) * head.target_hidden_size * size
    trained = length * (fuse + 2 * size * kv) + counts[0] * (2 * size * heads + finish)
    trained += sum(counts[1:]) * (2 * size * (heads + kv) + finish)
    trained += sum(counts) * size * head.draft_vocab_size
    for step, rows in enumerate(plan.rows):
        pairs = float((rows - plan.doc_start[rows] + 1 + step).sum())
        trained += 2 * pairs * heads
    teacher = int(plan.needed.sum()) * head.target_hidden_size * head.draft_vocab_size
    return 2.0 * (3 * trained + teacher)


def benchmark_training(target_name: str, compare: RatioOptions | None = None) -> dict[str, Any]:
    """Measure training of a fresh head.

    Args:
        target_name: folder, hub id or known name.
        compare: also measure the ratios of :mod:`eagle_kit.bench.train.ratios`; with random weights, nothing
            else is measured.

    Returns:
        :func:`measure_rate`'s figures, and ``ratios``.
    """
    if compare is not None and compare.model is not None:
        return {"ratios": measure_ratios(compare, None)}
    folder = resolve_target(target_name)
    target = load_target(folder, device=compare.device if compare is not None else "cpu")
    if compare is None:
        return measure_rate(target)
    tokenizer = None if compare.data is None else load_tokenizer(folder)
    result = measure_rate(target) if compare.device == "cpu" else {}
    return {**result, "ratios": measure_ratios(compare, target, tokenizer)}


def measure_rate(target: LlamaModel, ttt_length: int = 7, draft_vocab_size: int = 8192) -> dict[str, Any]:
    """Time capture and training of a fresh head on one packed row of 1,024 random tokens, on the CPU.

    Returns:
        Matmul ceilings in GFLOP/s, needed operations, median seconds, tokens/s, shares of each ceiling, and
        peak memory.
    """
    keep_large_blocks()
    ceiling = matmul_ceiling()
    torch.manual_seed(0)
    head = Eagle3Head(DraftConfig.for_target(target.config, draft_vocab_size))
    ids = torch.randint(0, draft_vocab_size, (sum(DOCUMENTS),))
    doc_start, reply = torch.zeros_like(ids), torch.full_like(ids, -1)
    start = 0
    for number, length in enumerate(DOCUMENTS):
        doc_start[start : start + length] = start
        reply[start + 50 : start + length] = number
        start += length
    plan = plan_row(reply, doc_start, ttt_length)
    features = capture_features(target, ids, doc_start, head.config.aux_layer_ids, plan.needed)
    # Random text makes the target choose words outside the map; here every row is to carry loss.
    features = features._replace(argmax=torch.randint(0, draft_vocab_size, ids.shape))
    seconds = {
        "capture": _median(
            lambda: capture_features(target, ids, doc_start, head.config.aux_layer_ids, plan.needed)
        ),
        "head": _median(lambda: _train_once(head, target, ids, features, plan)),
    }
    flops = {"capture": row_capture_flops(target.config, plan), "head": draft_flops(head.config, plan)}
    total_s, total_flops = sum(seconds.values()), sum(flops.values())
    return {
        "threads": torch.get_num_threads(),
        "ttt_length": ttt_length,
        "tokens": ids.shape[0],
        "supervised_rows": plan.counts,
        "matmul_gflops": ceiling,
        "needed_gflop": {name: value / 1e9 for name, value in flops.items()},
        "seconds": seconds,
        "tokens_per_s": ids.shape[0] / total_s,
        "gflops": total_flops / total_s / 1e9,
        "share_of_ceiling": {name: total_flops / total_s / 1e9 / rate for name, rate in ceiling.items()},
        "peak_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def _train_once(
    head: Eagle3Head, target: LlamaModel, ids: torch.Tensor, features: TargetFeatures, plan: RowPlan
) -> None:
    weights = [torch.full((count,), 1.0 / max(count, 1)) for count in plan.counts]
    rows = target.head_weight[head.target_ids]
    batch = TTTBatch(ids, plan, weights, features, target.embed_tokens.weight, rows)
    ttt_forward_backward(head, batch)


def _median(run: Callable[[], Any], repeats: int = 5) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]


def format_training(result: dict[str, Any]) -> str:
    """The figures as text."""
    if "ratios" in result:
        rate = {name: value for name, value in result.items() if name != "ratios"}
        ratios = format_ratios(result["ratios"])
        return f"{format_training(rate)}\n{ratios}" if rate else ratios
    seconds, need, share = result["seconds"], result["needed_gflop"], result["share_of_ceiling"]
    parts = ", ".join(
        f"{name} {seconds[name]:.2f} s at {need[name] / seconds[name]:.0f} GFLOP/s"
        for name in ("capture", "head")
    )
    shares = ", ".join(f"{value:.0%} of {name}'s" for name, value in share.items())
    return (
        f"online training, K = {result['ttt_length']}, {result['tokens']} tokens: "
        f"{result['tokens_per_s']:.0f} tokens/s; {parts}\n"
        f"  needed arithmetic at {result['gflops']:.0f} GFLOP/s = {shares} matmul rate; "
        f"peak memory {result['peak_memory_gb']:.2f} GB"
    )
