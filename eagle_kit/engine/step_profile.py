"""Profile of an engine's next steps: a trace of torch.profiler in Chrome's format, one file for each rank.

It is started, counted and stopped in the engine's thread. Another thread writes the file, since a trace of
a hundred steps takes seconds to write and responses do not wait for it.
"""

import gzip
import logging
import os
import shutil
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from eagle_kit.core.errors import UserError, first_line
from eagle_kit.core.files import give_usual_mode, replacing
from eagle_kit.ops.step_ranges import StepRanges

Activity = Literal["CPU", "GPU"]
SUFFIX = ".pt.trace.json.gz"
"""End of a trace's name, by which TensorBoard finds it; Perfetto reads it too."""


class ProfileSettings(NamedTuple):
    """Contents and place of a profile.

    Attributes:
        folder: folder of the traces; it is made if need be.
        name: beginning of the files' names.
        num_steps: steps of the engine, after which the profile ends by itself.
        activities: ``"CPU"`` are operations and ranges of the engine's thread, ``"GPU"`` kernels and copies.
        with_stack: record Python's stack of each operation.
        record_shapes: record the shapes of each operation's inputs.
    """

    folder: Path
    name: str
    num_steps: int
    activities: tuple[Activity, ...]
    with_stack: bool = False
    record_shapes: bool = False


class StepProfile:
    """Profile that runs from its creation until :meth:`stop`. The engine's thread makes all calls.

    Args:
        settings: what it records.
        rank: number of this process in tensor parallelism; 0 without.
        ranges: of the engine; they are marked while the profile runs.
        has_graphs: whether the engine replays CUDA graphs.

    Attributes:
        num_steps: steps that it has recorded.
        written: done when the file is there; holds its path, or the error of its writing.

    Raises:
        UserError: torch cannot start a profile here.
    """

    def __init__(self, settings: ProfileSettings, *, rank: int, ranges: StepRanges, has_graphs: bool) -> None:
        self.settings = settings
        self.num_steps = 0
        self.written: Future[Path] = Future()
        self._path = settings.folder / f"{settings.name}-rank{rank}{SUFFIX}"
        self._ranges = ranges

        # Graphs that were captured before do not survive that CUPTI is torn down after a first profile.
        if has_graphs and "GPU" in settings.activities:
            os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
            os.environ.setdefault("TEARDOWN_CUPTI", "0")

        kinds = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}
        self._profiler = profile(
            activities=[kinds[name] for name in settings.activities],
            with_stack=settings.with_stack,
            record_shapes=settings.record_shapes,
        )
        try:
            self._profiler.start()
        except RuntimeError as error:
            raise UserError(
                f"The profiler of torch cannot start: {first_line(error)}.",
                "End other profilers of this process, or ask for fewer activities.",
            ) from error
        ranges.is_profiled = True

    @property
    def is_complete(self) -> bool:
        """True if it has recorded all steps that were asked for."""
        return self.num_steps >= self.settings.num_steps

    def stop(self) -> None:
        """End the profile, and let another thread write its file."""
        self._ranges.is_profiled = False
        try:
            self._profiler.stop()
        except RuntimeError as error:
            self._fail(error)
            return
        # Not a daemon: a server that stops meanwhile finishes the file.
        threading.Thread(target=self._write, name="eagle-kit profile").start()

    def _write(self) -> None:
        """Write the trace: as text first, since torch writes only that, then compressed."""
        folder = self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(prefix=".profile-", suffix=".json", dir=folder) as text:
                self._profiler.export_chrome_trace(text.name)
                with replacing(self._path) as work:
                    with open(text.name, "rb") as trace, gzip.open(work, "wb", compresslevel=5) as packed:
                        shutil.copyfileobj(trace, packed)
                    give_usual_mode(work)
        except Exception as error:
            self._fail(error)
            return
        self.written.set_result(self._path)

    def _fail(self, error: Exception) -> None:
        """Report an error of torch or of the disk; the engine goes on."""
        logging.getLogger(__name__).error("The profile %s could not be written: %s", self._path, error)
        self.written.set_exception(error)


def prepare_profiles() -> None:
    """Make torch's profiler ready. Call it in the thread that has imported torch: in another one the profiler
    prints an error of its own at its first start."""
    with profile(activities=[ProfilerActivity.CPU]):
        pass


def available_activities(device: torch.device) -> tuple[Activity, ...]:
    """Return the activities that an engine on ``device`` has."""
    return ("CPU", "GPU") if device.type == "cuda" else ("CPU",)
