"""Cells of a comparison: the settings of a draft on one task at one batch size, its first responses, what
choosing costs, and other engines."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

from benchmarks.case import Machine
from benchmarks.peers import Seconds, peer_rate, transformers_model, transformers_seconds, vllm_engines
from benchmarks.tune.prompts import part_of
from benchmarks.tune.sizes import AUTO, PLAIN, TOKENS_OF_A_ROUND, Sizes
from eagle_kit.autotune.policy import ShapePolicy
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.llm import LLM
from eagle_kit.eval.side_by_side import Decoded, decode_side_by_side

WARM_UP = 1
"""Rounds before those that count, at the first task of a batch size."""
FAR_BEHIND = 0.85
"""Part of the best setting's speed below which a fixed shape is not decoded in further rounds."""

Engines = Mapping[str, LLM]
"""Engines by setting: a shape, ``none`` or ``auto``."""


def compare(
    llms: Engines,
    prompts: Sequence[list[int]],
    batch: int,
    sizes: Sizes,
    warm: set[int],
    machine: Machine,
) -> dict[str, Any]:
    """Decode a batch of prompts a round in every setting, side by side, as long as it is whole; responses go
    on behind their ends. A fixed shape that is far behind after a round is left out of the others; see
    :func:`judged`.

    Args:
        warm: the batch size that there are graphs for, if there are; becomes this one.
    """
    num_warm_ups = 0 if batch in warm else WARM_UP
    if num_warm_ups:
        forget_graphs(llms)
    params = _responses(sizes, batch)
    rates: dict[str, list[float]] = {setting: [] for setting in llms}
    cycle_ms: dict[str, list[float]] = {setting: [] for setting in llms}
    used: Counter[str] = Counter()
    running = dict(llms)
    for number in range(-num_warm_ups, sizes.rounds):
        decoded = decode_side_by_side(running, part_of(prompts, number, batch), params, while_whole=True)
        texts = {name: [request.token_ids for request in each.requests] for name, each in decoded.items()}
        assert all(_agree(each, texts[PLAIN]) for each in texts.values()), "a shape changed the text"
        if number < 0:
            continue
        for name, each in decoded.items():
            rates[name].append(each.rate)
            cycle_ms[name].append(each.cycle_ms)
        for request in decoded[AUTO].requests:
            used.update({str(shape): count for shape, count in request.stats.shapes.items()})
        ratios = _over_plain(rates)
        stay = PLAIN, AUTO
        running = {name: llms[name] for name in running if name in stay or _may_win(name, ratios)}
    warm.clear()
    warm.add(batch)
    return {
        **judged(rates, [str(shape) for shape in sizes.shapes]),
        "rounds": rates,
        "cycle_ms": {setting: statistics.median(values) for setting, values in cycle_ms.items()},
        "shapes": dict(used.most_common()),
    }


