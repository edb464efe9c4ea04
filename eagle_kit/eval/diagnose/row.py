"""Responses packed in one row, and what the target computes over them in one forward.

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


class PromptResponse(NamedTuple):
    """Token ids of a prompt and of the greedy response to it."""

    prompt: Sequence[int]
    response: Sequence[int]


class Row(NamedTuple):
    """Prompts and responses, packed one after the other.

    A *root* is a token of a response that is not its last one: a cycle of decoding may begin
    there, and its drafts are compared with the tokens after the root.

    Attributes:
        ids: int64 ``[T]``, tokens.
        doc_start: int64 ``[T]``, row of the first token of each token's document.
        roots: int64 ``[R]``, rows of the roots, ascending.
        ends: int64 ``[R]``, row after the last token of the root's response.
        text_index: int64 ``[R]``, index of the prompt and response that the root belongs to.
    """

    ids: torch.Tensor
    doc_start: torch.Tensor
    roots: torch.Tensor
    ends: torch.Tensor
    text_index: torch.Tensor

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the tokens in their documents, int64 ``[T]``."""
        return torch.arange(len(self.ids), device=self.ids.device) - self.doc_start

    def to(self, device: torch.device) -> "Row":
        """The row on another device."""
        return Row(*(part.to(device) for part in self))


def pack(texts: Sequence[PromptResponse], length: int = 0) -> Row:
    """Pack prompts and responses into one row, on the CPU.

    Args:
        length: most tokens of a document. As many consecutive texts as fit are one document, in
            which each attends to those before it. A text that is longer, as all are by default, is
            a document by itself.
    """
    ids: list[int] = []
    doc_start: list[int] = []
    roots: list[int] = []
    ends: list[int] = []
    text_index: list[int] = []
    document = 0
    for index, (prompt, response) in enumerate(texts):
        start = len(ids)
        end = start + len(prompt) + len(response)
        if index == 0 or end - document > length:
            document = start
        ids += [*prompt, *response]
        doc_start += [document] * (end - start)

        # The first token of a row has no hidden state before it, so it is no root even in a response.
        text_roots = range(start + max(len(prompt), 1), end - 1)
        roots += text_roots
        ends += [end] * len(text_roots)
        text_index += [index] * len(text_roots)
    return Row(
        ids=torch.tensor(ids, dtype=torch.int64),
        doc_start=torch.tensor(doc_start, dtype=torch.int64),
        roots=torch.tensor(roots, dtype=torch.int64),
        ends=torch.tensor(ends, dtype=torch.int64),
        text_index=torch.tensor(text_index, dtype=torch.int64),
    )


class TargetStates(NamedTuple):
    """What the target computes over a row.

    Attributes:
        inputs: ``[T, H]``, the input of each captured layer, by its index. Index L is the output of
            the last layer, before the final norm.
        hidden: ``[T, H]``, after the final norm.
        greedy: int64 ``[R]``, the most likely token after each root.
        logsumexp: fp32 ``[R]``, log-sum-exp of the logits after each root.
    """

    inputs: Mapping[int, torch.Tensor]
    hidden: torch.Tensor
    greedy: torch.Tensor
    logsumexp: torch.Tensor


@torch.inference_mode()
def compute_states(target: Target, row: Row, layers: Sequence[int]) -> TargetStates:
    """Run the target over a row, every document by itself, and capture the inputs of ``layers``."""
    capture = tuple(sorted(set(layers)))
    out = target(row.ids, row.positions, target.packed(document_spans(row.doc_start)), capture)
    size = target.config.hidden_size
    inputs = {layer: out.aux_hidden_states[:, i * size : (i + 1) * size] for i, layer in enumerate(capture)}

    # Logits of all roots at once would need too much memory.
    greedy = []
    logsumexp = []
    for hidden in out.hidden[row.roots].split(LOGIT_ROWS):
        logits = target.logits(hidden).float()
        greedy.append(logits.argmax(-1))
        logsumexp.append(logits.logsumexp(-1))
    return TargetStates(inputs, out.hidden, torch.cat(greedy), torch.cat(logsumexp))


@torch.inference_mode()
def log_probs(
    target: Target,
    row: Row,
    states: TargetStates,
    tokens: torch.Tensor,
    vocabulary: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log-probabilities under the target, fp32 ``[R]``.

    Args:
        tokens: int64 ``[R]``, one token after each root.
        vocabulary: int64 ``[Vd]``, tokens among which probabilities sum to one; None for all
            tokens.
    """
    hidden = states.hidden[row.roots]
    weight = target.head_weight
    logits = target.logit_form(torch.einsum("rh,rh->r", hidden.float(), weight[tokens].float()))
    if vocabulary is None:
        return logits - states.logsumexp

    weight = weight[vocabulary]
    logsumexp = []
    for rows in hidden.split(LOGIT_ROWS):
        chunk = target.logit_form(linear(rows, weight).float())
        logsumexp.append(chunk.logsumexp(-1))
    return logits - torch.cat(logsumexp)
