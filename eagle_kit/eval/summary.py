"""Answers added up: accept length, acceptance per position and speed per task, category, draft and shape.

Accept lengths are ratios of sums (tokens emitted over verifies), never means of ratios, so that
responses count by their number of verifies. A speed-up is a ratio of decoding speeds (tokens over
seconds) on the same prompts in the same run.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from eagle_kit.core.stats import SpecStats
from eagle_kit.eval.answers import PLAIN, Answer, Setting
from eagle_kit.eval.distribution import LEVEL, uniform_test
from eagle_kit.eval.promises import EXACT, Promise, Promises

ALL = "all"
"""The task or category of a row that adds all of them up."""
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160)
"""97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; the last one stands for more, which is
on the safe side."""


def summarise(
    answers: Sequence[Answer],
    runs: Sequence[Setting],
    tasks: Sequence[str],
    promises: Promises = MappingProxyType({}),
) -> dict[str, Any]:
    """Add answers up.

    Args:
        answers: of complete prompts, every setting's.
        runs: the settings, plain first.
        tasks: task names, in the order to show.
        promises: of settings; settings that are missing promise the text.

    Returns:
        ``rows``: for each temperature, one per setting and per (task, category): all tasks together
        (``"all", "all"``), each task (``task, "all"``), and each category of a task that has several. See
        :func:`_row` for the fields.
        ``num_prompts``: user turns measured. ``num_compared``: answers whose text has to equal the plain one.
        ``greedy_identical`` and ``seeded_identical``: whether all of them do, greedy ones and samples (None
        when nothing was compared). ``differences``: the answers that do not, with their first difference.
        ``distribution_kept``: whether no setting that promises the target's distribution is rejected (None
        without any). The tests have the level ``LEVEL`` together, so each has an equal part of it.
    """
    rows = []
    for temperature in dict.fromkeys(answer.temperature for answer in answers):
        of_temperature = [answer for answer in answers if answer.temperature == temperature]
        for part in _parts(of_temperature, tasks):
            for run in runs:
                promise = None
                if run != PLAIN:
                    promise = promises.get(run.draft, EXACT).at(temperature)
                rows.append({"temperature": temperature, **_row(run, part, promise)})
    compared = []
    for answer in answers:
        promise = promises.get(answer.draft, EXACT).at(answer.temperature)
        if answer.identical is not None and promise is Promise.TEXT:
            compared.append(answer)
    return {
        "num_prompts": sum(answer.setting == PLAIN for answer in answers),
        "rows": rows,
        "num_compared": len(compared),
        "greedy_identical": _all_identical([each for each in compared if each.temperature == 0]),
        "seeded_identical": _all_identical([each for each in compared if each.temperature > 0]),
        "distribution_kept": _all_kept(rows),
        "differences": [
            {
                "task": answer.task,
                "id": answer.id,
                "turn": answer.turn,
                "temperature": answer.temperature,
                "seed": answer.seed,
                "draft": answer.draft,
                "shape": answer.shape,
                "difference": answer.difference,
            }
            for answer in compared
            if answer.difference is not None
        ],
    }


def _all_identical(compared: Sequence[Answer]) -> bool | None:
    """Whether all answers equal the plain ones; None without any."""
    return all(answer.identical for answer in compared) if compared else None


def _all_kept(rows: Sequence[dict[str, Any]]) -> bool | None:
    """Whether no test of a setting that promises the distribution rejects it; None without a test."""
    tests = [row["distribution"] for row in rows if is_tested(row)]
    return all(test["p_value"] >= LEVEL / len(tests) for test in tests) if tests else None


def is_tested(row: dict[str, Any]) -> bool:
    """Whether a row has the test that decides about a setting: of all tasks, where the distribution is
    promised."""
    is_whole = (row["task"], row["category"]) == (ALL, ALL)
    return is_whole and row.get("promise") == Promise.DISTRIBUTION and row["distribution"] is not None


def find_row(
    summary: dict[str, Any],
    draft: str | None,
    shape: str,
    task: str = ALL,
    category: str = ALL,
    temperature: float | None = None,
) -> dict[str, Any]:
    """The row of a setting; ``find_row(summary, None, "none")`` is plain decoding. Without a temperature, the
    row of the first one. Raises KeyError."""
    key = (draft, shape, task, category)
    for row in summary["rows"]:
        is_wanted = temperature is None or row["temperature"] == temperature
        if is_wanted and (row["draft"], row["shape"], row["task"], row["category"]) == key:
            return row
    raise KeyError(key)


class _Part(NamedTuple):
    """Answers of all settings to the prompts of a category of a task."""

    task: str
    category: str
    answers: list[Answer]

    def of(self, setting: Setting) -> list[Answer]:
        """Answers of one setting."""
        return [answer for answer in self.answers if answer.setting == setting]


def _parts(answers: Sequence[Answer], tasks: Sequence[str]) -> Iterator[_Part]:
    """All answers, those of each task, and those of each category of a task that has several."""
    yield _Part(ALL, ALL, list(answers))
    for task in tasks:
        of_task = [answer for answer in answers if answer.task == task]
        yield _Part(task, ALL, of_task)
        categories = list(dict.fromkeys(answer.category for answer in of_task))
        if len(categories) > 1:
            for category in categories:
                of_category = [answer for answer in of_task if answer.category == category]
                yield _Part(task, category, of_category)


def _row(run: Setting, part: _Part, promise: Promise | None) -> dict[str, Any]:
    """One setting on one part.

    ``accept_length``: tokens per verify, bonus included. ``acceptance_per_position[d]``: share of verifies
    whose draft token at depth d + 1 reached the output. ``histogram[n]``: verifies that emitted n tokens.
    ``decode_tokens_per_s``: decoding alone, first tokens (prefill) not counted. ``speedup``: of each answer
    over plain decoding's of the same turn, the median, which a stall of the machine does not move;
    ``speedup_of_totals``: ratio of the tokens per second. ``accept_length_error`` and ``speedup_error``: half
    of the 95 % interval of the mean over seeds (Student's t); None with fewer than two seeds. ``prefill_s``:
    mean seconds to the first token. ``num_different``: answers that differ from the plain ones.
    ``promise``: what is the same as in plain decoding, ``text``, ``distribution`` or ``nothing``.
    ``agreement``: share of the plain text before the first different token, where nothing is promised.
    ``distribution``: fields of :class:`~eagle_kit.eval.distribution.UniformTest` for samples that promise no
    text. ``total_variation``: mean over the recorded positions, from the plain target. Values without data
    are None.
    """
    answers = part.of(run)
    plain = part.of(PLAIN)
    stats = SpecStats()
    for answer in answers:
        stats.add(answer.stats)
    test = uniform_test([place for answer in answers for place in answer.places])
    variations = [value for answer in answers for value in answer.total_variations]
    speed = decode_speed(answers)
    plain_speed = decode_speed(plain)
    speedup_of_totals = None
    if speed and plain_speed:
        speedup_of_totals = speed / plain_speed
    return {
        "task": part.task,
        "category": part.category,
        "draft": run.draft,
        "shape": run.shape,
        "num_answers": len(answers),
        "num_tokens": sum(len(answer.token_ids) for answer in answers),
        "num_verifies": stats.num_verifies,
        "accept_length": stats.accept_length if stats.num_verifies else None,
        "accept_length_error": half_interval(_by_seed(answers, plain, _accept_length)),
        "acceptance_per_position": stats.acceptance_per_position,
        "histogram": stats.histogram,
        "decode_tokens_per_s": speed,
        "speedup": median_speedup(answers, plain),
        "speedup_error": half_interval(_by_seed(answers, plain, median_speedup)),
        "speedup_of_totals": speedup_of_totals,
        "decode_s": sum(answer.decode_share_s for answer in answers),
        "prefill_s": sum(answer.prefill_s for answer in answers) / len(answers) if answers else None,
        "num_different": sum(answer.identical is False for answer in answers),
        "promise": None if promise is None else promise.value,
        "agreement": _agreement(answers, plain) if promise is Promise.NOTHING else None,
        "distribution": None if test is None else test._asdict(),
        "total_variation": statistics.fmean(variations) if variations else None,
    }


def _agreement(answers: Sequence[Answer], plain: Sequence[Answer]) -> float | None:
    """Share of the plain tokens that come before the first different one of an answer; None without any."""
    num_plain_of = {answer.key: len(answer.token_ids) for answer in plain}
    num_agreed = 0
    num_tokens = 0
    for answer in answers:
        num_plain = num_plain_of.get(answer.key, 0)
        num_tokens += num_plain
        num_agreed += num_plain if answer.difference is None else answer.difference["position"]
    return num_agreed / num_tokens if num_tokens else None


def _by_seed(
    answers: Sequence[Answer],
    plain: Sequence[Answer],
    figure: Callable[[list[Answer], list[Answer]], float | None],
) -> list[float]:
    """A figure of each seed's answers, where it has one."""
    values = []
    for seed in dict.fromkeys(answer.seed for answer in answers):
        value = figure(
            [answer for answer in answers if answer.seed == seed],
            [answer for answer in plain if answer.seed == seed],
        )
        if value is not None:
            values.append(value)
    return values


def _accept_length(answers: Sequence[Answer], plain: Sequence[Answer]) -> float | None:
    """Tokens per verify; None without verifies."""
    stats = SpecStats()
    for answer in answers:
        stats.add(answer.stats)
    return stats.accept_length if stats.num_verifies else None


def half_interval(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of a mean, by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    degrees = len(values) - 1
    quantile = T_QUANTILES[min(degrees, len(T_QUANTILES)) - 1]
    return quantile * statistics.stdev(values) / len(values) ** 0.5


def median_speedup(answers: Iterable[Answer], plain: Iterable[Answer]) -> float | None:
    """Median of the ratios of tokens per second, over the turns that both decoded; None where there
    are none."""
    plain_speeds = {answer.key: decode_speed([answer]) for answer in plain}
    ratios = []
    for answer in answers:
        speed = decode_speed([answer])
        plain_speed = plain_speeds.get(answer.key)
        if speed and plain_speed:
            ratios.append(speed / plain_speed)
    return statistics.median(ratios) if ratios else None


def decode_speed(answers: Iterable[Answer]) -> float | None:
    """Tokens per second of decoding over all ``answers``; None when there was none."""
    num_tokens = 0
    seconds = 0.0
    for answer in answers:
        num_tokens += answer.num_decode_tokens
        seconds += answer.decode_share_s
    return num_tokens / seconds if seconds > 0 else None
