"""Greedy verification against plain Python loops."""

import torch

from eagle_kit.ops.accept import accept_greedy


def walk(predicted, tokens, parents):
    node, emitted = 0, []
    while True:
        emitted.append(predicted[node])
        children = [i for i in range(1, len(tokens)) if parents[i] == node and tokens[i] == predicted[node]]
        if not children:
            return emitted
        node = children[0]


def test_equals_a_walk_over_random_trees():
    generator = torch.Generator().manual_seed(3)
    lengths = set()
    for _ in range(60):
        batch, nodes, vocab = 3, int(torch.randint(1, 24, (), generator=generator)), 3
        parents = torch.zeros(batch, nodes, dtype=torch.int64)
        for i in range(1, nodes):
            parents[:, i] = torch.randint(0, i, (batch,), generator=generator)
        tokens = torch.randint(0, vocab, (batch, nodes), generator=generator)
        predicted = torch.randint(0, vocab, (batch, nodes), generator=generator)
        out = accept_greedy(predicted, tokens, parents, steps=nodes)
        for b in range(batch):
            expected = walk(predicted[b].tolist(), tokens[b].tolist(), parents[b].tolist())
            count = int(out.num_accepted[b]) + 1
            assert out.tokens[b, :count].tolist() == expected
            lengths.add(count)
    assert max(lengths) >= 4, "the trees must have had something to accept"


def test_the_root_is_never_its_own_child():
    same = torch.full((1, 3), 5)
    out = accept_greedy(same, torch.tensor([[5, 1, 2]]), torch.tensor([[0, 0, 1]]), steps=2)
    assert out.num_accepted.tolist() == [0] and out.tokens[0, 0] == 5
