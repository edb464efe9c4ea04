"""``eagle-kit bench tune``: shapes chosen by measurements against plain decoding and against every fixed
shape, in interleaved rounds, over tasks and batch sizes; and beside transformers' own ``generate``.
"""

import copy
import gc
import random
import statistics
import string
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from eagle_kit.bench.case import Case, Machine
from eagle_kit.bench.options import Options
from eagle_kit.bench.peers import Seconds, peer_rate, transformers_model, transformers_seconds, vllm_engines
from eagle_kit.bench.runner import Benchmark, conduct
from eagle_kit.bench.side_by_side import decode_side_by_side
from eagle_kit.bench.verdict import Rows, Verdict, at_least, at_most
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import write_bytes_atomically
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.eval.tasks import KNOWN_TASKS, load_tasks
from eagle_kit.report.plots import GREY, Bars, BarSeries, Curve, Curves, HeatMap, Panel, draw, hue
from eagle_kit.serve.llm import LLM
from eagle_kit.tuning.policy import ShapePolicy

PLAIN, AUTO = "none", "auto"
NOISE, LANGUAGES, MIXED = "noise", "languages", "mixed"
OWN_TASKS = NOISE, LANGUAGES, MIXED
SENTENCES = (
    "Kerro minulle, miten leipää leivotaan uunissa.",
    "Wie baut man ein Fahrrad auseinander und wieder zusammen?",
    "Explique por qué el cielo se ve rojo al atardecer.",
    "日本の四季について短く説明してください。",
    "Quels sont les avantages d'un jardin en ville ?",
    "Почему зимой дни короче, чем летом?",
    "Come si prepara un buon caffè con la moka?",
    "Hvordan lærer man at spille klaver som voksen?",
)
SHAPES = ("1,1,2", "2,1,3", "3,1,4", "4,1,5", "5,4,16")
NOT_SLOWER, NEARLY_BEST, BEST_IN_THE_MEAN, CHOOSING = 0.98, 0.97, 1.0, 0.002
PEER_BATCHES = 1, 8
TOKENS_OF_A_ROUND = 1024
NUM_PROMPTS = 64
"""Of a task. Rounds of 32 meet them again after two, with their prefixes cached; smaller ones do not."""
WARM_UP = 1
"""Rounds before those that count, at the first task of a batch size."""
FAR_BEHIND = 0.8
"""Part of the best setting's speed below which a fixed shape is not decoded in further rounds."""
MAX_CONTEXT = 1024
WORTH = {1: 1.25, 8: 1.2}
"""Times plain decoding, by batch size, that the first draft is to reach on all tasks but those made here."""
TIMES_VLLM, TIMES_TRANSFORMERS = {1: 1.35, 8: 1.35}, {1: 3.0, 8: 2.7}

Engines = Mapping[str, LLM]
"""Engines by setting: a shape, ``none`` or ``auto``."""


class DraftEngines(Mapping[str, LLM]):
    """Engines of one draft, made when they are first asked for. Those of the draft before go then: the pools
    of two may not fit.

    Args:
        make: makes the engines.
        current: holds the draft whose engines there are; shared by all drafts.
    """

    def __init__(self, make: Callable[[], dict[str, LLM]], current: "list[DraftEngines]") -> None:
        self._make, self._current = make, current
        self._made: dict[str, LLM] = {}

    def __getitem__(self, setting: str) -> LLM:
        if not self._made:
            for other in self._current:
                other._made = {}
            self._current[:] = [self]
            gc.collect()
            self._made = self._make()
        return self._made[setting]

    def __iter__(self) -> Iterator[str]:
        self[PLAIN]
        return iter(self._made)

    def __len__(self) -> int:
        self[PLAIN]
        return len(self._made)


@dataclass(frozen=True)
class Sizes:
    """What is compared.

    Attributes:
        tasks: names of tasks or files, whose first turns are taken; ``noise`` (random strings), ``languages``
            (other than English) and ``mixed`` (code, prose and noise, one after another) are made here.
        batches: batch sizes.
        shapes: fixed shapes.
        rounds: interleaved rounds, each with prompts of its own.
        max_tokens: of a reply; less in large batches, whose rounds have :data:`TOKENS_OF_A_ROUND`.
        compare: also decode with transformers, plainly and with prompt look-up, at batch sizes 1 and 8.
        vllm: python of an environment with vLLM, to decode with it as well.
    """

    tasks: Sequence[str] = (*KNOWN_TASKS, *OWN_TASKS)
    batches: Sequence[int] = (1, 4, 8, 32)
    shapes: Sequence[str] = SHAPES
    rounds: int = 7
    max_tokens: int = 64
    compare: bool = True
    vllm: str | None = None


