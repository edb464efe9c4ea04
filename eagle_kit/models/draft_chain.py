"""Evaluation of a head along a known text (teacher forcing): its drafts after many roots, in a few forwards.

Nothing is decoded. Every step reads the text's own token, as if all drafts before it had been accepted. It
attends to the keys that serving has: of the target's hidden states up to the root, and of the draft's own
steps.

Legend: T packed tokens, R drafts, H hidden, Hq / Hkv heads, D head size.
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
    """Inputs of :meth:`~eagle_kit.models.draft_head.DraftHead.chain`.

    Attributes:
        features: features of the target at every token, ``[T, H]``.
        tokens: function from rows int64 ``[n]`` and a step to the tokens int64 ``[n]`` that the rows embed
            in it.
        embeds: function from rows and a step to the embeddings ``[n, H]`` of those tokens.
        mask: function from the id of a mask token to its embedding ``[1, H]``.
        rows: int64 ``[R]``, ascending. The draft of row i begins after token i + 1.
        doc_start: int64 ``[T]``, first token of each token's text.
    """

    features: torch.Tensor
    tokens: Callable[[torch.Tensor, int], torch.Tensor]
    embeds: Callable[[torch.Tensor, int], torch.Tensor]
    mask: Callable[[int], torch.Tensor]
    rows: torch.Tensor
    doc_start: torch.Tensor

    @property
    def all_rows(self) -> torch.Tensor:
        """All rows, int64 ``[T]``."""
        return torch.arange(len(self.features), device=self.features.device)

    @property
    def positions(self) -> torch.Tensor:
        """Positions of all rows within their text, int64 ``[T]``."""
        return self.all_rows - self.doc_start


class RowAttention:
    """Attention of one layer of a head, for all steps of its drafts.

    Args:
        variant: variant of attention of the layer.
        given: rows of the drafts.
    """

    def __init__(self, variant: AttentionVariant, given: ChainRows) -> None:
        self.variant = variant
        self.spans = document_spans(given.doc_start)
        self.rows = plan_queries(given.rows, given.doc_start)

        # Keys and values ``[R, Hkv, D]`` of the later steps.
        self._step_keys: list[torch.Tensor] = []
        self._step_values: list[torch.Tensor] = []

    def first(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention of every token of the texts, in step 0. Later steps attend to its keys."""
        self._text_keys = k
        self._text_values = v
        return packed_attention(q, k, v, self.spans, self.variant)

    def later(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of the drafts in a later step: to the text up to their row, and to their own keys."""
        self._step_keys.append(k)
        self._step_values.append(v)
        own_k = torch.stack(self._step_keys, 2)
        own_v = torch.stack(self._step_values, 2)

        # The operation takes values of the size of keys.
        text_v = self._text_values
        value_size = v.shape[-1]
        missing = k.shape[-1] - value_size
        if missing:
            text_v = pad(text_v, (0, missing))
            own_v = pad(own_v, (0, missing))

        rows = self.rows.with_window(self.variant.limits.window or None, len(self._step_keys))
        out = ttt_attention(q, self._text_keys, text_v, own_k, own_v, rows, self.variant.scale)
        return out[..., :value_size]

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
        """Attention of the blocks of drafts that are made in one pass, to the text up to their row and to the
        keys of the block; see :func:`~eagle_kit.ops.attention.ttt.anchored.anchored_attention`."""
        window = self.variant.limits.window or None
        scale = self.variant.scale
        return anchored_attention(q, k, v, own_k, own_v, self.rows, scale, window, is_causal=is_causal)
