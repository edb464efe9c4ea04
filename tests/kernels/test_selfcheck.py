"""The self-check passes, covers every operation, and notices a wrong one."""

from pathlib import Path

import pytest

import eagle_kit.kernels
from eagle_kit.kernels import cpp, selfcheck


def test_every_operation_is_checked_and_right():
    checks = selfcheck.run_checks()
    folders = {path.parent.name for path in Path(eagle_kit.kernels.__file__).parent.glob("*/__init__.py")}
    assert {check.kernel for check in checks} == folders
    assert [check for check in checks if not check.ok] == []


@pytest.mark.parametrize(
    "name",
    [
        "paged_prefill_attention",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("mla_window_attention", "small_linear")),
    ],
)
def test_a_wrong_kernel_is_noticed(name, monkeypatch):
    right = getattr(selfcheck, name)
    monkeypatch.setattr(selfcheck, name, lambda *args, **options: right(*args, **options) * 1.02)
    has_cpp = cpp.available() and name != "small_linear"
    wrong = [check for check in selfcheck.run_checks() if not check.ok]
    assert len(wrong) == (2 if has_cpp else 1) and len({check.kernel for check in wrong}) == 1


@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "window_attention",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("prefill_attention", "packed_attention", "ttt_attention")
        ),
    ],
)
def test_a_wrong_operation_is_noticed(name, monkeypatch):
    right = getattr(selfcheck, name)
    monkeypatch.setattr(selfcheck, name, lambda *args, **options: right(*args, **options) * 1.001)
    assert {check.kernel for check in selfcheck.run_checks() if not check.ok} == {name}
