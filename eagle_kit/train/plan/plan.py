"""A run on GPUs that are not at hand: the layout on N GPUs that fits, and its speed.

Nothing is loaded and nothing is measured: sizes come from the modules on the meta device, rates from data
sheets.
"""

import math
from dataclasses import dataclass

from eagle_kit.core.gpus import RUNTIME_BYTES, Gpu
from eagle_kit.train.plan.costs import Costs, Layout, Rates, Workload, make_workload

UTILISATION = 0.4
"""Share of the data sheet's FLOP/s that matmuls of a step are assumed to reach."""
USABLE = 0.92
"""Share of a GPU's memory that may be planned for; the rest is lost to fragments."""
SUPERVISED_SHARE = 0.75
"""Share of the tokens that replies are assumed to make; memory is planned for all of them."""
UNKNOWN_TOKENS = 100e6
"""Tokens of the data where the config does not say how many are learned from."""
DAY = 86400

LAYOUTS = {
    "fits": ("whole", "none"),
    "head sharded": ("whole", "fsdp2"),
    "target sharded": ("sharded", "none"),
    "both sharded": ("sharded", "fsdp2"),
    "from a store": ("stored", "none"),
    "from a store, head sharded": ("stored", "fsdp2"),
}
"""By name, the target's place and the head's sharding, in the order in which they are tried."""


@dataclass(frozen=True)
class Placement:
    """A layout on N GPUs.

    Attributes:
        name: of :data:`LAYOUTS`.
        memory: bytes of each GPU by name, see :meth:`Costs.memory`.
        peak: bytes of each GPU at the worst moment.
        fits: ``peak`` is within the usable memory.
        seconds_per_step: expected.
        tokens_per_day: of all GPUs, prompts included, without judging.
    """

    name: str
    layout: Layout
    memory: dict[str, float]
    peak: float
    fits: bool
    seconds_per_step: float
    tokens_per_day: float


@dataclass(frozen=True)
class Planner:
    """Layouts and speeds for one config on one kind of GPU."""

    costs: Costs
    gpu: Gpu

    @property
    def step_tokens(self) -> int:
        """Tokens of an optimiser step, all rows full."""
        return self.costs.config.training.sequences_per_step * self.costs.config.data.max_length

    @property
    def schedule_tokens(self) -> float:
        """Tokens that the schedule visits, all rows full; :data:`UNKNOWN_TOKENS` when it does not say."""
        steps = self.costs.config.training.max_steps
        return float(steps * self.step_tokens) if steps else UNKNOWN_TOKENS

    def place(self, num_gpus: int) -> Placement | None:
        """The first layout that fits, else the last one tried; None when the rows cannot be shared out."""
        shares = self.costs.shares(num_gpus)
        if shares is None:
            return None
        placement = None
        for name, (target, sharding) in LAYOUTS.items():
            if num_gpus > 1 or (target != "sharded" and sharding == "none"):
                placement = self._placement(name, Layout(num_gpus, target, sharding), *shares)
                if placement.fits:
                    return placement
        return placement

    def gpus_to_capture(self) -> int | None:
        """The smallest power of two of GPUs, up to 64, over which the sharded target can run at all."""
        forward = self.costs.target_forward(self.costs.config.data.max_length)
        for num_gpus in (1, 2, 4, 8, 16, 32, 64):
            needed = self.costs.target_bytes(_capture_layout(num_gpus)) + forward + RUNTIME_BYTES
            if needed <= USABLE * self.gpu.memory:
                return num_gpus
        return None

    def capture_tokens_per_day(self, num_gpus: int) -> float:
        """Tokens a day that ``num_gpus`` capture, one packed row each at a time."""
        work = self._work(1, 1.0)
        seconds = self.costs.capture_seconds(work, _capture_layout(num_gpus), self._rates)
        return num_gpus * work.tokens / seconds * DAY

    @property
    def days(self) -> dict[int, float]:
        """Days that the schedule takes on one and on eight GPUs, where it can run."""
        found = {n: self.place(n) for n in (1, 8)}
        return {
            n: self.schedule_tokens / placement.tokens_per_day
            for n, placement in found.items()
            if placement is not None and placement.fits and math.isfinite(placement.tokens_per_day)
        }

    @property
    def _rates(self) -> Rates:
        flops = UTILISATION * self.gpu.flops(self.costs.config.training.precision)
        return Rates(flops, self.gpu.bandwidth, self.gpu.link)

    def _work(self, rows: int, supervised: float) -> Workload:
        """A forward of full rows, each a single document."""
        config = self.costs.config
        length = config.data.max_length
        return make_workload(config, rows * length, rows * length * supervised, rows, length / 2)

    def _placement(self, name: str, layout: Layout, forwards: int, rows: int) -> Placement:
        work = self._work(rows, SUPERVISED_SHARE)
        memory = self.costs.memory(layout, work.tokens, work.tokens)
        peak = self.costs.peak(memory)
        seconds = self.costs.step_seconds(work, forwards, layout, self._rates)
        fits = peak <= USABLE * self.gpu.memory
        return Placement(name, layout, memory, peak, fits, seconds, self.step_tokens / seconds * DAY)


def _capture_layout(num_gpus: int) -> Layout:
    return Layout(num_gpus, "whole" if num_gpus == 1 else "sharded")
