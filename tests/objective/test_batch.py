"""Rows of a step: how they are laid end to end, and the weight of each row's loss."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_run import PackedRows

from eagle_kit.config.training import RowSampling
from eagle_kit.objective.batch import MicroBatch, make_micro_batch, row_weights
from eagle_kit.objective.row_drop import RowDrop

WEIGHTS = [1.0, 0.5, 0.25]
CPU = torch.device("cpu")


def packed(*documents: tuple[int, int]) -> SimpleNamespace:
    """A packed sequence of documents, each of so many tokens of a prompt and of a response."""
    response = []
    doc_start = []
    group = []
    for number, (num_prompt, num_response) in enumerate(documents):
        start = len(response)
        response += [-1] * num_prompt + [number] * num_response
        doc_start += [start] * (num_prompt + num_response)
        group += [number % 2] * (num_prompt + num_response)
    arrays = [np.array(part, dtype=np.int32) for part in (response, response, doc_start, group)]
    return SimpleNamespace(ids=np.abs(arrays[0]), response=arrays[1], doc_start=arrays[2], group=arrays[3])


DATA = PackedRows([packed((3, 9), (5, 4)), packed((2, 6)), packed((1, 11), (1, 3), (6, 5))], ("one", "two"))
"""Documents whose responses have 9, 4, 6, 11, 3 and 5 tokens, two of them behind a prompt of one token."""


def batches() -> list[MicroBatch]:
    """The rows of one global batch in two forwards, the first of two packed sequences."""
    return [make_micro_batch(DATA, numbers, 3, CPU) for numbers in ([1, 2], [0])]


def test_rows_laid_end_to_end_keep_their_responses_and_documents_apart() -> None:
    """Together they carry loss where each does alone."""
    together = make_micro_batch(DATA, [1, 2], 3, CPU)
    first, second = (make_micro_batch(DATA, [number], 3, CPU) for number in (1, 2))
    shift = len(first.ids)
    for step, rows in enumerate(together.plan.rows):
        assert rows.tolist() == first.plan.rows[step].tolist() + (second.plan.rows[step] + shift).tolist()
    assert together.num_documents == 4
    assert together.doc_start.unique().tolist() == [0, 8, 20, 24]
    # A round starts behind every token of a response but the last, and at step k not behind the last k
    # either.
    assert together.plan.counts == [sum(max(0, n - 1 - k) for n in (6, 11, 3, 5)) for k in range(3)]


@pytest.mark.parametrize("normalisation", ["tokens", "sequence", "published"])
def test_weights_of_rows_are_those_of_the_formula(normalisation: str) -> None:
    """Row by row, with step weights whose sum is not 1."""
    micro_batches = batches()
    counts = [float(sum(each.plan.counts[k] for each in micro_batches)) for k in range(3)]
    num_documents = sum(each.num_documents for each in micro_batches)
    assert num_documents == 6
    for each in micro_batches:
        found = row_weights(each, WEIGHTS, normalisation, counts, num_documents)
        assert [len(part) for part in found] == each.plan.counts
        for k, rows in enumerate(each.plan.rows):
            document = each.doc_start[rows]
            for row, weight in zip(rows.tolist(), found[k].tolist(), strict=True):
                mine = each.doc_start[row]
                num_rows = int((document == mine).sum())
                num_tokens = int((each.doc_start == mine).sum())
                expected = {
                    "tokens": WEIGHTS[k] / (sum(WEIGHTS) * counts[k]),
                    "sequence": WEIGHTS[k] / (sum(WEIGHTS) * num_documents * num_rows),
                    "published": WEIGHTS[k] / (num_documents * num_tokens),
                }[normalisation]
                assert weight == pytest.approx(expected, rel=1e-6)


def test_weights_of_the_global_batch_add_up_to_one() -> None:
    """So a loss is a mean, whatever the number of steps."""
    micro_batches = batches()
    counts = [float(sum(each.plan.counts[k] for each in micro_batches)) for k in range(3)]
    total = sum(
        float(part.sum())
        for each in micro_batches
        for part in row_weights(each, WEIGHTS, "tokens", counts, 6)
    )
    assert total == pytest.approx(1.0)


def test_rows_of_a_step_are_counted_by_group() -> None:
    micro_batch = make_micro_batch(DATA, [0, 2], 3, CPU)
    assert micro_batch.group_counts == [8 + 10 + 4, 3 + 2]
    drop = RowDrop(RowSampling(0.5, 0.0), seed=0, step=0)
    dropped = make_micro_batch(DATA, [0, 2], 3, CPU, "serving", drop)
    assert dropped.plan.keep_rates == pytest.approx((1.0, 0.5, 0.25))
    assert dropped.group_counts == micro_batch.group_counts, "every row is kept at the first step"
    assert sum(dropped.plan.counts[1:]) < sum(micro_batch.plan.counts[1:])
