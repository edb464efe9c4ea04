"""The verifier is chosen by the distribution of the draft, and whole runs of cycles follow the target."""

import pytest
import torch

from eagle_kit.config.engine import EngineConfig
from eagle_kit.ops.attention.window import ancestor_bits
from eagle_kit.ops.sampling import (
    DRAFT_UNIFORMS,
    TARGET_UNIFORMS,
    position_uniforms,
    sample,
    sample_distinct,
    window_uniforms,
)
from eagle_kit.ops.tree_build import Tree, chain_build
from eagle_kit.verify.proposal import Deterministic, DraftOutput, SampledChain, SampledTree
from eagle_kit.verify.verifiers import (
    BlockVerification,
    RejectionSampling,
    Relaxed,
    TargetOnly,
    accept,
    make_verifier,
)

V, S = 5, 3


def markov(seed: int, temperature: float = 1.0) -> torch.Tensor:
    """The distribution after every token, ``[V, V]``; one token is impossible after each."""
    logits = torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) / temperature
    return logits.masked_fill(torch.eye(V, dtype=torch.bool), float("-inf")).softmax(-1)


P, Q = markov(0), markov(1, temperature=0.7)


def window(roots: torch.Tensor, parents: list[int], tokens: torch.Tensor) -> Tree:
    b, n = tokens.shape
    up = torch.tensor(parents).expand(b, n)
    depths = torch.zeros(b, n, dtype=torch.int64)
    for i in range(1, n):
        depths[:, i] = depths[:, parents[i]] + 1
    return Tree(tokens, up, depths, ancestor_bits(up, S))


def top_two(roots, seeds, positions):
    """A deterministic tree: the two most likely tokens after the root, and two after the first of them."""
    first = Q[roots].topk(2).indices
    second = Q[first[:, 0]].topk(2).indices
    return window(roots, [0, 0, 0, 1, 1], torch.cat((roots[:, None], first, second), 1)), Deterministic()


def drawn_chain(roots, seeds, positions):
    uniforms = window_uniforms(seeds, positions, S, DRAFT_UNIFORMS)
    tokens = [roots]
    for i in range(S):
        tokens.append(sample(Q[tokens[-1]], uniforms[:, i]))
    chain = torch.stack(tokens, 1)
    return chain_build(roots, chain[:, 1:]), SampledChain(Q[chain[:, :-1]])


def drawn_tree(roots, seeds, positions):
    uniforms = window_uniforms(seeds, positions, 4, DRAFT_UNIFORMS)
    first = sample_distinct(Q[roots], uniforms[:, :2])
    second = sample_distinct(Q[first[:, 0]], uniforms[:, 2:])
    tokens = torch.cat((roots[:, None], first, second), 1)
    return window(roots, [0, 0, 0, 1, 1], tokens), SampledTree(Q[tokens[:, :2]])


def decode(propose, verifier, seeds: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, float]:
    """Cycle after cycle from token 0 at position 0 -> tokens ``[B, num_tokens]`` and the mean accepted."""
    b = len(seeds)
    roots, positions = torch.zeros(b, dtype=torch.int64), torch.zeros(b, dtype=torch.int64)
    text = torch.zeros(b, num_tokens + 2 * S + 2, dtype=torch.int64)
    accepted_per_cycle = []
    while int(positions.min()) < num_tokens:
        tree, proposal = propose(roots, seeds, positions)
        result = accept(P[tree.tokens], DraftOutput(tree, proposal), verifier, seeds, positions, S)
        place = torch.arange(S + 1)
        new = place <= result.num_accepted[:, None]
        at = torch.where(new, positions[:, None] + 1 + place, text.shape[1] - 1).clamp(max=text.shape[1] - 1)
        text.scatter_(1, at, result.tokens * new)
        positions = positions + result.num_accepted + 1
        roots = result.tokens.gather(1, result.num_accepted[:, None])[:, 0]
        ahead = positions >= num_tokens  # those wait for the others where they are
        positions = torch.where(ahead, num_tokens, positions)
        accepted_per_cycle.append(result.num_accepted.double().mean())
    return text[:, 1 : num_tokens + 1], float(torch.stack(accepted_per_cycle).mean())


