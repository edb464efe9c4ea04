"""Verifiers whose q is no distribution, such as that of a draft with NaN, emit the distribution of the
target, by the enumeration of ``test_accept_distributions``."""

import math
from itertools import product

import pytest
import torch
from crossed import crossed

from eagle_kit.ops.accept import accept_block, accept_rejection_chain, accept_rejection_tree
from eagle_kit.ops.sampling import VERIFY_UNIFORMS, sample_distinct, window_uniforms
from tests.ops.accept.test_accept_distributions import (
    TREE,
    P,
    Q,
    V,
    chains,
    check_lossless,
    cross,
    emitted_distribution,
    mean_accepted,
    rows,
    sobol,
    trees,
    with_zeros,
)
from tests.ops.accept.test_accept_triton import assert_same

NAN, INF = math.nan, math.inf
SPOILED = {
    "all NaN": [NAN] * V,
    "a NaN": [0.3, NAN, 0.2, 0.1],
    "infinity": [0.3, INF, 0.2, 0.1],
    "negative": [-0.5, 0.7, 0.5, 0.3],
    "zeros": [0.0] * V,
    "sum of two": [0.5] * V,
}
CHI_SQUARE_999 = 26.1
"""Quantile 0.999 for the 8 degrees of freedom of two tokens, of which 9 pairs are possible."""
SHAPES = {"chain": [0, 0, 1], "block": [0, 0, 1], "tree": TREE}


def windows(kind: str, points: int):
    """Windows drafted from ``Q``, and what verifies them once their q is spoiled."""
    if kind == "tree":
        tokens, weights, uniforms = cross(*trees(Q, distinct=True), sobol(points, 6))
    else:
        tokens, weights, uniforms = cross(*chains(Q), sobol(points, 3))
    shape = SHAPES[kind]

    def verify(probs, q, tokens, uniforms, device="cpu", **options):
        probs, q, tokens, uniforms = (x.to(device) for x in (probs, q, tokens, uniforms))
        if kind == "tree":
            up = torch.tensor(TREE, device=device).expand_as(tokens)
            return accept_rejection_tree(
                probs, q, tokens, up, uniforms[:, :5], uniforms[:, 5], steps=2, **options
            )
        accept = accept_block if kind == "block" else accept_rejection_chain
        return accept(probs, q, tokens, uniforms[:, :2], uniforms[:, 2], **options)

    return tokens, weights, uniforms, rows(P, tokens, shape), rows(Q, tokens, shape)[:, :2], verify


@crossed(("what", SPOILED), ("kind, spoiled", product(SHAPES, [0, 1])))
def test_the_distribution_is_the_targets(kind, what, spoiled):
    tokens, weights, uniforms, probs, q, verify = windows(kind, 1024 if kind == "tree" else 2048)
    q[:, spoiled] = torch.tensor(SPOILED[what])
    accepted = verify(probs, q, tokens, uniforms)
    check_lossless(accepted, weights)
    assert int(accepted.num_accepted.max()) == spoiled, "what was not sampled from q is not accepted"


