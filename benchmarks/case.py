"""Cases, the machine that they are measured on, and the figures of a row.

A row is one case in the record: ``group``, ``case``, what tells cases apart, ``status`` and ``seconds``, and
of these whatever applies: ``times_us`` by form, ours first; ``bytes``, ``flops``, ``floor_us``, ``bound`` and
``share`` (floor over time) of ours; ``sheet_floor_us`` and ``sheet_share``, the same with the bandwidth of
the data sheet where it is known; ``figures``, numbers by name.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from benchmarks.ceilings import Ceilings, measure_ceilings
from eagle_kit.ops.timing import Timer, Timing


class Cost(NamedTuple):
    """Bytes that must be moved to and from memory, and floating-point operations."""

    bytes: int
    flops: int = 0

    def seconds(self, ceilings: Ceilings) -> float:
        """The floor: the larger of what the bytes and what the arithmetic take at the ceilings."""
        return max(self.bytes / ceilings.copy_bytes_per_s, self.flops / ceilings.flops_per_s)


class Form(NamedTuple):
    """One way to do the work of a case.

    Attributes:
        run: does it once, the same every time.
        how: ``"graph"`` is captured where there is a GPU, ``"eager"`` is not, and ``"in a row"`` is timed
            from one run to the next, as an engine's steps follow one another.
    """

    run: Callable[[], Any]
    how: Literal["graph", "eager", "in a row"] = "graph"


class Machine(NamedTuple):
    """The device and its ceilings; ``seed`` is that of the inputs."""

    device: torch.device
    dtype: torch.dtype
    timer: Timer
    ceilings: Ceilings | None
    seed: int

    @property
    def name(self) -> str:
        """The GPU's name, or ``CPU``."""
        return torch.cuda.get_device_name(self.device) if self.on_gpu else "CPU"

    @property
    def on_gpu(self) -> bool:
        """True for a CUDA device."""
        return self.device.type == "cuda"

    @classmethod
    def here(cls, seed: int, *, tiny: bool = False, with_ceilings: bool = False) -> "Machine":
        """The machine at hand: bf16 on a GPU, fp32 on a CPU. ``tiny`` repeats little and measures small."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        timer = Timer(device, budget_s=0.005, least=3, most=10) if tiny else Timer(device)
        ceilings = measure_ceilings(timer, dtype, tiny=tiny) if with_ceilings else None
        return cls(device, dtype, timer, ceilings, seed)

    def time(self, form: Form) -> Timing:
        """Seconds of one run of a form."""
        if form.how == "in a row":
            return self.timer.time_in_a_row(form.run)
        return self.timer.time(form.run, as_graph=form.how == "graph")

    def compare(self, forms: Mapping[str, Callable[[], Form]], *costs: Cost) -> dict[str, Any]:
        """Time forms of the same work, ours first.

        Args:
            forms: what makes each form; one that raises is recorded with its error, unless it is ours.
            costs: of the parts of ours, one after another, for its floor.
        """
        name, *others = forms
        ours = self.time(forms[name]())
        times = {name: ours.in_us()}
        for other in others:
            try:
                times[other] = self.time(forms[other]()).in_us()
            except Exception as error:  # another library that cannot do it, or has no room
                times[other] = {"error": in_words(error)}
        return {"times_us": times, **(self._against_floor(costs, ours) if costs else {})}

    def _against_floor(self, costs: Sequence[Cost], ours: Timing) -> dict[str, Any]:
        assert self.ceilings is not None
        cost = Cost(sum(each.bytes for each in costs), sum(each.flops for each in costs))
        floor = sum(each.seconds(self.ceilings) for each in costs)
        by_bytes = cost.bytes / self.ceilings.copy_bytes_per_s
        sheet, stated = self.ceilings.by_data_sheet(), {}
        if sheet is not None:
            least = sum(each.seconds(sheet) for each in costs)
            stated = {"sheet_floor_us": round(1e6 * least, 4), "sheet_share": least / ours.median}
        return {
            "bytes": cost.bytes,
            "flops": cost.flops,
            **stated,
            "floor_us": round(1e6 * floor, 4),
            "byte_floor_us": round(1e6 * by_bytes, 4),
            "bound": "bytes" if by_bytes >= floor else "flops",
            "share": floor / ours.median,
            "gb_per_s": cost.bytes / ours.median / 1e9,
            "tflop_per_s": cost.flops / ours.median / 1e12,
        }


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        group: such as a kernel.
        name: such as ``"decode, batch 8, context 8192"``; unique in its group.
        measure: machine -> the rest of the row. Raises whatever it cannot do; a UserError leaves it out.
        values: what plots and targets tell cases apart by.
    """

    group: str
    name: str
    measure: Callable[[Machine], dict[str, Any]]
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Its name in the record."""
        return f"{self.group}: {self.name}"


def wall_seconds(run: Callable[[], Any], device: torch.device | None = None) -> float:
    """Seconds of one run by the clock; a GPU that is given is waited for."""
    on_gpu = device is not None and device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if on_gpu:
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def in_words(error: BaseException) -> str:
    """An error's kind and first line."""
    lines = str(error).strip().splitlines() or ["no reason given"]
    return f"{type(error).__name__}: {lines[0]}"
