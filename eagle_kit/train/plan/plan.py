"""A run on GPUs that are not at hand: the layout on N GPUs that fits, and its speed.

Nothing is loaded and nothing is measured: sizes come from the modules on the meta device, rates from data
sheets.
"""

import math
from dataclasses import dataclass

from eagle_kit.core.gpus import RUNTIME_BYTES, Gpu
from eagle_kit.train.plan.costs import ProcessLayout, Rates, RunCosts, Workload, make_workload

UTILISATION = 0.4
"""Share of the data sheet's FLOP/s that matmuls of a step are assumed to reach."""
USABLE = 0.92
"""Share of a GPU's memory that a plan may use; the rest is lost to fragmentation."""
SUPERVISED_SHARE = 0.75
"""Assumed share of supervised tokens in the speed of a step; memory is planned for a share of 1."""
UNKNOWN_TOKENS = 100e6
"""Tokens of the data if the config does not say how many are trained on."""
GPU_COUNTS = (1, 8)
"""Numbers of GPUs that a plan is made for."""
CAPTURE_COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of GPUs that a capture of hidden states is tried on."""
DAY = 86400
"""Seconds of a day."""

LAYOUTS = {
    "fits": ("whole", "none"),
    "head sharded": ("whole", "fsdp2"),
    "target sharded": ("sharded", "none"),
    "both sharded": ("sharded", "fsdp2"),
    "from a store": ("stored", "none"),
    "from a store, head sharded": ("stored", "fsdp2"),
}
"""Name -> ``target`` and ``sharding`` of a :class:`ProcessLayout`, in the order in which they are tried."""


@dataclass(frozen=True)
class Placement:
    """A layout on N GPUs, with its expected memory and speed.

    Attributes:
        name: key of :data:`LAYOUTS`.
        layout: the layout.
        memory: bytes of each GPU by name, see :meth:`RunCosts.memory`.
        peak: bytes of each GPU at the worst moment.
        fits: True if ``peak`` is within the usable memory.
        seconds_per_step: seconds of an optimiser step.
        tokens_per_day: tokens of all GPUs in a day, prompts included, without validation.
    """

    name: str
    layout: ProcessLayout
    memory: dict[str, float]
    peak: float
    fits: bool
    seconds_per_step: float
    tokens_per_day: float


@dataclass(frozen=True)
class GpuPlanner:
    """Plans one config on one kind of GPU."""

    costs: RunCosts
    gpu: Gpu

    @property
    def step_tokens(self) -> int:
        """Tokens of an optimiser step, all rows full."""
        return self.costs.config.training.sequences_per_step * self.costs.config.data.max_length

    @property
    def schedule_tokens(self) -> float:
        """Tokens that the schedule visits, all rows full; :data:`UNKNOWN_TOKENS` without ``max_steps``."""
        steps = self.costs.config.training.max_steps
        return float(steps * self.step_tokens) if steps else UNKNOWN_TOKENS

    def place(self, num_gpus: int) -> Placement | None:
        """Choose a layout.

        Returns:
            The first layout that fits, else the last that was tried; None if the packed sequences of a step
            cannot be divided over the GPUs.
        """
        shares = self.costs.shares(num_gpus)
        if shares is None:
            return None
        forwards, rows_per_forward = shares
        placement = None
        for name, (target, sharding) in LAYOUTS.items():
            # One GPU shards nothing.
            if num_gpus == 1 and (target == "sharded" or sharding != "none"):
                continue
            layout = ProcessLayout(num_gpus, target, sharding)
            placement = self._placement(name, layout, forwards, rows_per_forward)
            if placement.fits:
                return placement
        return placement

    def gpus_to_capture(self) -> int | None:
        """The smallest number of :data:`CAPTURE_COUNTS` over which the sharded target fits, or None."""
        forward = self.costs.target_forward(self.costs.config.data.max_length)
        for num_gpus in CAPTURE_COUNTS:
            needed = self.costs.target_bytes(_capture_layout(num_gpus)) + forward + RUNTIME_BYTES
            if needed <= USABLE * self.gpu.memory:
                return num_gpus
        return None

    def capture_tokens_per_day(self, num_gpus: int) -> float:
        """Tokens that ``num_gpus`` capture in a day, with one packed sequence on each GPU at a time."""
        work = self._work(1, 1.0)
        seconds = self.costs.capture_seconds(work, _capture_layout(num_gpus), self._rates)
        return num_gpus * work.tokens / seconds * DAY

    @property
    def days(self) -> dict[int, float]:
        """Days of the schedule by number of GPUs, for the :data:`GPU_COUNTS` on which it fits."""
        days = {}
        for num_gpus in GPU_COUNTS:
            placement = self.place(num_gpus)
            if placement is None or not placement.fits:
                continue
            if math.isfinite(placement.tokens_per_day):
                days[num_gpus] = self.schedule_tokens / placement.tokens_per_day
        return days

    @property
    def _rates(self) -> Rates:
        """Rates of the GPU that a step is assumed to reach."""
        flops = UTILISATION * self.gpu.flops(self.costs.config.training.precision)
        return Rates(flops, self.gpu.bandwidth, self.gpu.link)

    def _work(self, rows: int, supervised_share: float) -> Workload:
        """Workload of a forward over full packed sequences, each of them one document."""
        config = self.costs.config
        length = config.data.max_length
        tokens = rows * length
        return make_workload(config, tokens, tokens * supervised_share, rows, length / 2)

    def _placement(self, name: str, layout: ProcessLayout, forwards: int, rows: int) -> Placement:
        """Memory and speed of a layout, with ``forwards`` of ``rows`` packed sequences in each process."""
        work = self._work(rows, SUPERVISED_SHARE)
        memory = self.costs.memory(layout, work.tokens, work.tokens)
        peak = self.costs.peak(memory)
        seconds = self.costs.step_seconds(work, forwards, layout, self._rates)
        return Placement(
            name=name,
            layout=layout,
            memory=memory,
            peak=peak,
            fits=peak <= USABLE * self.gpu.memory,
            seconds_per_step=seconds,
            tokens_per_day=self.step_tokens / seconds * DAY,
        )


def _capture_layout(num_gpus: int) -> ProcessLayout:
    """Layout of a capture on ``num_gpus``."""
    return ProcessLayout(num_gpus, "whole" if num_gpus == 1 else "sharded")