@pytest.mark.parametrize("kind", SHAPES)
def test_responses_of_many_seeds_pass_a_chi_square_test(kind):
    """With the random numbers of the engine: every spoiled row, and rows that are not."""
    count, verify = 2000, windows(kind, 1)[-1]
    tokens, weights = trees(Q, distinct=True) if kind == "tree" else chains(Q)
    generator = torch.Generator().manual_seed(4)
    tokens = tokens[torch.multinomial(weights, count, replacement=True, generator=generator)]
    probs, q = (rows(x, tokens, SHAPES[kind]) for x in (P, Q))
    q, choices = q[:, :2].clone(), torch.tensor(list(SPOILED.values()))
    is_spoiled = torch.rand(count, 2, generator=generator) < 0.5
    what = choices[torch.randint(0, len(choices), (count, 2), generator=generator)]
    q = torch.where(is_spoiled[..., None], what, q)
    uniforms = window_uniforms(torch.arange(count), torch.full((count,), 17), 6, VERIFY_UNIFORMS)
    accepted = verify(probs, q, tokens, uniforms)
    emitted = emitted_distribution(accepted, torch.ones(count, dtype=torch.float64), P).sum(-1)
    expected = (P.first[:, None] * P.second).double() * count
    cells = expected > 0
    assert (emitted[~cells] == 0).all()
    chi_square = float(((emitted - expected)[cells] ** 2 / expected[cells]).sum())
    assert cells.sum() == 9 and chi_square < CHI_SQUARE_999


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("kind", SHAPES)
def test_nan_reads_as_zero(triton_device, kind, backend):
    """A row that is a distribution without its NaN stays one."""
    device = triton_device if backend == "triton" else "cpu"
    draft = with_zeros(Q)
    tokens, weights = trees(draft, True) if kind == "tree" else chains(draft)
    tokens = tokens[weights > 0][::3][:6]
    generator = torch.Generator().manual_seed(2)
    uniforms = torch.rand(len(tokens), 6, generator=generator, dtype=torch.float64)
    verify = windows(kind, 1)[-1]
    shape = SHAPES[kind]
    probs, q = (rows(x, tokens, shape) for x in (P, draft))
    q = q[:, :2]
    clean = verify(probs, q, tokens, uniforms, device, backend=backend)
    spoiled = verify(probs, q.masked_fill(q == 0, NAN), tokens, uniforms, device, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(clean, spoiled, strict=True))
    assert clean.num_accepted.max() == 2


@pytest.mark.parametrize("kind", SHAPES)
def test_kernels_sample_the_target_after_a_spoiled_row(triton_device, kind):
    """The first draft is certain, the second row is spoiled, the bonus uniforms are a grid: the counts of the
    second token differ from the target's by the grid alone."""
    count = 12
    verify = windows(kind, 1)[-1]
    shape = SHAPES[kind]
    tokens = torch.tensor([[0, 0, 1, 2, 3][: len(shape)]] * count)
    probs = rows(P, tokens, shape)
    probs[:, 0] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    q = probs[:, :2].clone()
    spoiled = list(SPOILED.values())
    q[:, 1] = torch.tensor([spoiled[i % len(spoiled)] for i in range(count)])
    uniforms = torch.full((count, 6), 0.5, dtype=torch.float64)
    uniforms[:, 2 if kind != "tree" else 5] = (torch.arange(count) + 0.5) / count
    ours = verify(probs, q, tokens, uniforms, triton_device, backend="triton")
    assert_same(ours, verify(probs, q, tokens, uniforms, backend="reference"))
    assert (ours.num_accepted == 1).all()
    emitted = torch.bincount(ours.tokens[:, 1].cpu(), minlength=V) / count
    assert (emitted[P.second[0] == 0] == 0).all() and (emitted - P.second[0]).abs().max() <= 1 / count


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_siblings_are_sampled_from_what_is_not_nan(triton_device, backend):
    device = triton_device if backend == "triton" else "cpu"
    probs = torch.tensor([[NAN] * 4, [0.2, NAN, 0.3, 0.0], [INF, 0.5, -1.0, 0.5]], device=device)
    uniforms = torch.tensor([[0.9, 0.1, 0.5]] * 3, dtype=torch.float64, device=device)
    sampled = sample_distinct(probs, uniforms, backend=backend).tolist()
    assert sampled == [[0, 1, 2], [2, 0, 1], [3, 1, 0]]


def test_a_draft_that_is_a_distribution_is_used():
    """The rule for rows that are none costs honest drafts nothing."""
    for kind in SHAPES:
        tokens, weights, uniforms, probs, q, verify = windows(kind, 64)
        assert mean_accepted(verify(probs, q, tokens, uniforms), weights) > 0.5
