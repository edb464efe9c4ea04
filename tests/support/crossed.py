"""Parametrization over all combinations of several axes, of which `make test` runs a diagonal."""

from collections.abc import Iterable
from itertools import chain, product
from typing import Any

import pytest

Parameters = type(pytest.param())


def crossed(*axes: tuple[str, Iterable[Any]], fixtures: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Parametrize with every combination of the axes' values; all but a diagonal are nightly.

    An axis is the names of its arguments, separated by commas, and their values. On the diagonal the n-th
    value of an axis stands beside the n-th of every other; shorter axes begin again, so each value is there.
    Those of ``fixtures`` are parameters of fixtures.
    """
    names = [[name.strip() for name in axis.split(",")] for axis, _ in axes]
    values = [
        [as_parameters(each, argument, place) for place, each in enumerate(found)]
        for argument, (_, found) in zip(names, axes, strict=True)
    ]
    sizes = [len(found) for found in values]
    diagonal = {tuple(n % size for size in sizes) for n in range(max(sizes))}
    cases = []
    for places in product(*map(range, sizes)):
        chosen = [found[place] for found, place in zip(values, places, strict=True)]
        marks = [mark for each in chosen for mark in each.marks]
        if places not in diagonal:
            marks.append(pytest.mark.nightly)
        together = [value for each in chosen for value in each.values]
        cases.append(pytest.param(*together, marks=marks, id="-".join(each.id for each in chosen)))
    return pytest.mark.parametrize(list(chain(*names)), cases, indirect=fixtures)


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
