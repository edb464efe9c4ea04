"""Replies packed in one row, and what the target computes over them in one forward.

Legend: T packed tokens, R roots, L layers of the target, H hidden, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from eagle_kit.models.targets.target import Target
from eagle_kit.ops.attention.packed import document_spans
from eagle_kit.ops.linear import linear

LOGIT_ROWS = 128
"""Rows whose logits over the target's vocabulary exist at the same time."""


class Text(NamedTuple):
    """Token ids of a prompt and of the greedy reply to it."""

    prompt: Sequence[int]
    reply: Sequence[int]


class Row(NamedTuple):
    """Texts one behind the other.

    A *root* is a token of a reply with another one behind it: a cycle of decoding may begin there, and its
    draft is compared with the tokens behind the root.

    Attributes:
        ids, doc_start: int64 ``[T]``, tokens, and the first token of each token's text.
        roots: int64 ``[R]``, ascending.
        ends: int64 ``[R]``, behind the last token of the root's reply.
        texts: int64 ``[R]``, number of the root's text.
    """

    ids: torch.Tensor
    doc_start: torch.Tensor
    roots: torch.Tensor
    ends: torch.Tensor
    texts: torch.Tensor

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the tokens in their texts, int64 ``[T]``."""
        return torch.arange(len(self.ids), device=self.ids.device) - self.doc_start

    def to(self, device: torch.device) -> "Row":
        """The row on another device."""
        return Row(*(part.to(device) for part in self))


def pack(texts: Sequence[Text], length: int = 0) -> Row:
    """Pack texts.

    Args:
        length: texts are joined to longer ones of at most so many tokens, each read behind those before it.
    """
    ids: list[int] = []
    starts: list[int] = []
    roots: list[int] = []
    ends: list[int] = []
    numbers: list[int] = []
    for number, (prompt, reply) in enumerate(texts):
        first, end = len(ids), len(ids) + len(prompt) + len(reply)
        joins = number > 0 and end - starts[-1] <= length
        mine = range(first + max(len(prompt), 1), end - 1)
        ids += [*prompt, *reply]
        starts += [starts[-1] if joins else first] * (end - first)
        roots += mine
        ends += [end] * len(mine)
        numbers += [number] * len(mine)
    return Row(*(torch.tensor(part, dtype=torch.int64) for part in (ids, starts, roots, ends, numbers)))


class States(NamedTuple):
    """What the target computes over a row.

    Attributes:
        inputs: ``[T, H]`` of each layer that was asked for, by its number: its input; the L-th is the output
            of the last layer before the final norm.
        hidden: ``[T, H]``, final-normed.
        greedy: int64 ``[R]``, the most likely token behind each root.
        log_total: fp32 ``[R]``, log-sum-exp of the logits behind each root.
    """

    inputs: Mapping[int, torch.Tensor]
    hidden: torch.Tensor
    greedy: torch.Tensor
    log_total: torch.Tensor


@torch.inference_mode()
def compute_states(target: Target, row: Row, layers: Sequence[int]) -> States:
    """Run the target over a row, every text by itself."""
    capture = tuple(sorted(set(layers)))
    out = target(row.ids, row.positions, target.packed(document_spans(row.doc_start)), capture)
    size = target.config.hidden_size
    inputs = {layer: out.aux_hidden_states[:, i * size : (i + 1) * size] for i, layer in enumerate(capture)}
    best, totals = [], []
    for rows in out.hidden[row.roots].split(LOGIT_ROWS):
        logits = target.logits(rows).float()
        best.append(logits.argmax(-1))
        totals.append(logits.logsumexp(-1))
    return States(inputs, out.hidden, torch.cat(best), torch.cat(totals))


@torch.inference_mode()
def log_probs(
    target: Target, row: Row, states: States, tokens: torch.Tensor, among: torch.Tensor | None = None
) -> torch.Tensor:
    """Log-probability under the target of ``tokens`` int64 ``[R]``, one behind each root, fp32 ``[R]``.

    Args:
        among: int64 ``[Vd]``, the only tokens there are; all when None.
    """
    hidden, weight = states.hidden[row.roots], target.head_weight
    logits = target.logit_form(torch.einsum("rh,rh->r", hidden.float(), weight[tokens].float()))
    if among is None:
        return logits - states.log_total
    chosen = weight[among]
    parts = (linear(rows, chosen).float() for rows in hidden.split(LOGIT_ROWS))
    totals = [target.logit_form(part).logsumexp(-1) for part in parts]
    return logits - torch.cat(totals)
