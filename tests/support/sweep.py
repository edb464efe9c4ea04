"""Cases of a test of which `make test` runs a part."""

from collections.abc import Iterable
from typing import Any

import pytest


def sweep(cases: Iterable[Any], fast: Iterable[Any]) -> list[Any]:
    """``cases`` for `pytest.mark.parametrize`, nightly except those of ``fast``, all of them in ``cases``."""
    cases, fast = list(cases), list(fast)
    unknown = [each for each in fast if each not in cases]
    assert not unknown, f"no cases of the sweep: {unknown}"
    return [each if each in fast else _nightly(each) for each in cases]


def _nightly(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.nightly)
