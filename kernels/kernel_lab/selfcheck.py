"""A small check of every operation on this machine, against the same computation written out in fp64.

The cases are those of `eagle-kit doctor --gpu` (:mod:`eagle_kit.doctor.operations`); implementations for CPUs
are added here, in other libraries and in C++. The tests go further (more shapes, all gradients).
"""

import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from eagle_kit.core.switches import OPERATIONS
from eagle_kit.doctor.operations import (
    CASES,
    TOLERANCES,
    CaseRun,
    attention_checks,
    case_runs,
    decoding_checks,
    layer_checks,
)
from eagle_kit.doctor.operations.inputs import error_of, normal
from eagle_kit.ops.backend import use
from eagle_kit.ops.cpu import cpp
from eagle_kit.ops.linear import onednn, panels

FP32 = torch.float32


class Check(NamedTuple):
    """One implementation of one operation in one dtype.

    Attributes:
        operation: its folder in ``eagle_kit/ops``.
        form: what was checked, of which implementation.
        error: largest difference over the largest value.
        tolerance: largest error that is a rounding error.
    """

    operation: str
    form: str
    error: float
    tolerance: float = TOLERANCES[FP32]

    @property
    def ok(self) -> bool:
        """True if the error is a rounding error."""
        return self.error <= self.tolerance


def run_checks() -> list[Check]:
    """Check every operation on torch's default device, in torch, in oneDNN, and in C++."""
    on_cpu = torch.get_default_device().type == "cpu"
    with use("reference"):
        # On a CPU the operation has another default, which is among the forms below.
        runs = [run for run in case_runs() if not on_cpu or run.case.operation != "attention/ttt"]
        checks = [_checked(run, "torch") for run in runs]
        for operation, form, error in _cpu_forms():
            checks.append(Check(operation, form, error()))
    return checks


def run_triton_checks() -> list[Check]:
    """Check the Triton kernels: in every dtype on a GPU, or in one where ``TRITON_INTERPRET`` is set.
    Operations without one are left out."""
    from kernel_lab.interpreter import repair

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        repair()
        # Of lanes that are not used.
        warnings.filterwarnings("ignore", "invalid value encountered in cast", RuntimeWarning)
    device = torch.device("cuda" if on_gpu else "cpu")
    library = "Triton" if on_gpu else "Triton, interpreted"
    with use("triton"):
        return [_checked(run, library, device) for run in triton_runs(in_one_dtype=not on_gpu)]


def triton_runs(*, in_one_dtype: bool) -> Iterator[CaseRun]:
    """Iterate over the cases of operations with a Triton kernel, in each dtype or in the first."""
    for case in CASES:
        if case.operation in OPERATIONS:
            for dtype in case.dtypes[:1] if in_one_dtype else case.dtypes:
                yield CaseRun(case, dtype)


def _checked(run: CaseRun, library: str, device: torch.device | None = None) -> Check:
    dtype = str(run.dtype).removeprefix("torch.")
    error = run.error(device or torch.get_default_device())
    return Check(run.case.operation, f"{library}, {run.case.form}, {dtype}", error, run.tolerance)


def _cpu_forms() -> Iterator[tuple[str, str, Callable[[], float]]]:
    """Operation, form and check of the implementations for CPUs, in fp32."""
    ttt = attention_checks.training_time_test
    yield "attention/ttt", "torch", partial(ttt, FP32, backend="reference")
    yield "attention/ttt", "CPU flash", partial(ttt, FP32, backend="cpu")
    if onednn.available():
        yield "linear", "oneDNN", partial(layer_checks.linears, FP32, "onednn")
        yield "linear", "oneDNN, packed", partial(_packed_linear, onednn.pack, onednn.packed_matmul)
    if not cpp.available() or torch.get_default_device().type != "cpu":
        return
    yield "linear", "C++, packed", partial(_packed_linear, panels.pack, panels.matmul)
    yield (
        "linear",
        "C++, packed bfloat16",
        partial(_packed_linear, panels.pack, panels.matmul, in_bfloat16=True),
    )
    for operation, form, check in (
        ("attention/prefill", "paged", attention_checks.paged_prompts),
        ("attention/window", "tree", attention_checks.window),
        ("attention/window", "tree, window, cap, sinks", attention_checks.limited_window),
        ("attention/mla", "chain", attention_checks.latents),
        ("norm", "add", layer_checks.norms),
        ("swiglu", "values", layer_checks.swiglu_values),
        ("rope", "window rows", layer_checks.rotated_windows),
        ("accept", "most likely", decoding_checks.most_likely_tokens),
        ("commit", "paths", decoding_checks.commits),
        ("draft_topk", "of logits", decoding_checks.drafts_of_logits),
        ("rows", "gathered, written, appended", decoding_checks.slot_rows),
    ):
        yield operation, f"C++, {form}", partial(_in_cpp, check)


def _in_cpp(check: Callable[[torch.dtype], float]) -> float:
    with use("cpp"):
        return check(FP32)


def _packed_linear(
    pack: Callable[..., Any], matmul: Callable[..., torch.Tensor], *, in_bfloat16: bool = False
) -> float:
    """Five rows of 96 numbers to 65, by a weight that is packed; in_bfloat16: one that bf16 holds exactly."""
    x = normal(FP32, 5, 96)
    weight = normal(FP32, 65, 96, seed=1)
    if in_bfloat16:
        weight = weight.bfloat16().float()
    return error_of(matmul(x, pack(weight)), x.double() @ weight.double().t())


if __name__ == "__main__":
    for check in run_triton_checks():
        print(json.dumps(check._asdict()))
