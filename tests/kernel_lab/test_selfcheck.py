"""The self-check passes, covers every operation, and notices a wrong one."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import eagle_kit.ops
from eagle_kit.ops.attention.ttt import cpu
from eagle_kit.ops.cpu import cpp
from eagle_kit.ops.linear import onednn
from kernel_lab import selfcheck


def test_every_operation_is_checked_and_right():
    checks = selfcheck.run_checks()
    root = Path(eagle_kit.ops.__file__).parent
    operations = {path.parent.name for path in root.glob("*/__init__.py")} - {"attention", "cpu"}
    operations |= {f"{path.parent.name}_attention" for path in root.glob("attention/*/__init__.py")}
    assert {check.kernel for check in checks} == operations
    assert [check for check in checks if not check.ok] == []


@pytest.mark.skipif(not cpp.available(), reason="no C++ here")
def test_every_operation_in_cpp_is_run():
    run = set()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            run.add(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Names():
        selfcheck.run_checks()
    there = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("eagle_kit_cpp::")}
    assert there - run == set()


def test_a_result_that_is_nan_is_not_right(monkeypatch):
    """Also where another result of the operation is right."""
    right = selfcheck.draft_inputs
    monkeypatch.setattr(
        selfcheck, "draft_inputs", lambda *args: (right(*args)[0], right(*args)[1] * math.nan)
    )
    assert [check.kernel for check in selfcheck.run_checks() if not check.ok] == ["draft_inputs"]


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


def test_a_wrong_form_of_an_operation_is_noticed_and_named(monkeypatch):
    """Those of other libraries; the torch form of the same operation is right."""
    flash = cpu.TTTAttention.apply
    product = onednn.matmul
    wrong = SimpleNamespace(apply=lambda *args: flash(*args) * 1.001)
    monkeypatch.setattr(cpu, "TTTAttention", wrong)
    expected = {("ttt_attention", "CPU flash")}
    if onednn.available():
        monkeypatch.setattr(onednn, "matmul", lambda *args: product(*args) * 1.001)
        expected |= {("linear", "oneDNN"), ("linear", "oneDNN, packed")}
    found = {(check.kernel, check.form) for check in selfcheck.run_checks() if not check.ok}
    assert expected <= found
    assert not found & {("ttt_attention", "torch"), ("linear", "torch")}
