"""Trees of candidates of depths, reference and kernel: a search by plain loops, which is exact also for equal
scores, and all paths there are, sorted."""

import itertools
import math

import pytest
import torch
from crossed import crossed
from torch._subclasses import FakeTensorMode

from eagle_kit.core.shape import SpecShape
from eagle_kit.ops.best_first import best_first
from eagle_kit.ops.tree_build import tree_build

SHAPES = [(1, 2, 3), (3, 1, 4), (4, 3, 23), (7, 4, 16)]


@pytest.fixture(params=["reference", "triton"])
def form(request):
    """Backend and its device."""
    name = request.param
    return name, request.getfixturevalue("triton_device") if name == "triton" else "cpu"


def candidates(shape, batch, given, kind):
    generator = torch.Generator().manual_seed(shape.tokens)
    size = batch, shape.steps, given, shape.topk
    scores = torch.randn(size, generator=generator).log_softmax(-1)
    if kind != "random":
        scores = -torch.randint(0, 3, size, generator=generator).float()
    if kind == "broken":
        broken = torch.tensor([math.nan, -math.inf, math.inf, 1.0, -1.0])
        scores = broken[torch.randint(0, 5, size, generator=generator)]
    tokens = torch.randint(0, 10**12, (batch, shape.steps, shape.topk), generator=generator)
    return torch.arange(7, 7 + batch), tokens, scores


def build(given, shape, form):
    backend, device = form
    tree = best_first(*(x.to(device) for x in given), shape, backend=backend)
    assert all(part.dtype == torch.int64 for part in tree)
    return [part.cpu() for part in tree]


def by_loops(root, tokens, scores, shape):
    """Search of one request: nodes as (token, parent, depth, ancestors)."""
    nodes, paths, open_paths = [(root, 0, 0, 1)], [()], {}
    lowest = torch.finfo(torch.float32).min

    def extend(node, path, score):
        depth = len(path)
        if depth == shape.steps:
            return
        row = path[-1] if depth and scores.shape[1] > 1 else 0
        for rank, gain in enumerate(scores[depth, row]):
            gain = torch.tensor(lowest) if gain.isnan() else gain
            total = torch.minimum(torch.maximum(score + gain, torch.tensor(lowest)), score)
            open_paths[(node, rank)] = (total.item(), (*path, rank))

    extend(0, (), torch.tensor(0.0))
    while len(nodes) < shape.tokens:
        key = min(open_paths, key=lambda each: (-open_paths[each][0], each))
        score, path = open_paths.pop(key)
        parent, node = key[0], len(nodes)
        token = tokens[len(path) - 1, path[-1]].item()
        bits = nodes[parent][3] | (1 << node)
        nodes.append((token, parent, len(path), bits - (1 << 64) if bits >> 63 else bits))
        paths.append(path)
        extend(node, path, torch.tensor(score))
    return nodes


@crossed(
    ("shape", SHAPES),
    (
        "kind, is_conditional",
        itertools.product(
            ["random", "coarse", "broken"],
            [False, True],
        ),
    ),
)
def test_every_node_is_the_best_that_can_be_added(form, shape, is_conditional, kind):
    shape = SpecShape(*shape)
    given = candidates(shape, 2, shape.topk if is_conditional else 1, kind)
    tree = build(given, shape, form)
    for b in range(2):
        found = list(zip(*(part[b].tolist() for part in tree), strict=True))
        assert found == by_loops(7 + b, given[1][b], given[2][b], shape)


@pytest.mark.parametrize("shape", [(8, 16, 64), (33, 2, 60)], ids=str)
def test_the_largest_windows(form, shape):
    shape = SpecShape(*shape)
    given = candidates(shape, 1, shape.topk, "coarse")
    found = list(zip(*(part[0].tolist() for part in build(given, shape, form)), strict=True))
    assert found == by_loops(7, given[1][0], given[2][0], shape)


@pytest.mark.parametrize("is_conditional", [False, True], ids=["independent", "conditional"])
def test_its_nodes_are_the_best_of_all_paths(form, is_conditional):
    shape = SpecShape(4, 3, 30)
    roots, tokens, scores = candidates(shape, 3, 3 if is_conditional else 1, "random")
    tree = build((roots, tokens, scores), shape, form)
    for b in range(3):
        ranked = []
        for depth in range(1, 5):
            for path in itertools.product(range(3), repeat=depth):
                rows = (0, *path[:-1]) if is_conditional else [0] * depth
                rows = (0, *rows[1:])
                parts = [scores[b, d, rows[d], rank].double().exp() for d, rank in enumerate(path)]
                ranked.append((math.prod(parts), tuple(tokens[b, d, r].item() for d, r in enumerate(path))))
        best = {path for _, path in sorted(ranked, reverse=True)[:29]}
        paths = [()]
        for node in range(1, 30):
            paths.append((*paths[tree[1][b, node]], tree[0][b, node].item()))
        assert set(paths[1:]) == best


def test_more_nodes_of_a_depth_are_extended_than_a_beam_has(form):
    """Where two candidates of each depth are as good as certain, all 2 + 4 + 8 paths of them are kept; a beam
    of two would extend two of the four."""
    shape = SpecShape(3, 3, 15)
    tokens = torch.arange(9).view(1, 3, 3)
    scores = torch.tensor([0.5, 0.499, 0.001]).log().expand(1, 3, 1, 3).contiguous()
    tree = build((torch.tensor([99]), tokens, scores), shape, form)
    assert sorted(tree[2][0].tolist()) == [0, 1, 1, 2, 2, 2, 2, *[3] * 8]
    assert not set(tree[0][0].tolist()) & {2, 5, 8}


def test_a_batch_of_none_and_fake_tensors(form):
    shape = SpecShape(3, 2, 6)
    roots, tokens, scores = candidates(shape, 2, 1, "random")
    tree = build((roots[:0], tokens[:0], scores[:0]), shape, form)
    assert all(part.shape == (0, 6) for part in tree)
    if form[0] == "triton":
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(x) for x in (roots, tokens, scores)]
            assert all(part.shape == (2, 6) for part in best_first(*fake, shape, backend="triton"))


def test_one_path_of_depth_one_is_what_a_beam_builds():
    shape = SpecShape(1, 4, 4)
    roots, tokens, scores = candidates(shape, 2, 1, "coarse")
    order = scores[:, 0, 0].sort(stable=True, dim=1, descending=True).indices
    ranked = [x.gather(1, order) for x in (tokens[:, 0], scores[:, 0, 0])]
    beam = tree_build(roots, *ranked, torch.full((2, 4), -1), shape)
    assert all(torch.equal(a, b) for a, b in zip(best_first(roots, tokens, scores, shape), beam, strict=True))


@pytest.mark.parametrize("size", [(2, 3, 1, 4), (2, 4, 1, 3), (2, 4, 2, 4)], ids=str)
def test_candidates_of_another_shape_are_refused(size):
    b, steps, given, topk = size
    tokens = torch.zeros(b, steps, topk, dtype=torch.int64)
    with pytest.raises(AssertionError):
        best_first(torch.zeros(b).long(), tokens, torch.zeros(b, steps, given, topk), SpecShape(4, 4, 9))
