"""Weights in e4m3: scales of blocks, of rows and of stacked parts stand for the same numbers."""

import pytest
import torch

from eagle_kit.ops.fp8 import E4M3, FP8Weight, quantize_fp8, stack_fp8


def drawn(*shape: int, block: tuple[int, int]) -> FP8Weight:
    """Weight ``[N, K]`` or ``[E, N, K]`` with other scales in every block."""
    generator = torch.Generator().manual_seed(7)
    values = (torch.randn(shape, generator=generator) * 100).clamp(-448, 448).to(E4M3)
    blocks = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    return FP8Weight(values, torch.randn(blocks, generator=generator).exp(), block)


def by_hand(weight: FP8Weight) -> torch.Tensor:
    """Every element times the scale of its block."""
    rows, columns = weight.block
    exact = weight.values.float()
    for n in range(exact.shape[-2]):
        for k in range(exact.shape[-1]):
            exact[..., n, k] *= weight.scales[..., n // rows, k // columns]
    return exact


@pytest.mark.parametrize("shape", [(7, 10), (2, 7, 10)], ids=["a layer", "experts"])
@pytest.mark.parametrize("block", [(3, 4), (2, 10), (1, 4), (1, 10), (16, 16)], ids=str)
def test_a_weight_is_its_values_times_the_scales_of_their_blocks(block, shape):
    weight = drawn(*shape, block=block)
    exact = by_hand(weight)
    assert torch.equal(weight.dense(torch.float32), exact)
    assert weight.by_row.block[0] == 1
    assert torch.equal(weight.by_row.dense(torch.float32), exact)


@pytest.mark.parametrize("rows", [(4, 6, 2), (4, 5, 3)], ids=["whole blocks", "a part ends within a block"])
def test_stacked_parts_are_what_each_is(rows):
    parts = [drawn(count, 10, block=(2, 4)) for count in rows]
    stacked = stack_fp8(parts)
    assert torch.equal(stacked.dense(torch.float32), torch.cat([by_hand(part) for part in parts]))


@pytest.mark.parametrize("numel", [1, 45, 1000])
def test_pieces_are_the_rows_of_their_places(numel):
    weight = drawn(7, 10, block=(2, 4))
    exact = by_hand(weight)
    found = torch.full((7, 10), float("nan"))
    for place, piece in weight.pieces(numel):
        found[place] = piece.dense(torch.float32)
    assert torch.equal(found, exact)


def test_quantising_keeps_each_element_within_its_bound():
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    weight[2] *= 1e-6
    weight[3] = 0
    held = quantize_fp8(weight)
    bound = torch.maximum(weight.abs() / 16, held.scales / 1024)
    assert held.is_by_row
    assert ((held.dense(torch.float32) - weight).abs() <= bound).all()
    assert torch.equal(held.values.float().abs().amax(-1)[:3], torch.full((3,), 448.0))
