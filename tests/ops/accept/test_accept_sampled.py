"""Verifiers at edge cases (uniforms, zeros, equal distributions) and against plain Python loops."""

import pytest
import torch
from siblings import check_distinct_siblings
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle_kit.ops.accept import (
    accept_block,
    accept_rejection_chain,
    accept_rejection_tree,
    accept_relaxed,
    accept_target_only,
)
from eagle_kit.ops.sampling import sample, sample_distinct

B, V, S = 3, 1271, 4
EDGES = (0.0, 1 - 2.0**-24, 1 - 2.0**-53)
PARENTS = [0, 0, 0, 0, 1, 1, 4, 6]


def distributions(generator, *shape, zeros=0.0, vocab=V):
    weights = torch.randn(*shape, vocab, generator=generator).mul(2).exp()
    weights *= torch.rand(*shape, vocab, generator=generator) >= zeros
    return weights / weights.sum(-1, keepdim=True)


def full(uniform, *shape):
    return torch.full(shape, uniform, dtype=torch.float64)


def run_all(probs, q, tokens, uniform):
    """Every verifier with all uniforms equal, on windows of 8 nodes: (accepted, tokens, parents) by name."""
    b = len(probs)
    chain, up = tokens[:, : S + 1], torch.arange(-1, S).clamp(min=0).expand(b, S + 1)
    parents = torch.tensor(PARENTS).expand(b, 8)
    depths = torch.tensor([0, 1, 1, 1, 2, 2, 3, 4]).expand(b, 8)
    node, bonus, depth = full(uniform, b, 8), full(uniform, b), full(uniform, b, S + 1)
    p_chain, q_chain = probs[:, : S + 1], q[:, :S]
    return {
        "chain": (accept_rejection_chain(p_chain, q_chain, chain, depth[:, 1:], bonus), chain, up),
        "block": (accept_block(p_chain, q_chain, chain, depth[:, 1:], bonus), chain, up),
        "tree": (accept_rejection_tree(probs, q, tokens, parents, node, bonus, S), tokens, parents),
        "target": (accept_target_only(probs, tokens, parents, depths, depth, S), tokens, parents),
        "relaxed": (accept_relaxed(probs, tokens, parents, depth, bonus, S, 0.0, 0.0), tokens, parents),
    }


@pytest.mark.parametrize("uniform", EDGES)
def test_a_token_of_probability_zero_is_never_emitted(uniform):
    generator = torch.Generator().manual_seed(1)
    ends = set()
    for trial in range(20):
        probs = distributions(generator, B, 8, zeros=0.7)
        q = (
            distributions(generator, B, 8)
            if trial % 2
            else probs + 1e-7 * torch.rand(B, 8, V, generator=generator)
        )
        tokens = torch.randint(0, V, (B, 8), generator=generator)
        known = probs[:, PARENTS[1:]]  # also drafts that the target may emit: its best, first and last token
        if trial % 4 == 0:
            tokens[:, 1:] = known.argmax(-1)
        elif trial % 4 == 1:
            tokens[:, 1:] = sample(known, full(uniform, B, 7))
        for name, (accepted, window, parents) in run_all(probs, q, tokens, uniform).items():
            path, emitted, count = accepted
            for b in range(B):
                for i in range(int(count[b]) + 1):
                    node = int(path[b, i])
                    assert probs[b, node, emitted[b, i]] > 0, (name, trial, b, i)
                    if i < count[b]:
                        child = int(path[b, i + 1])
                        assert parents[b, child] == node and window[b, child] == emitted[b, i]
                assert (path[b, int(count[b]) :] == path[b, int(count[b])]).all()
                ends.add((name, int(count[b]) > 0))
    assert {name for name, some in ends if some} == {"chain", "block", "tree", "target", "relaxed"}


@pytest.mark.parametrize("uniform", EDGES)
def test_equal_distributions_keep_every_draft(uniform):
    generator = torch.Generator().manual_seed(2)
    probs = distributions(generator, B, S + 1, zeros=0.5)
    sampled = torch.multinomial(probs[:, :S].reshape(-1, V), 1, generator=generator).view(B, S)
    tokens = torch.cat((torch.zeros(B, 1, dtype=torch.int64), sampled), 1)
    parents = torch.arange(-1, S).clamp(min=0).expand(B, S + 1)
    q, uniforms, bonus = probs[:, :S], full(uniform, B, S + 1), full(uniform, B)
    for accepted in (
        accept_rejection_chain(probs, q, tokens, uniforms[:, 1:], bonus),
        accept_block(probs, q, tokens, uniforms[:, 1:], bonus),
        accept_rejection_tree(probs, q, tokens, parents, uniforms, bonus, S),
    ):
        assert accepted.num_accepted.tolist() == [S] * B
        assert torch.equal(accepted.tokens[:, :S], sampled)
        assert (probs[:, S].gather(1, accepted.tokens[:, S:]) > 0).all()


