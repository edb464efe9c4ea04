"""A runner under load without having read a prompt: requests whose contexts are random keys in the pool."""

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from eagle_kit.config.engine import EngineConfig, GraphMode
from eagle_kit.core.request import SamplingParams
from eagle_kit.core.shape import MAX_WINDOW, NO_SPECULATION, ShapeTable, SpecShape
from eagle_kit.kernels.linear.choice import MACHINE
from eagle_kit.kernels.timing import Timing
from eagle_kit.kernels.tree_build import Tree
from eagle_kit.kernels.window_attention import ancestor_bits
from eagle_kit.kv.page_pool import PageAllocation
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.serve.cycle import CycleModels, CycleSettings, verify
from eagle_kit.serve.graph import EagerGraph, Graph, GraphCall, GraphRunner
from eagle_kit.serve.request import Request
from eagle_kit.serve.runner import Runner
from eagle_kit.speculation.propose.draft_model import DraftModel
from eagle_kit.speculation.propose.drafter import DraftState
from eagle_kit.speculation.verify.proposal import Deterministic, DraftOutput

PAGE_SIZE = 16
ROOM = 2 * MAX_WINDOW + 2
"""Tokens behind the context: the engine leaves as many for the deepest shape with a lag of one."""


class Load:
    """``batch`` requests of ``context`` tokens in the engine's own runner.

    Args:
        mode: of the graphs; on a CPU graphs are played eagerly.
    """

    def __init__(
        self,
        target: LlamaModel,
        draft: DraftModel | None,
        batch: int,
        context: int,
        mode: GraphMode = "cycle",
    ) -> None:
        device = target.embed_tokens.weight.device
        self.batch, self.context, self.device = batch, context, device
        pages = pages_of(context)
        config = EngineConfig(
            max_batch_size=batch,
            max_context=context,
            page_size=PAGE_SIZE,
            kv_tokens=batch * pages * PAGE_SIZE,
            batch_sizes=(batch,),
            lag=1,
        ).resolve(on_gpu=device.type == "cuda", max_positions=max(context, 2))
        graphs = GraphRunner(mode, Graph if device.type == "cuda" else EagerGraph)
        self.runner = Runner(target, draft, config, graphs)
        tables = torch.randperm(batch * pages).view(batch, pages).tolist()
        params = SamplingParams(ignore_eos=True)
        self.requests = [
            Request(i, [0], params, slot=i, allocation=PageAllocation(pages=table))
            for i, table in enumerate(tables)
        ]
        self._fill(self.runner.kv)
        if draft is not None:
            self.use_shape(SpecShape(1, 1, 2))
            assert self.runner.drafter is not None
            self._fill(self.runner.drafter.kv)

    @staticmethod
    def _fill(kv: Any) -> None:
        for store in (kv.k, kv.v):
            store.normal_()

    @torch.inference_mode()
    def use_shape(self, shape: SpecShape) -> None:
        """Start over with ``shape``: the same contexts, random roots and random first candidates."""
        runner = self.runner
        runner.use_shape(ShapeTable.parse(shape))
        for request in self.requests:
            runner.set_pages(request)
        slots = torch.arange(self.batch, device=self.device)
        draft = None
        if runner.drafter is not None and shape.steps:
            tokens, scores, features = runner.drafter.empty_state(self.batch, shape.topk)
            draft = DraftState(
                tokens + torch.arange(shape.topk, device=self.device),
                scores - torch.arange(1, shape.topk + 1, device=self.device),
                torch.randn_like(features),
            )
        roots = torch.randint(runner.target.config.vocab_size, (self.batch,), device=self.device)
        runner.slots.join(slots, torch.full_like(slots, self.context), roots, draft)

    @torch.inference_mode()
    def time_cycles(self, repeats: int, warmup: int = 3) -> tuple[Timing, float]:
        """Cycles one behind another with a lag of one, as the engine runs them -> seconds of one, and the
        host's seconds of launching it. Lengths are set back before each, so that all are alike."""
        runner, marks, host = self.runner, [], []
        with MACHINE.measuring():  # captures, and chooses forms of linear layers, as an engine's start does
            waiting = runner.decode(self.requests, self.context)
        for _ in range(warmup + repeats + 1):
            runner.slots.seq_lens[: self.batch] = self.context
            marks.append(mark(self.device))
            start = time.perf_counter()
            results = runner.decode(self.requests, self.context)
            host.append(time.perf_counter() - start)
            waiting.copy.wait()
            waiting = results
        waiting.copy.wait()
        seconds = seconds_between(marks, self.device)[warmup:]
        how = "clock" if self.device.type != "cuda" else "events"
        return Timing.of(seconds, how), statistics.median(host[warmup:])

    @torch.inference_mode()
    def verification(self, nodes: int) -> Callable[[], Any]:
        """The cycle's own verification over a random tree of ``nodes``, as a graph that is
        captured now; plain decoding is 1."""
        runner, b = self.runner, self.batch
        limits = torch.arange(nodes, device=self.device).clamp(min=1).expand(b, nodes)
        parents = (torch.rand(b, nodes, device=self.device) * limits).long()
        depths = torch.zeros_like(parents)
        for j in range(1, nodes):
            depths[:, j] = depths.gather(1, parents[:, j : j + 1])[:, 0] + 1
        tokens = torch.randint(runner.target.config.vocab_size, (b, nodes), device=self.device)
        tree = Tree(tokens, parents, depths, ancestor_bits(parents, nodes))
        shape = NO_SPECULATION if nodes == 1 else SpecShape(nodes - 1, 1, nodes)
        settings = CycleSettings(shape, runner.config.max_pages * PAGE_SIZE)
        models = CycleModels(runner.target, runner.kv)

        def body(inputs: tuple[torch.Tensor, Tree]) -> torch.Tensor:
            rows, tree = inputs
            state, window = runner.slots.gather(rows), DraftOutput(tree, Deterministic())
            return verify(models, state, window, settings).accepted.tokens

        rows = torch.arange(b, device=self.device)
        idle = torch.full_like(rows, runner.slots.dummy), tree
        call = GraphCall("verification", nodes, body, (rows, tree), lambda: idle)
        run = partial(runner.graphs.run, call)
        with MACHINE.measuring():
            run()
        return run


def pages_of(context: int) -> int:
    """Pages of a request."""
    return -(-(context + ROOM) // PAGE_SIZE)


def pool_bytes(target: LlamaModel, draft: DraftModel | None, batch: int, context: int) -> int:
    """Bytes of keys and values that a load takes, scratch included."""
    values = target.config.cache.values_per_token
    if draft is not None:
        values += draft.cache.values_per_token
    size = target.embed_tokens.weight.element_size()
    return size * values * batch * (pages_of(context) * PAGE_SIZE + MAX_WINDOW)


def mark(device: torch.device) -> Any:
    """A point in the device's time."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(marks: list[Any], device: torch.device) -> list[float]:
    """Seconds from each mark to the next."""
    pairs = list(pairwise(marks))
    if device.type != "cuda":
        return [after - before for before, after in pairs]
    torch.cuda.synchronize(device)
    return [1e-3 * before.elapsed_time(after) for before, after in pairs]


def free_now(device: torch.device) -> None:
    """Give memory back that nothing refers to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
