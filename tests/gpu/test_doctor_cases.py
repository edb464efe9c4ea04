"""The cases of `eagle-kit doctor --gpu` on the device."""

from contextlib import nullcontext

import pytest

from eagle_kit.core.switches import OPERATIONS
from eagle_kit.doctor.operations import case_runs
from eagle_kit.ops.backend import use
from tests.gpu.place import DEVICE, REHEARSED


@pytest.mark.parametrize("run", list(case_runs()), ids=lambda run: run.name.replace(" ", "-"))
def test_each_operation_computes_what_fp64_does(run):
    """A rehearsal runs the kernels under the interpreter."""
    interprets = REHEARSED and run.case.operation in OPERATIONS
    with use("triton") if interprets else nullcontext():
        assert run.error(DEVICE) <= run.tolerance
