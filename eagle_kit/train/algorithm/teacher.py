"""Distributions of the teacher: the target's probabilities over the draft vocabulary.

Legend: H target hidden, V / Vd target / draft vocabulary, P positions.
"""

import torch

from eagle_kit.kernels.linear import linear
from eagle_kit.models.targets.target import LogitForm
from eagle_kit.train.algorithm.target_features import ROW_CHUNK, VOCAB_CHUNK


@torch.no_grad()
def draft_vocab_probs(hidden: torch.Tensor, head_rows: torch.Tensor, form: LogitForm) -> torch.Tensor:
    """The target's softmax over the draft vocabulary only: ``[P, H]``, ``[Vd, H]`` -> fp32 ``[P, Vd]``;
    ``form`` of its logits."""
    probs = torch.empty(hidden.shape[0], head_rows.shape[0], dtype=torch.float32, device=hidden.device)
    for start in range(0, hidden.shape[0], ROW_CHUNK):
        rows = slice(start, start + ROW_CHUNK)
        logits = form(linear(hidden[rows], head_rows).float())
        torch.softmax(logits, -1, out=probs[rows])
    return probs


@torch.no_grad()
def draft_vocab_mass(
    hidden: torch.Tensor, head_rows: torch.Tensor, head_weight: torch.Tensor, form: LogitForm
) -> torch.Tensor:
    """The target's probability of the draft vocabulary as a whole: ``[P, H]``, ``[Vd, H]`` and ``[V, H]`` ->
    fp32 ``[P]``, at most 1. One matmul with the whole output layer for every teacher, shared by all steps."""
    mine, whole = (_log_total(hidden, weight, form) for weight in (head_rows, head_weight))
    return (mine - whole).exp().clamp_max(1.0)


def _log_total(hidden: torch.Tensor, head_weight: torch.Tensor, form: LogitForm) -> torch.Tensor:
    """Log of the sum of exponentials of all logits, in chunks of rows and words."""
    totals = []
    for rows in hidden.split(ROW_CHUNK):
        logits = (linear(rows, words).float() for words in head_weight.split(VOCAB_CHUNK))
        parts = [form(each).logsumexp(-1) for each in logits]
        totals.append(torch.stack(parts).logsumexp(0))
    return torch.cat(totals)
