"""``eagle-kit bench tune``: shapes chosen by measurements against plain decoding and against every fixed
shape, in interleaved rounds, over tasks and batch sizes; and beside transformers' own ``generate``.
"""

import random
import statistics
import string
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle_kit.bench.case import Case, Machine
from eagle_kit.bench.options import Options
from eagle_kit.bench.runner import Benchmark, conduct
from eagle_kit.bench.verdict import Rows, Verdict, at_least
from eagle_kit.core.files import write_bytes_atomically
from eagle_kit.core.output import RequestOutput
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.eval.decoder import batch_decode_seconds
from eagle_kit.eval.tasks import KNOWN_TASKS, load_tasks
from eagle_kit.models.loading.source import resolve_target
from eagle_kit.report.plots import Bars, BarSeries, Curve, Curves, draw, hue
from eagle_kit.serve.llm import LLM

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
NOT_SLOWER, NEARLY_BEST, BEST_IN_THE_MEAN = 0.98, 0.97, 1.0


@dataclass(frozen=True)
class Sizes:
    """What is compared.

    Attributes:
        tasks: names of tasks or files; ``noise`` (random strings), ``languages`` (other than English) and
            ``mixed`` (code, prose and noise, one after another) are made here.
        batches: batch sizes.
        shapes: fixed shapes.
        rounds: interleaved rounds, each with prompts of its own.
        max_tokens: of a reply.
        compare: also decode with transformers, plainly and with prompt look-up, at batch sizes 1 and 8.
    """

    tasks: Sequence[str] = (*KNOWN_TASKS, *OWN_TASKS)
    batches: Sequence[int] = (1, 4, 8, 32)
    shapes: Sequence[str] = SHAPES
    rounds: int = 7
    max_tokens: int = 64
    compare: bool = True


def main(target: str, drafts: Sequence[str], sizes: Sizes, options: Options) -> int:
    """Measure -> exit code, 1 when a case failed or a target was missed.

    Raises:
        UserError: a task or a model that cannot be loaded.
    """
    plain = LLM(target, max_batch_size=max(sizes.batches), shape=PLAIN, max_context=1280)
    llms = {
        Path(draft).name: LLM(
            plain.target,
            draft,
            tokenizer=plain.tokenizer,
            max_batch_size=max(sizes.batches),
            max_context=1280,
        )
        for draft in drafts
    }
    prompts = {task: make_prompts(plain, task, options.seed) for task in sizes.tasks}
    model = _transformers_model(target, plain) if sizes.compare else None
    settings = {"target": target, "drafts": list(drafts), **sizes.__dict__}
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    benchmark = Benchmark(
        "tune", list(cases(llms, prompts, sizes, model)), settings, partial(verdicts, sizes), plot
    )
    return conduct(benchmark, Machine.here(options.seed), options)


def make_prompts(llm: LLM, task: str, seed: int) -> list[list[int]]:
    """Tokenise the prompts of a task in an order drawn by ``seed``."""
    rng = random.Random(f"{task}:{seed}")
    texts: list[Any]
    if task == NOISE:
        letters = string.ascii_letters + string.digits + string.punctuation + " "
        texts = ["".join(rng.choices(letters, k=160)) for _ in range(64)]
    elif task == LANGUAGES:
        texts = list(SENTENCES)
    elif task == MIXED:
        parts = [make_prompts(llm, each, seed) for each in (*KNOWN_TASKS, NOISE)]
        return [prompt for group in zip(*parts, strict=False) for prompt in group]
    else:
        texts = [prompt.messages([]) for prompt in load_tasks([task])[0].prompts]
    rng.shuffle(texts)
    return [llm.tokenize(text) for text in texts]


