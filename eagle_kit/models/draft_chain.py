"""Evaluation of a head along a known text (teacher forcing): its chains after many roots, in a few forwards.

Nothing is decoded. Every step reads the text's own token, as if all drafts before it had been accepted. Keys
are those of serving: of the target's states up to the root, and of the chain's own steps after it.

Legend: T packed tokens, R chains, H hidden, Hq / Hkv heads, D head size.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from eagle_kit.ops.attention.packed import document_spans, packed_attention
from eagle_kit.ops.attention.ttt import plan_queries, ttt_attention
from eagle_kit.ops.attention.ttt.anchored import anchored_attention
from eagle_kit.ops.attention.variant import AttentionVariant


class ChainRows(NamedTuple):
    """A known text, and the rows after whose tokens chains are drafted.

    Attributes:
        features: ``[T, H]``, of the target at every token.
        tokens: of rows int64 ``[n]`` and a step: the tokens that the rows embed at the step, int64 ``[n]``.
        embeds: the same, the embeddings of these tokens ``[n, H]``.
        mask: embedding ``[1, H]`` of a token.
        rows: int64 ``[R]``, ascending: the chain of row i drafts after token i + 1.
        doc_start: int64 ``[T]``, first token of each token's text.
    """

    features: torch.Tensor
    tokens: Callable[[torch.Tensor, int], torch.Tensor]
    embeds: Callable[[torch.Tensor, int], torch.Tensor]
    mask: Callable[[int], torch.Tensor]
    rows: torch.Tensor
    doc_start: torch.Tensor

    @property
    def everywhere(self) -> torch.Tensor:
        """All rows, int64 ``[T]``."""
        return torch.arange(len(self.features), device=self.features.device)

    @property
    def positions(self) -> torch.Tensor:
        """Positions of all rows within their text, int64 ``[T]``."""
        return self.everywhere - self.doc_start


class RowAttention:
    """Attention of a layer over the rows: to all tokens up to the query's in its text, and in later steps to
    the chain's own keys too."""

    def __init__(self, variant: AttentionVariant, given: ChainRows) -> None:
        self.variant, self.spans = variant, document_spans(given.doc_start)
        self.rows = plan_queries(given.rows, given.doc_start)
        self.own: list[tuple[torch.Tensor, torch.Tensor]] = []

    def first(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention of every token, whose keys are kept."""
        self.k, self.v = k, v
        return packed_attention(q, k, v, self.spans, self.variant)

    def later(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of a later step of the chains."""
        self.own.append((k, v))
        own_k, own_v = (torch.stack(part, 2) for part in zip(*self.own, strict=True))
        size, missing = v.shape[-1], k.shape[-1] - v.shape[-1]
        values, own_v = (pad(x, (0, missing)) if missing else x for x in (self.v, own_v))
        rows = self.rows.with_window(self.variant.limits.window or None, len(self.own))
        return ttt_attention(q, self.k, values, own_k, own_v, rows, self.variant.scale)[..., :size]

    def block(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        q: torch.Tensor,
        own_k: torch.Tensor,
        own_v: torch.Tensor,
        *,
        is_causal: bool,
    ) -> torch.Tensor:
        """Attention of a block after every row that drafts, to keys of the text up to it and to its own:
        arguments as of :func:`~eagle_kit.ops.attention.ttt.anchored.anchored_attention`."""
        window = self.variant.limits.window or None
        scale = self.variant.scale
        return anchored_attention(q, k, v, own_k, own_v, self.rows, scale, window, is_causal=is_causal)
