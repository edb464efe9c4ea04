"""Windows of different sizes in one forward: the same text, from fewer rows of the target."""

import math

import pytest
import torch
from tiny_engine import PROMPTS, decode, make_engine, resolved, serve

from eagle_kit.autotune.packing import packed_counts, packed_rows
from eagle_kit.autotune.policy import ShapePolicy
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.graphs import cpu_graph
from eagle_kit.engine.graphs.cpu_graph import CpuGraphs
from eagle_kit.engine.packed import Packing
from eagle_kit.engine.request import Request
from eagle_kit.models.targets.target import TargetOutput
from eagle_kit.ops.accept import accept_block, accept_rejection_chain, accept_relaxed, accept_target_only
from eagle_kit.ops.sampling import sample
from eagle_kit.ops.tree_build import Tree, chain_build
from eagle_kit.verify.proposal import Deterministic, DraftOutput, SampledChain


class Fixed(ShapePolicy):
    """One shape, of which each request's first drafts are verified, as many as its number says."""

    def __init__(self, shape, drafts):
        super().__init__({1: [shape]})
        self.only, self.given, self.known = shape, drafts, []

    def new_request(self):
        self.known.append(super().new_request())
        return self.known[-1]

    def choose(self, requests, context):
        numbers = [self.known.index(request) for request in requests]
        self.num_drafts = [self.given[i % len(self.given)] for i in numbers]
        return self.only


class Turning(Fixed):
    """The same, of which each request has another number in every cycle."""

    def choose(self, requests, context):
        self.given = [*self.given[1:], self.given[0]]
        return super().choose(requests, context)


def serve_watched(engine, requests):
    """Serve requests -> rows of the target's forwards over windows."""
    rows, is_cycle = [], False
    decode, read = engine.runner.decode, engine.target.forward

    def decode_watched(*args):
        nonlocal is_cycle
        is_cycle = True
        try:
            return decode(*args)
        finally:
            is_cycle = False

    def read_watched(ids, *rest):
        if is_cycle:
            rows.append(len(ids))
        return read(ids, *rest)

    engine.runner.decode, engine.target.forward = decode_watched, read_watched
    try:
        serve(engine, requests)
    finally:
        del engine.target.forward
    return rows


def requests_of(**params):
    params = SamplingParams(**{"max_tokens": 40, **params})
    return [Request(i, list(PROMPTS[i]), params) for i in range(4)]


WINDOWS = [
    ("4,1,5", [4, 0, 1, 2]),
    ("3,2,6", [5, 0, 2, 1]),
    ("5,4,16", [3, 15, 0, 7]),
    ("4,1,5", [0]),
    ("4,1,5", [4]),
]


@pytest.fixture(scope="module")
def plain(models):
    """Replies of plain decoding."""
    return [request.token_ids for request in decode(models, prompts=PROMPTS[:4], max_tokens=40)]


@pytest.mark.parametrize(("shape", "drafts"), WINDOWS)
def test_packed_windows_change_no_text_and_take_fewer_rows(models, plain, shape, drafts):
    engine = make_engine(models, 4)
    requests = requests_of()
    policy = Fixed(SpecShape.parse(shape), drafts)
    timed = []
    policy.observe_time = lambda *given: timed.append(given)
    engine.use_shape(policy)
    rows = serve_watched(engine, requests)
    assert [request.token_ids for request in requests] == plain
    for size, used, _, _, num_rows in timed:
        assert (num_rows or size * used.tokens) in rows
    assert len(timed) > 20 and any(num_rows for *_, num_rows in timed) == (drafts != [4])
    nodes = SpecShape.parse(shape).tokens
    expected = packed_rows(4, nodes - 1, sum((4 * drafts)[:4]))
    assert max(rows) == (expected or 4 * nodes) and (expected is None) == (drafts == [4])
    for i, request in enumerate(requests):
        accepted = request.stats.spec.num_accepted_at
        assert len([n for n in accepted if n]) <= drafts[i % len(drafts)]
        assert request.stats.shapes[SpecShape.parse(shape)] == request.stats.spec.num_verifies
        if drafts == [0]:
            assert set(request.stats.shapes) == {NO_SPECULATION} and request.stats.spec.num_verifies == 0
    assert (engine.totals.spec.num_accepted_at[:1] or [0])[0] > 0 or drafts == [0], "nothing was accepted"
    assert (engine.totals.num_draft_tokens == 0) == (drafts == [0])


