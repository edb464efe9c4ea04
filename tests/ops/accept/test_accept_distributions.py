"""Every verifier emits the target's distribution.

The distributions of three tokens are known as tables over all contexts. Drafts are enumerated with their
exact probability, and uniform random numbers are a Sobol sequence (an equidistributed grid of the unit cube),
so that the emitted distribution of the first three tokens is an integral without noise; tokens that a
verifier does not emit are sampled from the target.
"""

from typing import NamedTuple

import pytest
import torch
from crossed import crossed

from eagle_kit.ops.accept import (
    accept_block,
    accept_rejection_chain,
    accept_rejection_tree,
    accept_relaxed,
    accept_target_only,
)

V = 4
CLOSE = 2e-3
"""Total variation attributed to the error of the grid; the wrong distributions below are 20 times further."""


class Distributions(NamedTuple):
    """``first [V]``, ``second [V, V]`` after every token, ``third [V, V, V]`` after every two."""

    first: torch.Tensor
    second: torch.Tensor
    third: torch.Tensor

    @property
    def joint(self) -> torch.Tensor:
        return self.first[:, None, None] * self.second[:, :, None] * self.third


def make_distributions(seed: int, temperature: float = 1.0) -> Distributions:
    generator = torch.Generator().manual_seed(seed)

    def distribution(*shape):
        weights = (torch.randn(*shape, V, generator=generator) / temperature).exp()
        return weights / weights.sum(-1, keepdim=True)

    return Distributions(distribution(), distribution(V), distribution(V, V))


def with_zeros(distributions: Distributions) -> Distributions:
    """Distributions with impossible tokens, as after top-k: another one after each token."""
    third = distributions.third.clone()
    third[..., 1] = 0
    second = distributions.second * (1 - torch.eye(V))
    first = distributions.first * torch.tensor([1.0, 1.0, 0.0, 1.0])
    return Distributions(*(x / x.sum(-1, keepdim=True) for x in (first, second, third)))


P, Q = with_zeros(make_distributions(0)), make_distributions(1)


def sobol(points: int, dims: int) -> torch.Tensor:
    return torch.quasirandom.SobolEngine(dims, scramble=True, seed=5).draw(points, dtype=torch.float64)


def cross(tokens: torch.Tensor, weights: torch.Tensor, uniforms: torch.Tensor):
    """Cross product of drafts and uniforms: tokens ``[M, N]``, weights ``[M]``, uniforms ``[C, D]`` -> ``M *
    C`` rows."""
    m, c = len(tokens), len(uniforms)
    return tokens.repeat_interleave(c, 0), weights.repeat_interleave(c) / c, uniforms.repeat(m, 1)


def rows(distributions: Distributions, tokens: torch.Tensor, parents: list[int]) -> torch.Tensor:
    """Distributions after every node of windows no deeper than two: ``[M, N, V]``."""
    out = []
    for node, parent in enumerate(parents):
        if node == 0:
            out.append(distributions.first.expand(len(tokens), V))
        elif parent == 0:
            out.append(distributions.second[tokens[:, node]])
        else:
            out.append(distributions.third[tokens[:, parent], tokens[:, node]])
    return torch.stack(out, 1)


def emitted_distribution(accepted, weights: torch.Tensor, target: Distributions) -> torch.Tensor:
    """Distribution ``[V, V, V]`` of the first three tokens when the target continues after the accepted
    ones."""
    distribution = torch.zeros(V, V, V, dtype=torch.float64)
    t, count = accepted.tokens, accepted.num_accepted
    first = torch.zeros(V, dtype=torch.float64).index_add(0, t[:, 0], weights * (count == 0))
    distribution += first[:, None, None] * target.second[:, :, None] * target.third
    if t.shape[1] > 1:
        second = torch.zeros(V * V, dtype=torch.float64)
        second.index_add_(0, t[:, 0] * V + t[:, 1] % V, weights * (count == 1))
        distribution += second.view(V, V, 1) * target.third
    if t.shape[1] > 2:
        index = (t[:, 0] * V + t[:, 1] % V) * V + t[:, 2] % V
        third = torch.zeros(V**3, dtype=torch.float64)
        distribution += third.index_add_(0, index, weights * (count == 2)).view(V, V, V)
    return distribution


