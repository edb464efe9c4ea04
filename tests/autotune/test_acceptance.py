"""Acceptance of a shape, predicted from drafts that were recorded at every position."""

import pytest
import torch

from eagle_kit.autotune.acceptance import DraftRecording
from eagle_kit.core.shape import SpecShape
from eagle_kit.ops.tree_build import Candidates

NUM_DRAFTED = 4


def recording_of(rank: int) -> DraftRecording:
    """Four positions of one response, whose next token is everywhere the drafted one of this rank."""
    tokens = torch.arange(10, 10 + NUM_DRAFTED).expand(4, NUM_DRAFTED)
    scores = torch.tensor([-0.5, -1.5, -2.5, -3.5]).expand(4, NUM_DRAFTED)
    candidates = Candidates(tokens, scores, torch.full_like(tokens, -1))
    truth = tokens[:, rank : rank + 1]
    return DraftRecording(1, NUM_DRAFTED, candidates, torch.full((4,), 0.6), truth, [4])


@pytest.mark.parametrize("rank", range(NUM_DRAFTED))
@pytest.mark.parametrize("num_tokens", range(2, NUM_DRAFTED + 2))
def test_a_window_has_as_many_of_the_best_candidates_as_it_has_nodes_behind_the_root(rank, num_tokens):
    predicted = recording_of(rank).acceptance(SpecShape(1, NUM_DRAFTED, num_tokens))
    is_in_window = rank < num_tokens - 1
    assert predicted.length == 1 + is_in_window
    assert predicted.reach == (float(is_in_window),)
