"""Expansion of a draft and its window, reference and kernels, against plain loops: exact, also for equal
scores."""

import math

import pytest
import torch
from crossed import crossed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from eagle_kit.core.shape import SpecShape
from eagle_kit.ops.attention.window import ancestor_bits, chain_bits
from eagle_kit.ops.tree_build import chain_build, grow_beam, start_beam, tree_build
from eagle_kit.ops.tree_build.reference import num_candidates


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill new memory with NaN and the largest integers, so that elements that are never written are
    noticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["reference", "triton"])
def form(request):
    """Backend and its device."""
    name = request.param
    return name, request.getfixturevalue("triton_device") if name == "triton" else "cpu"


KINDS = ["random", "coarse", "certain", "impossible", "signed zeros", "nan"]


def log_probs(shape, kind, generator):
    """fp32 log-probabilities, many of them equal except in the first kind."""
    if kind == "random":
        return torch.rand(shape, generator=generator).log()
    if kind == "coarse":
        return -torch.randint(0, 3, shape, generator=generator).float()
    if kind == "impossible":
        values = torch.rand(shape, generator=generator).log()
        return torch.where(torch.rand(shape, generator=generator) < 0.6, -math.inf, values)
    if kind == "nan":
        values = -torch.randint(0, 3, shape, generator=generator).float()
        return torch.where(torch.rand(shape, generator=generator) < 0.3, math.nan, values)
    if kind == "signed zeros":
        return torch.where(torch.rand(shape, generator=generator) < 0.5, 0.0, -0.0)
    return torch.zeros(shape)


def proposals(shape, batch, kind, seed=1):
    """Tokens and log-probabilities of depth 1 and of every draft step."""
    generator = torch.Generator().manual_seed(seed)
    k = shape.topk
    sizes = [(batch, k)] + [(batch * k, k)] * (shape.steps - 1)
    return [
        (torch.randint(0, 10**12, size, generator=generator), log_probs(size, kind, generator))
        for size in sizes
    ]


def rank(score, number):
    """Sort key of a candidate: NaN is the worst score, like -inf."""
    return (math.inf if math.isnan(score) else -float(score), number)


