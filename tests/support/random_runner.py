"""Random results in place of a runner's models, for tests of the engine, the scheduler and the page pool."""

import random
from types import SimpleNamespace

import torch

from eagle_kit.core.shape import SpecShape
from eagle_kit.engine.cycle import Emitted
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.graphs.cuda_graph import HostCopy
from eagle_kit.engine.runner import Results

STOP = 5
"""A token that a runner emits more seldom than others, for targets whose end token it is."""


class RandomRunner:
    """A runner without models: every cycle emits random tokens, between one and a window of them.

    It asserts what the device relies on: pages for all that is written, page tables that are up to date, and
    recurrent states that have read the tokens before them, each once.

    Args:
        seed: of the random results.
        page_size: tokens of a page of the engine's pool.
        shape: the deepest shape that the engine uses.
        ngram: True if drafts come from the engine's n-gram log, so that there is no drafter.
        lookback: tokens before a part of a prompt that are computed with it.
        failure_share: chance that the logits of a request are not finite in a cycle.

    Attributes:
        states: tokens that each recurrent state has read, by the number of the state.
        roots: the next token of each request, by slot.
        tables: page tables as the device knows them, by slot.
    """

    def __init__(
        self,
        seed: int,
        page_size: int,
        shape: SpecShape,
        ngram: bool,
        lookback: int = 0,
        failure_share: float = 0.005,
    ) -> None:
        self.states: dict[int, list[int]] = {}
        self.roots: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.lookback = lookback
        self.rng = random.Random(seed)
        self.failure_share = failure_share
        self.page_size = page_size
        self.steps = shape.steps
        self.drafter = None
        self.pending = ()
        if shape.steps and not ngram:
            self.drafter = SimpleNamespace(check_shape=lambda draft, shape: None, lookback=lookback)
        self.models = SimpleNamespace(drafter=self.drafter)
        self.kv = SimpleNamespace(values_per_token=16)
        self.device = torch.device("cpu")

    def use_shape(self, shapes, *, needs_confidence=False, by_size=None):
        self.steps = max(shape.steps for shape in shapes)

    def _token(self):
        return self.rng.choice((0, 1, 2, 3, 4, STOP if self.rng.random() < 0.1 else 4))

    def _is_finite(self, counts):
        return torch.tensor([self.rng.random() >= self.failure_share for _ in counts])

    def set_pages(self, requests):
        for request in requests:
            if request.on_device.num_pages_written != len(request.sequence.allocation):
                self.tables[request.sequence.slot] = request.sequence.allocation.table
                request.on_device.num_pages_written = len(request.sequence.allocation)

    def invalidate_pages(self, request):
        request.on_device.num_pages_written = -1

    def prefill(self, chunks):
        for request, start, stop, _ in chunks:
            assert self.tables[request.sequence.slot] == request.sequence.allocation.table
            assert 0 <= start < stop <= request.num_to_compute and start <= request.sequence.num_computed
            assert len(request.sequence.allocation) * self.page_size >= stop
        requests, _, stops, _ = zip(*chunks, strict=True)
        ends = [request.num_to_compute == stop for request, _, stop, _ in chunks]
        counts = torch.tensor([int(ends[i] and not r.token_ids) for i, r in enumerate(requests)])
        tokens = torch.tensor([[self._token()] for _ in requests])
        if chunks[0].state_moves is not None:
            before = dict(self.states)
            for chunk, (token,) in zip(chunks, tokens.tolist(), strict=True):
                self._move(chunk, before)
                known = chunk.request.token_ids
                self.roots[chunk.request.sequence.slot] = known[-1] if known else token
            written = [number for chunk in chunks for _, number in chunk.state_moves.saves]
            assert len(set(written)) == len(written), "two prompts save one state"
        emitted = Emitted(tokens, counts, None, self._is_finite(counts))
        sequences = [request.sequence for request in requests]
        return [Results(list(requests), sequences, HostCopy(emitted), None, stops)]

    def _move(self, chunk, before):
        request, start, _, (source, saves) = chunk
        first = max(start - self.lookback, 0)
        held = [] if source is None else before[source]
        assert held == request.tokens(0, first), "a state has other tokens than those before the part"
        for count, number in saves:
            assert 0 <= count <= chunk.stop - first
            self.states[number] = request.tokens(0, first + count)

    def _decode_states(self, requests, tokens, counts):
        for request, emitted, count in zip(requests, tokens, counts, strict=True):
            slot = request.sequence.slot
            state = self.states[slot]
            known = request.num_tokens - 1
            assert state[:known] == request.tokens(0, known) and len(state) >= known
            self.states[slot] = [*state, self.roots[slot], *emitted[: count - 1]]
            self.roots[slot] = emitted[count - 1]

    def padded(self, batch_size):
        return batch_size

    def decode(self, requests, shape, ngram=None):
        width = shape.steps + 1
        num_draft_tokens = [shape.tokens - 1] * len(requests)
        if ngram is not None:
            assert all(request.token_ids for request in requests)
            contexts = [request.tokens(0, request.num_tokens) for request in requests]
            draft = ngram.propose(contexts, shape.tokens, shape.steps)
            assert [row[0] for row in draft.tokens] == [context[-1] for context in contexts]
            num_draft_tokens = (draft.parents != range(shape.tokens)).sum(1).tolist()
        assert len({request.sequence.slot for request in requests}) == len(requests)
        for request in requests:
            assert self.tables[request.sequence.slot] == request.sequence.allocation.table
            unseen = sum(
                results.copy.wait().tokens.shape[1] for results in self.pending if request in results.requests
            )
            num_slots = len(request.sequence.allocation) * self.page_size
            assert num_slots >= request.num_tokens - 1 + unseen + width
        counts = torch.tensor([self.rng.randint(1, width) for _ in requests])
        tokens = torch.tensor([[self._token() for _ in range(width)] for _ in requests])
        if self.states:
            self._decode_states(requests, tokens.tolist(), counts.tolist())
        sequences = [request.sequence for request in requests]
        return Results(
            requests,
            sequences,
            HostCopy(Emitted(tokens, counts, None, self._is_finite(counts))),
            num_draft_tokens,
        )


def use_random_runner(engine: Engine, runner: RandomRunner, shape: SpecShape) -> None:
    """Give ``engine`` a runner without models, and the shape of its cycles."""
    engine.runner = runner
    runner.pending = engine._in_flight
    if runner.drafter is not None:
        engine.draft = SimpleNamespace(draft_vocab_size=6)
    engine.use_shape(shape)
