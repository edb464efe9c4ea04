"""The engine's cycle against this machine's ceilings, with random weights at the shapes of known models.

With random weights nothing is accepted but by chance, so times are reported, their ratio to the floor, and
tokens/s at accept lengths that are stated, never a speed-up that was measured.

Legend: B requests, N window nodes, S steps.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from eagle_kit.bench.engine.floor import cycle_forwards, floor_of
from eagle_kit.bench.engine.load import Load, free_now, pool_bytes
from eagle_kit.bench.engine.models import check_room, make_models, preset_named
from eagle_kit.bench.kernels.command import default_path, device_name, dtype_of, make_timer, say
from eagle_kit.bench.kernels.options import check_arguments
from eagle_kit.bench.kernels.record import Record
from eagle_kit.bench.kernels.report import Verdict, judge
from eagle_kit.bench.kernels.run import in_words, is_lost
from eagle_kit.core.errors import UserError
from eagle_kit.core.request import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.kernels.ceilings import Ceilings, device_state, measure_ceilings
from eagle_kit.kernels.linear.choice import MACHINE
from eagle_kit.kernels.timing import Timer
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.serve.engine import Engine, EngineOptions
from eagle_kit.serve.graph import GraphMode
from eagle_kit.serve.memory import free_memory
from eagle_kit.serve.request import Request
from eagle_kit.speculation.propose.draft_model import HeadDraftModel

ACCEPT_LENGTHS = (2, 3, 4)
PLAIN = "none"
COMPILING_S = 90.0
"""About how long transformers' forward compiles."""


@dataclass(frozen=True)
class Grid:
    """What is measured: ``points`` of (batch, context) in mode cycle, ``other_points`` in the other modes,
    ``contexts`` and ``windows`` of verification at batch 1, ``batches`` of the host's time, ``rival`` (batch,
    context), and how often."""

    points: tuple[tuple[int, int], ...]
    other_points: tuple[tuple[int, int], ...]
    contexts: tuple[int, ...]
    windows: tuple[int, ...]
    batches: tuple[int, ...]
    rival: tuple[int, int]
    shapes: tuple[str, ...] = ("3,1,4", "5,4,8", "7,8,32")
    repeats: int = 30


K = 1024
FULL = Grid(
    points=(
        *((1, K), (8, K), (1, 8 * K), (1, 32 * K), (8, 8 * K), (32, K), (64, K), (8, 32 * K)),
        *((32, 8 * K), (64, 8 * K)),
    ),
    other_points=((1, K), (8, 8 * K)),
    contexts=(K, 8 * K, 32 * K),
    windows=(1, 4, 8, 16, 32),
    batches=(1, 8, 64),
    rival=(1, K),
)
TINY = Grid(
    points=((1, 64), (2, 128)),
    other_points=((1, 64),),
    contexts=(64,),
    windows=(1, 8),
    batches=(2,),
    rival=(1, 64),
    repeats=3,
)


