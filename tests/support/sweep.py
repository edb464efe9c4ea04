"""Cases of a test of which `make test` runs a part."""

from collections.abc import Iterable
from typing import Any

import pytest


def sweep(cases: Iterable[Any], fast: Iterable[Any]) -> list[Any]:
    """``cases`` for `pytest.mark.parametrize`, slow but for those of ``fast``, which must be among them."""
    cases, fast = list(cases), list(fast)
    unknown = [each for each in fast if each not in cases]
    assert not unknown, f"no cases of the sweep: {unknown}"
    return [each if each in fast else _slow(each) for each in cases]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
