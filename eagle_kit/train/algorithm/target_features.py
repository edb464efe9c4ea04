"""Hidden states and choices of the target over a packed row, captured in one forward.

Legend: T packed tokens, H target hidden, V target vocabulary, P positions.
"""

from typing import NamedTuple

import torch

from eagle_kit.kernels.backend import current_device
from eagle_kit.kernels.linear import linear
from eagle_kit.kernels.packed_attention import document_spans
from eagle_kit.models.targets.target import Target

VOCAB_CHUNK = 8192
ROW_CHUNK = 256


class TargetFeatures(NamedTuple):
    """States of the target over one packed row.

    Attributes:
        aux: ``[T, 3 H]``, the captured states.
        hidden: ``[T, H]``, final-normed.
        argmax: int64 ``[T]``, the most likely next token at each position that some row learns from, -1
            elsewhere.
    """

    aux: torch.Tensor
    hidden: torch.Tensor
    argmax: torch.Tensor


def positions_of(doc_start: torch.Tensor) -> torch.Tensor:
    """Positions within the document ``[T]``, of ``doc_start`` int64 ``[T]``."""
    return torch.arange(doc_start.shape[0], device=doc_start.device) - doc_start


@torch.no_grad()
def capture_features(
    target: Target,
    ids: torch.Tensor,
    doc_start: torch.Tensor,
    layer_ids: tuple[int, ...],
    needed: torch.Tensor,
) -> TargetFeatures:
    """Run the target over a packed row, every document by itself.

    Args:
        target: on any device; the features are returned where ``ids`` are.
        ids, doc_start: int64 ``[T]``.
        layer_ids: captured states, as inputs of these layers.
        needed: bool ``[T]``, positions whose most likely token is wanted.
    """
    device, home = target.embed_tokens.weight.device, ids.device
    spans = document_spans(doc_start)
    with current_device(device):
        out = target(
            ids.to(device),
            positions_of(doc_start).to(device),
            target.packed(spans),
            layer_ids,
        )
        best = vocab_argmax(out.hidden[needed.to(device)], target.head_weight)
    argmax = torch.full_like(ids, -1)
    argmax[needed] = best.to(home)
    return TargetFeatures(out.aux.to(home), out.hidden.to(home), argmax)


@torch.no_grad()
def vocab_argmax(hidden: torch.Tensor, head_weight: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row, without ``P x V`` logits: ``[P, H]``, ``[V, H]`` -> ``[P]``."""
    best = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    for start in range(0, hidden.shape[0], ROW_CHUNK):
        rows = hidden[start : start + ROW_CHUNK]
        values, tokens = [], []
        for first in range(0, head_weight.shape[0], VOCAB_CHUNK):
            value, token = linear(rows, head_weight[first : first + VOCAB_CHUNK]).max(-1)
            values.append(value)
            tokens.append(token + first)
        winner = torch.stack(values).argmax(0, keepdim=True)
        best[start : start + ROW_CHUNK] = torch.stack(tokens).gather(0, winner)[0]
    return best
