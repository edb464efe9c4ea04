"""Weights in fp8 with scales of blocks: by rows, and on top of each other."""

import pytest
import torch

from eagle_kit.kernels.fp8 import E4M3, FP8Weight, stack_fp8

BLOCK = (4, 8)


def weight(num_rows: int, num_columns: int = 21, seed: int = 0) -> FP8Weight:
    """Random, with blocks that end neither with the rows nor with the columns."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_rows, num_columns, generator=generator).to(E4M3)
    num_blocks = -(-num_rows // BLOCK[0]), -(-num_columns // BLOCK[1])
    scales = torch.rand(num_blocks, generator=generator) + 0.1
    return FP8Weight(values, scales, BLOCK)


def meant(given: FP8Weight) -> torch.Tensor:
    """Its numbers, one by one."""
    dense = given.values.float()
    for row in range(dense.shape[0]):
        for column in range(dense.shape[1]):
            dense[row, column] *= given.scales[row // given.block[0], column // given.block[1]]
    return dense


@pytest.mark.parametrize("num_rows", [3, 4, 10])
def test_scales_of_single_rows_mean_the_same_numbers(num_rows):
    given = weight(num_rows)
    by_row = given.by_row
    assert by_row.block == (1, BLOCK[1]) and by_row.scales.shape == (num_rows, 3)
    assert torch.equal(meant(by_row), meant(given)) and torch.equal(by_row.dense(torch.float32), meant(given))


@pytest.mark.parametrize(
    ("sizes", "rows_of_a_block"),
    [((8, 4, 8), 4), ((8, 4, 6), 1), ((6, 8), 1), ((3, 3), 1), ((10,), 4)],
)
def test_weights_on_top_of_each_other_mean_the_same_numbers(sizes, rows_of_a_block):
    parts = [weight(size, seed=size + i) for i, size in enumerate(sizes)]
    stacked = stack_fp8(parts)
    assert stacked.block == (rows_of_a_block, BLOCK[1])
    assert torch.equal(stacked.dense(torch.float32), torch.cat([meant(part) for part in parts]))