def cases(
    llms: dict[str, LLM], prompts: dict[str, list[list[int]]], sizes: Sizes, model: Any
) -> Iterator[Case]:
    """A case for every draft, batch size and task; then those beside transformers."""
    for name, llm in llms.items():
        for batch in sizes.batches:
            for task, texts in prompts.items():
                values = {"draft": name, "batch": batch, "task": task}
                measure = partial(compare, llm, texts, batch, sizes)
                yield Case(f"{name}, batch {batch}", task, measure, values)
        for batch in (1, 8) if model is not None else ():
            values = {"draft": name, "batch": batch, "task": KNOWN_TASKS[0], "peer": "transformers"}
            measure = partial(compare_transformers, llm, model, prompts[KNOWN_TASKS[0]], batch, sizes)
            yield Case(f"{name}, transformers", f"batch {batch}", measure, values)


def compare(
    llm: LLM, prompts: Sequence[list[int]], batch: int, sizes: Sizes, machine: Machine
) -> dict[str, Any]:
    """Decode a batch of prompts a round in every setting; which one is first rotates."""
    params = SamplingParams(max_tokens=sizes.max_tokens)
    settings = [PLAIN, *sizes.shapes, AUTO]
    rates: dict[str, list[float]] = {setting: [] for setting in settings}
    used: Counter[str] = Counter()
    course: list[tuple[float, float]] = []
    for setting in settings:
        llm.generate(_part(prompts, 0, batch), SamplingParams(max_tokens=16), shape=setting)
    for number in range(sizes.rounds):
        part = _part(prompts, number, batch)
        first = number % len(settings)
        texts = {}
        for setting in settings[first:] + settings[:first]:
            outputs = llm.generate(part, params, shape=setting)
            rates[setting].append(rate(outputs))
            texts[setting] = [output.token_ids for output in outputs]
            if setting == AUTO:
                for output in outputs:
                    used.update({str(shape): count for shape, count in output.shapes.items()})
        course.append((rates[AUTO][-1] / rates[PLAIN][-1], max(rates[s][-1] for s in sizes.shapes)))
        assert all(each == texts[PLAIN] for each in texts.values()), "a shape changed the text"
    ratios = {s: [a / b for a, b in zip(rates[s], rates[PLAIN], strict=True)] for s in settings[1:]}
    best = max(sizes.shapes, key=lambda shape: statistics.median(ratios[shape]))
    best_ratio = max(statistics.median(ratios[best]), 1.0)
    mine = statistics.median(ratios[AUTO])
    over_best = [a / max(b, 1.0) for a, b in zip(ratios[AUTO], ratios[best], strict=True)]
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
        "over_best": over_best,
        "course": [each for each, _ in course],
        "shapes": dict(used.most_common()),
    }


def _part(prompts: Sequence[list[int]], number: int, batch: int) -> list[list[int]]:
    """Prompts of a round, those of the next round behind them."""
    return [prompts[(number * batch + i) % len(prompts)] for i in range(batch)]


def rate(outputs: Sequence[RequestOutput]) -> float:
    """Tokens per second of decoding, first tokens and prompts left out."""
    return sum(len(output.token_ids) - 1 for output in outputs) / batch_decode_seconds(outputs)


def interval(values: Sequence[float], share: float = 0.95) -> tuple[float, float]:
    """Bootstrap interval of the median."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(np.asarray(values), (2000, len(values))), axis=1)
    low, high = np.quantile(medians, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


def compare_transformers(
    llm: LLM, model: Any, prompts: Sequence[list[int]], batch: int, sizes: Sizes, machine: Machine
) -> dict[str, Any]:
    """Decode rounds with ours and with transformers; prompt look-up takes one prompt at a time."""
    params = SamplingParams(max_tokens=sizes.max_tokens, ignore_eos=True)
    modes: dict[str, dict[str, Any]] = {"transformers": {}}
    if batch == 1:
        modes["transformers, prompt look-up"] = {"prompt_lookup_num_tokens": 10}
    rates: dict[str, list[float]] = {AUTO: [], **{mode: [] for mode in modes}}
    llm.generate(_part(prompts, 0, batch), params, shape=AUTO)
    for number in range(max(3, sizes.rounds // 2)):
        part = _part(prompts, number, batch)
        rates[AUTO].append(rate(llm.generate(part, params, shape=AUTO)))
        for mode, options in modes.items():
            rates[mode].append(transformers_rate(model, part, sizes.max_tokens, options))
    figures = {f"{AUTO} tokens/s": statistics.median(rates[AUTO])}
    for mode in modes:
        ratios = [a / b for a, b in zip(rates[AUTO], rates[mode], strict=True)]
        figures[f"{mode} tokens/s"] = statistics.median(rates[mode])
        figures[f"times {mode}"] = statistics.median(ratios)
    return {"figures": figures, "rounds": rates}


@torch.inference_mode()
def transformers_rate(
    model: Any, prompts: Sequence[list[int]], num_tokens: int, options: dict[str, Any]
) -> float:
    """Tokens per second of transformers' greedy ``generate``, the prompt's part taken off by a second run."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)

    def seconds(count: int) -> float:
        begun = time.perf_counter()
        model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            max_new_tokens=count,
            min_new_tokens=count,
            **options,
        )
        return time.perf_counter() - begun

    return len(prompts) * (num_tokens - 1) / (seconds(num_tokens) - seconds(1))


