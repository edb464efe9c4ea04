"""Measures kernels, one after another, into a record."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from eagle_kit.bench.kernels.attention import mla_cases, prefill_cases, window_cases
from eagle_kit.bench.kernels.case import Case, RandomInputs, Sizes
from eagle_kit.bench.kernels.decoding import (
    accept_cases,
    commit_cases,
    draft_head_cases,
    linear_cases,
    norm_cases,
    rope_cases,
    sampling_cases,
    swiglu_cases,
    tree_cases,
)
from eagle_kit.bench.kernels.record import Record
from eagle_kit.bench.kernels.training import loss_cases, packed_cases, ttt_cases
from eagle_kit.kernels.backend import Backend, triton_available
from eagle_kit.kernels.ceilings import Ceilings
from eagle_kit.kernels.timing import Timer

KERNELS: dict[str, Callable[[Sizes], list[Case]]] = {
    "window_attention": window_cases,
    "prefill_attention": prefill_cases,
    "mla_attention": mla_cases,
    "small_linear": linear_cases,
    "draft_head": draft_head_cases,
    "rope": rope_cases,
    "norm": norm_cases,
    "swiglu": swiglu_cases,
    "tree_build": tree_cases,
    "accept": accept_cases,
    "commit": commit_cases,
    "sampling": sampling_cases,
    "ttt_attention": ttt_cases,
    "packed_attention": packed_cases,
    "soft_cross_entropy": loss_cases,
}
"""Cases of every kernel with a Triton form."""
MAX_DEVIATION = 0.05
"""Of a result from the torch form's, relative, in half types: beyond it a time is of no interest."""


class DeviceLost(RuntimeError):
    """The device answers no more; only a new process can go on."""


def run_kernels(
    names: Sequence[str],
    sizes: Sizes,
    rng: RandomInputs,
    timer: Timer,
    ceilings: Ceilings,
    record: Record,
    *,
    deadline: float,
    progress: Callable[[str, int], None],
    say: Callable[[str], None],
) -> None:
    """Measure ``names`` into ``record``. What fails is recorded, said, and does not stop the others.

    Args:
        deadline: of ``time.monotonic()``, after which cases are left out.
        progress: called with what is measured next, and how many cases were done.

    Raises:
        DeviceLost: after a failure that the device did not survive; it is recorded.
    """
    for name in names:
        if not record.begin(name):
            continue
        rows: list[dict[str, Any]] = []
        start, lost = time.monotonic(), False
        for case in _cases_of(name, sizes, rows):
            progress(f"{name}: {case.name}", 0)
            if time.monotonic() > deadline:
                rows.append({"case": case.name, "left_out": "no time was left"})
            else:
                rows.append(_measured(case, rng, timer, ceilings))
            if error := rows[-1].get("error"):
                say(f"{name}: {case.name} failed: {error}")
                lost = is_lost(timer.device)
            progress(f"{name}: {case.name}", 1)
            if lost:
                break
        record.finish(name, {"status": _status(rows), "seconds": time.monotonic() - start, "cases": rows})
        if lost:
            raise DeviceLost(f"The device was lost in {name}.")


def count_cases(name: str, sizes: Sizes) -> int:
    """How many cases a kernel has; 0 when they cannot be made."""
    return len(_cases_of(name, sizes, []))


def _cases_of(name: str, sizes: Sizes, rows: list[dict[str, Any]]) -> list[Case]:
    try:
        return KERNELS[name](sizes)
    except Exception as error:  # a kernel that cannot even be described is a failure like another
        rows.append({"case": "its cases", "error": in_words(error)})
        return []


def _status(rows: list[dict[str, Any]]) -> str:
    if any("error" in row for row in rows):
        return "failed"
    return "left out" if any(row.get("left_out") == "no time was left" for row in rows) else "ok"


def _measured(case: Case, rng: RandomInputs, timer: Timer, ceilings: Ceilings) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case.name, **case.values}
    try:
        return {**row, **measure(case, rng, timer, ceilings)}
    except torch.OutOfMemoryError:
        return {**row, "left_out": "it does not fit into the memory"}
    except Exception as error:  # whatever a kernel, its compiler or the driver raises
        return {**row, "error": in_words(error)}
    finally:
        if timer.device.type == "cuda":
            with suppress(RuntimeError):  # the device may be lost, which the caller finds out
                torch.cuda.empty_cache()


def measure(case: Case, rng: RandomInputs, timer: Timer, ceilings: Ceilings) -> dict[str, Any]:
    """One case -> its cost, its floor, and the times of all forms, ours first."""
    on_gpu = timer.device.type == "cuda"
    ours: Backend = "triton" if on_gpu and triton_available() else "reference"
    cost = case.cost(rng.dtype.itemsize)
    with torch.enable_grad() if case.trains else torch.inference_mode():
        work = case.make(rng)
        deviation = None
        if ours == "triton":
            deviation = _deviation(work.op("triton"), work.op("reference"))
            if deviation is not None and not deviation <= MAX_DEVIATION:
                raise AssertionError(f"its result is {deviation:.1e} from that of the torch form")
        first = timer.time(partial(work.op, ours), as_graph=ours not in work.eager)
        times = {"triton" if ours == "triton" else "torch": first.in_us()}
        others: dict[str, Callable[[], Callable[[], Any]]] = {}
        if ours == "triton":
            others["torch"] = lambda: partial(work.op, "reference")
        if on_gpu:
            others |= work.rivals
        for name, make in others.items():
            try:
                as_graph = name != "torch" or "reference" not in work.eager
                times[name] = timer.time(make(), as_graph=as_graph).in_us()
            except Exception as error:  # a rival that cannot do it, or has no room
                times[name] = {"error": in_words(error)}
    floor = cost.seconds(ceilings.copy_bytes_per_s, ceilings.flops_per_s)
    by_bytes = cost.bytes / ceilings.copy_bytes_per_s
    return {
        "bytes": cost.bytes,
        "flops": cost.flops,
        "floor_us": round(1e6 * floor, 4),
        "bound": "bytes" if by_bytes >= floor else "flops",
        "share": floor / first.median,
        "share_of_copy": by_bytes / first.median,
        "gb_per_s": cost.bytes / first.median / 1e9,
        "tflop_per_s": cost.flops / first.median / 1e12,
        "deviation": deviation,
        "times_us": times,
    }


def is_lost(device: torch.device) -> bool:
    """Whether a device is of no more use to this process."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
        return bool(torch.ones(8, device=device).sum().item() != 8)
    except RuntimeError:
        return True


def _deviation(one: Any, other: Any) -> float | None:
    """The largest relative distance between results of floats; None when there are none to compare."""
    pairs = zip(_tensors(one), _tensors(other), strict=False)
    found = [
        float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))
        for a, b in ((mine.detach(), theirs.detach()) for mine, theirs in pairs)
        if a.is_floating_point() and a.shape == b.shape and a.dtype == b.dtype and a.numel()
    ]
    return max(found) if found else None


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, tuple) else []


def in_words(error: BaseException) -> str:
    """An error's kind and first line."""
    lines = str(error).strip().splitlines() or ["no reason given"]
    return f"{type(error).__name__}: {lines[0]}"