def test_penalties_and_log_probabilities_are_those_of_whole_windows(models):
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 1.0, "logit_bias": {3: 1.5}}
    params = {"temperature": 0.7, "seed": 1, "logprobs": 2, "max_tokens": 25, **penalties}
    replies = []
    for drafts in ([4, 0, 1, 2], [4]):
        engine, requests = make_engine(models, 4), requests_of(**params)
        engine.use_shape(Fixed(SpecShape.parse("4,1,5"), drafts))
        serve(engine, requests)
        replies.append([(request.token_ids, request.reply.logprobs) for request in requests])
    assert replies[0] == replies[1]


@pytest.mark.skipif(not cpu_graph.available(), reason="torch without TorchScript's graphs")
def test_recorded_cycles_say_the_same(models, plain):
    """On a CPU cycles are replayed without Python once they have run often; which drafts are verified changes
    from cycle to cycle."""
    engine = make_engine(models, 4)
    requests = requests_of()
    engine.runner.graphs = CpuGraphs(1)
    engine.use_shape(Turning(SpecShape.parse("4,1,5"), [4, 0, 1, 2]))
    serve(engine, requests)
    assert engine.num_graphs > 0
    assert [request.token_ids for request in requests] == plain


def test_n_gram_windows_take_the_rows_of_what_was_found(models):
    plain = [request.token_ids for request in decode(models, max_tokens=30, ignore_eos=True)][:4]
    engine = Engine(models[0], None, resolved(4, 256, kv_tokens=1600, algorithm="NGRAM"))
    engine.use_shape(SpecShape.parse("8,4,12"))
    requests, propose, found = requests_of(max_tokens=30, ignore_eos=True), engine.ngram.propose, []

    def watched(*args):
        draft = propose(*args)
        found.append((len(draft.tokens), int((draft.parents != range(12)).sum())))
        return draft

    engine.ngram.propose = watched
    rows = serve_watched(engine, requests)
    assert [request.token_ids for request in requests] == plain
    assert rows == [packed_rows(size, 11, total) or 12 * size for size, total in found]
    assert len(set(rows)) > 2 and engine.totals.spec.num_accepted_at[0] > 0


@pytest.mark.parametrize("num_drafts", [[2, 0, 3], [0, 0, 0], [3, 3, 3], [1, 1, 1]])
def test_every_kept_node_has_a_row_and_others_are_copies_of_their_root(num_drafts):
    kept = sum(num_drafts) + 3
    for num_rows in range(kept, 13):
        packing = Packing.of(torch.tensor(num_drafts), 4, num_rows)
        assert len(packing.rows) == num_rows == len(set(packing.rows.tolist()))
        nodes = torch.arange(12)
        assert packing.is_kept.sum() == kept
        found = nodes[packing.rows][packing.places].view(3, 4)
        wanted = torch.where(packing.is_kept, nodes.view(3, 4), nodes.view(3, 4)[:, :1])
        assert torch.equal(found, wanted)
        whole = packing.whole(TargetOutput(packing.rows[:, None].float(), packing.rows[:, None].float() + 1))
        assert torch.equal(whole.hidden.view(3, 4), wanted.float())
        assert torch.equal(whole.aux.view(3, 4), wanted.float() + 1)
        parents = torch.tensor([0, 0, 1, 2]).expand(3, 4)
        tree = Tree(parents, parents, parents, parents)
        cut = packing.cut(DraftOutput(tree, Deterministic())).tree.parents
        assert torch.equal(cut == torch.arange(4), ~packing.is_kept | (torch.arange(4) == 0))


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("drafts", [1, 2, 4, 15])
def test_rows_are_enough_and_of_few_numbers(batch, drafts):
    most, counts = batch * drafts, packed_counts(batch, drafts)
    for total in range(most + 1):
        rows = packed_rows(batch, drafts, total)
        assert total + batch <= (rows or most + batch)
        assert rows is None or (rows < most + batch and rows - batch in counts)
        assert (rows or most + batch) - batch - total <= math.ceil(most / 4)
    assert len(counts) <= 4
    assert [packed_rows(batch, drafts, count) for count in counts] == [batch + count for count in counts]


