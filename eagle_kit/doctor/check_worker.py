"""A process that runs checks one after another, so that an illegal memory access hides no other fault:
``python -m eagle_kit.doctor.check_worker``.

It reads JSON objects ``{"check": NAME, "given": {...}}`` from its standard input, one a line. It writes
others to its standard output: first ``{"ready": true}``, then the outcome of each check. It ends behind a
check that raised, since the CUDA context may be broken. What libraries print goes to standard error.
"""

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TextIO

import torch

from eagle_kit.core.errors import cut, first_line
from eagle_kit.doctor import devices, small_engine
from eagle_kit.doctor.checks import (
    DEVICES_CHECK,
    MEMORY_CHECK,
    MODEL_MEMORY_CHECK,
    REFERENCE_CHECK,
    SHOW_STACK,
    CheckOutcome,
)
from eagle_kit.doctor.operations import CaseRun, case_runs

NUM_FRAMES = 12
"""Innermost frames of an error's stack that go into the file."""


def main() -> int:
    """Answer requests until the input ends."""
    faulthandler.enable()
    faulthandler.register(SHOW_STACK, all_threads=True)

    # The answers have the standard output for themselves.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.cuda.init()
    torch.cuda.synchronize()
    _write(answers, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        answer = run(request["check"], request.get("given", {}))
        _write(answers, answer)
        if answer["raised"]:
            # The end of a process with a broken context may crash or hang.
            os._exit(0)
    return 0


def run(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Run a check, and wait for the GPU; an error is an outcome, too."""
    begun = time.perf_counter()
    has_raised = False
    try:
        outcome = body_of(name)(given)
        torch.cuda.synchronize()
    except Exception as error:  # whatever an operation, a compiler or a driver raises
        has_raised = True
        frames = traceback.format_list(traceback.extract_tb(error.__traceback__)[-NUM_FRAMES:])
        detail = cut(f"{type(error).__name__}: {first_line(error)}", 300)
        outcome = CheckOutcome(False, detail, {"message": cut(str(error), 4000), "stack": frames})
    return {
        "passed": outcome.passed,
        "detail": outcome.detail,
        "values": dict(outcome.values),
        "seconds": time.perf_counter() - begun,
        "raised": has_raised,
    }


def body_of(name: str) -> Callable[[Mapping[str, Any]], CheckOutcome]:
    """Return the function that runs a check on the current GPU, with the ``given`` of a request."""
    bodies = {
        DEVICES_CHECK.name: devices.check_devices,
        REFERENCE_CHECK.name: small_engine.reference_texts,
        MEMORY_CHECK.name: small_engine.check_memory,
        MODEL_MEMORY_CHECK.name: small_engine.check_memory_of_models,
    }
    if name in bodies:
        return bodies[name]
    if name.startswith("engine, "):
        dtype, form = name.removesuffix(", without programmatic launch").split(", ", 2)[1:]
        return partial(small_engine.check_texts, dtype, form)
    [case] = [case for case in case_runs() if case.name == name]
    return partial(_check_operation, case)


def _check_operation(case: CaseRun, given: Mapping[str, Any]) -> CheckOutcome:
    error = case.error(torch.device("cuda"))
    if error <= case.tolerance:
        return CheckOutcome(True, f"error {error:.1e}", {"error": error})
    detail = f"numbers differ by {error:.1e} of the largest, {case.tolerance:.1e} is allowed"
    return CheckOutcome(False, detail, {"error": repr(error)})


def _write(answers: TextIO, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
