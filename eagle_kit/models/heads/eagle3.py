"""The EAGLE-3 draft head (arXiv 2503.01840), one definition for training and serving.

Legend: T packed tokens, H hidden, Vd draft vocabulary, V target vocabulary.

The feature is the fused target states of three layers, then the head's own output of the step before. The
decoder layer is a Llama one, or has latent attention. EAGLE-3.1 (arXiv 2605.09992) is two flags of
:class:`~eagle_kit.models.config.DraftConfig`.
"""

import torch
from torch import nn

from eagle_kit.kernels.linear import Linear
from eagle_kit.models.blocks.layers import MLP, Attention, RMSNorm
from eagle_kit.models.blocks.mla import LatentAttention
from eagle_kit.models.config import DraftConfig
from eagle_kit.models.heads.draft_head import Block, DraftHead


class Eagle3Layer(Block):
    """The decoder layer over cat(norm(embedding), norm(feature)), with the feature as residual."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        heads, bias = config.num_heads, config.attention_bias
        if config.mla is None:
            self.self_attn = Attention(2 * size, size, heads, config.num_kv_heads, config.head_dim, bias=bias)
        else:
            self.self_attn = LatentAttention(2 * size, size, heads, config.mla, bias=bias)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, config.intermediate_size)
        self.norm_before_residual = config.norm_before_residual

    def inputs(self, hidden: torch.Tensor, embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~eagle_kit.models.heads.draft_head.Block`; attention's input is ``[T, 2H]``."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        return torch.cat((self.input_layernorm(embeds), normed), -1), residual

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """See :class:`~eagle_kit.models.heads.draft_head.Block`."""
        h = residual + self.self_attn.o_proj(attended.flatten(1))
        return h + self.mlp(self.post_attention_layernorm(h))


class Eagle3Head(DraftHead):
    """An EAGLE-3 head.

    Buffers: ``d2t`` int64 ``[Vd]``, offsets (target id = draft id + ``d2t[draft id]``); ``t2d`` bool ``[V]``.
    """

    config: DraftConfig
    d2t: torch.Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        num_aux = len(config.aux_layer_ids)
        self.fc_norm = (
            nn.ModuleList(RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in range(num_aux))
            if config.fc_norm
            else None
        )
        self.fc = Linear(num_aux * config.target_hidden_size, size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = Linear(size, config.draft_vocab_size, bias=False)

    def make_buffers(self) -> None:
        """See :class:`DraftHead`; the map is that of the first Vd tokens."""
        super().make_buffers()
        self.register_buffer("d2t", torch.zeros(self.config.draft_vocab_size, dtype=torch.int64))
        t2d = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        t2d[: self.config.draft_vocab_size] = True
        self.register_buffer("t2d", t2d)

    def set_vocab_map(self, d2t: torch.Tensor, t2d: torch.Tensor) -> None:
        """Copy the hot-token map in: ``d2t`` int64 ``[Vd]`` of offsets, ``t2d`` bool ``[V]``."""
        self.d2t.copy_(d2t)
        self.t2d.copy_(t2d)

    @property
    def blocks(self) -> list[Block]:
        """The one layer."""
        return [self.midlayer]

    @property
    def output(self) -> Linear:
        """``lm_head``."""
        return self.lm_head

    @property
    def last_norm(self) -> RMSNorm:
        """``norm``."""
        return self.norm

    @property
    def target_ids(self) -> torch.Tensor:
        """The target id of every draft id, int64 ``[Vd]``."""
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    @property
    def token_map(self) -> torch.Tensor:
        """:attr:`target_ids`."""
        return self.target_ids

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft ids of any shape -> target ids."""
        return draft_ids + self.d2t[draft_ids]

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """The captured target states ``[T, 3 * H_target]`` -> the feature ``[T, H]`` of step 0."""
        if self.fc_norm is not None:
            parts = aux.split(self.config.target_hidden_size, -1)
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(aux)

    def features(self, hidden: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
        """:meth:`fuse` of ``aux``."""
        return self.fuse(aux)

    def feed_back(self, out: torch.Tensor) -> torch.Tensor:
        """The layer's output ``[T, H]`` -> the state that the next step gets: normed for EAGLE-3.1, else as
        it is."""
        return self.norm(out) if self.config.norm_output else out

    def norm_for_head(self, fed_back: torch.Tensor) -> torch.Tensor:
        """:meth:`forward`'s output ``[T, H]`` -> what ``lm_head`` multiplies."""
        return fed_back if self.config.norm_output else self.norm(fed_back)