def verify(name, probs, window, uniforms, bonus, backend):
    """Verify chains with given uniform random numbers, one more than nodes."""
    (tokens, parents, depths, _), steps = window.tree, probs.shape[1] - 1
    match name, window.proposal:
        case "target-only", Deterministic():
            given = probs, tokens, parents, depths, uniforms[:, : steps + 1], steps
            return accept_target_only(*given, backend=backend)
        case "relaxed", Deterministic():
            given = probs, tokens, parents, uniforms[:, : steps + 1], bonus, steps, 0.5, 0.7
            return accept_relaxed(*given, backend=backend)
        case _, SampledChain(q):
            kernel = {"block": accept_block, "rejection": accept_rejection_chain}[name]
            return kernel(probs, q, tokens, uniforms[:, 1 : steps + 1], bonus, backend=backend)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("name", ["target-only", "relaxed", "rejection", "block"])
def test_what_is_left_of_a_chain_is_verified_as_a_shorter_one(triton_device, name, backend):
    device = triton_device if backend == "triton" else "cpu"
    with torch.device(device):
        check_cut_chains(name, backend, torch.Generator(device).manual_seed(0))


def check_cut_chains(name, backend, rng):
    steps = 3
    vocabulary = 37
    is_sampled = name in ("rejection", "block")
    num_drafts = torch.arange(steps + 1).repeat(16 if backend == "reference" else 4)
    count, num_accepted = len(num_drafts), 0
    probs = torch.rand(count, steps + 1, vocabulary, generator=rng).pow(60)
    probs /= probs.sum(-1, keepdim=True)
    q = 0.85 * probs[:, :-1] + 0.15 / vocabulary
    drawn = torch.multinomial(q.view(-1, vocabulary), 1, generator=rng).view(count, steps)
    if not is_sampled:
        drawn = probs[:, :-1].argmax(-1)
    uniforms = torch.rand(count, steps + 1, dtype=torch.float64, generator=rng)
    bonus = torch.rand(count, dtype=torch.float64, generator=rng)

    def window(rows, length):
        tree = chain_build(drawn[rows, 0], drawn[rows, :length], backend="reference")
        return DraftOutput(tree, SampledChain(q[rows, :length]) if is_sampled else Deterministic())

    every = torch.arange(count)
    packing = Packing.of(num_drafts, steps + 1, int((num_drafts + 1).sum()))
    cut = verify(name, probs, packing.cut(window(every, steps)), uniforms, bonus, backend)
    bare = num_drafts == 0
    own = bonus if name != "target-only" else uniforms[:, 0]
    first = sample(probs[bare, 0].double(), own[bare], backend="reference")
    assert not cut.num_accepted[bare].any() and torch.equal(cut.tokens[bare, 0], first)
    for length in range(1, steps + 1):
        rows = (num_drafts == length).nonzero()[:, 0]
        short = window(rows, length)
        expected = verify(name, probs[rows, : length + 1], short, uniforms[rows], bonus[rows], backend)
        assert torch.equal(cut.num_accepted[rows], expected.num_accepted)
        is_given = torch.arange(length + 1) <= expected.num_accepted[:, None]
        assert torch.equal(cut.tokens[rows, : length + 1][is_given], expected.tokens[is_given])
        num_accepted += int(expected.num_accepted.sum())
        assert (expected.num_accepted == length).any(), "no chain ends where it is cut"
    assert num_accepted > count / 4
