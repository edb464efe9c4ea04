"""Property tests of kernels: the shapes that have found faults as cases, and a sweep over drawn ones."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import pytest
from crossed import as_parameters
from hypothesis import HealthCheck, settings

SWEEP = settings(
    max_examples=20,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
"""The same examples in every run, and no limit on the time of one."""


def diagonal(*axes: tuple[str, Iterable[Any]]) -> pytest.MarkDecorator:
    """Parametrize so that every value of every axis occurs.

    The n-th values of all axes stand together; shorter axes begin again. An axis is the names of its
    arguments, separated by commas, and their values.
    """
    names = [[name.strip() for name in axis.split(",")] for axis, _ in axes]
    values = [
        [as_parameters(each, arguments, place) for place, each in enumerate(found)]
        for arguments, (_, found) in zip(names, axes, strict=True)
    ]
    cases = []
    for number in range(max(len(found) for found in values)):
        chosen = [found[number % len(found)] for found in values]
        together = [value for each in chosen for value in each.values]
        marks = [mark for each in chosen for mark in each.marks]
        cases.append(pytest.param(*together, marks=marks, id="-".join(each.id for each in chosen)))
    return pytest.mark.parametrize(list(chain(*names)), cases)
