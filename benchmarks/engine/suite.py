"""``python benchmarks engine``: whole cycles against this machine's ceilings, with random weights at the
shapes of known models.

With random weights nothing is accepted but by chance, so times are reported, their ratio to the floor, and
tokens/s at a stated accept length, never a speed-up that was measured.

Legend: B requests, N window nodes, S steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.case import Case, Form, Machine
from benchmarks.engine.floor import cycle_forwards
from benchmarks.engine.load import ROOM, decoding, host_work, loaded, random_prompts, window_forms
from benchmarks.models import check_room, make_models, preset_named
from benchmarks.options import Options
from benchmarks.plots import plot_cycles
from benchmarks.runner import Benchmark, conduct, say
from benchmarks.verdict import Rows, Verdict, at_most
from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.base.draft_model import HeadDraftModel
from eagle_kit.engine.graphs.cuda_graph import GraphMode
from eagle_kit.engine.llm import LLM
from eagle_kit.models.targets.target import Target

PLAIN = "none"
STATED = 3
"""Tokens that a cycle is said to emit where it drafts as many."""
K = 1024


@dataclass(frozen=True)
class Grid:
    """Measured cases: ``points`` of (batch, context) as graphs, ``eager_points`` without graphs,
    ``contexts`` and ``windows`` of verification at batch 1. ``shapes``: chains of 3, 5 and 7 steps, of which
    published figures are, and trees."""

    points: tuple[tuple[int, int], ...] = (
        *((1, K), (8, K), (1, 8 * K), (1, 32 * K), (8, 8 * K), (32, K), (64, K), (8, 32 * K)),
        *((32, 8 * K), (64, 8 * K)),
    )
    eager_points: tuple[tuple[int, int], ...] = ((1, K), (8, 8 * K))
    contexts: tuple[int, ...] = (K, 8 * K, 32 * K)
    windows: tuple[int, ...] = (1, 4, 8, 16, 32)
    shapes: tuple[str, ...] = (PLAIN, "3,1,4", "5,1,6", "7,1,8", "5,4,8", "5,4,16", "7,8,32")


TINY = Grid(points=((1, 64), (2, 128)), eager_points=((1, 64),), contexts=(64,), windows=(1, 8))


def main(model: str | None, options: Options, grid: Grid | None = None) -> int:
    """Measure the shapes of ``model`` -> exit code, 1 when a case failed.

    Raises:
        UserError: for wrong arguments, or a model that does not fit.
    """
    machine = Machine.here(options.seed, tiny=True)
    tiny = options.tiny or not machine.on_gpu
    if tiny and not options.tiny:
        say("There is no CUDA device: a tiny grid on the CPU, to try the benchmark only.")
    name = model or ("tiny" if tiny else "llama-3.1-8b")
    config, draft_vocab_size = preset_named(name)
    check_room(config, machine.device, machine.dtype)
    machine = Machine.here(options.seed, tiny=tiny, with_ceilings=True)
    models = make_models(config, draft_vocab_size, machine.device, machine.dtype, options.seed)
    grid = grid or (TINY if tiny else Grid())
    settings = {"model": f"{name} (random weights)", "sizes": "tiny" if tiny else "full"}
    cases = list(Suite(*models, grid).cases())
    benchmark = Benchmark(f"engine-{name}", cases, settings, engine_targets, plot_cycles)
    return conduct(benchmark, machine, options)


class Suite:
    """The cases of one target and draft; cases of the same load share its LLM, and so its prompts' keys."""

    def __init__(self, target: Target, draft: HeadDraftModel, grid: Grid) -> None:
        self.target, self.draft, self.grid = target, draft, grid
        self._llm: tuple[Any, LLM] | None = None

    def cases(self) -> Iterator[Case]:
        """All cases, the most telling first."""
        longest = self.target.config.max_position_embeddings - ROOM
        for context in self.grid.contexts:
            if context <= longest:
                yield Case(
                    "verify", f"context {context}", partial(self.verify, context), {"context": context}
                )
        loads: list[tuple[GraphMode, tuple[int, int]]] = [("cycle", point) for point in self.grid.points]
        loads += [("off", point) for point in self.grid.eager_points]
        for mode, (batch, context) in loads:
            for shape in self.grid.shapes if context <= longest else ():
                values = {"batch": batch, "context": context, "mode": mode, "shape": shape}
                case = f"{shape}, batch {batch}, context {context}"
                yield Case(mode, case, partial(self.cycle, batch, context, mode, shape), values)

    def llm(self, batch: int, context: int, mode: GraphMode) -> LLM:
        """The LLM of a load, made when the load before is done with."""
        key = batch, context, mode
        if self._llm is None or self._llm[0] != key:
            self._llm = None  # its pool is freed first
            self._llm = key, loaded(self.target, self.draft, batch, context, graph_mode=mode)
        return self._llm[1]

    def cycle(self, batch: int, context: int, mode: GraphMode, text: str, machine: Machine) -> dict[str, Any]:
        """One shape at one load: cycles in a row, as the engine runs them, against the cycle's floor."""
        llm, shape = self.llm(batch, context, mode), SpecShape.parse(text)
        forwards = cycle_forwards(self.target, self.draft, shape, batch, context)
        with decoding(llm, random_prompts(llm, batch, context, machine.seed), shape) as engine:
            row = machine.compare({"cycle": lambda: Form(engine.step, "in a row")}, *forwards)
            host = {} if mode == "off" else {"host_us": 1e3 * host_work(engine, machine)["host_ms"]}
        tokens = min(STATED, shape.steps + 1)
        rate = 1e6 * batch * tokens / row["times_us"]["cycle"]["median"]
        ratios = {"times the floor": 1 / row["share"]}
        if "sheet_share" in row:
            ratios["times the data sheet's floor"] = 1 / row["sheet_share"]
        figures = {**ratios, **host, "tokens a cycle": tokens, "tokens/s": rate}
        return {**row, "figures": figures, "linear_backends": engine.runner.linear_backends.report()}

    def verify(self, context: int, machine: Machine) -> dict[str, Any]:
        """Windows of several sizes at batch 1, against plain decoding."""
        return machine.compare(window_forms(self.llm(1, context, "off"), self.grid.windows, context))


def engine_targets(rows: Rows, counts: bool) -> list[Verdict]:
    """Targets of the engine; ``counts`` False, on a CPU or at tiny sizes, measures only."""
    cycles = [row for row in rows if row["group"] == "cycle" and row["status"] == "ok"]
    ratios = [(1 / row["share"], row["case"]) for row in cycles if row["shape"] != PLAIN]
    windows = [
        (times["8 nodes"]["median"] / times["1 node"]["median"], row["case"])
        for row in rows
        if row["group"] == "verify" and "median" in (times := row.get("times_us", {})).get("8 nodes", ())
    ]
    hosts = [(row["figures"]["host_us"], row["case"]) for row in cycles if "host_us" in row["figures"]]
    worst = partial(at_most, counts=counts)
    return [
        worst("full cycle: <= 1.40 x its floor, the worst of the grid", 1.40, ratios),
        worst("full cycle: <= 1.25 x its floor, the worst of the grid", 1.25, ratios),
        worst("verify of 8 nodes: <= 1.08 x plain decode, batch 1", 1.08, windows),
        worst("host: <= 150 us a cycle", 150.0, hosts),
    ]
