"""Reference of the draft head: order, ties, normalisation, the map to target ids."""

import pytest
import torch

from eagle_kit.ops import draft_topk as operation
from eagle_kit.ops.draft_topk import draft_topk
from eagle_kit.ops.draft_topk.reference import best_of, topk_of_logits


def test_the_best_are_those_of_a_stable_sort():
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randint(-3, 4, (7, 401), generator=generator) * 0.5  # many ties
    zeros = torch.where(torch.rand(3, 50, generator=generator) < 0.5, 0.0, -0.0)
    for logits in (
        torch.randn(5, 1271, generator=generator),
        coarse,
        zeros,
        -coarse.abs() - 1,
        coarse * 1e38,
    ):
        for topk in (1, 4, 16):
            expected = logits.sort(dim=1, descending=True, stable=True).indices[:, :topk]
            assert torch.equal(best_of(logits, topk), expected)


def test_scores_are_log_probabilities_unless_a_chain_needs_none():
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(3, 8, generator=generator), torch.randn(20, 8, generator=generator)
    logits = x @ weight.T
    ids, scores = draft_topk(x, weight, 4, backend="reference")
    torch.testing.assert_close(scores, logits.log_softmax(-1).gather(1, ids))
    assert torch.equal(ids, topk_of_logits(logits, 4)[0])
    unranked, zeros = draft_topk(x, weight, 4, normalized=False, backend="reference")
    assert torch.equal(unranked, ids) and torch.equal(zeros, torch.zeros(3, 4))
    first, _ = draft_topk(x, weight, 1, normalized=False, backend="reference")
    assert torch.equal(first, ids[:, :1])


def test_ids_go_through_the_map():
    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn(3, 8, generator=generator), torch.randn(20, 8, generator=generator)
    token_map = torch.randperm(100, generator=generator)[:20]
    ids, _ = draft_topk(x, weight, 3, backend="reference")
    mapped, _ = draft_topk(x, weight, 3, token_map=token_map, backend="reference")
    assert torch.equal(mapped, token_map[ids])


@pytest.mark.parametrize("topk", [0, 17, 6])
def test_topk_out_of_range(topk):
    with pytest.raises(AssertionError, match="topk"):
        draft_topk(torch.ones(1, 4), torch.ones(5, 4), topk)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("topk", "has_cpp"), [(17, True), (40, True), (4, False), (1, False)])
def test_logits_at_hand_have_the_same_best(monkeypatch, topk, has_cpp, dtype):
    """More of them than the forms of our own take, and where there is no C++."""
    if not has_cpp:
        monkeypatch.setattr(operation, "uses_cpp", lambda logits: False)
    logits = torch.randperm(300, generator=torch.Generator().manual_seed(4)).view(3, 100).to(dtype) / 8
    ids, scores = operation.topk_of_logits(logits, topk)
    wanted = logits.float().log_softmax(-1)
    torch.testing.assert_close(scores, wanted.topk(topk).values)
    torch.testing.assert_close(scores, wanted.gather(1, ids))
    unranked, zeros = operation.topk_of_logits(logits, topk, normalized=False)
    assert torch.equal(logits.gather(1, unranked), logits.gather(1, ids))
    assert torch.equal(zeros, torch.zeros(3, topk))
