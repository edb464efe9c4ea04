"""Alignment of rows, tokens, positions and teachers.

At row i and step k of training-time test

    feature    the fused target state f_i (k = 0), else the head's own output at row i of step k - 1
    token      x[i + 1 + k]
    position   i + k (RoPE, within the document)
    teacher    the target's distribution at position i + 1 + k, its prediction of x[i + 2 + k]

A row carries loss at step k when serving would draft there: a round starts after a token that was sampled, so
x[i + 1] is a token of a reply, and the predicted token x[i + 2 + k] belongs to the same reply. Rows whose
target would run past the sequence do not exist.

The published code of EAGLE-3 (SafeAILab/EAGLE, ``traineagle3``) multiplies by its loss mask shifted by k, and
its mask lies one token before the reply's tokens and ends two before its end: row i carries loss at step k
when x[i + 1 + k] and x[i + 2 + k] are of the same reply. At step 0 that is the same; later it adds k rows
before every reply, where no round ever starts. (In a conversation's last turn its mask runs on to the end of
the text, which also teaches what follows the last token, and once a uniform distribution: one and two
rows a conversation that are not imitated.)

Legend: T packed tokens, K steps, R_k rows of step k.
"""

import torch


def supervised_rows(reply: torch.Tensor, ttt_length: int) -> list[torch.Tensor]:
    """Rows that carry loss at each step.

    Args:
        reply: int64 ``[T]``, the reply each token must be produced in, different for every reply of the
            packed row; -1 elsewhere.
        ttt_length: K.

    Returns:
        K ascending int64 tensors ``[R_k]``; replies are contiguous, so each is a subset of the one before.
    """
    length = reply.shape[0]
    rows = []
    for k in range(ttt_length):
        count = max(length - 2 - k, 0)
        started, predicted = reply[1 : 1 + count], reply[2 + k : 2 + k + count]
        rows.append(torch.nonzero((started >= 0) & (started == predicted))[:, 0])
    return rows


def published_rows(reply: torch.Tensor, doc_start: torch.Tensor, ttt_length: int) -> list[torch.Tensor]:
    """Rows that carry loss at each step in the published code of EAGLE-3.

    Args:
        reply, ttt_length: see :func:`supervised_rows`.
        doc_start: int64 ``[T]``; a row and what it learns are of one document.

    Returns:
        K ascending int64 tensors ``[R_k]``, not subsets of each other.
    """
    length = reply.shape[0]
    rows = []
    for k in range(ttt_length):
        count = max(length - 2 - k, 0)
        seen, predicted = reply[1 + k : 1 + k + count], reply[2 + k : 2 + k + count]
        inside = doc_start[:count] == doc_start[1 + k : 1 + k + count]
        rows.append(torch.nonzero((seen >= 0) & (seen == predicted) & inside)[:, 0])
    return rows


def token_of(rows: torch.Tensor, step: int) -> torch.Tensor:
    """Index of the token that each row embeds at ``step``."""
    return rows + 1 + step


def teacher_of(rows: torch.Tensor, step: int) -> torch.Tensor:
    """Index of the position whose target distribution each row learns at ``step``."""
    return rows + 1 + step