def distance(distribution: torch.Tensor, other: torch.Tensor) -> float:
    """Total variation, after a check that nothing impossible was emitted."""
    assert distribution.sum().item() == pytest.approx(1.0, abs=1e-6)
    return float((distribution - other).abs().sum() / 2)


def check_lossless(accepted, weights, target=P) -> None:
    distribution = emitted_distribution(accepted, weights, target)
    assert (distribution[target.joint == 0] == 0).all(), "a token of probability zero was emitted"
    assert distance(distribution, target.joint) < CLOSE


def chains(draft: Distributions) -> tuple[torch.Tensor, torch.Tensor]:
    """All chains of two drafts behind a root, and their probability under the draft."""
    first, second = torch.meshgrid(torch.arange(V), torch.arange(V), indexing="ij")
    tokens = torch.stack((torch.zeros(V * V, dtype=torch.int64), first.flatten(), second.flatten()), 1)
    return tokens, (draft.first[:, None] * draft.second).flatten().double()


def verify_chains(verifier, target: Distributions, draft: Distributions, points: int = 8192):
    tokens, weights, uniforms = cross(*chains(draft), sobol(points, 3))
    probs, q = rows(target, tokens, [0, 0, 1]), rows(draft, tokens, [0, 0, 1])[:, :2]
    return verifier(probs, q, tokens, uniforms[:, :2], uniforms[:, 2]), weights


@crossed(
    ("verifier", [accept_rejection_chain, accept_block]),
    ("draft", [Q, make_distributions(2, temperature=0.3), P, with_zeros(make_distributions(3))]),
)
def test_sampled_chains_emit_the_distribution_of_the_target(verifier, draft):
    check_lossless(*verify_chains(verifier, P, draft))


def test_a_softmax_for_a_deterministic_draft_emits_another_distribution():
    """Shows the reason that ``accept`` refuses rejection for deterministic drafts: the top-1 chain comes with
    a q."""
    best = int(Q.first.argmax())
    tokens = torch.tensor([[0, best, int(Q.second[best].argmax())]])
    tokens, weights, uniforms = cross(tokens, torch.ones(1, dtype=torch.float64), sobol(8192, 3))
    probs, q = rows(P, tokens, [0, 0, 1]), rows(Q, tokens, [0, 0, 1])[:, :2]
    accepted = accept_rejection_chain(probs, q, tokens, uniforms[:, :2], uniforms[:, 2])
    assert distance(emitted_distribution(accepted, weights, P), P.joint) > 20 * CLOSE


TREE = [0, 0, 0, 1, 1]
"""Two children of the root, two of the first of them."""


