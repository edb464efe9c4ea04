"""Random events, hundreds of thousands in all in the nightly tier: whatever arrives, stops, is aborted or sent
back, no page or token is lost. The models are replaced by random results; scheduler, prefix cache, n-gram log
and engine are the real ones."""

import random
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_target
from tiny_engine import resolved

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.config_parts import RecurrenceSpec, StateSpec
from eagle_kit.serve.cycle import Emitted
from eagle_kit.serve.engine import Engine
from eagle_kit.serve.graph import HostCopy
from eagle_kit.serve.request import Request
from eagle_kit.serve.runner import Results

STOP = 5


class HybridConfig(TargetConfig):
    """Of a target with a recurrent layer."""

    states = StateSpec((), (RecurrenceSpec(1, 1, 2, 2),))


class RandomRunner:
    """Results of random length. It asserts what the device relies on: pages for all that is written,
    ``tables`` of them that are up to date, and that a state has the tokens before it, each once. In place of
    numbers, ``states`` hold those tokens, and ``roots`` the next ones by slot."""

    lookback = 0

    def __init__(self, seed: int, page_size: int, shape: SpecShape, ngram: bool, lookback: int = 0) -> None:
        self.states, self.roots, self.tables, self.lookback = {}, {}, {}, lookback
        self.rng, self.page_size = random.Random(seed), page_size
        self.steps, self.drafter, self.pending = shape.steps, None, ()
        if shape.steps and not ngram:
            self.drafter = SimpleNamespace(check_shape=lambda draft, shape: None, lookback=lookback)
        self.models = SimpleNamespace(drafter=self.drafter)
        self.kv, self.device = SimpleNamespace(numbers_per_token=16), torch.device("cpu")

    def use_shape(self, shapes, *, tells_confidence=False, by_size=None):
        self.steps = max(shape.steps for shape in shapes)

    def _token(self):
        return self.rng.choice((0, 1, 2, 3, 4, STOP if self.rng.random() < 0.1 else 4))

    def _is_finite(self, counts):
        return torch.tensor([self.rng.random() > 0.005 for _ in counts])

    def set_pages(self, requests):
        for request in requests:
            if request.num_pages_written != len(request.allocation):
                self.tables[request.slot] = request.allocation.table
                request.num_pages_written = len(request.allocation)

    def prefill(self, chunks):
        for request, start, stop, _ in chunks:
            assert self.tables[request.slot] == request.allocation.table
            assert 0 <= start < stop <= request.num_to_compute and start <= request.num_computed
            assert len(request.allocation) * self.page_size >= stop
        requests, _, stops, _ = zip(*chunks, strict=True)
        ends = [request.num_to_compute == stop for request, _, stop, _ in chunks]
        counts = torch.tensor([int(ends[i] and not r.token_ids) for i, r in enumerate(requests)])
        tokens = torch.tensor([[self._token()] for _ in requests])
        if chunks[0].states is not None:
            before = dict(self.states)
            for chunk, (token,) in zip(chunks, tokens.tolist(), strict=True):
                self._move(chunk, before)
                known = chunk.request.token_ids
                self.roots[chunk.request.slot] = known[-1] if known else token
            written = [number for chunk in chunks for _, number in chunk.states.saves]
            assert len(set(written)) == len(written), "two prompts save one state"
        emitted = Emitted(tokens, counts, None, self._is_finite(counts))
        epochs = [request.epoch for request in requests]
        return [Results(list(requests), epochs, HostCopy(emitted), None, stops)]

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
            state, known = self.states[request.slot], request.num_tokens - 1
            assert state[:known] == request.tokens(0, known) and len(state) >= known
            self.states[request.slot] = [*state, self.roots[request.slot], *emitted[: count - 1]]
            self.roots[request.slot] = emitted[count - 1]

    def padded(self, batch_size):
        return batch_size

    def decode(self, requests, shape, ngram=None, wanted=None):
        assert wanted is None or len(wanted) == len(requests)
        width = shape.steps + 1
        num_drafts = [shape.tokens - 1] * len(requests)
        if ngram is not None:
            assert all(request.token_ids for request in requests)
            contexts = [request.tokens(0, request.num_tokens) for request in requests]
            draft = ngram.propose(contexts, shape.tokens, shape.steps)
            assert [row[0] for row in draft.tokens] == [context[-1] for context in contexts]
            num_drafts = (draft.parents != range(shape.tokens)).sum(1).tolist()
        assert len({request.slot for request in requests}) == len(requests)
        for request in requests:
            assert self.tables[request.slot] == request.allocation.table
            unseen = sum(
                results.copy.wait().tokens.shape[1] for results in self.pending if request in results.requests
            )
            assert len(request.allocation) * self.page_size >= request.num_tokens - 1 + unseen + width
        counts = torch.tensor([self.rng.randint(1, width) for _ in requests])
        tokens = torch.tensor([[self._token() for _ in range(width)] for _ in requests])
        if self.states:
            self._decode_states(requests, tokens.tolist(), counts.tolist())
        epochs = [request.epoch for request in requests]
        return Results(
            requests, epochs, HostCopy(Emitted(tokens, counts, None, self._is_finite(counts))), num_drafts
        )


