"""Run of a soak: responses alone first, then all clients at once, then the judgement.

An ordinary response may take ``(2 + A) T`` seconds: twice its time alone, T, and its fair share, a further T
for each of the A other requests that the server worked on meanwhile: their mean number, however many choices
they have, without probes and without those whose headers or body never end.
"""

import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks.options import Options
from benchmarks.record import describe
from benchmarks.runner import say
from benchmarks.soak.clients import MIX, MODES, QUESTIONS, Case, Load, ordinary, repeat
from benchmarks.soak.wire import Server
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import write_bytes_atomically, write_json_atomically
from eagle_kit.eval.counters import read_samples
from eagle_kit.report.plots import Curve, Curves, draw, has_matplotlib, hue

WATCH_S = 5.0
TRIES = 3
GROWTH = 1.05
"""Most memory of the last third of a soak, over that of the third before."""
MEMORY = ("process_resident_memory_bytes", "eagle_kit:promised_memory_bytes")
"""Metrics whose sum does not change as the pages of the key-value pool are first written."""


class Alone(NamedTuple):
    """A response with nobody else: seconds to its first and last token, and its text."""

    first: float
    whole: float
    text: str


class Sample(NamedTuple):
    """State of the server: seconds since the start, GB resident or promised, milliseconds until ``/health``
    answered."""

    at: float
    memory_gb: float
    health_ms: float


def main(base_url: str, key: str, options: Options) -> int:
    """Soak a server for ``options.minutes``, print and write the figures -> exit code, 1 when it failed.

    Raises:
        UserError: nobody answers, or the package that reads metrics is missing.
    """
    read_samples("")  # raises UserError without the package
    parts = urlsplit(base_url)
    if parts.scheme != "http" or not parts.hostname:
        raise UserError(f"{base_url!r} is no HTTP address.", "Write it like http://127.0.0.1:8000.")
    server = Server(parts.hostname, parts.port or 80, key)
    try:
        load, alone, samples = asyncio.run(_soak(server, options))
    except OSError as error:
        raise UserError(f"Nobody answers at {base_url} ({error}).", "Start the server first.") from None
    figures = judge(load, alone, samples)
    path = options.path("soak", "cpu", full=False)
    rows = {"waits": [wait._asdict() for wait in load.waits], "samples": [each._asdict() for each in samples]}
    mix = [{**kind._asdict(), "act": kind.act.__name__} for kind in MIX]
    head = {"kind": "soak", **describe("cpu", options.command), "base_url": base_url, "seed": options.seed}
    record = {**head, "mix": mix, "figures": figures, **rows}
    write_json_atomically(path, record)
    for name, value in figures.items():
        say(f"{name:34s} {value}")
    if has_matplotlib() and not options.no_plot:
        write_bytes_atomically(path.with_suffix(".png"), picture(load, alone, samples))
    say(f"written to {path}")
    return int(bool(figures["failures"]))


