"""Engines under load, by their public interface: all requests decode, and a step is a cycle of all of them.

Legend: B requests, N window nodes.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.case import Form, Machine
from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.drafts.base.cycle_state import CycleState
from eagle_kit.drafts.base.draft_model import DraftModel
from eagle_kit.engine.cycle import CycleModels, CycleSettings, verify_and_commit
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.graphs.cuda_graph import CycleGraphs
from eagle_kit.engine.llm import LLM
from eagle_kit.models.targets.target import Target
from eagle_kit.ops.attention.window import ancestor_bits
from eagle_kit.ops.tree_build import Tree
from eagle_kit.verify.proposal import Deterministic, DraftOutput

ROOM = 768
"""Tokens behind a context: 96 cycles of the deepest shape."""
COLUMNS = 64


def loaded(target: Target, draft: DraftModel | None, batch: int, context: int, **options: Any) -> LLM:
    """An LLM with room for ``batch`` requests of ``context`` tokens, and for their cycles behind it."""
    longest = min(context + ROOM, target.config.max_position_embeddings)
    return LLM(
        target,
        draft=draft,
        max_batch_size=batch,
        max_context=longest,
        kv_tokens=batch * (longest + 160),
        batch_sizes=(batch,),
        **options,
    )


def random_prompts(llm: LLM, batch: int, context: int, seed: int = 0) -> list[list[int]]:
    """Token ids of ``batch`` different prompts of ``context`` tokens."""
    rng = random.Random(seed)
    return [rng.choices(range(5, llm.target.config.vocab_size), k=context) for _ in range(batch)]


@contextmanager
def decoding(llm: LLM, prompts: Sequence[list[int]], shape: SpecShape | None = None) -> Iterator[Engine]:
    """An engine whose requests, one for each prompt, have all begun their responses and do not end.

    Raises:
        RuntimeError: a response ended within, so that what was timed was a smaller batch.
    """
    engine = llm.engine(shape)
    params = SamplingParams(max_tokens=llm.max_context, ignore_eos=True)
    requests = [llm.make_request(prompt, params) for prompt in prompts]
    try:
        for request in requests:
            engine.add_request(request)
        while any(not request.token_ids for request in requests):
            engine.step()
        yield engine
        if any(request.finish_reason is not None for request in requests):
            raise RuntimeError("a response ended while cycles were timed")
    finally:
        for request in requests:
            engine.abort(request)
        engine.drain()


class _Clocked:
    """A graph runner whose runs are timed."""

    def __init__(self, graphs: CycleGraphs) -> None:
        self.graphs, self.seconds = graphs, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.graphs, name)

    def run(self, *args: Any) -> Any:
        """Run and time."""
        start = time.perf_counter()
        try:
            return self.graphs.run(*args)
        finally:
            self.seconds += time.perf_counter() - start


def host_work(engine: Engine, machine: Machine, steps: int = 20) -> dict[str, float]:
    """Milliseconds of a step, and of the host's own work in it: scheduling, page tables, batch tensors, stops
    and detokenising.

    On a GPU the own work is a step after the device has come to rest; on a CPU it is all but the cycle.

    Raises:
        UserError: cycles run in Python on this CPU, so that their part cannot be told.
    """
    graphs = engine.runner.graphs
    if graphs.mode == "off":
        raise UserError("Cycles are not recorded here, so the host's part cannot be told.", "Update torch.")
    clocked = _Clocked(graphs)
    whole, own = [], []
    engine.runner.graphs = clocked  # type: ignore[assignment]
    try:
        for _ in range(steps):
            if machine.on_gpu:
                torch.cuda.synchronize(machine.device)
            clocked.seconds, start = 0.0, time.perf_counter()
            engine.step()
            own.append(time.perf_counter() - start - (0.0 if machine.on_gpu else clocked.seconds))
            if machine.on_gpu:
                torch.cuda.synchronize(machine.device)
            whole.append(time.perf_counter() - start)
    finally:
        engine.runner.graphs = graphs
    step, host = (1e3 * statistics.median(seconds) for seconds in (whole, own))
    return {"step_ms": step, "host_ms": host, "host_share": host / step}


def window_forms(llm: LLM, sizes: Sequence[int], context: int) -> dict[str, Callable[[], Form]]:
    """The cycle's own verification of random trees of N nodes behind ``context`` tokens, at batch 1: target
    forward, acceptance and commit. Plain decoding is ``"1 node"``."""
    llm.generate(random_prompts(llm, 1, context), SamplingParams(max_tokens=1), shape=NO_SPECULATION)

    def form(nodes: int) -> Form:
        return Form(partial(_verify, llm, _random_tree(llm, nodes), context))

    return {f"{nodes} node{'s' * (nodes > 1)}": partial(form, nodes) for nodes in sizes}


def _random_tree(llm: LLM, nodes: int) -> Tree:
    device = llm.target.embed_tokens.weight.device
    limits = torch.arange(nodes, device=device).clamp(min=1)[None]
    parents = (torch.rand(1, nodes, device=device) * limits).long()
    depths = torch.zeros_like(parents)
    for j in range(1, nodes):
        depths[:, j] = depths.gather(1, parents[:, j : j + 1])[:, 0] + 1
    tokens = torch.randint(llm.target.config.vocab_size, (1, nodes), device=device)
    return Tree(tokens, parents, depths, ancestor_bits(parents, nodes))


@torch.inference_mode()
def _verify(llm: LLM, tree: Tree, context: int) -> torch.Tensor:
    """Verify one tree -> the tokens that a cycle would emit."""
    runner, nodes, device = llm.engine(NO_SPECULATION).runner, tree.tokens.shape[1], tree.tokens.device
    pages = torch.arange(runner.config.max_pages, device=device)[None]
    one = torch.ones(1, dtype=torch.int64, device=device)
    state = CycleState(pages, context * one, tree.tokens[:, 0], one.bool(), None, 0 * one)
    shape = NO_SPECULATION if nodes == 1 else SpecShape(nodes - 1, 1, nodes)
    settings = CycleSettings(shape, -(-(context + nodes) // COLUMNS) * COLUMNS)
    with runner.linear_backends.measuring():
        draft = DraftOutput(tree, Deterministic())
        models = CycleModels(llm.target, runner.kv, recurrent_states=runner.recurrent_states)
        return verify_and_commit(models, state, draft, settings).accepted.tokens