class RandomMatch:
    """A grammar that ends, leads nowhere, or goes on, at random."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.is_complete, self.is_stuck = rng, False, False

    def advance(self, tokens):
        assert not (self.is_complete or self.is_stuck)
        for count in range(1, len(tokens) + 1):
            event = self.rng.random()
            if event < 0.05:
                self.is_complete = True
                return count
            if event < 0.06:
                self.is_stuck = True
                return count - 1
        return len(tokens)


def _prompt(rng: random.Random) -> list[int]:
    """Often one of a few beginnings, so that pages are shared."""
    beginning = rng.choice(([], [1] * 9, [1, 2] * 8, [3] * 21))
    return beginning + [rng.randrange(5) for _ in range(rng.choice((1, 2, 5, 20)))]


@pytest.mark.parametrize("num_events", [6_000, pytest.param(33_400, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("page_size", "lag", "shape", "with_ngram", "share_of_grammars", "lookback"),
    [
        (1, 0, "5,4,16", False, 0.0, None),
        pytest.param(4, 1, "4,1,5", False, 0.0, None, marks=pytest.mark.nightly),
        (16, 1, None, False, 0.0, None),
        (4, 1, "5,4,16", True, 0.0, None),
        pytest.param(4, 1, "4,1,5", False, 0.2, None, marks=pytest.mark.nightly),
        (1, 1, "4,1,5", True, 0.2, None),
        pytest.param(4, 1, "4,1,5", False, 0.0, 0, marks=pytest.mark.nightly),
        (1, 0, "5,4,16", False, 0.0, 2),
        (4, 1, "2,1,3", False, 0.1, 2),
        pytest.param(4, 1, None, False, 0.0, 0, marks=pytest.mark.nightly),
        (1, 1, "4,1,5", True, 0.0, 0),
    ],
)
def test_a_storm_of_events_loses_nothing(
    page_size, lag, shape, with_ngram, share_of_grammars, lookback, num_events
):
    """With a ``lookback``, the target has recurrent layers."""
    rng = random.Random(page_size)
    options = {"algorithm": "NGRAM", "ngram": {"capacity": 500}} if with_ngram else {}
    sizes = {"kv_tokens": 128, "page_size": page_size, "prefill_tokens": 24, "lag": lag}
    config = resolved(8, 60, **sizes, **options)
    target = tiny_target(vocab_size=6, num_layers=1, eos_token_ids=(STOP,))
    if lookback is not None:
        target.config = HybridConfig(**vars(target.config))
    engine = Engine(target, None, config)
    shape = SpecShape.parse(shape)
    engine.runner = RandomRunner(page_size, page_size, shape, with_ngram, lookback or 0)
    engine.runner.pending = engine._pending
    engine.draft = SimpleNamespace(draft_vocab_size=6) if engine.runner.drafter is not None else None
    engine.use_shape(shape)
    assert engine.scheduler.needs_last is (shape.steps > 0 and not with_ngram)
    alive: list[Request] = []
    finished: list[Request] = []
    number, events = 0, 0
    while events < num_events:
        events += 1
        event = rng.random()
        if event < 0.25 and engine.num_waiting < 20:
            params = SamplingParams(max_tokens=rng.choice((1, 2, 3, 10, 200)), ignore_eos=rng.random() < 0.3)
            request = Request(number, _prompt(rng), params, priority=rng.choice((0, 0, 0, 1)))
            request.group = max(0, number - rng.choice((0, 0, number % 8)))
            if rng.random() < share_of_grammars:
                request.match = RandomMatch(rng)
            engine.add_request(request)
            alive.append(request)
            number += 1
        elif event < 0.3 and alive:
            engine.abort(rng.choice(alive))
        else:
            engine.step()
        engine.check()
        for request in [request for request in alive if request.finish_reason is not None]:
            alive.remove(request)
            finished.append(request)
    while engine.has_work:
        engine.step()
        engine.check()
    assert engine.page_pool.num_available == engine.page_pool.num_pages and engine.num_running == 0
    for request in finished + alive:
        tokens, params = request.token_ids, request.params
        assert not request.allocation.nodes and not request.allocation.pages
        assert len(tokens) <= params.max_tokens and request.num_tokens <= 60
        if request.finish_reason == "length":
            assert len(tokens) == params.max_tokens
        elif request.finish_reason == "context":
            assert request.num_tokens == 60
        elif request.finish_reason == "stop":
            assert request.match or (tokens[-1] == STOP and not params.ignore_eos)
        if not params.ignore_eos:
            assert STOP not in tokens[:-1]
    reasons = engine.totals.num_finished
    often = num_events // 700
    assert all(reasons[reason] > often for reason in ("stop", "length", "context", "abort", "error")), reasons
    assert engine.totals.num_preemptions > often and engine.page_pool.num_evicted > 2 * often
    assert engine.totals.num_cached_prompt_tokens > 20 * often or lookback is not None
    assert engine.totals.num_cached_prompt_tokens > 5 * often
    if with_ngram:
        assert not engine._num_indexed and engine.totals.num_draft_tokens > 20 * often