def test_a_chain_is_verified_as_a_tree_without_branches():
    generator = torch.Generator().manual_seed(3)
    b = 400
    probs, q = distributions(generator, b, S + 1, vocab=7), distributions(generator, b, S, vocab=7)
    tokens = torch.randint(0, 7, (b, S + 1), generator=generator)
    tokens[:, 1:] = torch.multinomial(q.view(-1, 7), 1, generator=generator).view(b, S)
    uniforms = torch.rand(b, S + 1, generator=generator, dtype=torch.float64)
    bonus = torch.rand(b, generator=generator, dtype=torch.float64)
    parents = torch.arange(-1, S).clamp(min=0).expand(b, S + 1)
    chain = accept_rejection_chain(probs, q, tokens, uniforms[:, 1:], bonus)
    tree = accept_rejection_tree(probs, q, tokens, parents, uniforms, bonus, S)
    emitted = torch.arange(S + 1) <= chain.num_accepted[:, None]
    assert torch.equal(chain.num_accepted, tree.num_accepted) and torch.equal(chain.path, tree.path)
    assert torch.equal(chain.tokens * emitted, tree.tokens * emitted)
    assert set(chain.num_accepted.tolist()) == {0, 1, 2, 3, 4}


def relaxed_walk(probs, tokens, parents, uniforms, single, acc):
    """SGLang's loop over first children and siblings -> accepted nodes and the residual of p."""
    node, path, left = 0, [], probs[0].clone()
    while True:
        mass, uniform = 0.0, uniforms[len(path)]
        for child in range(1, len(tokens)):
            if parents[child] != node:
                continue
            p = float(probs[node, tokens[child]])
            mass += p
            if uniform < mass / acc or p >= single:
                path.append(child)
                node, left = child, probs[child].clone()
                break
            left[tokens[child]] = 0
        else:
            return path, left


@pytest.mark.parametrize("single, acc", [(1.0, 1.0), (0.3, 1.0), (1.0, 0.6), (0.2, 0.4)])
def test_thresholds_mean_what_they_mean_in_sglang(single, acc):
    generator = torch.Generator().manual_seed(4)
    b, vocab = 400, 9
    probs = distributions(generator, b, 8, vocab=vocab)
    parents = torch.zeros(b, 8, dtype=torch.int64)
    for i in range(1, 8):
        parents[:, i] = torch.randint(0, i, (b,), generator=generator)
    tokens = torch.stack([torch.randperm(vocab, generator=generator)[:8] for _ in range(b)])
    uniforms = torch.rand(b, 8, generator=generator, dtype=torch.float64)
    bonus = torch.rand(b, generator=generator, dtype=torch.float64)
    accepted = accept_relaxed(probs, tokens, parents, uniforms, bonus, 7, single, acc)
    for i in range(b):
        path, left = relaxed_walk(probs[i], tokens[i], parents[i].tolist(), uniforms[i].tolist(), single, acc)
        count = len(path)
        assert accepted.path[i, : count + 1].tolist() == [0, *path] and accepted.num_accepted[i] == count
        assert accepted.tokens[i, :count].tolist() == tokens[i, path].tolist()
        sums = left.double().cumsum(0)
        assert accepted.tokens[i, count] == int((sums > bonus[i] * sums[-1]).int().argmax())
    assert accepted.num_accepted.max() >= 2


def test_a_threshold_outside_its_range_is_refused():
    window = torch.zeros(1, 1, dtype=torch.int64)
    for single, acc in ((1.5, 1.0), (1.0, -0.1)):
        with pytest.raises(ValueError, match="threshold_.* 1 is lossless"):
            accept_relaxed(torch.ones(1, 1, 3), window, window, full(0, 1, 1), full(0, 1), 0, single, acc)


def test_repeated_siblings_are_found():
    parents = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 1, 2]])
    good = torch.tensor([[5, 7, 8, 7, 5], [5, 7, 8, 9, 9]])  # cousins may be the same token
    check_distinct_siblings(good, parents)
    check_distinct_siblings(torch.tensor([[5, -1, -1, 3, 4]]), parents[:1])
    bad = good.clone()
    bad[0, 4] = 7
    with pytest.raises(ValueError, match="nodes 3 and 4, children of node 1, are both token 7"):
        check_distinct_siblings(bad, parents)


def test_siblings_sampled_for_a_tree_are_distinct():
    generator = torch.Generator().manual_seed(5)
    q = distributions(generator, 50, 1, zeros=0.998)[:, 0].nan_to_num(0.0)
    q[:, 5] += 0.5  # some distributions have fewer tokens than are sampled
    uniforms = torch.rand(50, 6, generator=generator, dtype=torch.float64)
    sampled = sample_distinct(q, uniforms)
    check_distinct_siblings(torch.cat((sampled[:, :1], sampled), 1), torch.zeros(50, 7, dtype=torch.int64))
    assert (q > 0).sum(1).min() < 6
    assert torch.equal((q.gather(1, sampled) > 0).sum(1), (q > 0).sum(1).clamp(max=6))


def test_every_verifier_needs_no_host():
    generator = torch.Generator().manual_seed(6)
    probs, q = distributions(generator, B, 8), distributions(generator, B, 8)
    tokens = torch.randint(0, V, (B, 8), generator=generator)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (probs, q, tokens)]
        for accepted, _, _ in run_all(*fake, 0.5).values():
            assert accepted.tokens.shape == accepted.path.shape == (B, S + 1)
        assert sample_distinct(fake[1][:, 0], full(0.5, B, 4)).shape == (B, 4)
