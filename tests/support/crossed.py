"""Parametrization over several axes: all combinations, most of them nightly, or a diagonal alone."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest

Parameters = type(pytest.param())


def crossed(*axes: tuple[str, Iterable[Any]], fixtures: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Parametrize with every combination of the axes' values; all but a diagonal are nightly.

    An axis is the names of its arguments, separated by commas, and their values. On the diagonal the n-th
    value of an axis stands beside the n-th of every other; shorter axes begin again, so each value is there.
    Those of ``fixtures`` are parameters of fixtures.
    """
    names, values = read_axes(axes)
    sizes = [len(found) for found in values]
    diagonal = {tuple(n % size for size in sizes) for n in range(max(sizes))}
    cases = []
    for places in product(*map(range, sizes)):
        chosen = [found[place] for found, place in zip(values, places, strict=True)]
        cases.append(joined(chosen, () if places in diagonal else (pytest.mark.nightly,)))
    return pytest.mark.parametrize(names, cases, indirect=fixtures)


def diagonal(*axes: tuple[str, Iterable[Any]]) -> pytest.MarkDecorator:
    """Parametrize so that every value of every axis occurs.

    The n-th values of all axes stand together; shorter axes begin again. An axis is the names of its
    arguments, separated by commas, and their values.
    """
    names, values = read_axes(axes)
    count = max(len(found) for found in values)
    cases = [joined([found[number % len(found)] for found in values]) for number in range(count)]
    return pytest.mark.parametrize(names, cases)


def read_axes(axes: Sequence[tuple[str, Iterable[Any]]]) -> tuple[list[str], list[list[Any]]]:
    """The names of all arguments, and for each axis its values as `pytest.param` with a name."""
    names: list[str] = []
    values = []
    for axis, found in axes:
        arguments = [name.strip() for name in axis.split(",")]
        names += arguments
        values.append([as_parameters(each, arguments, place) for place, each in enumerate(found)])
    return names, values


def joined(chosen: Sequence[Any], marks: Iterable[Any] = ()) -> Any:
    """One case of a value of each axis, with the marks of all and these."""
    together = [value for each in chosen for value in each.values]
    all_marks = [mark for each in chosen for mark in each.marks]
    all_marks += marks
    return pytest.param(*together, marks=all_marks, id="-".join(each.id for each in chosen))


def as_parameters(value: Any, names: list[str], place: int) -> Any:
    """A value of an axis as `pytest.param` with a name."""
    found = value if isinstance(value, Parameters) else None
    if found is None:
        found = pytest.param(*value) if len(names) > 1 else pytest.param(value)
    assert len(found.values) == len(names), (names, value)
    assert not any(isinstance(each, Parameters) for each in found.values), f"{names}: nested {value}"
    if found.id:
        return found
    name = "-".join(getattr(each, "__name__", None) or str(each) for each in found.values)
    return found._replace(id=name if len(name) <= 80 else f"{names[0]}{place}")
