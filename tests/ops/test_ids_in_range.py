"""Every operation that returns ids or indices names ones that exist, whatever its rows hold: the next kernel
reads memory there."""

import math

import pytest
import torch
from crossed import crossed

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.ops.accept import (
    accept_block,
    accept_most_likely,
    accept_rejection_chain,
    accept_relaxed,
    accept_target_only,
    most_likely,
)
from eagle_kit.ops.best_first import best_first
from eagle_kit.ops.draft_topk import draft_topk, topk_of_logits
from eagle_kit.ops.sampling import (
    make_sampling_batch,
    sample,
    sample_distinct,
    target_distribution,
    token_logprobs,
)
from eagle_kit.ops.soft_cross_entropy import Teacher, linear_soft_cross_entropy
from eagle_kit.ops.tree_build import grow_beam, start_beam, tree_build

NAN = math.nan
INF = math.inf
VOCABULARIES = [1, 250, 256, 4096, 4100, 49152]
"""Rows of one element, and rows whose last chunk of 256 or 4,096 is partial and full."""
STEPS = 1


def hostile_rows(vocab: int) -> torch.Tensor:
    """Rows ``[10, V]``: one value throughout, one value among zeros, and chunks of NaN beside good ones."""
    throughout = [torch.full((vocab,), value) for value in (NAN, INF, -INF, 0.0)]
    last, first, half = (torch.zeros(vocab) for _ in range(3))
    last[-1] = NAN
    first[0] = INF
    half[vocab // 2 :] = NAN
    masked = torch.full((vocab,), -INF)
    masked[-1] = NAN
    mixed = torch.tensor([NAN, INF, -INF]).repeat(vocab // 3 + 1)[:vocab]
    negative = -torch.full((vocab,), NAN)
    return torch.stack((*throughout, last, first, half, masked, mixed, negative))


def windows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A window of a chain for each of ``rows [B, V]``, all of whose nodes have that row: logits ``[B, N,
    V]``, drafted tokens and parents ``[B, N]``."""
    (b, vocab), nodes = rows.shape, STEPS + 1
    tokens = (torch.arange(nodes, device=rows.device) % vocab).expand(b, nodes).contiguous()
    parents = (torch.arange(nodes, device=rows.device) - 1).clamp(min=0).expand(b, nodes).contiguous()
    return rows[:, None].expand(b, nodes, vocab).contiguous(), tokens, parents


def assert_ids(ids: torch.Tensor, bound: int) -> None:
    """Assert that all ``ids`` are in 0 .. ``bound`` - 1."""
    assert ((ids >= 0) & (ids < bound)).all(), ids


def assert_path(accepted, vocab: int) -> None:
    """Assert that an accepted path names tokens, nodes and counts that exist."""
    assert_ids(accepted.tokens, vocab)
    assert_ids(accepted.path, STEPS + 1)
    assert_ids(accepted.num_accepted, STEPS + 1)


@pytest.fixture(params=["reference", "triton", "cpp"])
def backend(request):
    """Backend and device of an operation; C++ where there is a compiler."""
    name = request.param
    if name == "cpp":
        from eagle_kit.ops.cpu import cpp

        if not cpp.available():
            pytest.skip(f"no C++: {cpp.problem()}")
    return name, request.getfixturevalue("triton_device") if name == "triton" else "cpu"


@pytest.fixture(params=["reference", "triton"])
def without_cpp(request):
    """The same of an operation that has no form in C++."""
    name = request.param
    return name, request.getfixturevalue("triton_device") if name == "triton" else "cpu"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_greedy_tokens(backend, vocab):
    name, device = backend
    rows = hostile_rows(vocab).to(device)
    window = windows(rows)
    assert_path(accept_most_likely(*window, STEPS, backend=name), vocab)
    assert_ids(most_likely(rows, backend=name).tokens, vocab)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@crossed(
    ("vocab", [256, 250]),
    ("params", [{"temperature": 0.0}, {"top_k": 5, "top_p": 0.5, "min_p": 0.1}]),
)
def test_sampled_tokens(without_cpp, vocab, params):
    name, device = without_cpp
    logits, tokens, parents = windows(hostile_rows(vocab).to(device))
    b, nodes = tokens.shape
    batch = make_sampling_batch(
        [SamplingParams(**{"temperature": 1.0, **params})] * b,
        [[0]] * b,
        [1] * b,
        vocab,
        torch.device(device),
    )
    p = target_distribution(logits, batch, backend=name)
    uniforms = torch.full((b, nodes), 0.99, dtype=torch.float64, device=device)
    assert_ids(sample(p, uniforms, backend=name), vocab)
    depths = torch.arange(nodes, device=device).expand(b, nodes)
    chosen = accept_target_only(p, tokens, parents, depths, uniforms, STEPS, backend=name)
    assert_path(chosen, vocab)
    bonus = uniforms[:, 0]
    relaxed = accept_relaxed(p, tokens, parents, uniforms, bonus, STEPS, 0.5, 0.5, backend=name)
    assert_path(relaxed, vocab)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("vocab", [250, 256, pytest.param(4096, marks=pytest.mark.nightly)])
def test_sampled_drafts(without_cpp, vocab):
    """Hostile rows of p, of q, and of both."""
    name, device = without_cpp
    rows = hostile_rows(vocab).to(device)
    good = torch.full_like(rows, 1 / vocab)
    for p_rows, q_rows in ((rows, good), (good, rows), (rows, rows)):
        p, tokens, _ = windows(p_rows)
        q = windows(q_rows)[0][:, :STEPS].contiguous()
        uniforms = torch.full((len(rows), STEPS), 0.99, dtype=torch.float64, device=device)
        bonus = uniforms[:, 0].contiguous()
        assert_path(accept_rejection_chain(p, q, tokens, uniforms, bonus, backend=name), vocab)
        assert_path(accept_block(p, q, tokens, uniforms, bonus, backend=name), vocab)
    siblings = sample_distinct(rows, uniforms.expand(len(rows), 3).contiguous(), backend=name)
    assert_ids(siblings, vocab)
    assert all(len(set(row)) == 3 for row in siblings.tolist())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@crossed(("vocab", [70, 128, 256]), ("topk", [1, 4]))
def test_draft_tokens(without_cpp, vocab, topk):
    name, device = without_cpp
    one = torch.ones(1, 1, device=device)
    for row in hostile_rows(vocab).to(device):
        ids, _ = draft_topk(one, row[:, None].contiguous(), topk, backend=name)
        assert_ids(ids, vocab)
        assert len(set(ids[0].tolist())) == topk


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_most_likely_drafts_and_alternatives(vocab):
    """In C++ where there is a compiler, and in torch."""
    rows = hostile_rows(vocab)
    topk = min(4, vocab)
    assert_ids(topk_of_logits(rows, topk)[0], vocab)
    assert_ids(topk_of_logits(rows.bfloat16(), 1, normalized=False)[0], vocab)
    assert_ids(token_logprobs(rows, torch.zeros(len(rows), dtype=torch.int64), topk)[1], vocab)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [NAN, -NAN, INF, -INF, 0.0])
def test_trees(without_cpp, value):
    name, device = without_cpp
    shape = SpecShape(3, 4, 8)
    b = 2
    k = shape.topk
    roots = torch.arange(b, device=device)
    tokens = torch.arange(b * k * k, device=device).view(b * k, k)
    scores = torch.full((b * k, k), value, device=device)
    beam, candidates = start_beam(tokens[:b], scores[:b], shape, backend=name)
    for step in range(1, shape.steps):
        beam = grow_beam(beam, candidates, tokens, scores, step, backend=name)
        assert_ids(beam.rows, b * k)
        assert_ids(beam.ids, candidates.tokens.shape[1])
        assert_ids(beam.tokens, b * k * k)
    tree = tree_build(roots, *candidates, shape, backend=name)
    depths = torch.full((b, shape.steps, k, k), value, device=device)
    places = torch.arange(b * shape.steps * k, device=device).view(b, shape.steps, k)
    for window in (tree, best_first(roots, places, depths, shape, backend=name)):
        assert_ids(window.tokens, b * k * k)
        assert_ids(window.parents, shape.tokens)
        assert_ids(window.depths, shape.steps + 1)
        assert (window.parents[:, 1:] < torch.arange(1, shape.tokens, device=device)).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("vocab", [1, 250, 2048, 4096])
def test_best_tokens_of_a_loss(without_cpp, vocab):
    name, device = without_cpp
    one = torch.ones(1, 1, device=device)
    probs = torch.full((1, vocab), 1 / vocab, device=device)
    teacher = Teacher(probs, torch.zeros(1, dtype=torch.int64, device=device), one[0])
    for row in hostile_rows(vocab).to(device):
        found = linear_soft_cross_entropy(one, row[:, None].contiguous(), teacher, backend=name)
        assert_ids(found.best, vocab)
