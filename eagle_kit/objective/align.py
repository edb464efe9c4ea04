"""Alignment of training-time test: the token, position and teacher of each row, and the loss mask.

Row i is token position i of a packed sequence, and stands for the draft round whose root is x[i + 1]: step k
of the row is depth k + 1 of that draft. At row i and step k (EAGLE-3, arXiv 2503.01840, section 3.2), with
the text x:

    feature    g of position i (k = 0), or a of row i at step k - 1
    token      x[i + 1 + k], whose embedding e the head reads
    position   i + k, for RoPE, within the document
    teacher    the target's distribution at position i + 1 + k, which predicts x[i + 2 + k]

In serving, the same step computes the entry of the token at position i + 1 + k
(:mod:`eagle_kit.drafts.base.cycle_state`).

Rows without x[i + 2 + k] do not exist. The loss mask is ``response``: the number of the response that each
token belongs to, and -1 for tokens of prompts. ``loss_mask`` of other trainers is ``response >= 0``. Of the
rows that exist, these are supervised at step k:

    loss_rows    condition                                        function
    serving      x[i + 1] and x[i + 2 + k] are of one response       :func:`supervised_rows`
    published    x[i + 1 + k] and x[i + 2 + k] are of one response   :func:`published_rows`

``serving`` has the rows where the engine drafts: a round starts after a token of a response. ``published``
has those of the published code (SafeAILab/EAGLE, ``traineagle3``), which shifts its loss mask by k. Both are
equal at step 0. At step k ``published`` adds k rows before every response: their x[i + 1] is a token of the
prompt, where decoding starts no round.

The published code also trains one or two rows after the last response of a conversation, because its mask
goes on to the end of the text. These rows are not imitated.

Not every supervised row has a loss: where the target token is outside the draft vocabulary there is none
(:mod:`eagle_kit.objective.loss`, as in the published code).

Legend: T packed tokens, K steps (``ttt_length``), R_k supervised rows of step k.
"""

import torch


def supervised_rows(response: torch.Tensor, ttt_length: int) -> list[torch.Tensor]:
    """Supervised rows of each step, where the engine drafts (``loss_rows: serving``).

    Args:
        response: int64 ``[T]``, number of the response that each token belongs to, different for every
            response of the packed sequence; -1 elsewhere.
        ttt_length: K.

    Returns:
        K ascending int64 tensors ``[R_k]``; responses are contiguous, so each is a subset of the one before.
    """
    length = response.shape[0]
    rows = []
    for k in range(ttt_length):
        num_rows = max(length - 2 - k, 0)
        started = response[1 : 1 + num_rows]  # response of x[i + 1]
        predicted = response[2 + k : 2 + k + num_rows]  # response of x[i + 2 + k]
        loss_mask = (started >= 0) & (started == predicted)
        rows.append(torch.nonzero(loss_mask)[:, 0])
    return rows


def published_rows(response: torch.Tensor, doc_start: torch.Tensor, ttt_length: int) -> list[torch.Tensor]:
    """Supervised rows of each step in the published code of EAGLE-3 (``loss_rows: published``).

    Args:
        response: see :func:`supervised_rows`.
        doc_start: int64 ``[T]``, first token of each token's document; a row and its teacher are of one
            document.
        ttt_length: K.

    Returns:
        K ascending int64 tensors ``[R_k]``, not subsets of each other.
    """
    length = response.shape[0]
    rows = []
    for k in range(ttt_length):
        num_rows = max(length - 2 - k, 0)
        embedded = response[1 + k : 1 + k + num_rows]  # response of x[i + 1 + k]
        predicted = response[2 + k : 2 + k + num_rows]  # response of x[i + 2 + k]
        is_one_document = doc_start[:num_rows] == doc_start[1 + k : 1 + k + num_rows]
        loss_mask = (embedded >= 0) & (embedded == predicted) & is_one_document
        rows.append(torch.nonzero(loss_mask)[:, 0])
    return rows


def token_of(rows: torch.Tensor, step: int) -> torch.Tensor:
    """Index of the token whose embedding each row reads at ``step``; ``rows`` int64 of any shape."""
    return rows + 1 + step


def teacher_of(rows: torch.Tensor, step: int) -> torch.Tensor:
    """Position whose target distribution each row learns at ``step``; ``rows`` int64 of any shape."""
    return rows + 1 + step
