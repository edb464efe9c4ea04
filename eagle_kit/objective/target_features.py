"""Hidden states and choices of the target over a packed row, captured in one forward.

Legend: T packed tokens, H target hidden, V target vocabulary, P positions.
"""

from typing import NamedTuple

import torch

from eagle_kit.models.targets.target import Target
from eagle_kit.ops.attention.packed import document_spans
from eagle_kit.ops.backend import current_device
from eagle_kit.ops.linear import linear

VOCAB_CHUNK = 8192
ROW_CHUNK = 256
LOGITS_ON_GPU = 1 << 28
"""Logits of :func:`vocab_argmax` that exist together on a GPU: 512 MB in bfloat16, 2,000 rows of a vocabulary
of 128 K, few launches."""


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
    spans: list[tuple[int, int]] | None = None,
) -> TargetFeatures:
    """Run the target over a packed row, every document by itself.

    Args:
        target: on any device; the features are returned where ``ids`` are.
        ids, doc_start: int64 ``[T]``.
        layer_ids: captured states, as inputs of these layers.
        needed: positions whose most likely token is wanted, bool ``[T]`` or int64 ``[P]``; only the former
            has the host wait for a GPU.
        spans: (start, stop) of each document; default from ``doc_start``, for which the host waits.
    """
    device, home = target.embed_tokens.weight.device, ids.device
    spans, starts = spans or document_spans(doc_start), doc_start.to(device)
    with current_device(device):
        out = target(
            ids.to(device),
            positions_of(starts),
            target.packed(spans, starts.int()),
            layer_ids,
        )
        best = vocab_argmax(out.hidden[needed.to(device)], target.head_weight)
    argmax = torch.full_like(ids, -1)
    argmax[needed] = best.to(home)
    return TargetFeatures(out.aux.to(home), out.hidden.to(home), argmax)


@torch.no_grad()
def vocab_argmax(hidden: torch.Tensor, head_weight: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row, without ``P x V`` logits: ``[P, H]``, ``[V, H]`` -> ``[P]``. At most
    :data:`LOGITS_ON_GPU` logits exist at a time on a GPU, and as many as fit into a cache on a CPU."""
    best = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    words = head_weight.shape[0] if hidden.is_cuda else VOCAB_CHUNK
    size = max(1, LOGITS_ON_GPU // words) if hidden.is_cuda else ROW_CHUNK
    for start in range(0, hidden.shape[0], size):
        rows = hidden[start : start + size]
        values, tokens = [], []
        for first in range(0, head_weight.shape[0], words):
            value, token = linear(rows, head_weight[first : first + words]).max(-1)
            values.append(value)
            tokens.append(token + first)
        winner = torch.stack(values).argmax(0, keepdim=True)
        best[start : start + size] = torch.stack(tokens).gather(0, winner)[0]
    return best
