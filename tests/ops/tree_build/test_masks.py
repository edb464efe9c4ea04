"""Tree masks of other engines against an enumeration of every node's path to the root."""

import pytest
import torch

from eagle_kit.ops.tree_build.masks import tree_mask

TREES = {
    "one node": [-1],
    "chain": [-1, 0, 1, 2],
    "tree": [-1, 0, 0, 1, 2, 2, 3],
    "9 nodes": [-1, 0, 0, 0, 1, 1, 4, 4, 7],
    "17 nodes": [-1, *range(16)],
    "64 nodes, the highest bit": [-1, *range(63)],
}


def path_of(parents, node):
    """Yield the node and its ancestors."""
    while node >= 0:
        yield node
        node = parents[node]


def bits_of(parents):
    words = [sum(1 << node for node in path_of(parents, i)) for i in range(len(parents))]
    return torch.tensor([word - (1 << 64) if word >> 63 else word for word in words])


@pytest.mark.parametrize("name", TREES)
def test_every_form_lets_a_node_attend_to_its_path_only(name):
    parents = TREES[name]
    other = [-1] + [0] * (len(parents) - 1)
    trees, prefix = [parents, other], [3, 0]
    ancestors = torch.stack([bits_of(tree) for tree in trees])
    full, window = tree_mask(ancestors, "full", prefix), tree_mask(ancestors, "window")
    packed = tree_mask(ancestors, "packed")
    n, at = len(parents), 0
    for b, tree in enumerate(trees):
        for i in range(n):
            path = set(path_of(tree, i))
            assert {j for j in range(n) if window[b, i, j]} == path
            word = packed[b, i].item() % (1 << 8 * packed.itemsize)
            assert {j for j in range(64) if word >> j & 1} == path
            row = full[at : at + prefix[b] + n]
            at += prefix[b] + n
            assert row[: prefix[b]].all() and {j for j in range(n) if row[prefix[b] + j]} == path
    assert at == len(full)


@pytest.mark.parametrize(("nodes", "width"), [(1, 1), (8, 1), (9, 2), (16, 2), (17, 4), (33, 8), (64, 8)])
def test_words_are_the_narrowest_that_hold_a_window(nodes, width):
    assert tree_mask(torch.ones(1, nodes, dtype=torch.int64), "packed").itemsize == width


def test_the_last_nodes_of_a_window_ask_for_all_of_its_keys():
    bits = bits_of(TREES["9 nodes"])[None]
    whole, last = tree_mask(bits, "window"), tree_mask(bits[:, -2:], "window", num_keys=9)
    assert torch.equal(last, whole[:, -2:])
    assert torch.equal(tree_mask(bits[:, -2:], "full", [0], num_keys=9), last.flatten())
    assert tree_mask(bits[:, -2:], "packed", num_keys=9).dtype == torch.int16


def test_a_full_mask_needs_every_prefix():
    with pytest.raises(AssertionError, match="prefix of every request"):
        tree_mask(torch.ones(2, 3, dtype=torch.int64), "full", [5])
