"""Named ranges around the parts of a step, in the traces of Nsight Systems and of torch.profiler.

An engine has one :class:`StepRanges`, which is off until somebody looks: ``--nvtx``, or a profile that runs.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch.profiler import record_function

from eagle_kit.core.errors import UserError

PREFIX = "eagle_kit."
"""Beginning of the names of all ranges."""
NOTHING: AbstractContextManager[None] = nullcontext()
"""Context manager of every range that is off."""


class StepRanges:
    """Make the ranges of an engine's steps. Any thread may open one; it must close the range itself.

    Ranges lie around launches, never in the body of a graph or of a recording.

    Args:
        has_nvtx: mark ranges for Nsight Systems (NVTX), until the engine is dropped.

    Attributes:
        is_profiled: mark ranges for ``torch.profiler``, while a profile runs.

    Raises:
        UserError: NVTX was asked for, and this build of torch has none.
    """

    def __init__(self, *, has_nvtx: bool = False) -> None:
        if has_nvtx:
            check_nvtx()
        self.has_nvtx = has_nvtx
        self.is_profiled = False

    def __call__(self, name: str, *details: object) -> AbstractContextManager[None]:
        """Return the context manager of a range.

        Args:
            name: name of the part of the step, after ``PREFIX``.
            details: shown after the name, with blanks between them. They become text only if the range is on.
        """
        if not (self.has_nvtx or self.is_profiled):
            return NOTHING
        text = " ".join((PREFIX + name, *map(str, details)))
        return _marked(text, has_nvtx=self.has_nvtx, is_profiled=self.is_profiled)


@contextmanager
def _marked(text: str, *, has_nvtx: bool, is_profiled: bool) -> Iterator[None]:
    """Context manager of a range that is on."""
    with ExitStack() as marks:
        if has_nvtx:
            torch.cuda.nvtx.range_push(text)
            marks.callback(torch.cuda.nvtx.range_pop)
        if is_profiled:
            marks.enter_context(record_function(text))
        yield


def check_nvtx() -> None:
    """Raise UserError if this build of torch has no NVTX."""
    try:
        torch.cuda.nvtx.range_push(f"{PREFIX}check")
        torch.cuda.nvtx.range_pop()
    except RuntimeError:
        raise UserError(
            "Ranges for Nsight Systems were asked for, and this torch has no NVTX.",
            "Leave --nvtx (nvtx=True) out, or install torch with CUDA.",
        ) from None