def main(target: str, drafts: Sequence[str], sizes: Sizes, options: Options) -> int:
    """Measure -> exit code, 1 when a case failed.

    Raises:
        UserError: a task or a model that cannot be loaded, or two drafts of one name.
    """
    if len({name_of(draft) for draft in drafts}) < len(drafts):
        raise UserError("Two drafts have one name.", "Give folders with different names.")
    most: dict[str, Any] = {"max_batch_size": max(sizes.batches), "max_context": MAX_CONTEXT}
    plain = LLM(target, shape=PLAIN, **most)
    current: list[DraftEngines] = []
    llms = {
        name_of(draft): DraftEngines(partial(_settings, plain, draft, sizes.shapes, most), current)
        for draft in drafts
    }
    prompts = {Path(task).stem: make_prompts(plain, task, options.seed) for task in sizes.tasks}
    beside = peer_cases(llms, prompts, sizes, target, drafts) if sizes.compare else ()
    settings = {"target": target, "drafts": list(drafts), **sizes.__dict__}
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    benchmark = Benchmark(
        "tune",
        [
            *cases(llms, prompts, sizes),
            *cold_cases(llms, prompts, sizes, most),
            *choosing_cases(llms, sizes.batches),
            *beside,
        ],
        settings,
        partial(verdicts, sizes),
        plot,
    )
    return conduct(benchmark, Machine.here(options.seed), options)


def name_of(draft: str) -> str:
    """Name of a draft, that of its run where it lies in one."""
    path = Path(draft)
    return path.parent.name if path.name == "draft" else path.name


def _settings(plain: LLM, draft: str, shapes: Sequence[str], most: dict[str, Any]) -> dict[str, LLM]:
    """Make an engine for every setting; they share the weights. Graphs are made at the first run and kept, as
    by one that has been running."""
    auto = LLM(plain.target, draft, tokenizer=plain.tokenizer, **most)
    fixed = {
        shape: LLM(plain.target, auto.draft, tokenizer=plain.tokenizer, shape=shape, **most)
        for shape in shapes
    }
    llms = {PLAIN: plain, **fixed, AUTO: auto}
    _forget_graphs(llms)
    return llms


def _forget_graphs(llms: Engines) -> None:
    for llm in llms.values():
        runner = llm.engine().runner
        runner.graphs = runner.graphs.anew()


