"""An engine on fake tensors, whose host side is real: it schedules, fills slots and takes results in, which
are invented here, since nothing is computed."""

import random
from typing import Any

import numpy as np
import torch

from eagle_kit.engine.cycle import Emitted
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.graphs.cuda_graph import GraphCall, GraphRunner, map_tensors
from eagle_kit.engine.runner import Results


class AnyText:
    """A compiler of grammars that allow every text, and the match of each."""

    num_compiled = 1
    is_complete = is_stuck = False

    def start(self, grammar: Any, salt: str | None = None) -> "AnyText":
        return AnyText()

    def advance(self, tokens: list[int]) -> int:
        return len(tokens)


def any_bits(matches, tree, vocab_size) -> torch.Tensor:
    """Stand-in for :func:`~eagle_kit.engine.grammar.masks.allowed_bits`, which reads the tree on the host."""
    b, n = tree.tokens.shape
    return torch.full((b, n, 4 * -(-vocab_size // 32)), 255, dtype=torch.uint8)


class _Invented:
    """Copy of results that is complete: random tokens, from one to all of a cycle's."""

    def __init__(self, results: Results, rng: random.Random, vocab_size: int) -> None:
        shapes = results.copy.wait()
        rows, length = shapes.tokens.shape
        counts = [rng.randint(1, length) for _ in range(rows)]
        if results.is_prefill:
            ends = zip(results.requests, results.num_computed, strict=True)
            counts = [int(stop == each.num_to_compute and not each.token_ids) for each, stop in ends]
        tokens = np.array([[rng.randrange(vocab_size) for _ in range(length)] for _ in range(rows)])
        logprobs = shapes.logprobs
        if logprobs is not None:
            logprobs = type(logprobs)(
                chosen=np.zeros(logprobs.chosen.shape),
                ids=np.zeros(logprobs.ids.shape, dtype=np.int64),
                values=np.zeros(logprobs.values.shape),
            )
        self._emitted = Emitted(tokens, np.array(counts), logprobs, np.ones(rows, dtype=bool))

    def wait(self, ranks: object = None) -> Emitted:
        return self._emitted


class _TracedGraph:
    """Graph whose capture is a run over fake tensors. Its replay launches nothing from the host."""

    node_bytes = 0

    def __init__(self, body, example) -> None:
        self.inputs = map_tensors(torch.clone, example)
        self.last_inputs = None
        self.outputs = body(self.inputs)

    def replay(self) -> None:
        """Do what Triton sees of a replay."""


class _TracedGraphs(GraphRunner):
    def _capture(self, call: GraphCall) -> Any:
        return _TracedGraph(call.body, call.idle())


class TracedEngine(Engine):
    """An engine as on a GPU; everything of it runs in a mode of fake tensors, with ``use("triton")``."""

    def __init__(self, target, draft, config) -> None:
        for model in (target, getattr(draft, "head", None)):
            if model is not None:
                _make_fake(model)
        super().__init__(target, draft, config, AnyText)
        self.runner.graphs = _TracedGraphs("cycle")
        self._rng = random.Random(0)

    def _collect(self, results: Results) -> None:
        made = _Invented(results, self._rng, self.target.config.vocab_size)
        super()._collect(results._replace(copy=made))


def _make_fake(module: torch.nn.Module) -> None:
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    tensors[name] = torch.nn.Parameter(fake, False) if is_parameter else fake
