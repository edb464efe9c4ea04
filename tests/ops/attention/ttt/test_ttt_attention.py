"""Attention of training-time test: the CPU implementation against the reference, forward and backward."""

import pytest
import torch

from eagle_kit.ops.attention.ttt import plan, plan_queries, ttt_attention


@pytest.mark.parametrize(("length", "own"), [(401, 0), (401, 3), (37, 6)])
@pytest.mark.parametrize("block_rows", [256, 19])
def test_flash_form_equals_the_reference(length, own, block_rows):
    generator = torch.Generator().manual_seed(length + own)
    doc_start = torch.zeros(length, dtype=torch.int64)
    doc_start[length // 3 :] = length // 3
    rows = torch.nonzero(torch.rand(length, generator=generator) < 0.7)[:, 0]
    shapes = [(rows.shape[0], 9, 16), (length, 3, 16), (length, 3, 16)] + [(rows.shape[0], 3, own, 16)] * 2
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    blocks = plan_queries(rows, doc_start, block_rows)
    dout = torch.randn(shapes[0], generator=generator)
    expected = ttt_attention(*inputs, plan_queries(rows, doc_start), 0.25, backend="reference")
    wanted = torch.autograd.grad(expected, inputs, dout, materialize_grads=True)
    out = ttt_attention(*inputs, blocks, 0.25, backend="cpu")
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(out, inputs, dout, materialize_grads=True), wanted, strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_masks_that_are_too_many_to_keep_are_made_for_each_step(monkeypatch, backend):
    generator = torch.Generator().manual_seed(5)
    rows = torch.arange(2, 30)
    doc_start = torch.tensor([0] * 9 + [9] * 21)
    shapes = [(28, 4, 8), (30, 2, 8), (30, 2, 8), (28, 2, 2, 8), (28, 2, 2, 8)]
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    found = []
    for most in (plan.KEPT_MASK_ENTRIES, 0):
        monkeypatch.setattr(plan, "KEPT_MASK_ENTRIES", most)
        steps = plan_queries(rows, doc_start, 11)
        for _ in range(2):
            out = ttt_attention(*inputs, steps, 0.3, backend=backend)
            found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for others in found[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(others, found[0], strict=True))


def test_a_key_of_another_document_or_a_later_row_has_no_weight():
    doc_start = torch.tensor([0, 0, 0, 3, 3, 3])
    rows = torch.tensor([1, 4])
    q, none = torch.zeros(2, 1, 2), torch.zeros(2, 1, 0, 2)
    k, v = torch.zeros(6, 1, 2), torch.arange(6.0)[:, None, None].expand(6, 1, 2).contiguous()
    out = ttt_attention(q, k, v, none, none, plan_queries(rows, doc_start), 1.0)
    assert out[:, 0, 0].tolist() == [0.5, 3.5]


def test_half_inputs_are_attended_in_fp32_and_come_back_as_they_were():
    rows, generator = torch.arange(7), torch.Generator().manual_seed(0)
    inputs = [torch.randn(7, 4, 8, generator=generator).bfloat16() for _ in range(3)]
    inputs += [torch.randn(7, 4, 2, 8, generator=generator).bfloat16() for _ in range(2)]
    steps = plan_queries(rows, torch.zeros_like(rows))
    with torch.autocast("cpu", torch.bfloat16):
        out = ttt_attention(*inputs, steps, 0.3)
    exact = ttt_attention(*(x.float() for x in inputs), steps, 0.3, backend="reference")
    torch.testing.assert_close(out.float(), exact, rtol=0.01, atol=0.01)
    assert out.dtype == torch.bfloat16