async def _soak(server: Server, options: Options) -> tuple[Load, dict[Case, Alone], list[Sample]]:
    models = json.loads((await server.ask("/v1/models")).body)
    load = Load(server, random.Random(options.seed), models["data"][0]["max_model_len"])
    alone = await measure_alone(load)
    load.waits.clear()
    load.started = time.monotonic()
    samples: list[Sample] = []
    tasks = [asyncio.create_task(repeat(load, kind)) for kind in MIX for _ in range(kind.num_clients)]
    tasks.append(asyncio.create_task(_watch(load, samples, options)))
    try:
        await asyncio.wait(tasks, timeout=60 * options.minutes, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
    except asyncio.CancelledError:  # Ctrl-C: what there is until now is judged
        say("interrupted")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return load, alone, samples


async def measure_alone(load: Load) -> dict[Case, Alone]:
    """Ask every question in every mode, one after another -> medians of some tries.

    Raises:
        UserError: a response is not the same each time.
    """
    alone = {}
    for case in [(number, mode) for number in range(len(QUESTIONS)) for mode in MODES]:
        await ordinary(load, case)  # the prefix cache has it from now on, as it will have it later
        load.waits.clear()
        for _ in range(TRIES):
            await ordinary(load, case)
        firsts, wholes = zip(*((wait.first, wait.whole) for wait in load.waits), strict=True)
        texts = {wait.text for wait in load.waits}
        if len(texts) > 1:
            raise UserError(
                f"The server answers {QUESTIONS[case[0]]!r} ({case[1]}) in {len(texts)} ways.",
                "Serve in fp32, where a greedy or seeded response is always the same.",
            )
        alone[case] = Alone(statistics.median(firsts), statistics.median(wholes), texts.pop())
    return alone


async def _watch(load: Load, samples: list[Sample], options: Options) -> None:
    """Take samples until cancelled, with a progress bar."""
    from tqdm import tqdm

    total = round(60 * options.minutes)
    with tqdm(total=total, unit="s", disable=options.no_progress) as bar:
        while True:
            begun = time.monotonic()
            await load.server.ask("/health")
            health_ms = 1e3 * (time.monotonic() - begun)
            answer = await load.server.ask("/metrics")
            try:
                text = answer.body.decode()
                values = {sample.name: sample.value for sample in read_samples(text)}
            except ValueError:  # bytes that are no text, or a text that has no metrics
                load.num_unreadable += 1
                await asyncio.sleep(WATCH_S)
                continue
            at = time.monotonic() - load.started
            memory = sum(values.get(name, 0.0) for name in MEMORY)
            samples.append(Sample(at, memory / 1e9, health_ms))
            bar.update(min(round(at), total) - bar.n)
            bar.set_postfix_str(f"{samples[-1].memory_gb:.2f} GB, {len(load.waits)} ordinary responses")
            await asyncio.sleep(WATCH_S)


def allowed(alone: Alone, others: float) -> float:
    """Seconds that a response may take."""
    return (2 + others) * alone.whole


def judge(load: Load, alone: dict[Case, Alone], samples: Sequence[Sample]) -> dict[str, Any]:
    """Figures of a soak, and its ``failures`` in words."""
    failures = []
    ratios = [wait.whole / allowed(alone[wait.case], wait.others) for wait in load.waits]
    late = sum(ratio > 1 for ratio in ratios)
    if late or not ratios:
        failures.append(f"{late} of {len(ratios)} ordinary responses took longer than their fair share")
    if others := sum(wait.text != alone[wait.case].text for wait in load.waits):
        failures.append(f"{others} ordinary responses differ from those alone")
    for kind in MIX:
        outcomes = load.outcomes.get(kind.name, Counter())
        wrong = {outcome: n for outcome, n in outcomes.items() if outcome not in kind.right}
        failures += [f"{kind.name}: {count} times {outcome}" for outcome, count in wrong.items()]
    if load.num_unreadable:
        failures.append(f"{load.num_unreadable} answers of /metrics could not be read")
    third = len(samples) // 3
    if not third:
        return {"failures": [*failures, "it was too short to be judged"]}
    before, last = (
        max(each.memory_gb for each in part) for part in (samples[third:-third], samples[-third:])
    )
    if last > GROWTH * before:
        failures.append(f"memory grew from {before:.2f} to {last:.2f} GB in the last third")
    return {
        "minutes": round(samples[-1].at / 60, 1),
        "requests": {kind.name: dict(load.outcomes.get(kind.name, {})) for kind in MIX},
        "ordinary responses": len(ratios),
        "same text as alone": len(ratios) - others,
        "seconds alone, whole": _spread([each.whole for each in alone.values()]),
        "seconds, whole": _spread([wait.whole for wait in load.waits]),
        "seconds allowed": _spread([allowed(alone[w.case], w.others) for w in load.waits]),
        "seconds over allowed": _spread(ratios),
        "seconds alone, first token": _spread([each.first for each in alone.values()]),
        "seconds, first token": _spread([wait.first for wait in load.waits]),
        "other requests meanwhile": _spread([wait.others for wait in load.waits]),
        "GB resident or promised at start, 1/3, 2/3, end": [
            round(samples[i].memory_gb, 2)
            for i in (0, len(samples) // 3, 2 * len(samples) // 3, len(samples) - 1)
        ],
        "milliseconds of /health": _spread([each.health_ms for each in samples]),
        "failures": failures,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    ranks = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[round(rank * (len(ordered) - 1))], 3) for name, rank in ranks.items()}


def picture(load: Load, alone: dict[Case, Alone], samples: Sequence[Sample]) -> bytes:
    """Draw waiting times against what is allowed, and memory, over time."""
    waits = sorted(load.waits)
    minutes = [wait.at / 60 for wait in waits]
    may = [allowed(alone[wait.case], wait.others) for wait in waits]
    times = Curves(
        across="minutes",
        up="seconds of an ordinary response",
        curves=[
            Curve(minutes, may, "allowed", hue(1)),
            Curve(minutes, [wait.whole for wait in waits], "last token", hue(0)),
            Curve(minutes, [wait.first for wait in waits], "first token", hue(2)),
        ],
        limits=(0, None),
    )
    at = [each.at / 60 for each in samples]
    memory = Curves(
        "minutes", "GB resident or promised", [Curve(at, [s.memory_gb for s in samples])], limits=(0, None)
    )
    return draw("Soak", [times, memory], legend=True)
