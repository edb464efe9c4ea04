"""Distributions of the teacher: the target's probabilities over the draft vocabulary.

Legend: H target hidden, V / Vd target / draft vocabulary, P positions.
"""

import torch

from eagle_kit.kernels.linear import linear
from eagle_kit.train.algorithm.target_features import ROW_CHUNK, VOCAB_CHUNK


@torch.no_grad()
def draft_vocab_probs(hidden: torch.Tensor, head_rows: torch.Tensor) -> torch.Tensor:
    """The target's softmax over the draft vocabulary only: ``[P, H]``, ``[Vd, H]`` -> fp32 ``[P, Vd]``."""
    probs = torch.empty(hidden.shape[0], head_rows.shape[0], dtype=torch.float32, device=hidden.device)
    for start in range(0, hidden.shape[0], ROW_CHUNK):
        rows = slice(start, start + ROW_CHUNK)
        torch.softmax(linear(hidden[rows], head_rows).float(), -1, out=probs[rows])
    return probs


@torch.no_grad()
def draft_vocab_mass(
    hidden: torch.Tensor, head_rows: torch.Tensor, head_weight: torch.Tensor
) -> torch.Tensor:
    """The target's probability of the draft vocabulary as a whole: ``[P, H]``, ``[Vd, H]`` and ``[V, H]`` ->
    fp32 ``[P]``, at most 1. One matmul with the whole output layer for every teacher, shared by all steps."""
    return (_log_total(hidden, head_rows) - _log_total(hidden, head_weight)).exp().clamp_max(1.0)


def _log_total(hidden: torch.Tensor, head_weight: torch.Tensor) -> torch.Tensor:
    """Log of the sum of exponentials of all logits, in chunks of rows and words."""
    totals = []
    for rows in hidden.split(ROW_CHUNK):
        parts = [linear(rows, words).float().logsumexp(-1) for words in head_weight.split(VOCAB_CHUNK)]
        totals.append(torch.stack(parts).logsumexp(0))
    return torch.cat(totals)