def make_prompts(llm: LLM, task: str, seed: int) -> list[list[int]]:
    """Tokenise :data:`NUM_PROMPTS` prompts of a task in an order drawn by ``seed``, without those longer than
    half the context, whose number is printed."""
    rng = random.Random(f"{task}:{seed}")
    texts: list[Any]
    if task == NOISE:
        letters = string.ascii_letters + string.digits + string.punctuation + " "
        texts = ["".join(rng.choices(letters, k=160)) for _ in range(64)]
    elif task == LANGUAGES:
        texts = list(SENTENCES)
    elif task == MIXED:
        parts = [make_prompts(llm, each, seed) for each in (*KNOWN_TASKS, NOISE)]
        return [prompt for group in zip(*parts, strict=False) for prompt in group][:NUM_PROMPTS]
    else:
        texts = [prompt.messages([]) for prompt in load_tasks([task])[0].prompts]
    rng.shuffle(texts)
    ids = [llm.tokenize(text) for text in texts]
    kept = [each for each in ids if len(each) <= MAX_CONTEXT // 2]
    if len(kept) < len(ids):
        print(
            f"{task}: {len(ids) - len(kept)} of {len(ids)} prompts have more than {MAX_CONTEXT // 2} tokens"
        )
    return kept[:NUM_PROMPTS]


def cases(llms: Mapping[str, Engines], prompts: dict[str, list[list[int]]], sizes: Sizes) -> Iterator[Case]:
    """A case for every draft, batch size and task."""
    for name, llm in llms.items():
        warm: set[int] = set()
        for batch in sizes.batches:
            for task, texts in prompts.items():
                values = {"draft": name, "batch": batch, "task": task}
                measure = partial(compare, llm, texts, batch, sizes, warm)
                yield Case(f"{name}, batch {batch}", task, measure, values)


def cold_cases(
    llms: Mapping[str, Engines], prompts: dict[str, list[list[int]]], sizes: Sizes, most: dict[str, Any]
) -> Iterator[Case]:
    """A case for every draft: the first replies of a new engine, its recordings not made yet."""
    task = next(iter(prompts))
    for name, llm in llms.items():
        values = {"draft": name, "batch": 1, "task": task}
        measure = partial(compare_cold, llm, prompts[task], sizes, most)
        yield Case(f"{name}, cold", task, measure, values)


def compare_cold(
    llms: Engines, prompts: Sequence[list[int]], sizes: Sizes, most: dict[str, Any], machine: Machine
) -> dict[str, Any]:
    """Decode the first replies of new engines one after another, the making of recordings included."""
    params = SamplingParams(max_tokens=sizes.max_tokens, ignore_eos=True)
    like = llms[AUTO]
    drafts = {PLAIN: None, AUTO: like.draft}
    new = {s: LLM(like.target, draft, tokenizer=like.tokenizer, **most) for s, draft in drafts.items()}
    seconds, tokens = dict.fromkeys(new, 0.0), dict.fromkeys(new, 0)
    course = []
    for number in range(sizes.rounds):
        part = _part(prompts, number, 1)
        for name, each in decode_side_by_side(new, part, params, counts_recording=True).items():
            seconds[name] += (len(each.requests[0].token_ids) - 1) / each.rate
            tokens[name] += len(each.requests[0].token_ids) - 1
        course.append(seconds[PLAIN] / seconds[AUTO])
    assert tokens[PLAIN] == tokens[AUTO], "a shape changed the text"
    figures = {"plain tokens/s": tokens[PLAIN] / seconds[PLAIN], "auto over plain": course[-1]}
    return {"figures": figures, "course": course}


def choosing_cases(llms: Mapping[str, Engines], batches: Sequence[int]) -> Iterator[Case]:
    """What choosing costs beside a cycle, for every draft and batch size."""
    for name, llm in llms.items():
        for batch in batches:
            values = {"draft": name, "batch": batch}
            measure = partial(time_choosing, llm, batch)
            yield Case(f"{name}, choosing", f"batch {batch}", measure, values)


def time_choosing(llms: Engines, batch: int, machine: Machine, num_cycles: int = 2000) -> dict[str, Any]:
    """Time what the policy of a draft does in a cycle whose requests differ."""
    policy, rng = copy.deepcopy(llms[AUTO].engine().shapes), random.Random(0)
    assert isinstance(policy, ShapePolicy)
    seconds = 1e-3 * policy.plan([batch])[0].milliseconds
    eases = [policy.new_request() for _ in range(batch)]
    begun = time.perf_counter()
    for number in range(num_cycles):
        shape = policy.choose(eases, 200 + number)
        for ease in eases:
            policy.observe(ease, shape, rng.randint(0, shape.steps))
            policy.see(ease, rng.random())
        policy.observe_time(batch, shape, 200 + number, seconds)
    spent = (time.perf_counter() - begun) / num_cycles
    return {"figures": {"choosing us": 1e6 * spent, "share of a cycle": spent / seconds}}


def peer_cases(
    llms: Mapping[str, Engines],
    prompts: dict[str, list[list[int]]],
    sizes: Sizes,
    target: str,
    drafts: Sequence[str],
) -> Iterator[Case]:
    """A case for every draft and two batch sizes, beside other engines."""
    task = next(iter(prompts))
    for (name, llm), draft in zip(llms.items(), drafts, strict=True):
        for batch in (size for size in PEER_BATCHES if size <= max(sizes.batches)):
            values = {"draft": name, "batch": batch, "task": task, "peers": True}
            started = partial(start_peers, target, draft, llm, sizes)
            measure = partial(compare_peers, llm, started, prompts[task], batch, sizes)
            yield Case(f"{name}, beside others", f"batch {batch}", measure, values)


def compare(
    llms: Engines,
    prompts: Sequence[list[int]],
    batch: int,
    sizes: Sizes,
    warm: set[int],
    machine: Machine,
) -> dict[str, Any]:
    """Decode a batch of prompts a round in every setting, side by side. A fixed shape that is far behind
    after a round has the figures of the rounds that it was in.

    Args:
        warm: the batch size that there are graphs for, if there are; becomes this one.
    """
    num_warm_ups = 0 if batch in warm else WARM_UP
    if num_warm_ups:
        _forget_graphs(llms)
    params = SamplingParams(max_tokens=min(sizes.max_tokens, TOKENS_OF_A_ROUND // batch))
    rates: dict[str, list[float]] = {setting: [] for setting in llms}
    cycle_ms: dict[str, list[float]] = {setting: [] for setting in llms}
    ratios: dict[str, list[float]] = {}
    used: Counter[str] = Counter()
    running = dict(llms)
    for number in range(-num_warm_ups, sizes.rounds):
        decoded = decode_side_by_side(running, _part(prompts, number, batch), params)
        texts = {name: [request.token_ids for request in each.requests] for name, each in decoded.items()}
        assert all(each == texts[PLAIN] for each in texts.values()), "a shape changed the text"
        if number < 0:
            continue
        for name, each in decoded.items():
            rates[name].append(each.rate)
            cycle_ms[name].append(each.cycle_ms)
        for request in decoded[AUTO].requests:
            used.update({str(shape): count for shape, count in request.shapes.items()})
        ratios = {
            s: [mine / plain for mine, plain in zip(rates[s], rates[PLAIN], strict=False)]
            for s in (*sizes.shapes, AUTO)
        }
        running = {name: llms[name] for name in running if name in (PLAIN, AUTO) or _may_win(name, ratios)}
    warm.clear()
    warm.add(batch)
    best = max(sizes.shapes, key=lambda shape: statistics.median(ratios[shape]))
    best_ratio = max(statistics.median(ratios[best]), 1.0)
    mine = statistics.median(ratios[AUTO])
    over_best = [a / max(b, 1.0) for a, b in zip(ratios[AUTO], ratios[best], strict=False)]
    return {
        "figures": {
            "plain tokens/s": statistics.median(rates[PLAIN]),
            "auto over plain": mine,
            "auto over best": mine / best_ratio,
            f"best fixed ({best})": best_ratio,
        },
        "ratios": {setting: statistics.median(values) for setting, values in ratios.items()},
        "intervals": {setting: interval(values) for setting, values in ratios.items()},
        "rounds": rates,
        "cycle_ms": {setting: statistics.median(values) for setting, values in cycle_ms.items()},
        "over_best": over_best,
        "course": ratios[AUTO],
        "shapes": dict(used.most_common()),
    }


def _may_win(shape: str, ratios: Mapping[str, Sequence[float]]) -> bool:
    """Return False for a fixed shape that is far behind: at batch 32 such shapes would take most of the
    time."""
    best = max(statistics.median(values) for values in ratios.values())
    return max(ratios[shape]) >= FAR_BEHIND * max(best, 1.0)


def _part(prompts: Sequence[list[int]], number: int, batch: int) -> list[list[int]]:
    """Prompts of a round, those of the next round behind them."""
    return [prompts[(number * batch + i) % len(prompts)] for i in range(batch)]


def interval(values: Sequence[float], share: float = 0.95) -> tuple[float, float]:
    """Bootstrap interval of the median."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(np.asarray(values), (2000, len(values))), axis=1)
    low, high = np.quantile(medians, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


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
            run(_part(prompts, 0, batch))
        names = list(runs)
        for number in range(sizes.rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                rates[name].append(runs[name](_part(prompts, number, batch)))
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


def verdicts(sizes: Sizes, rows: Rows, counts: bool) -> list[Verdict]:
    """Judge: never slower than plain decoding, nearly the best fixed shape of every cell, better than each
    of them in the mean."""
    cells = [row for row in rows if "ratios" in row]

    def where(row: dict[str, Any]) -> str:
        return f"{row['draft']}, batch {row['batch']}, {row['task']}"

    plain = [(row["figures"]["auto over plain"], where(row)) for row in cells]
    cold = [
        (row["figures"]["auto over plain"], row["draft"])
        for row in rows
        if "course" in row and "ratios" not in row
    ]
    best = [(row["figures"]["auto over best"], where(row)) for row in cells]
    choosing = [
        (row["figures"]["share of a cycle"], f"{row['draft']}, batch {row['batch']}")
        for row in rows
        if "share of a cycle" in row.get("figures", {})
    ]
    means = [
        (_mean(row["ratios"][AUTO] for row in cells) / _mean(row["ratios"][shape] for row in cells), shape)
        for shape in sizes.shapes
        if cells
    ]
    return [
        at_least(f"auto at least {NOT_SLOWER} x plain decoding", NOT_SLOWER, plain),
        at_least(f"auto at least {NOT_SLOWER} x plain decoding in the first replies", NOT_SLOWER, cold),
        at_least(f"auto at least {NEARLY_BEST} x the best fixed shape", NEARLY_BEST, best),
        at_least("auto above every fixed shape in the mean", BEST_IN_THE_MEAN, means),
        at_most(f"choosing at most {CHOOSING:.1%} of a cycle", CHOOSING, choosing),
        *_reached(rows),
    ]


def _reached(rows: Rows) -> Iterator[Verdict]:
    """Judge what the first draft is worth, beside plain decoding and beside other engines."""
    first = next((row["draft"] for row in rows if "draft" in row), None)
    mine = [row for row in rows if row.get("draft") == first]
    peers = [row for row in mine if row.get("peers")]

    def found(rows: Rows, figure: str, batch: int) -> list[tuple[float, str]]:
        chosen = [row for row in rows if row["batch"] == batch and figure in row.get("figures", {})]
        return [(row["figures"][figure], f"{first}, batch {batch}, {row['task']}") for row in chosen]

    cells = [row for row in mine if "ratios" in row and row["task"] not in OWN_TASKS]
    for where, figure, name, wanted in (
        (cells, "auto over plain", "plain decoding", WORTH),
        (peers, "times vLLM at its best", "vLLM at its best", TIMES_VLLM),
        (peers, "times transformers", "transformers", TIMES_TRANSFORMERS),
    ):
        for batch, least in wanted.items():
            text = f"{first or 'auto'} at batch {batch} at least {least} x {name}"
            yield at_least(text, least, found(where, figure, batch))


def _mean(values: Iterator[float]) -> float:
    return statistics.geometric_mean(values)


def plot(record: dict[str, Any], path: Path) -> None:
    """Draw, for every draft, plain decoding, the best fixed shape and the choice by batch size, every shape
    by batch size, and the choice over the rounds of mixed text."""
    cells = [row for row in record["cases"].values() if "ratios" in row]
    names = list(dict.fromkeys(row["draft"] for row in cells))
    panels = [panel for name in names for panel in _panels(name, [r for r in cells if r["draft"] == name])]
    if panels:
        title = "Shapes chosen by measurements: speed over plain decoding"
        write_bytes_atomically(path, draw(title, panels, columns=len(panels) // len(names), legend=True))
    else:
        print("There is nothing to draw.", file=sys.stderr)


def _panels(name: str, cells: Rows) -> list[Panel]:
    """Panels of a draft."""
    batches = list(dict.fromkeys(row["batch"] for row in cells))
    settings = list(cells[0]["ratios"])
    means = {
        (setting, batch): _mean(r["ratios"][setting] for r in cells if r["batch"] == batch)
        for setting in settings
        for batch in batches
    }
    fixed = [setting for setting in settings if setting != AUTO]
    best = [max((means[setting, batch], setting) for setting in fixed)[1] for batch in batches]
    groups = [f"batch {batch}\nbest {shape}" for batch, shape in zip(batches, best, strict=True)]
    series = [
        BarSeries("plain decoding", [1.0] * len(batches), GREY),
        _bars("best fixed shape", best, batches, cells, means, 1),
        _bars(AUTO, [AUTO] * len(batches), batches, cells, means, 0),
    ]
    panels: list[Panel] = [
        Bars("times plain decoding; a dot is a task", groups, series, name, line=1.0),
        HeatMap(
            "batch size",
            list(map(str, batches)),
            settings,
            [[means[setting, batch] for batch in batches] for setting in settings],
            "mean over tasks",
        ),
    ]
    curves = [
        Curve(range(1, len(row["course"]) + 1), row["course"], f"batch {row['batch']}", hue(i), "o-")
        for i, row in enumerate(row for row in cells if row["task"] == MIXED)
    ]
    if curves:
        up = f"{AUTO} over plain decoding"
        panels.append(Curves("round", up, curves, "code, prose and noise in turns", legend="", whole=True))
    return panels


def _bars(
    label: str,
    chosen: Sequence[str],
    batches: Sequence[int],
    cells: Rows,
    means: dict[tuple[str, int], float],
    colour: int,
) -> BarSeries:
    pairs = list(zip(chosen, batches, strict=True))
    dots = [[row["ratios"][setting] for row in cells if row["batch"] == batch] for setting, batch in pairs]
    return BarSeries(label, [means[pair] for pair in pairs], hue(colour), dots)