def test_deterministic_drafts_change_no_token():
    seeds = torch.arange(300)
    text, mean = decode(top_two, TargetOnly(), seeds, 12)
    token, plain = torch.zeros(300, dtype=torch.int64), []
    for position in range(1, 13):
        uniform = position_uniforms(seeds, torch.full((300, 1), position), TARGET_UNIFORMS)[:, 0]
        token = sample(P[token], uniform)
        plain.append(token)
    assert torch.equal(text, torch.stack(plain, 1))
    assert mean > 0.3, "the draft must have had something accepted"


@pytest.mark.parametrize(
    "propose, verifier",
    [
        (drawn_chain, RejectionSampling()),
        (drawn_chain, BlockVerification()),
        (drawn_tree, RejectionSampling()),
        (top_two, Relaxed(1.0, 1.0)),
        (top_two, TargetOnly()),
    ],
)
def test_runs_of_cycles_follow_the_target(propose, verifier):
    """40,000 responses of four tokens against their distribution, across cycles whose uniform random numbers
    must not depend on each other."""
    num = 40_000
    text, mean = decode(propose, verifier, torch.arange(num) * 7919, 4)
    cells = torch.bincount((text * torch.tensor([V**3, V**2, V, 1])).sum(1), minlength=V**4).double()
    distribution = torch.einsum("a,ab,bc,cd->abcd", P[0], P, P, P).flatten().double()
    assert cells[distribution == 0].sum() == 0
    expected = num * distribution
    rare = expected < 5  # one cell for all of them
    observed = torch.cat((cells[~rare], cells[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    chi_square = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5
    assert mean > 0.3


def test_an_engine_gets_the_verifier_that_it_asks_for():
    def made(**options):
        return make_verifier(EngineConfig(**options).resolve(on_gpu=False))

    assert made() is None and made(sampled_drafts=True) is None
    assert made(verifier="target-only") == TargetOnly()
    assert made(verifier="rejection", sampled_drafts=True) == RejectionSampling()
    assert made(verifier="block", sampled_drafts=True) == BlockVerification()
    thresholds = {"accept_threshold_single": 0.25, "accept_threshold_acc": 0.75}
    assert made(**thresholds) == made(verifier="relaxed", **thresholds) == Relaxed(0.25, 0.75)
    assert made(accept_threshold_single=0.25) == Relaxed(0.25, 1.0)
    assert made(accept_threshold_acc=0.75) == Relaxed(1.0, 0.75)


@pytest.mark.parametrize(("single", "acc", "share"), [(1.0, 0.5, 0.8), (0.5, 1.0, 0.4), (0.4, 1.0, 1.0)])
def test_each_threshold_is_of_its_own_kind(single, acc, share):
    """A draft of probability 0.4 is accepted for it alone, or for its share of the other threshold."""
    num = 4000
    probs = torch.tensor([0.1, 0.4, 0.5]).expand(num, 2, 3)
    roots = torch.zeros(num, dtype=torch.int64)
    seeds = torch.arange(num)
    drafted = DraftOutput(chain_build(roots, roots[:, None] + 1), Deterministic())
    result = accept(probs, drafted, Relaxed(single, acc), seeds, roots, 1)
    assert result.num_accepted.double().mean().item() == pytest.approx(share, abs=0.03)


def test_a_verifier_that_does_not_fit_the_draft_is_refused():
    seeds = torch.arange(3)
    chain, tree, fixed = (f(seeds, seeds, seeds) for f in (drawn_chain, drawn_tree, top_two))
    for (shape, proposal), verifier in (
        (fixed, RejectionSampling()),
        (fixed, BlockVerification()),
        (tree, BlockVerification()),
        (tree, TargetOnly()),
        (chain, TargetOnly()),
        (chain, Relaxed(1.0, 1.0)),
    ):
        with pytest.raises(TypeError, match="is not sound for"):
            accept(P[shape.tokens], DraftOutput(shape, proposal), verifier, seeds, seeds, S)