def _responses(sizes: Sizes, batch: int) -> SamplingParams:
    """Parameters of a round's responses, which go on behind their ends."""
    return SamplingParams(max_tokens=min(sizes.max_tokens, TOKENS_OF_A_ROUND // batch), ignore_eos=True)


def judged(rates: Mapping[str, Sequence[float]], shapes: Sequence[str]) -> dict[str, Any]:
    """Return what a cell's rates say: tokens per second of each round by setting, of fixed shapes perhaps of
    the first rounds only. Texts and the machine differ by round, so settings are compared within rounds, by
    medians of these ratios: beside the best shape such a median is not the quotient of two beside plain
    decoding. A shape of the first rounds only has its part of the median of ``auto`` in all."""
    over_plain = _over_plain(rates)
    auto, mine = over_plain[AUTO], statistics.median(over_plain[AUTO])
    beside = {
        setting: statistics.median([a / b for a, b in zip(auto, values, strict=False)])
        for setting, values in over_plain.items()
    }
    ratios = {
        setting: statistics.median(values) if len(values) == len(auto) else mine / beside[setting]
        for setting, values in over_plain.items()
    }
    best = max(shapes, key=ratios.__getitem__)
    return {
        "figures": {
            "plain tokens/s": statistics.median(rates[PLAIN]),
            "auto over plain": mine,
            "auto over best in a round": min(mine, *(beside[shape] for shape in shapes)),
            f"best fixed ({best})": max(ratios[best], 1.0),
        },
        "ratios": ratios,
        "intervals": {setting: interval(values) for setting, values in over_plain.items()},
        "course": auto,
    }


def _over_plain(rates: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Rates over those of plain decoding in the same rounds."""
    plain = rates[PLAIN]
    return {
        setting: [mine / theirs for mine, theirs in zip(values, plain, strict=False)]
        for setting, values in rates.items()
        if setting != PLAIN
    }


def _agree(texts: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> bool:
    """Return True if texts are equal as far as both go."""
    pairs = zip(texts, others, strict=True)
    return all(list(a[: len(b)]) == list(b[: len(a)]) for a, b in pairs)


def _may_win(shape: str, ratios: Mapping[str, Sequence[float]]) -> bool:
    """Return False for a fixed shape that is far behind: at batch 32 such shapes would take most of the
    time."""
    best = max(statistics.median(values) for values in ratios.values())
    return max(ratios[shape]) >= FAR_BEHIND * max(best, 1.0)


def interval(values: Sequence[float], share: float = 0.95) -> tuple[float, float]:
    """Bootstrap interval of the median."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(np.asarray(values), (2000, len(values))), axis=1)
    low, high = np.quantile(medians, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


def compare_cold(
    llms: Engines, prompts: Sequence[list[int]], sizes: Sizes, most: dict[str, Any], machine: Machine
) -> dict[str, Any]:
    """Decode the first responses of new engines one after another, the making of recordings included."""
    params = SamplingParams(max_tokens=sizes.max_tokens, ignore_eos=True)
    like = llms[AUTO]
    drafts = {PLAIN: None, AUTO: like.draft}
    new = {s: LLM(like.target, draft, tokenizer=like.tokenizer, **most) for s, draft in drafts.items()}
    seconds, tokens = dict.fromkeys(new, 0.0), dict.fromkeys(new, 0)
    course = []
    for number in range(sizes.rounds):
        part = part_of(prompts, number, 1)
        for name, each in decode_side_by_side(new, part, params, counts_recording=True).items():
            seconds[name] += (len(each.requests[0].token_ids) - 1) / each.rate
            tokens[name] += len(each.requests[0].token_ids) - 1
        course.append(seconds[PLAIN] / seconds[AUTO])
    assert tokens[PLAIN] == tokens[AUTO], "a shape changed the text"
    figures = {"plain tokens/s": tokens[PLAIN] / seconds[PLAIN], "auto over plain": course[-1]}
    return {"figures": figures, "course": course}


CHOOSING = "choose", "observe", "observe_confidence", "observe_time", "new_request"
"""What an engine calls of its policy."""


def time_choosing(
    llms: Engines, prompts: Sequence[list[int]], batch: int, sizes: Sizes, machine: Machine
) -> dict[str, Any]:
    """Time what the policy of a draft does in the cycles of responses: behind a forward, which leaves nothing
    in the processor's caches, it takes several times what it takes in a loop of its own."""
    policy = llms[AUTO].engine().shapes
    assert isinstance(policy, ShapePolicy)
    params = _responses(sizes, batch)

    def decode(number: int) -> Decoded:
        part = part_of(prompts, number, batch)
        return decode_side_by_side({AUTO: llms[AUTO]}, part, params, while_whole=True)[AUTO]

    decode(-WARM_UP)
    with _timed(policy) as spent:
        rounds = [decode(number) for number in range(sizes.rounds)]
    mine = sum(map(sum, spent.values())) / len(spent["choose"])
    whole = 1e-3 * statistics.median(each.cycle_ms for each in rounds)
    return {"figures": {"choosing us": 1e6 * mine, "share of a cycle": mine / whole}}


@contextmanager
def _timed(policy: ShapePolicy) -> Iterator[Mapping[str, Sequence[float]]]:
    """Yield the seconds of every call of a policy, by name."""
    spent: dict[str, list[float]] = {name: [] for name in CHOOSING}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent[name].append(time.perf_counter() - begun)

        return run

    for name in CHOOSING:
        setattr(policy, name, timed(name, getattr(policy, name)))
    try:
        yield spent
    finally:
        for name in CHOOSING:
            delattr(policy, name)


def compare_peers(
    llms: Engines,
    started: Callable[[int], AbstractContextManager[dict[str, Seconds]]],
    prompts: Sequence[list[int]],
    batch: int,
    sizes: Sizes,
    machine: Machine,
) -> dict[str, Any]:
    """Decode rounds with ours and with the peers, which ``started`` starts for a batch size."""
    count = sizes.max_tokens
    params = SamplingParams(max_tokens=count, ignore_eos=True)

    def ours(part: list[list[int]]) -> float:
        return decode_side_by_side({AUTO: llms[AUTO]}, part, params)[AUTO].rate

    with started(batch) as peers:
        runs: dict[str, Callable[[list[list[int]]], float]] = {AUTO: ours}
        for name, seconds in peers.items():
            runs[name] = partial(peer_rate, seconds, num_tokens=count)
        rates: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            run(part_of(prompts, 0, batch))
        names = list(runs)
        for number in range(sizes.rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                rates[name].append(runs[name](part_of(prompts, number, batch)))
    figures = {f"{name} tokens/s": statistics.median(values) for name, values in rates.items()}
    for name in peers:
        ratios = [mine / theirs for mine, theirs in zip(rates[AUTO], rates[name], strict=True)]
        figures[f"times {name}"] = statistics.median(ratios)
    if times := [figures[f"times {name}"] for name in peers if name.startswith("vLLM")]:
        figures["times vLLM at its best"] = min(times)
    return {"figures": figures, "rounds": rates}


@contextmanager
def start_peers(
    target: str, draft: str, llms: Engines, sizes: Sizes, batch: int
) -> Iterator[dict[str, Seconds]]:
    """Load transformers, whose prompt look-up takes one prompt at a time, and start vLLM if it is there."""
    model = transformers_model(target, llms[AUTO].target.embed_tokens.weight)
    peers: dict[str, Seconds] = {"transformers": partial(transformers_seconds, model)}
    if batch == 1:
        peers["transformers, prompt look-up"] = partial(
            transformers_seconds, model, prompt_lookup_num_tokens=10
        )
    with ExitStack() as stack:
        if sizes.vllm:
            peers |= stack.enter_context(vllm_engines(sizes.vllm, target, draft, batch))
        yield peers


def forget_graphs(llms: Engines) -> None:
    for llm in llms.values():
        runner = llm.engine().runner
        runner.graphs = runner.graphs.new_empty()
