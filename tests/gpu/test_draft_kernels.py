"""The draft head, trees and commits at the sizes of real models: fp64, and the reference for integers."""

import pytest
import torch

from eagle_kit.core.shape import SpecShape
from eagle_kit.ops.accept import Accepted, outcome
from eagle_kit.ops.commit import commit_path
from eagle_kit.ops.draft_inputs import draft_inputs
from eagle_kit.ops.draft_topk import draft_topk
from eagle_kit.ops.rows import gather_rows, write_rows
from eagle_kit.ops.tree_build import chain_build, grow_beam, start_beam, tree_build
from tests.gpu.near import assert_near, assert_same_bits
from tests.gpu.place import DEVICE, DTYPES, FP8, generator, pick, randn

pytestmark = pytest.mark.usefixtures("poisoned_memory")
# Rows, draft vocabulary, hidden size, K.
HEADS = pick(
    [
        (1, 32000, 4096, 1),
        (1, 32000, 4096, 8),
        (64, 32000, 4096, 1),
        (256, 32000, 4096, 4),
        (640, 32000, 4096, 10),
        (32, 151936, 4096, 8),
        (64, 128256, 4096, 16),
        (17, 8192, 576, 10),
        (5, 49152, 576, 4),
    ],
    [(3, 70, 32, 4), (2, 20, 24, 1)],
)
LOGIT = {torch.float32: 2e-5, torch.float16: 2e-5, torch.bfloat16: 2e-5}
"""Of logits of size 1: products of halves are exact in fp32, and sums are fp32 whatever the dtype."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "vocab", "size", "topk"), HEADS)
def test_the_draft_head_finds_the_best(rows, vocab, size, topk, dtype):
    by = generator(20)
    x, weight = (
        randn(rows, size, dtype=dtype, by=by),
        randn(vocab, size, dtype=dtype, by=by, scale=size**-0.5),
    )
    token_map = torch.randperm(2 * vocab, generator=by, device=DEVICE)[:vocab]
    ids, scores = draft_topk(x, weight, topk, normalized=True, token_map=token_map, backend="triton")
    back = torch.full((2 * vocab,), -1, device=DEVICE).scatter(
        0, token_map, torch.arange(vocab, device=DEVICE)
    )
    own = back[ids]
    logits = x.double() @ weight.double().T
    assert (own >= 0).all() and all(len(set(row)) == topk for row in own.tolist())
    best = logits.topk(topk, -1).values
    found = logits.gather(1, own)
    assert (found - best).abs().max() <= LOGIT[dtype], "a token that is not among the best, or out of order"
    right = logits.log_softmax(-1).gather(1, own)
    assert (scores.double() - right).abs().max() <= 5 * LOGIT[dtype]
    chained, zeros = draft_topk(x, weight, topk, normalized=False, backend="triton")
    assert torch.equal(token_map[chained], ids) and not zeros.any()


SHAPES = pick(["2,4,8", "5,4,16", "6,10,60", "8,10,60", "3,16,64", "9,8,64"], ["3,3,9"])


@pytest.mark.parametrize("batch", pick([1, 7, 64], [2]))
@pytest.mark.parametrize("shape", SHAPES)
def test_trees_grow_as_the_reference_grows_them(shape, batch):
    """Additions and comparisons are the same everywhere, so all is equal to the bit; scores often tie."""
    shape, by = SpecShape.parse(shape), generator(21)

    def scores(*size: int) -> torch.Tensor:
        return (randn(*size, by=by).abs() * -4).round() / 4

    def tokens(*size: int) -> torch.Tensor:
        return torch.randint(0, 128256, size, generator=by, device=DEVICE)

    k = shape.topk
    first = tokens(batch, k), scores(batch, k).sort(1, descending=True).values
    steps = [(tokens(batch * k, k), scores(batch * k, k)) for _ in range(shape.steps - 1)]
    roots, made = tokens(batch), []
    for backend, where in (("triton", DEVICE), ("reference", torch.device("cpu"))):
        beam, candidates = start_beam(*(x.to(where) for x in first), shape, backend=backend)
        for step, (ids, values) in enumerate(steps, 1):
            beam = grow_beam(beam, candidates, ids.to(where), values.to(where), step, backend=backend)
        tree = tree_build(roots.to(where), *candidates, shape, backend=backend)
        chain = chain_build(roots.to(where), first[0].to(where), backend=backend)
        made.append([x.cpu() for x in (*beam, *candidates, *tree, *chain)])
    for i, (ours, theirs) in enumerate(zip(*made, strict=True)):
        assert torch.equal(ours, theirs), f"tensor {i} of beam, candidates, tree and chain"


# Layers, heads, head size; 0 heads is one latent store.
STORES = pick(
    {"Llama-3.1-8B": (32, 8, 128), "SmolLM2": (30, 3, 64), "latent": (61, 0, 576)}, {"tiny": (2, 2, 8)}
)


@pytest.mark.parametrize("dtype", [*DTYPES, FP8], ids=str)
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("name", STORES)
def test_commits_move_what_was_accepted_and_nothing_else(name, page, dtype):
    (layers, heads, size), by = STORES[name], generator(22)
    batch, length, window = pick(64, 3), 6, 64
    pages = batch * -(-24 // page) + 1
    scratch = pages * page
    shape = (
        (layers, heads, scratch + batch * window, size) if heads else (layers, scratch + batch * window, size)
    )
    k = randn(*shape, by=by).to(dtype)
    v = randn(*shape, by=by).to(dtype) if heads else None
    table = torch.randperm(pages - 1, generator=by, device=DEVICE).view(batch, -1)
    nodes = torch.randint(0, window, (batch, length), generator=by, device=DEVICE)
    first = torch.randint(0, 24 - length, (batch,), generator=by, device=DEVICE)
    count = torch.randint(0, length + 1, (batch,), generator=by, device=DEVICE)
    before = [None if x is None else x.clone() for x in (k, v)]
    commit_path(k, v, table, page, nodes, first, count, scratch, window, backend="triton")
    sources, targets = [], []
    for b, (start, many) in enumerate(zip(first.tolist(), count.tolist(), strict=True)):
        place = torch.arange(start, start + many, device=DEVICE)
        sources.append(scratch + b * window + nodes[b, :many])
        targets.append(table[b, place // page] * page + place % page)
    source, target = torch.cat(sources), torch.cat(targets)
    for ours, old in zip((k, v), before, strict=True):
        if ours is not None:
            raw, expected = ours.view(torch.uint8), old.view(torch.uint8)
            expected[..., target, :] = expected[..., source, :].clone()
            assert_same_bits("commit_path", raw, expected)


def test_rows_of_slots_are_gathered_and_written_back():
    by = generator(24)
    slots = [
        torch.randint(0, 2**40, (65, 512), generator=by, device=DEVICE),
        torch.randint(0, 2, (65,), generator=by, device=DEVICE).bool(),
        randn(65, 4096, dtype=torch.bfloat16, by=by),
        randn(65, 10, dtype=torch.float32, by=by),
    ]
    rows = torch.randperm(65, generator=by, device=DEVICE)[:32]
    found = gather_rows(slots, rows, backend="triton")
    for ours, table in zip(found, slots, strict=True):
        assert torch.equal(ours, table[rows])
    expected = [table.clone() for table in slots]
    new = [part.flip(0) for part in found]
    write_rows(slots, rows, new, backend="triton")
    write_rows(expected, rows, new, backend="reference")
    for ours, exact in zip(slots, expected, strict=True):
        assert torch.equal(ours, exact)


def test_the_outcome_of_a_path_is_the_references():
    by = generator(25)
    logits = randn(65, 16, 1271, dtype=torch.bfloat16, by=by)
    logits[3, 4, 5] = torch.nan
    path, tokens = (torch.randint(0, 16, (65, 6), generator=by, device=DEVICE) for _ in range(2))
    accepted = Accepted(path, tokens, torch.randint(0, 6, (65,), generator=by, device=DEVICE))
    lens = torch.randint(0, 2**40, (65,), generator=by, device=DEVICE)
    ours = outcome(logits.amax(-1), accepted, lens % 3 > 0, lens, backend="triton")
    theirs = outcome(logits.amax(-1), accepted, lens % 3 > 0, lens, backend="reference")
    for name, one, other in zip(ours._fields, ours, theirs, strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", pick([576, 4096, 8192], [48]))
def test_inputs_of_a_head_are_normed_and_joined(size, dtype):
    by = generator(26)
    features, table = randn(40, size, dtype=dtype, by=by), randn(1271, size, dtype=dtype, by=by)
    norms = (randn(size, dtype=dtype, by=by), randn(size, dtype=dtype, by=by))
    rows = torch.randint(0, 40, (37,), generator=by, device=DEVICE)
    tokens = torch.randint(0, 1271, (37,), generator=by, device=DEVICE)
    x, taken = draft_inputs(features, rows, tokens, table, norms, 1e-5, backend="triton")
    parts = torch.stack((table[tokens], features[rows])).double()
    weights = torch.stack(norms).double()[:, None]
    exact = parts / (parts.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights
    assert_near("input", x, torch.cat(tuple(exact), -1))
    assert torch.equal(taken, features[rows])
