"""Reranking: best paths kept, parents first, also at equal probabilities."""

import torch

from eagle_kit.core.shape import SpecShape
from eagle_kit.ops.tree_build import tree_build


def candidates(shape: SpecShape, batch: int, seed: int, certain: bool = False):
    """Random candidates with the scores of a real draft; ``certain`` makes every probability 1."""
    generator = torch.Generator().manual_seed(seed)
    k = shape.topk
    tokens, scores, parents = [], [], []
    for b in range(batch):
        step = torch.zeros(k) if certain else torch.rand(k, generator=generator).log()
        row_scores, row_parents = list(step.tolist()), [-1] * k
        beams = list(range(k))
        for _ in range(shape.steps - 1):
            new = []
            for beam in beams:
                for _ in range(k):
                    gain = 0.0 if certain else float(torch.rand((), generator=generator).log())
                    new.append((row_scores[beam] + gain, len(row_scores) + len(new), beam))
            row_scores += [score for score, _, _ in new]
            row_parents += [beam for _, _, beam in new]
            beams = [index for _, index, _ in sorted(new, key=lambda x: (-x[0], x[1]))[:k]]
        scores.append(row_scores)
        parents.append(row_parents)
        tokens.append([1000 * b + i for i in range(len(row_scores))])
    return torch.tensor(tokens), torch.tensor(scores), torch.tensor(parents)


def check(shape: SpecShape, certain: bool) -> None:
    batch = 3
    tokens, scores, parents = candidates(shape, batch, seed=shape.tokens, certain=certain)
    roots = torch.tensor([7, 8, 9])
    tree = tree_build(roots, tokens, scores, parents, shape)
    assert tree.tokens[:, 0].tolist() == [7, 8, 9]
    for b in range(batch):
        kept = [int(t) - 1000 * b for t in tree.tokens[b, 1:]]
        best = sorted(range(scores.shape[1]), key=lambda i: (-float(scores[b, i]), i))[: shape.tokens - 1]
        assert kept == sorted(best)
        for node in range(1, shape.tokens):
            parent = int(tree.parents[b, node])
            drafted_by = int(parents[b, kept[node - 1]])
            assert parent < node
            assert (kept[parent - 1] if parent else -1) == drafted_by
            assert int(tree.depths[b, node]) == int(tree.depths[b, parent]) + 1
            assert int(tree.ancestors[b, node]) == int(tree.ancestors[b, parent]) | (1 << node)


def test_keeps_the_best_paths_with_their_parents():
    for shape in (
        SpecShape(1, 3, 3),
        SpecShape(4, 1, 5),
        SpecShape(3, 2, 6),
        SpecShape(5, 4, 16),
        SpecShape(5, 10, 60),
    ):
        check(shape, certain=False)


def test_probabilities_of_one_do_not_select_a_child_without_its_parent():
    for shape in (SpecShape(4, 1, 5), SpecShape(5, 4, 16), SpecShape(6, 8, 60)):
        check(shape, certain=True)


def test_a_candidate_counts_no_more_than_its_ancestors_however_far_above():
    """Scores that are no sums of log-probabilities, as rounding or a broken draft leaves them."""
    for shape in (SpecShape(2, 3, 5), SpecShape(5, 2, 9), SpecShape(9, 2, 20)):
        tokens, _, parents = candidates(shape, 3, seed=shape.steps)
        scores = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(shape.tokens))
        tree = tree_build(torch.tensor([7, 8, 9]), tokens, scores, parents, shape)
        for b in range(3):
            least = scores[b].tolist()
            for number, parent in enumerate(parents[b].tolist()):
                least[number] = min(least[number], least[parent]) if parent >= 0 else least[number]
            best = sorted(range(len(least)), key=lambda i: (-least[i], i))[: shape.tokens - 1]
            assert [int(token) - 1000 * b for token in tree.tokens[b, 1:]] == sorted(best)
