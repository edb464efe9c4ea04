"""The self-check passes, covers every operation, and notices a wrong one."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import eagle_kit.ops
from eagle_kit.doctor.operations import attention_checks, case_runs, decoding_checks, layer_checks
from eagle_kit.ops.attention.ttt import cpu
from eagle_kit.ops.cpu import cpp
from eagle_kit.ops.linear import onednn
from kernel_lab import selfcheck


def test_every_operation_is_checked_and_right():
    checks = selfcheck.run_checks()
    root = Path(eagle_kit.ops.__file__).parent
    operations = {path.parent.name for path in root.glob("*/__init__.py")} - {"attention", "cpu"}
    operations |= {f"attention/{path.parent.name}" for path in root.glob("attention/*/__init__.py")}
    assert {check.operation for check in checks} == operations
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


def test_every_operation_with_a_triton_kernel_has_a_case():
    root = Path(eagle_kit.ops.__file__).parent
    folders = {path.parent.relative_to(root).as_posix() for path in root.rglob("triton.py")}
    assert folders == {run.case.operation for run in selfcheck.triton_runs(in_one_dtype=False)}


def test_names_of_cases_are_unique():
    names = [run.name for run in case_runs()]
    assert len(set(names)) == len(names) > 60


def test_a_result_that_is_nan_is_not_right(monkeypatch):
    """Also where another result of the operation is right."""
    right = decoding_checks.draft_inputs
    monkeypatch.setattr(
        decoding_checks, "draft_inputs", lambda *args: (right(*args)[0], right(*args)[1] * math.nan)
    )
    assert {check.operation for check in selfcheck.run_checks() if not check.ok} == {"draft_inputs"}


@pytest.mark.parametrize(
    ("module", "name", "operation"),
    [
        (attention_checks, "paged_prefill_attention", "attention/prefill"),
        pytest.param(attention_checks, "mla_window_attention", "attention/mla", marks=pytest.mark.nightly),
        pytest.param(layer_checks, "small_linear", "small_linear", marks=pytest.mark.nightly),
    ],
)
def test_a_wrong_kernel_is_noticed(module, name, operation, monkeypatch):
    """In all dtypes."""
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **options: right(*args, **options) * 1.02)
    wrong = [check for check in selfcheck.run_checks() if not check.ok]
    assert {check.operation for check in wrong} == {operation}
    assert any("bfloat16" in check.form for check in wrong)


@pytest.mark.parametrize(
    ("module", "name", "operation"),
    [
        (layer_checks, "linear", "linear"),
        (attention_checks, "window_attention", "attention/window"),
        *(
            pytest.param(attention_checks, name, operation, marks=pytest.mark.nightly)
            for name, operation in (
                ("prefill_attention", "attention/prefill"),
                ("packed_attention", "attention/packed"),
                ("ttt_attention", "attention/ttt"),
            )
        ),
    ],
)
def test_a_wrong_operation_is_noticed(module, name, operation, monkeypatch):
    """In fp32."""
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **options: right(*args, **options) * 1.001)
    assert {check.operation for check in selfcheck.run_checks() if not check.ok} == {operation}


def test_a_wrong_form_of_an_operation_is_noticed_and_named(monkeypatch):
    """Those of other libraries; the torch form of the same operation is right."""
    flash = cpu.TTTAttention.apply
    product = onednn.matmul
    wrong = SimpleNamespace(apply=lambda *args: flash(*args) * 1.001)
    monkeypatch.setattr(cpu, "TTTAttention", wrong)
    expected = {("attention/ttt", "CPU flash")}
    if onednn.available():
        monkeypatch.setattr(onednn, "matmul", lambda *args: product(*args) * 1.001)
        expected |= {("linear", "oneDNN"), ("linear", "oneDNN, packed")}
    found = {(check.operation, check.form) for check in selfcheck.run_checks() if not check.ok}
    assert expected <= found
    assert not found & {("attention/ttt", "torch"), ("linear", "torch, library, float32")}
