"""Benchmarks of decoding: ceilings first, then windows, cycles and whole replies, each against what it is
judged by.

Legend: B requests, N window nodes.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from eagle_kit.core.request import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.kernels.linear import onednn
from eagle_kit.kernels.window_attention import chain_bits
from eagle_kit.models.heads.eagle3 import Eagle3Head
from eagle_kit.serve.cycle import CycleSettings, cycle
from eagle_kit.serve.llm import LLM
from eagle_kit.serve.request import Request
from eagle_kit.serve.runner import COLUMN_BUCKET


def median_seconds(run: Callable[[], Any], repeats: int = 15, warmup: int = 3) -> float:
    """Median wall time of ``run()`` in seconds; on a GPU the device is waited for."""
    times = []
    for i in range(warmup + repeats):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if i >= warmup:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


@torch.inference_mode()
def matmul_ceiling(size: int = 2048) -> dict[str, float]:
    """GFLOP/s of a square fp32 matmul, by torch (``torch_mm``) and by oneDNN (``onednn``) where it is
    there."""
    a, b = torch.randn(2, size, size)
    flops = 2 * size**3 / 1e9
    rates = {"torch_mm": flops / median_seconds(lambda: a @ b, 7)}
    if onednn.available():
        rates["onednn"] = flops / median_seconds(lambda: onednn.matmul(a, b), 7)
    return rates


@torch.inference_mode()
def window_cost(
    llm: LLM, sizes: tuple[int, ...] = (1, 2, 4, 5, 8, 16), context: int = 256
) -> dict[int, float]:
    """Milliseconds of one target forward over a window of N nodes at batch 1, logits and choice included."""
    engine = llm.engine(SpecShape.parse(None))
    table = torch.arange(engine.config.max_pages)[None]
    lens = torch.tensor([context])

    def forward(n: int) -> Callable[[], torch.Tensor]:
        ids, positions = torch.arange(n) + 5, context + torch.arange(n)
        columns = -(-(context + n) // COLUMN_BUCKET) * COLUMN_BUCKET

        def run() -> torch.Tensor:
            attend = engine.runner.kv.window_attend(table, lens, chain_bits(n, ids.device)[None], n, columns)
            return llm.target.logits(llm.target(ids, positions, attend).hidden).argmax(-1)

        return run

    return {n: 1e3 * median_seconds(forward(n)) for n in sizes}


@torch.inference_mode()
def cycle_cost(
    llm: LLM, shapes: tuple[str, ...] = ("3,1,4", "4,1,5", "5,4,16"), context: int = 256
) -> dict[str, float]:
    """Milliseconds of one whole cycle at batch 1 and about ``context`` tokens, whatever was accepted."""
    out = {}
    for text in shapes:
        shape = SpecShape.parse(text)
        engine = llm.engine(shape)
        request = Request(
            0, [5 + i % 90 for i in range(context)], SamplingParams(max_tokens=256, ignore_eos=True)
        )
        engine.add_request(request)
        while request.is_prefilling or not request.token_ids:
            engine.step()
        runner = engine.runner
        runner.set_pages(request)
        state = runner.slots.gather(torch.tensor([request.slot]))
        columns = -(-(context + 64) // COLUMN_BUCKET) * COLUMN_BUCKET
        run = partial(cycle, runner.models, state, CycleSettings(shape, columns))
        out[text] = 1e3 * median_seconds(run)
        engine.abort(request)
    return out


def decode_rate(llm: LLM, batch: int, prompt_ids: list[int], num_tokens: int = 64) -> float:
    """Plain decoding by our engine: tokens/s of a batch after its first tokens. An engine that is new
    records its cycles on the way."""
    if llm.max_batch_size != batch:
        llm.configure(max_batch_size=batch)
    outputs = llm.generate(
        [prompt_ids] * batch, SamplingParams(max_tokens=num_tokens, ignore_eos=True), shape="none"
    )
    # The batch is whole from the last prefill on, so the last request's time is the batch's.
    return batch * (num_tokens - 1) / outputs[-1].decode_s


def transformers_rate(model: Any, batch: int, prompt_ids: list[int], num_tokens: int = 64) -> float:
    """Greedy ``generate`` of a transformers model: tokens/s of a batch, the prefill taken off by a second
    run."""
    ids = torch.tensor([prompt_ids] * batch)
    options = {
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
        "pad_token_id": 0,
        "eos_token_id": None,
    }

    def run(count: int) -> float:
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, **options)
        return time.perf_counter() - start

    with torch.inference_mode():
        run(2)
        return batch * (num_tokens - 1) / (run(num_tokens) - run(1))


def benchmark_decoding(
    target: str, draft: str | Eagle3Head | None, *, compare: bool = True
) -> dict[str, Any]:
    """All decoding figures of a target on this machine's CPU, as a dictionary for :func:`format_decoding`."""
    llm = LLM(target, draft, max_batch_size=1, max_context=1024, device="cpu")
    result: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "matmul_gflops": matmul_ceiling(),
        "window_ms": window_cost(llm),
        "cycle_ms": cycle_cost(llm) if llm.head is not None else {},
        "tokens_per_s": {},
    }
    model = None
    if compare:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(str(llm._target_name), dtype=torch.float32).eval()
    prompt = llm.tokenize("Tell me about the history of Rome, and about Greece, in a long essay.")
    for batch in (1, 8):
        for _ in range(2):  # as a server that has been running
            decode_rate(llm, batch, prompt)
        pairs = [
            (decode_rate(llm, batch, prompt), transformers_rate(model, batch, prompt) if model else None)
            for _ in range(3)
        ]
        ours = statistics.median(pair[0] for pair in pairs)
        theirs = statistics.median(pair[1] for pair in pairs if pair[1]) if model else None
        result["tokens_per_s"][batch] = {"eagle_kit": ours, "transformers": theirs}
    return result


def format_decoding(result: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"fp32 matmul ceiling, {result['threads']} threads: "]
    lines[0] += ", ".join(f"{name} {rate:.0f} GFLOP/s" for name, rate in result["matmul_gflops"].items())
    windows = result["window_ms"]
    lines.append("target window at batch 1, without recordings, ms (times a window of 1):")
    lines.append("  " + "  ".join(f"N={n}: {ms:.1f} ({ms / windows[1]:.2f}x)" for n, ms in windows.items()))
    for text, ms in result["cycle_ms"].items():
        nodes = SpecShape.parse(text).tokens
        lines.append(f"cycle {text} likewise: {ms:.1f} ms = {ms / windows[nodes]:.2f}x its target window")
    for batch, rates in result["tokens_per_s"].items():
        line = f"plain decoding, batch {batch}: {rates['eagle_kit']:.1f} tokens/s"
        if rates["transformers"]:
            ratio = rates["eagle_kit"] / rates["transformers"]
            line += f" against transformers {rates['transformers']:.1f} = {ratio:.2f}x"
        lines.append(line)
    return "\n".join(lines)
