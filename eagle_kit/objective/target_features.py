"""Hidden states and most likely tokens of the target over a packed sequence, captured in one forward.

These are the inputs of EAGLE-3's draft model (section 3.1) and of its teacher (section 3.2).

Legend: T packed tokens, L captured layers, H hidden of the target, V target vocabulary, P positions.
"""

from typing import NamedTuple

import torch

from eagle_kit.models.targets.target import Target
from eagle_kit.ops.attention.packed import document_spans
from eagle_kit.ops.backend import current_device
from eagle_kit.ops.linear import linear

VOCAB_CHUNK = 8192
"""Tokens of the vocabulary in a chunk of logits."""
ROW_CHUNK = 256
"""Rows in a chunk of logits."""
ARGMAX_LOGITS_ON_GPU = 1 << 28
"""Logits of :func:`vocab_argmax` that exist at the same time on a GPU: 512 MB in bfloat16, or 2,000 rows of a
vocabulary of 128 K."""


class TargetFeatures(NamedTuple):
    """Hidden states of the target over one packed sequence, and its most likely tokens.

    Attributes:
        aux_hidden_states: inputs of the captured layers, side by side (l, m, h), ``[T, L * H]``.
        hidden: final hidden states ``[T, H]``, after the target's last norm.
        argmax: int64 ``[T]``, the most likely next token at each teacher position, -1 elsewhere.
    """

    aux_hidden_states: torch.Tensor
    hidden: torch.Tensor
    argmax: torch.Tensor

    def to_stored(self) -> dict[str, torch.Tensor]:
        """Tensors by their names in a store of hidden states (:mod:`eagle_kit.data.hidden_states`)."""
        return {"aux": self.aux_hidden_states, "hidden": self.hidden, "argmax": self.argmax}

    @classmethod
    def from_stored(cls, tensors: dict[str, torch.Tensor]) -> "TargetFeatures":
        """Features from the tensors of :meth:`to_stored`."""
        return cls(tensors["aux"], tensors["hidden"], tensors["argmax"])


def positions_of(doc_start: torch.Tensor) -> torch.Tensor:
    """Position of each token within its document, int64 ``[T]``.

    Args:
        doc_start: int64 ``[T]``, first token of each token's document.
    """
    return torch.arange(doc_start.shape[0], device=doc_start.device) - doc_start


@torch.no_grad()
def capture_features(
    target: Target,
    ids: torch.Tensor,
    doc_start: torch.Tensor,
    layer_ids: tuple[int, ...],
    teachers: torch.Tensor,
    spans: list[tuple[int, int]] | None = None,
) -> TargetFeatures:
    """Run the target over a packed sequence. Documents do not attend to each other.

    Args:
        target: on any device. The features are returned on the device of ``ids``.
        ids: int64 ``[T]``.
        doc_start: int64 ``[T]``, first token of each token's document.
        layer_ids: target layers whose inputs are captured.
        teachers: teacher positions, whose most likely token is computed: bool ``[T]``, or int64 ``[P]``, for
            which the host does not wait for a GPU.
        spans: (start, stop) of each document. None reads them from ``doc_start``, and the host waits.
    """
    device = target.embed_tokens.weight.device
    home = ids.device
    spans = spans or document_spans(doc_start)
    starts = doc_start.to(device)

    # The forward, and the most likely tokens at teacher positions.
    with current_device(device):
        out = target(
            ids.to(device),
            positions_of(starts),
            target.packed(spans, starts.int()),
            layer_ids,
        )
        best = vocab_argmax(out.hidden[teachers.to(device)], target.head_weight)  # [P]

    # Back to the device of ``ids``.
    argmax = torch.full_like(ids, -1)
    argmax[teachers] = best.to(home)
    return TargetFeatures(out.aux_hidden_states.to(home), out.hidden.to(home), argmax)


@torch.no_grad()
def vocab_argmax(hidden: torch.Tensor, head_weight: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row, without ``[P, V]`` logits in memory.

    Args:
        hidden: final hidden states ``[P, H]``.
        head_weight: output layer ``[V, H]``.

    Returns:
        int64 ``[P]``.
    """
    # Sizes of chunks: on a GPU all tokens at once, on a CPU what fits into a cache.
    num_tokens = VOCAB_CHUNK
    num_rows = ROW_CHUNK
    if hidden.is_cuda:
        num_tokens = head_weight.shape[0]
        num_rows = max(1, ARGMAX_LOGITS_ON_GPU // num_tokens)

    best = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    for start in range(0, hidden.shape[0], num_rows):
        # The best token of each chunk of the vocabulary, and the best of these.
        rows = hidden[start : start + num_rows]
        values = []
        tokens = []
        for first in range(0, head_weight.shape[0], num_tokens):
            value, token = linear(rows, head_weight[first : first + num_tokens]).max(-1)
            values.append(value)
            tokens.append(token + first)
        winner = torch.stack(values).argmax(0, keepdim=True)
        best[start : start + num_rows] = torch.stack(tokens).gather(0, winner)[0]
    return best