class Bench:
    """The models, the ceilings and the grid of one run."""

    def __init__(
        self, target: LlamaModel, draft: HeadDraftModel, grid: Grid, timer: Timer, ceilings: Ceilings
    ) -> None:
        self.target, self.draft, self.grid, self.timer, self.ceilings = target, draft, grid, timer, ceilings
        self.device, self.config = timer.device, target.config

    def parts(self, *, compare: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """Name and work of every part, the most telling first."""
        grid = self.grid
        longest = self.config.max_position_embeddings
        for context in (c for c in grid.contexts if c <= longest):
            yield f"verify, context {context}", partial(self.verify, context)
        for batch, context in (point for point in grid.points if point[1] <= longest):
            yield f"cycle, batch {batch}, context {context}", partial(self.cycles, batch, context, "cycle")
        for batch in grid.batches:
            yield f"host, batch {batch}", partial(self.host, batch)
        for batch, context in (point for point in grid.other_points if point[1] <= longest):
            for mode in ("phases", "off"):
                yield f"{mode}, batch {batch}, context {context}", partial(self.cycles, batch, context, mode)
        if compare:
            for attention, nodes in (("sdpa", 1), ("sdpa", 8), ("flex_attention", 8)):
                yield (
                    f"transformers, {attention}, {nodes} nodes",
                    partial(self.transformers, attention, nodes),
                )

    def cycles(self, batch: int, context: int, mode: GraphMode) -> dict[str, Any]:
        """Every shape at one point."""
        if reason := self._no_room(batch, context):
            return {"left_out": reason}
        load = Load(self.target, self.draft, batch, context, mode)
        rows = []
        for text in (PLAIN, *self.grid.shapes):
            shape = SpecShape.parse(text)
            load.use_shape(shape)
            timing, host = load.time_cycles(self.grid.repeats)
            forwards = cycle_forwards(self.target, self.draft, shape, batch, context)
            floor = floor_of(forwards, self.ceilings.copy_bytes_per_s, self.ceilings.flops_per_s)
            rates = {a: batch * a / timing.median for a in ACCEPT_LENGTHS if a <= shape.steps + 1}
            rows.append(
                {
                    "shape": text,
                    "mode": mode,
                    "batch": batch,
                    "context": context,
                    "cycle_us": timing.in_us(),
                    "launch_us": 1e6 * host,
                    "bytes": floor.bytes,
                    "byte_floor_us": 1e6 * floor.byte_seconds,
                    "floor_us": 1e6 * floor.seconds,
                    "over_byte_floor": timing.median / floor.byte_seconds,
                    "over_floor": timing.median / floor.seconds,
                    "tokens_per_s": rates or {1: batch / timing.median},
                }
            )
        return {"cycles": rows}

    def verify(self, context: int) -> dict[str, Any]:
        """The target over windows of several sizes at batch 1, acceptance and commit included."""
        if reason := self._no_room(1, context):
            return {"left_out": reason}
        load = Load(self.target, None, 1, context)
        times = {}
        for nodes in self.grid.windows:
            run = load.verification(nodes)
            with torch.inference_mode():
                times[nodes] = self.timer.time(run, as_graph=False).in_us()
        plain = times[1]["median"]
        return {
            "context": context,
            "window_us": times,
            "times_plain": {nodes: t["median"] / plain for nodes, t in times.items()},
        }

    @torch.inference_mode()
    def host(self, batch: int, steps: int = 30) -> dict[str, Any]:
        """What the host does between two cycles of the whole engine, scheduler included: a step after the
        device has come to rest. On a CPU that is the cycle as well."""
        on_gpu = self.device.type == "cuda"
        shape = SpecShape.parse(self.grid.shapes[1])
        room = 2 * K if on_gpu else 512
        options = EngineOptions(
            max_running=batch,
            max_context=room,
            kv_tokens=batch * (room + 256),
            prefix_cache=False,
            prefill_tokens=8192,
            lag=1,
            batch_sizes=(batch,),
            graph_mode="cycle" if on_gpu else "off",
        )
        engine = Engine(self.target, self.draft, options)
        engine.use_shape(shape)
        engine.runner.warm_up()
        steps = steps if on_gpu else 3
        params = SamplingParams(max_tokens=room - 16, ignore_eos=True)
        for i in range(batch):
            engine.add_request(Request(i, [1 + (i + j) % 100 for j in range(16)], params))
        seconds = []
        for i in range(5 + steps):
            if on_gpu:
                torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            engine.step()
            if i >= 5:
                seconds.append(time.perf_counter() - start)
        for request in list(engine.scheduler.running):
            engine.abort(request)
        engine.drain()
        row = {"batch": batch, "shape": str(shape), "host_us": 1e6 * statistics.median(seconds)}
        return {"host": row, "includes_the_device": not on_gpu}

    def transformers(self, attention: str, nodes: int) -> dict[str, Any]:
        """The same forward by transformers, compiled on a GPU."""
        from eagle_kit.bench.engine.peer import Transformers

        batch, context = self.grid.rival
        dtype, compiled = self.target.embed_tokens.weight.dtype, self.device.type == "cuda"
        try:
            rival = Transformers(self.config, self.device, dtype, compiled=compiled)
            timing = rival.time(attention, batch, context, nodes, self.grid.repeats)
        except Exception as error:  # whatever it or its compiler raises: that is no failure of ours
            return {"left_out": f"transformers cannot do it here: {in_words(error)}"}
        row = {"attention": attention, "batch": batch, "context": context, "nodes": nodes}
        return {"transformers": {**row, "forward_us": timing.in_us()}}

    def _no_room(self, batch: int, context: int) -> str:
        """Why a point is left out; empty when it fits."""
        needed = pool_bytes(self.target, self.draft, batch, context)
        needed += 8 * batch * 32 * self.config.vocab_size  # logits of the widest window, twice in fp32
        free = free_memory(self.device)
        if needed < 0.9 * free:
            return ""
        return f"it takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"


def main(args: argparse.Namespace, describe: Callable[[str], dict[str, Any]]) -> int:
    """Measure and write what ``eagle-kit bench engine`` is told -> exit code, 1 when a part failed.

    Raises:
        UserError: for wrong arguments.
    """
    check_arguments(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu, dtype = device.type == "cuda", dtype_of(device)
    if not on_gpu and not args.tiny:
        say("There is no CUDA device: a tiny grid on the CPU, to try the benchmark only.")
    grid = FULL if on_gpu and not args.tiny else TINY
    size = "full" if grid is FULL else "tiny"
    model = args.model or ("llama-3.1-8b" if size == "full" else "tiny")
    config, draft_vocab_size = preset_named(model)
    check_room(config, device, dtype)
    path = args.output or default_path(f"engine-{model}", device, size)
    settings = {"model": model, "sizes": size, "device": device_name(device), "dtype": str(dtype)}
    record = Record(path, describe(str(device)), settings, resume=args.resume)
    say(f"device  {device_name(device)}, {dtype}; random weights of {model}, {size} grid; results in {path}")
    deadline = time.monotonic() + 60 * args.minutes - (20 if size == "full" else 0)
    timer = make_timer(device, tiny=size == "tiny")
    before = device_state(device)
    ceilings = measure_ceilings(timer, dtype, tiny=size == "tiny")
    seed = args.seed if args.seed is not None else time.time_ns() % (1 << 31)
    record.put(ceilings=ceilings.to_dict(), seed=seed, device_state={"before": before})
    say(f"ceilings  {ceilings}\n")
    bench = Bench(*make_models(config, draft_vocab_size, device, dtype, seed), grid, timer, ceilings)
    _run(bench, args, record, deadline, compare=on_gpu and not args.no_compare)
    if not on_gpu and not args.no_compare:
        say("transformers is compared on a GPU only.")
    return _finish(args, config, record, device, counts=on_gpu and size == "full")


def _run(bench: Bench, args: argparse.Namespace, record: Record, deadline: float, *, compare: bool) -> None:
    parts = list(bench.parts(compare=compare))
    with tqdm(
        total=sum(name not in record.parts for name, _ in parts),
        unit="part",
        disable=args.no_progress,
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr.isatty() else 30.0,
    ) as bar:
        for name, work in parts:
            if not record.begin(name):
                continue
            bar.set_postfix_str(name)
            start = time.monotonic()
            if start > deadline - (COMPILING_S if name.startswith("transformers") else 0):
                record.finish(name, {"status": "left out", "reason": "no time was left"})
            else:
                record.finish(name, {**_done(name, work), "seconds": time.monotonic() - start})
            free_now(bench.device)
            part = record.parts[name]
            bar.update()
            bar.write(format_part(name, part), file=sys.stdout)
            if part["status"] == "failed" and is_lost(bench.device):
                raise UserError(
                    f"The device was lost in {name!r}.", f"Go on with --resume --output {record.path}."
                )


def _done(name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a part came to; a failure is recorded and stops nothing."""
    try:
        return {"status": "ok", **work()}
    except torch.OutOfMemoryError:
        return {"status": "ok", "left_out": "it does not fit into the memory"}
    except Exception as error:  # whatever a kernel, a compiler, the driver or transformers raises
        return {"status": "failed", "error": in_words(error)}


def _finish(
    args: argparse.Namespace, config: TargetConfig, record: Record, device: torch.device, *, counts: bool
) -> int:
    verdicts = engine_targets(record.parts, counts=counts)
    state = {**record.data.get("device_state", {}), "after": device_state(device)}
    record.put(
        targets=[verdict._asdict() for verdict in verdicts],
        device_state=state,
        linear_forms=MACHINE.report(),
    )
    say("\ntargets" + ("" if counts else " (judged on a GPU and at full sizes only)"))
    for verdict in verdicts:
        say(f"  {verdict}")
    for line in comparison(record.parts):
        say(f"  {line}")
    say(f"\nresults in {record.path}")
    if not args.no_plot:
        from eagle_kit.bench.engine.plot import plot_cycles

        settings = record.data["settings"]
        title = f"{settings['model']} (random weights), {settings['device']}, {record.data.get('date', '')}"
        picture = record.path.with_suffix(".png")
        plot_cycles(cycle_rows(record.parts), title, picture)
        say(f"picture in {picture}")
    if failed := record.failed:
        say(f"failed: {'; '.join(failed)}")
    return 1 if record.failed else 0


def cycle_rows(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """All cycles of a record."""
    return [row for part in parts.values() for row in part.get("cycles", ())]


def engine_targets(parts: dict[str, Any], *, counts: bool) -> list[Verdict]:
    """The targets of the engine; ``counts`` False measures only."""
    drafted = [row for row in cycle_rows(parts) if row["mode"] == "cycle" and row["shape"] != PLAIN]
    ratios = [
        (row["over_floor"], f"{row['shape']}, batch {row['batch']}, context {row['context']}")
        for row in drafted
    ]
    windows = [
        (part["times_plain"][nodes], f"context {part['context']}")
        for part in parts.values()
        for nodes in part.get("times_plain", ())
        if int(nodes) == 8
    ]
    hosts = [
        (part["host"]["host_us"], f"batch {part['host']['batch']}")
        for part in parts.values()
        if "host" in part
    ]
    worst = partial(judge, at_least=False, counts=counts)
    return [
        worst("full cycle: <= 1.40 x its floor, the worst of the grid", 1.40, ratios),
        worst("full cycle: <= 1.25 x its floor, the worst of the grid", 1.25, ratios),
        worst("verify of 8 nodes: <= 1.08 x plain decode, batch 1", 1.08, windows),
        worst("host: <= 150 us a cycle", 150.0, hosts),
    ]


def comparison(parts: dict[str, Any]) -> list[str]:
    """transformers beside the engine, where both were measured."""
    ours = {
        (part["context"], int(nodes)): time["median"]
        for part in parts.values()
        for nodes, time in part.get("window_us", {}).items()
    }
    lines = []
    for part in parts.values():
        if row := part.get("transformers"):
            theirs, mine = row["forward_us"]["median"], ours.get((row["context"], row["nodes"]))
            factor = f" = {theirs / mine:.2f} x ours ({mine / 1e3:.3f} ms)" if mine else ""
            lines.append(
                f"transformers, static cache, {row['forward_us']['how']}, {row['attention']}, {row['nodes']} "
                f"nodes, context {row['context']}: {theirs / 1e3:.3f} ms{factor}"
            )
    return lines


def format_part(name: str, part: dict[str, Any]) -> str:
    """One part as text."""
    if part["status"] != "ok" or "left_out" in part:
        reason = part.get("error") or part.get("reason") or part.get("left_out")
        return f"{name}: {'FAILED' if part['status'] == 'failed' else 'left out'}: {reason}"
    lines = [name]
    for row in part.get("cycles", ()):
        time, rates = row["cycle_us"], row["tokens_per_s"]
        spread = f"{time['low'] / 1e3:.3f}..{time['high'] / 1e3:.3f}"
        told = ", ".join(f"{rate:,.0f} at {length}" for length, rate in rates.items())
        lines.append(
            f"  {row['shape']:7} {time['median'] / 1e3:9.3f} ms ({spread})"
            f"  {row['over_floor']:.2f} x floor {row['floor_us'] / 1e3:.3f}"
            f"  {row['over_byte_floor']:.2f} x bytes {row['byte_floor_us'] / 1e3:.3f}"
            f"  launch {row['launch_us']:.0f} us  tokens/s {told}"
        )
    for nodes, time in part.get("window_us", {}).items():
        factor = part["times_plain"][nodes]
        lines.append(f"  {nodes:>3} nodes {time['median'] / 1e3:9.3f} ms = {factor:.3f} x plain decode")
    if host := part.get("host"):
        with_device = ", the cycle included" if part["includes_the_device"] else ""
        lines.append(f"  {host['host_us']:.0f} us a step{with_device}")
    if row := part.get("transformers"):
        lines.append(f"  {row['forward_us']['median'] / 1e3:.3f} ms")
    return "\n".join(lines)
