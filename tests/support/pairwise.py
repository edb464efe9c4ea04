"""Covering arrays: few cases in which every two values of two axes stand together at least once."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def pairs_of(case: Case) -> set[tuple[str, Any, str, Any]]:
    """All pairs of a case: the names of two axes, in the case's order, and their values."""
    return {(one, case[one], other, case[other]) for one, other in combinations(case, 2)}


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Make cases that hold every pair of values of every two axes.

    Each case begins with the first pair that no case holds yet. Every other axis then takes the value that
    brings most new pairs with the values chosen before it; of equals the one that was used least. The result
    depends on ``axes`` and their order alone.
    """
    missing: dict[tuple[str, Any, str, Any], None] = {}
    for one, other in combinations(axes, 2):
        for pair in product(axes[one], axes[other]):
            missing[(one, pair[0], other, pair[1])] = None
    uses = {(name, value): 0 for name, values in axes.items() for value in values}

    cases = []
    while missing:
        one, first, other, second = next(iter(missing))
        chosen = {one: first, other: second}
        for name in axes:
            if name not in chosen:
                chosen[name] = _best(name, axes, chosen, missing, uses)
        case = {name: chosen[name] for name in axes}
        for pair in pairs_of(case):
            missing.pop(pair, None)
        for item in case.items():
            uses[item] += 1
        cases.append(case)
    return cases


def _best(name: str, axes: Mapping[str, Sequence[Any]], chosen: Case, missing: Mapping, uses: Mapping) -> Any:
    """The value of an axis that brings most missing pairs with the chosen values."""
    names = list(axes)

    def worth(value: Any) -> tuple[int, int]:
        new = 0
        for other, theirs in chosen.items():
            if names.index(other) < names.index(name):
                new += (other, theirs, name, value) in missing
            else:
                new += (name, value, other, theirs) in missing
        return new, -uses[name, value]

    return max(axes[name], key=worth)


def covering_values(
    cases: Sequence[Case], axes: Mapping[str, Sequence[Any]], costs: Mapping[Any, float]
) -> list[Case]:
    """Choose of ``cases`` a few that hold every value of every axis at least once.

    Args:
        costs: of values, in new values that a case must hold to be worth it; 0 where there is none.
    """
    missing = {(name, value) for name, values in axes.items() for value in values}

    def worth(case: Case) -> float:
        new = len(missing & set(case.items()))
        return new - sum(costs.get(value, 0.0) for value in case.values()) if new else float("-inf")

    chosen = []
    while missing:
        best = max(cases, key=worth)
        missing -= set(best.items())
        chosen.append(best)
    return chosen
