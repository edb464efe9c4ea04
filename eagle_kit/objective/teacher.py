"""Teacher distributions over the draft vocabulary: the target's probabilities, or the text's tokens.

Legend: H hidden of the target, V / Vd target / draft vocabulary, P teacher positions.
"""

import torch

from eagle_kit.models.targets.target import LogitForm
from eagle_kit.objective.target_features import ROW_CHUNK, VOCAB_CHUNK
from eagle_kit.ops.linear import linear


@torch.no_grad()
def draft_vocab_probs(hidden: torch.Tensor, target_rows: torch.Tensor, form: LogitForm) -> torch.Tensor:
    """The target's softmax over the logits of the draft vocabulary alone, as the published code has it.

    Args:
        hidden: final hidden states of the target ``[P, H]``.
        target_rows: rows of its output layer for the draft vocabulary ``[Vd, H]``.
        form: scale and soft cap of its logits.

    Returns:
        fp32 ``[P, Vd]``; each row sums to 1.
    """
    probs = torch.empty(hidden.shape[0], target_rows.shape[0], dtype=torch.float32, device=hidden.device)
    for start in range(0, hidden.shape[0], ROW_CHUNK):
        rows = slice(start, start + ROW_CHUNK)
        logits = form(linear(hidden[rows], target_rows).float())
        torch.softmax(logits, -1, out=probs[rows])
    return probs


@torch.no_grad()
def draft_vocab_mass(
    hidden: torch.Tensor, target_rows: torch.Tensor, target_head: torch.Tensor, form: LogitForm
) -> torch.Tensor:
    """The sum of the target's probabilities of all tokens of the draft vocabulary.

    Args:
        hidden: final hidden states of the target ``[P, H]``.
        target_rows: rows of its output layer for the draft vocabulary ``[Vd, H]``.
        target_head: its whole output layer ``[V, H]``.
        form: scale and soft cap of its logits.

    Returns:
        fp32 ``[P]``, at most 1.
    """
    draft_total = _log_sum_exp(hidden, target_rows, form)  # [P]
    target_total = _log_sum_exp(hidden, target_head, form)  # [P]
    return (draft_total - target_total).exp().clamp_max(1.0)


def text_probs(tokens: torch.Tensor, t2d: torch.Tensor, token_map: torch.Tensor | None) -> torch.Tensor:
    """One-hot distributions of the text's tokens, for ``hard-ce``.

    Args:
        tokens: target ids, int64 ``[P]``.
        t2d: bool ``[V]``, True for tokens of the draft vocabulary.
        token_map: target id of every draft id, int64 ``[Vd]``; None if they are equal.

    Returns:
        fp32 ``[P, Vd]``. A row is zero if its token is outside the draft vocabulary.
    """
    # Draft id of each token.
    size = len(t2d)
    ids = tokens
    if token_map is not None:
        size = len(token_map)
        draft_ids = torch.zeros_like(t2d, dtype=torch.int64)  # [V]
        draft_ids[token_map] = torch.arange(size, device=tokens.device)
        ids = draft_ids[tokens]  # [P]

    probs = torch.zeros(len(tokens), size, device=tokens.device)  # [P, Vd]
    in_draft_vocab = t2d[tokens].float()  # [P]
    return probs.scatter_(1, ids[:, None], in_draft_vocab[:, None])


def _log_sum_exp(hidden: torch.Tensor, weight: torch.Tensor, form: LogitForm) -> torch.Tensor:
    """Log of the sum of the exponentials of each row's logits, fp32 ``[P]``, in chunks of rows and tokens."""
    totals = []
    for rows in hidden.split(ROW_CHUNK):
        parts = []
        for tokens in weight.split(VOCAB_CHUNK):
            logits = form(linear(rows, tokens).float())
            parts.append(logits.logsumexp(-1))
        totals.append(torch.stack(parts).logsumexp(0))
    return torch.cat(totals)