def by_hand(shape, batch, drafted):
    """The same expansion, request by request in lists: the beams of every step, and all candidates."""
    k = shape.topk
    beams, records = [[] for _ in range(shape.steps)], []
    for b in range(batch):
        tokens, scores = (x[b] for x in drafted[0])
        record = [(int(tokens[i]), scores[i], -1) for i in range(k)]
        beam = [(*record[i][:2], i, b, {i}) for i in range(k)]
        beams[0].append(beam)
        for step in range(1, shape.steps):
            tokens, scores = drafted[step]
            children = [
                (int(tokens[b * k + i, j]), beam[i][1] + scores[b * k + i, j], i, beam[i][2])
                for i in range(k)
                for j in range(k)
            ]
            best = sorted(range(k * k), key=lambda c: rank(children[c][1], c))[:k]
            beam = [
                (*children[c][:2], len(record) + c, b * k + children[c][2], {step * k + n, *beam[c // k][4]})
                for n, c in enumerate(best)
            ]
            record += [(token, score, parent) for token, score, _, parent in children]
            beams[step].append(beam)
        records.append(record)
    return beams, records


def words(bits, count=1):
    """Set of bits as ``count`` words of int64; those behind the last word are lost."""
    found = []
    for first in range(0, 64 * count, 64):
        value = sum(1 << bit - first for bit in bits if first <= bit < first + 64)
        found.append(value - (1 << 64) if value >> 63 else value)
    return found


def run(shape, drafted, form):
    backend, device = form
    drafted = [(tokens.to(device), scores.to(device)) for tokens, scores in drafted]
    beam, candidates = start_beam(*drafted[0], shape, backend=backend)
    beams = [beam]
    for step in range(1, shape.steps):
        beam = grow_beam(beam, candidates, *drafted[step], step, backend=backend)
        beams.append(beam)
    return beams, candidates


def assert_grown(beams, candidates, expected, records):
    for beam, hand in zip(beams, expected, strict=True):
        assert beam.tokens.tolist() == [[node[0] for node in row] for row in hand]
        scores = torch.tensor([[node[1] for node in row] for row in hand])
        torch.testing.assert_close(beam.scores.cpu(), scores, rtol=0, atol=0, equal_nan=True)
        assert beam.ids.tolist() == [[node[2] for node in row] for row in hand]
        assert beam.rows.tolist() == [node[3] for row in hand for node in row]
        count = beam.ancestors.shape[2]
        assert beam.ancestors.tolist() == [[words(node[4], count) for node in row] for row in hand]
        assert beam.scores.dtype == torch.float32
    for record, place in zip(candidates, range(3), strict=True):
        expected = torch.tensor([[entry[place] for entry in row] for row in records])
        torch.testing.assert_close(record.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@crossed(("kind", KINDS), ("shape", [(1, 1, 2), (3, 2, 4), (4, 3, 8), (5, 4, 16)]))
def test_a_beam_keeps_the_best_children(form, shape, kind):
    shape, batch = SpecShape(*shape), 3
    drafted = proposals(shape, batch, kind)
    assert_grown(*run(shape, drafted, form), *by_hand(shape, batch, drafted))


@crossed(("kind", ["coarse", "random"]), ("shape", [(3, 10, 60), (2, 16, 64), (5, 16, 64), (2, 40, 64)]))
def test_wide_beams(form, shape, kind):
    shape, batch = SpecShape(*shape), 1
    drafted = proposals(shape, batch, kind)
    assert_grown(*run(shape, drafted, form), *by_hand(shape, batch, drafted))


# EAGLE-3's published tree; nodes that fill two words; the widest.
@crossed(("kind", ["coarse", "random"]), ("shape", [(8, 10, 60), (9, 16, 64), (63, 2, 64), (3, 63, 64)]))
def test_a_draft_of_more_than_64_nodes_has_two_words(form, shape, kind):
    shape, batch = SpecShape.parse(SpecShape(*shape)), 2
    drafted = proposals(shape, batch, kind)
    beams, candidates = run(shape, drafted, form)
    assert all(beam.ancestors.shape == (batch, shape.topk, 2) for beam in beams)
    assert_grown(beams, candidates, *by_hand(shape, batch, drafted))
    last_run = beams[-2].ancestors.cpu()
    assert last_run[:, :, 1].any(), "the last nodes that are run have their bits in the second word"


def test_ancestors_are_those_of_the_whole_scratch_window(form):
    shape, batch = SpecShape(6, 5, 20), 2
    beams, _ = run(shape, proposals(shape, batch, "random", seed=3), form)
    parents = torch.arange(5).expand(batch, 5)
    for step, beam in enumerate(beams):
        if step:
            up = beam.rows.view(batch, 5).cpu() - torch.arange(batch)[:, None] * 5
            parents = torch.cat((parents, (step - 1) * 5 + up), 1)
        assert torch.equal(beam.ancestors.cpu()[:, :, 0], ancestor_bits(parents, step + 1)[:, -5:])


def test_nan_is_taken_for_the_worst(form):
    shape = SpecShape(2, 3, 5)
    drafted = proposals(shape, 1, "random")
    drafted[1][1][:] = math.nan
    drafted[1][1].view(torch.int32)[1, 2] = -1  # a negative one
    drafted[1][1][1, 0], drafted[1][1][2, 1] = -9.0, -math.inf
    beams, _ = run(shape, drafted, form)
    assert beams[1].ids[0].tolist() == [3 + 3, 3 + 0, 3 + 1]


@given(data=st.data(), shape=st.sampled_from([(1, 4, 3), (2, 2, 5), (3, 2, 6), (5, 3, 12), (9, 2, 20)]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_scores_hold_the_parent_of_every_node_is_chosen(triton_device, data, shape):
    """Also when the candidates of a path were not made one from another."""
    shape = SpecShape(*shape)
    n = num_candidates(shape)
    number = st.floats(width=32, allow_nan=True, allow_infinity=True) | st.just(math.nan) | st.just(0.0)
    scores = torch.tensor([data.draw(st.lists(number, min_size=n, max_size=n))])
    k, parents = shape.topk, [-1] * shape.topk
    for step in range(1, shape.steps):
        first = max(0, k + (step - 2) * k * k)
        above = range(first, k if step == 1 else first + k * k)
        beam = data.draw(st.permutations(above))[:k]
        parents += [node for node in beam for _ in range(k)]
    tokens, parents, roots = 1000 + torch.arange(n)[None], torch.tensor([parents]), torch.tensor([7])
    tree = tree_build(roots, tokens, scores, parents, shape, backend="reference")
    chosen = (tree.tokens[0, 1:] - 1000).tolist()
    assert len(set(chosen)) == shape.tokens - 1 and set(chosen) <= set(range(n))
    for node, candidate in enumerate(chosen, 1):
        parent = int(parents[0, candidate])
        assert ([-1, *chosen])[int(tree.parents[0, node])] == parent, "the parent in the window is its own"
        above = int(tree.parents[0, node])
        assert above < node and int(tree.depths[0, node]) == int(tree.depths[0, above]) + 1
        assert int(tree.ancestors[0, node]) == int(tree.ancestors[0, above]) | (1 << node)
    there = (x.to(triton_device) for x in (roots, tokens, scores, parents))
    kernel = tree_build(*there, shape, backend="triton")
    assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(kernel, tree, strict=True))


def build_by_hand(root, record, shape):
    """Window of one request: tokens, parents, depths, ancestor sets."""
    best = sorted(range(len(record)), key=lambda i: rank(record[i][1], i))[: shape.tokens - 1]
    kept = [-1, *sorted(best)]
    tokens, parents, depths, ancestors = [root], [0], [0], [{0}]
    for node, i in enumerate(kept[1:], 1):
        parent = kept.index(record[i][2])
        tokens.append(record[i][0])
        parents.append(parent)
        depths.append(depths[parent] + 1)
        ancestors.append({node, *ancestors[parent]})
    return tokens, parents, depths, [words(bits)[0] for bits in ancestors]


def assert_built(shape, batch, kind, form):
    backend, device = form
    _, records = by_hand(shape, batch, proposals(shape, batch, kind, seed=shape.tokens))
    tokens, scores, parents = (
        torch.tensor([[entry[place] for entry in row] for row in records], device=device)
        for place in range(3)
    )
    roots = torch.arange(7, 7 + batch, device=device)
    tree = tree_build(roots, tokens, scores, parents, shape, backend=backend)
    expected = zip(*(build_by_hand(7 + b, records[b], shape) for b in range(batch)), strict=True)
    for ours, theirs in zip(tree, expected, strict=True):
        assert ours.dtype == torch.int64 and ours.tolist() == list(theirs)


@crossed(("kind", KINDS), ("shape", [(1, 2, 2), (4, 1, 5), (3, 2, 6), (5, 4, 16)]))
def test_a_window_keeps_the_best_candidates(form, shape, kind):
    assert_built(SpecShape(*shape), 2, kind, form)


# All of the candidates; a window of 64; 510 and 1,040 candidates; the deepest and widest of all, 3,856.
@crossed(
    ("kind", ["coarse", "random"]),
    ("shape", [(3, 3, 22), (6, 5, 64), (6, 10, 64), (8, 10, 60), (5, 16, 64), (16, 16, 64), (16, 2, 60)]),
)
def test_large_windows(form, shape, kind):
    assert_built(SpecShape(*shape), 1, kind, form)


def test_a_deep_path_knows_all_its_ancestors(form):
    assert_built(SpecShape(16, 4, 17), 2, "certain", form)
    assert_built(SpecShape(63, 1, 64), 1, "random", form)


@pytest.mark.parametrize("steps", [1, 2, 5, 63])
def test_a_chain_keeps_every_token(form, steps):
    backend, device = form
    roots = torch.tensor([5, 6, 7], device=device)
    tokens = torch.randint(0, 10**12, (steps, 3), generator=torch.Generator().manual_seed(1)).to(device).T
    tree = chain_build(roots, tokens, backend=backend)
    assert torch.equal(tree.tokens, torch.cat((roots[:, None], tokens), 1))
    assert tree.parents.tolist() == [[0, *range(steps)]] * 3
    assert tree.depths.tolist() == [[*range(steps + 1)]] * 3
    assert tree.ancestors.tolist() == [chain_bits(steps + 1, roots.device).tolist()] * 3


def test_no_request(form):
    shape = SpecShape(3, 2, 5)
    beams, candidates = run(shape, proposals(shape, 0, "random"), form)
    assert beams[-1].rows.shape == (0,)
    roots = torch.zeros(0, dtype=torch.int64, device=form[1])
    assert tree_build(roots, *candidates, shape, backend=form[0]).tokens.shape == (0, 5)
    assert chain_build(roots, roots.view(0, 4), backend=form[0]).ancestors.shape == (0, 5)


def test_fake_tensors_pass():
    pytest.importorskip("triton")
    shape = SpecShape(3, 2, 5)
    with FakeTensorMode():
        tokens, scores = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
        beam, candidates = start_beam(tokens, scores, shape, backend="triton")
        tokens, scores = torch.zeros(6, 2, dtype=torch.int64), torch.zeros(6, 2)
        beam = grow_beam(beam, candidates, tokens, scores, 1, backend="triton")
        assert beam.rows.shape == (6,) and beam.ancestors.shape == (3, 2, 1)
        tree = tree_build(beam.tokens[:, 0], *candidates, shape, backend="triton")
        assert all(part.shape == (3, 5) and part.dtype == torch.int64 for part in tree)
        tree = chain_build(beam.tokens[:, 0], beam.tokens, backend="triton")
        assert all(part.shape == (3, 3) and part.dtype == torch.int64 for part in tree)


def test_the_operators_are_well_formed(triton_device):
    from eagle_kit.ops.tree_build import triton

    shape = SpecShape(3, 2, 5)
    drafted = [tuple(x.to(triton_device) for x in pair) for pair in proposals(shape, 2, "random")]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(triton._start.overload, (*drafted[0], 10, 2), test_utils=tests)
    (beam, *_), candidates = run(shape, drafted, ("triton", triton_device))
    nodes = (beam.tokens, beam.scores, beam.ids, beam.ancestors)
    torch.library.opcheck(triton._grow.overload, (*nodes, *drafted[1], *candidates, 1), test_utils=tests)
    torch.library.opcheck(triton._tree.overload, (beam.tokens[:, 0], *candidates, *shape), test_utils=tests)
    torch.library.opcheck(
        triton._chain.overload, (beam.tokens[:, 0].contiguous(), beam.tokens), test_utils=tests
    )