def trees(draft: Distributions, distinct: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """All trees of the shape ``TREE``, siblings drawn without (``distinct``) or with replacement."""
    tokens = torch.cartesian_prod(*[torch.arange(V)] * 4)
    tokens = torch.cat((torch.zeros_like(tokens[:, :1]), tokens), 1)
    a, b, c, d = tokens[:, 1:].unbind(1)
    first, second = draft.first.double(), draft.second.double()
    if not distinct:
        return tokens, first[a] * first[b] * second[a, c] * second[a, d]
    second_draw = first[b] / (1 - first[a]) * second[a, d] / (1 - second[a, c])
    weights = first[a] * second[a, c] * second_draw * (a != b) * (c != d)
    return tokens[weights > 0], weights[weights > 0]


@crossed(("distinct", [True, False]), ("draft", [Q, make_distributions(2, temperature=0.5)]))
def test_sampled_trees_emit_the_distribution_of_the_target(draft, distinct):
    tokens, weights, uniforms = cross(*trees(draft, distinct), sobol(2048, 6))
    parents = torch.tensor(TREE).expand_as(tokens)
    probs, q = rows(P, tokens, TREE), rows(draft, tokens, TREE)[:, :2]
    accepted = accept_rejection_tree(probs, q, tokens, parents, uniforms[:, :5], uniforms[:, 5], steps=2)
    check_lossless(accepted, weights)
    assert (accepted.path[:, 1] == 2).any() and (accepted.path[:, 2] == 4).any()


def test_a_sibling_beyond_the_last_token_of_q_changes_nothing():
    """q has one token, its sibling is a filler: the distribution is the target's for any filler."""
    for fill in range(V):
        tokens = torch.tensor([[0, 3, fill]])
        tokens, weights, uniforms = cross(tokens, torch.ones(1, dtype=torch.float64), sobol(8192, 4))
        q = torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(len(tokens), 1, V)
        parents = torch.zeros_like(tokens)
        probs = rows(P, tokens, [0, 0, 0])
        accepted = accept_rejection_tree(probs, q, tokens, parents, uniforms[:, :3], uniforms[:, 3], steps=1)
        check_lossless(accepted, weights)


def fixed_tree(children: list[int]) -> torch.Tensor:
    """Deterministic draft: the root's two children and two of the first one's."""
    return torch.tensor([[0, *children]])


@pytest.mark.parametrize("children", [[0, 1, 2, 3], [2, 3, 0, 1], [3, 3, 1, 1], [1, 0, -1, 3]])
def test_deterministic_trees_emit_the_distribution_of_the_target(children):
    """Also with repeated siblings, impossible tokens and unused nodes."""
    one = torch.ones(1, dtype=torch.float64)
    tokens, weights, uniforms = cross(fixed_tree(children), one, sobol(32768, 4))
    probs, parents = rows(P, tokens, TREE), torch.tensor(TREE).expand_as(tokens)
    depths = torch.tensor([0, 1, 1, 2, 2]).expand_as(tokens)
    check_lossless(accept_target_only(probs, tokens, parents, depths, uniforms[:, :3], 2), weights)
    relaxed = accept_relaxed(probs, tokens, parents, uniforms[:, :3], uniforms[:, 3], 2, 1.0, 1.0)
    check_lossless(relaxed, weights)


@pytest.mark.parametrize("single, acc", [(0.25, 1.0), (1.0, 0.5)])
def test_thresholds_below_one_are_lossy_and_accept_more(single, acc):
    one = torch.ones(1, dtype=torch.float64)
    tokens, weights, uniforms = cross(fixed_tree([0, 1, 2, 3]), one, sobol(8192, 4))
    probs, parents = rows(P, tokens, TREE), torch.tensor(TREE).expand_as(tokens)

    def relaxed(single, acc):
        return accept_relaxed(probs, tokens, parents, uniforms[:, :3], uniforms[:, 3], 2, single, acc)

    exact, lossy = relaxed(1.0, 1.0), relaxed(single, acc)
    distribution = emitted_distribution(lossy, weights, P)
    assert distance(distribution, P.joint) > 20 * CLOSE
    assert (distribution[P.joint == 0] == 0).all()
    assert lossy.num_accepted.double().mean() > exact.num_accepted.double().mean() + 0.1


def mean_accepted(accepted, weights) -> float:
    return float((accepted.num_accepted * weights).sum())


def test_block_verification_accepts_as_the_paper_says():
    """Example of arXiv 2403.10444, section 2: 10/9 tokens by rejection, 11/9 as a block."""
    target, draft = torch.tensor([1 / 3, 2 / 3, 0, 0]), torch.tensor([2 / 3, 1 / 3, 0, 0])
    p, q = (Distributions(x, x.expand(V, V), x.expand(V, V, V)) for x in (target, draft))
    assert mean_accepted(*verify_chains(accept_rejection_chain, p, q)) == pytest.approx(10 / 9, abs=1e-3)
    assert mean_accepted(*verify_chains(accept_block, p, q)) == pytest.approx(11 / 9, abs=1e-3)


def test_block_verification_accepts_at_least_as_much_as_rejection():
    gains = []
    for seed in range(12):
        p, q = make_distributions(10 + seed), make_distributions(50 + seed)
        rejection = mean_accepted(*verify_chains(accept_rejection_chain, p, q, 1024))
        block = mean_accepted(*verify_chains(accept_block, p, q, 1024))
        ratio_1 = (p.first / q.first)[:, None].clamp(max=1.0)
        joint_2 = (ratio_1 * p.second / q.second).clamp(max=1.0)
        expected = (q.first * ratio_1[:, 0]).sum() + (q.first[:, None] * q.second * joint_2).sum()
        assert block == pytest.approx(float(expected), abs=5e-3)
        gains.append(block - rejection)
    assert min(gains) > -2e-3 and max(gains) > 0.02
