"""Sizes and draft vocabulary of heads that read captured hidden states: EAGLE-3, P-EAGLE, DFlash and DSpark.

Legend: H / Ht hidden of the head / of the target, V / Vd target / draft vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch

from eagle_kit.models.config import DecoderConfig, HeadArchitecture, TargetConfig
from eagle_kit.models.draft_head import DraftHead


@dataclass(frozen=True)
class CapturedStatesArchitecture(DecoderConfig, HeadArchitecture):
    """Architecture of a head that reads captured hidden states: the fields that every such kind has.

    Attributes:
        hidden_size: H.
        target_hidden_size: Ht.
        vocab_size: V.
        draft_vocab_size: Vd.
        aux_layer_ids: target layers whose inputs are captured.
    """

    hidden_size: int
    target_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    aux_layer_ids: tuple[int, ...]


def default_sizes(model: TargetConfig, draft_vocab_size: int, *, latent: bool = False) -> dict[str, Any]:
    """Fields of :class:`CapturedStatesArchitecture` of a new head: the target's sizes, RoPE and default
    captured layers.

    Args:
        model: architecture of the target.
        draft_vocab_size: Vd.
        latent: sizes for latent attention, instead of a Llama layer.
    """
    num_heads = model.num_heads
    num_kv_heads = model.num_kv_heads
    head_dim = model.head_dim
    rope_scaling = model.rope_scaling

    # A Llama layer for a target with latent attention: heads of the size of the target's values, at most
    # 8 key-value heads. RoPE is plain, because engines scale YaRN differently outside latent attention.
    if model.mla is not None and not latent:
        head_dim = model.mla.v_head_dim
        num_heads = max(1, model.hidden_size // head_dim)
        num_kv_heads = next(count for count in range(8, 0, -1) if num_heads % count == 0)
        rope_scaling = None

    return {
        "hidden_size": model.hidden_size,
        "target_hidden_size": model.hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": rope_scaling,
        "max_position_embeddings": model.max_position_embeddings,
        "aux_layer_ids": model.default_aux_layer_ids,
    }


class CapturedStatesHead(DraftHead):
    """Base of heads that read captured hidden states and have a draft vocabulary.

    Attributes:
        d2t: int64 ``[Vd]``, offsets: target id = draft id + ``d2t[draft id]``.
        t2d: bool ``[V]``, True for target tokens that are in the draft vocabulary.
    """

    d2t: torch.Tensor

    def make_buffers(self) -> None:
        """See :class:`DraftHead`. The draft vocabulary begins as the first Vd target tokens."""
        super().make_buffers()
        draft_vocab_size = self.config.draft_vocab_size
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(self.config.vocab_size) < draft_vocab_size)

    def set_vocab_map(self, d2t: torch.Tensor, t2d: torch.Tensor) -> None:
        """Copy in the draft vocabulary: ``d2t`` int64 ``[Vd]`` of offsets, ``t2d`` bool ``[V]``."""
        self.d2t.copy_(d2t)
        self.t2d.copy_(t2d)
