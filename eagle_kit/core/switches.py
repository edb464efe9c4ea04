"""Switches for parts that may fail on some hardware: ``EAGLE_KIT_DISABLE=graphs,triton:norm``.

A part that is disabled is replaced by a slower one with the same results. Processes that a command
starts inherit the variable.
"""

import os
from collections.abc import Iterable
from functools import cache

from eagle_kit.core.errors import UserError, shown

VARIABLE = "EAGLE_KIT_DISABLE"
"""Environment variable with the names of disabled parts, separated by commas."""
TRITON = "triton"
"""Name of all Triton kernels together."""
OPERATIONS = (
    "accept",
    "attention/mla",
    "attention/packed",
    "attention/prefill",
    "attention/ttt",
    "attention/window",
    "best_first",
    "commit",
    "draft_inputs",
    "draft_topk",
    "experts",
    "norm",
    "recurrence",
    "rope",
    "rows",
    "sampling",
    "small_linear",
    "soft_cross_entropy",
    "swiglu",
    "tree_build",
)
"""Operations with Triton kernels: folders of ``eagle_kit/ops`` that have a ``triton.py``."""
BORROWED = {"accept": "sampling", "attention/packed": "attention/ttt"}
"""Operations whose Triton kernels are, or contain, those of another one."""


def of_operation(operation: str) -> str:
    """Name of the switch of one of :data:`OPERATIONS`: ``"triton:norm"``."""
    return f"{TRITON}:{operation}"


PARTS = {
    "graphs": "No CUDA graphs: the operations of a step are launched one by one.",
    "prompt-graphs": "No CUDA graphs of prompts: their operations are launched one by one.",
    "lag": "The host waits for the results of a step before it launches the next one.",
    "programmatic-launch": "A kernel starts when the kernel before it has ended, not earlier.",
    "one-shot-all-reduce": "NCCL computes sums over GPUs of any size.",
    TRITON: "Every operation runs its reference in torch.",
    **{of_operation(name): f"{name} runs its reference in torch." for name in OPERATIONS},
}
"""Behaviour without a part, by its name."""


def is_disabled(part: str) -> bool:
    """Return whether the environment variable disables ``part``, a key of :data:`PARTS`.

    ``triton`` disables each ``triton:OPERATION``, and an operation those that have kernels of it
    (:data:`BORROWED`). ``graphs`` and ``triton:attention/prefill`` disable ``prompt-graphs``. The
    variable is read once per process.

    Raises:
        UserError: the variable has an unknown name.
    """
    return part in disabled_parts()


@cache
def disabled_parts() -> frozenset[str]:
    """Names of all disabled parts, those that others include too. Read once per process.

    Raises:
        UserError: the variable has an unknown name.
    """
    return parse(os.environ.get(VARIABLE, ""))


def parse(text: str) -> frozenset[str]:
    """Parse names separated by commas; see :func:`disabled_parts`."""
    names = {word.strip() for word in text.split(",")} - {""}
    unknown = sorted(names - PARTS.keys())
    if unknown:
        raise UserError(
            f"{VARIABLE} has unknown names: {', '.join(map(shown, unknown))}.",
            f"Use names of this list, separated by commas: {', '.join(PARTS)}.",
        )
    return frozenset(_with_included(names))


def _with_included(names: Iterable[str]) -> set[str]:
    """The names, and those of the parts that they include."""
    found = set(names)
    if TRITON in found:
        found.update(map(of_operation, OPERATIONS))
    for borrower, lender in BORROWED.items():
        if of_operation(lender) in found:
            found.add(of_operation(borrower))
    # Sizes of prompts are read on the host by the reference of their attention, which ends a capture.
    if found & {"graphs", of_operation("attention/prefill")}:
        found.add("prompt-graphs")
    return found
