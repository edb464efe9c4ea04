"""Distributions of the teacher over the draft vocabulary: the target's probabilities, or the text's tokens.

Legend: H target hidden, V / Vd target / draft vocabulary, P positions.
"""

import torch

from eagle_kit.models.targets.target import LogitForm
from eagle_kit.objective.target_features import ROW_CHUNK, VOCAB_CHUNK
from eagle_kit.ops.linear import linear


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


def text_probs(tokens: torch.Tensor, t2d: torch.Tensor, token_map: torch.Tensor | None) -> torch.Tensor:
    """Distributions fp32 ``[P, Vd]`` that are certain of ``tokens`` int64 ``[P]``; zero for those outside the
    draft vocabulary.

    Args:
        t2d: bool ``[V]``, the tokens of the draft vocabulary.
        token_map: target id of every draft id, int64 ``[Vd]``; None where they are equal.
    """
    size, ids = len(t2d), tokens
    if token_map is not None:
        size, draft_ids = len(token_map), torch.zeros_like(t2d, dtype=torch.int64)
        draft_ids[token_map] = torch.arange(size, device=tokens.device)
        ids = draft_ids[tokens]
    probs = torch.zeros(len(tokens), size, device=tokens.device)
    return probs.scatter_(1, ids[:, None], t2d[tokens].float()[:, None])


def _log_total(hidden: torch.Tensor, head_weight: torch.Tensor, form: LogitForm) -> torch.Tensor:
    """Log of the sum of exponentials of all logits, in chunks of rows and words."""
    totals = []
    for rows in hidden.split(ROW_CHUNK):
        logits = (linear(rows, words).float() for words in head_weight.split(VOCAB_CHUNK))
        parts = [form(each).logsumexp(-1) for each in logits]
        totals.append(torch.stack(parts).logsumexp(0))
    return torch.cat(totals)
