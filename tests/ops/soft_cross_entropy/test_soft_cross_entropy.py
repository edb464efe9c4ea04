"""Fused loss against autograd on whole logits."""

import pytest
import torch

from eagle_kit.ops.soft_cross_entropy import Teacher, linear_soft_cross_entropy


@pytest.mark.parametrize(("chunk", "group"), [(128, 1024), (7, 20), (64, 64)])
def test_loss_and_gradients_equal_autograd(chunk, group):
    generator = torch.Generator().manual_seed(chunk)
    rows, vocab, size, positions = 101, 1271, 23, 57
    h = torch.randn(rows, size, generator=generator, requires_grad=True)
    w = torch.randn(vocab, size, generator=generator, requires_grad=True)
    probs = torch.randn(positions, vocab, generator=generator).mul(3).softmax(-1)
    index = torch.randint(0, positions, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator)
    z = (h @ w.t()).double()
    row_losses = -(probs[index].double() * z.log_softmax(-1)).sum(-1)
    expected = torch.autograd.grad((row_losses * weights).sum() * 2, (h, w))
    out = linear_soft_cross_entropy(h, w, Teacher(probs, index, weights), chunk_rows=chunk, group_rows=group)
    torch.testing.assert_close(out.row_losses.double(), row_losses, rtol=1e-5, atol=1e-4)
    assert torch.equal(out.best, z.argmax(-1))
    for ours, theirs in zip(torch.autograd.grad(out.loss * 2, (h, w)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_teacher_of_probability_one_gives_hard_cross_entropy():
    h, w = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(0))
    truth = torch.arange(8).flip(0)
    probs = torch.eye(8)[truth]
    out = linear_soft_cross_entropy(h, w, Teacher(probs, torch.arange(8), torch.ones(8)))
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(h @ w.t(), truth, reduction="sum"))


def test_autocast_runs_the_matmuls_in_bfloat16_and_keeps_fp32_gradients():
    generator = torch.Generator().manual_seed(3)
    h = torch.randn(40, 24, generator=generator, requires_grad=True)
    w = torch.randn(96, 24, generator=generator, requires_grad=True)
    probs, index, weights = torch.rand(40, 96).softmax(-1), torch.arange(40), torch.ones(40)
    exact = torch.autograd.grad(linear_soft_cross_entropy(h, w, Teacher(probs, index, weights)).loss, (h, w))
    with torch.autocast("cpu", torch.bfloat16):
        out = linear_soft_cross_entropy(h, w, Teacher(probs, index, weights))
    for ours, theirs in zip(torch.autograd.grad(out.loss, (h, w)), exact, strict=True):
        assert ours.dtype == torch.float32
        assert not torch.equal(ours, theirs)
        assert torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), 0) > 0.999