def _transformers_model(target: str, llm: LLM) -> Any:
    from transformers import AutoModelForCausalLM

    weight = llm.target.embed_tokens.weight
    model: Any = AutoModelForCausalLM.from_pretrained(str(resolve_target(target)), dtype=weight.dtype)
    return model.to(weight.device).eval()


def verdicts(sizes: Sizes, rows: Rows, counts: bool) -> list[Verdict]:
    """Judge: never slower than plain decoding, nearly the best fixed shape of every cell, better than each
    of them in the mean."""
    cells = [row for row in rows if "ratios" in row]

    def where(row: dict[str, Any]) -> str:
        return f"{row['draft']}, batch {row['batch']}, {row['task']}"

    plain = [(row["figures"]["auto over plain"], where(row)) for row in cells]
    best = [(row["figures"]["auto over best"], where(row)) for row in cells]
    means = [
        (_mean(row["ratios"][AUTO] for row in cells) / _mean(row["ratios"][shape] for row in cells), shape)
        for shape in sizes.shapes
        if cells
    ]
    return [
        at_least(f"auto at least {NOT_SLOWER} x plain decoding", NOT_SLOWER, plain),
        at_least(f"auto at least {NEARLY_BEST} x the best fixed shape", NEARLY_BEST, best),
        at_least("auto above every fixed shape in the mean", BEST_IN_THE_MEAN, means),
    ]


def _mean(values: Iterator[float]) -> float:
    return statistics.geometric_mean(values)


def plot(record: dict[str, Any], path: Path) -> None:
    """Draw, for every draft, plain decoding, the best fixed shape and the choice by batch size, and the
    choice over the rounds of mixed text."""
    cells = [row for row in record["cases"].values() if "ratios" in row]
    panels: list[Bars | Curves] = []
    for name in dict.fromkeys(row["draft"] for row in cells):
        mine = [row for row in cells if row["draft"] == name]
        groups = list(dict.fromkeys(row["batch"] for row in mine))
        settings = list(mine[0]["ratios"])
        series = [
            BarSeries(
                setting,
                [_mean(r["ratios"][setting] for r in mine if r["batch"] == batch) for batch in groups],
                hue(i),
                [[r["ratios"][setting] for r in mine if r["batch"] == batch] for batch in groups],
            )
            for i, setting in enumerate(settings)
        ]
        across = "speed over plain decoding (line at 1); a dot is a task"
        panels.append(Bars(across, [f"batch {batch}" for batch in groups], series, name, line=1.0))
        curves = [
            Curve(range(1, len(row["course"]) + 1), row["course"], f"batch {row['batch']}", hue(i), "o-")
            for i, row in enumerate(row for row in mine if row["task"] == MIXED)
        ]
        if curves:
            panels.append(
                Curves(
                    "round", "auto over plain decoding", curves, f"{name}, mixed text", legend="", whole=True
                )
            )
    if panels:
        columns = 2 - len(panels) % 2
        title = "Shapes chosen by measurements"
        write_bytes_atomically(path, draw(title, panels, columns=columns, legend=True))
    else:
        print("There is nothing to draw.", file=sys.stderr)
