"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values of all heads are linear in one latent per token, beside which lies one key part with RoPE that
all heads share. Attention has two mathematically equal forms: *expanded*, with a key and a value for every
head, and *absorbed*, with W_UK folded into the query and W_UV applied to the sum, so that all heads attend to
the latents themselves. The layer supports both; its ``attend`` argument selects one.

Legend: T tokens, H heads, Dn / Dr sizes of a head's part without / with RoPE, Dv of a value, L latent size, C
keys.
"""

from typing import NamedTuple, Protocol

import torch
from torch import nn

from eagle_kit.models.blocks.layers import Attend, Attention, RMSNorm
from eagle_kit.models.config import DecoderConfig
from eagle_kit.models.layer_configs import MLAConfig
from eagle_kit.ops.cpu.summation import pad_rows
from eagle_kit.ops.linear import Linear, MergedLinear, pack_merged, takes_packed
from eagle_kit.ops.rope import Rotation, rope_store

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms inside the layer, independent of the config's ``rms_norm_eps``."""


class Queries(NamedTuple):
    """Rotated queries of T tokens: the parts without RoPE, ``nope [T, H, Dn]``, and with RoPE, ``rope [T, H,
    Dr]``."""

    nope: torch.Tensor
    rope: torch.Tensor

    @property
    def whole(self) -> torch.Tensor:
        """Concatenated queries ``[T, H, Dn + Dr]``."""
        return torch.cat(self, -1)


class LatentHeads(Protocol):
    """Projections between latents and heads that a layer provides to its attention."""

    def expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[C, H, Dn + Dr]`` and values ``[C, H, Dv]`` of rows ``[C, L + Dr]``."""
        ...

    def absorb(self, q: Queries) -> torch.Tensor:
        """Queries in the space of rows, ``[T, H, L + Dr]``."""
        ...

    def project(self, attended: torch.Tensor) -> torch.Tensor:
        """Sums of values ``[T, H, Dv]`` of sums of latents ``[T, H, L]``."""
        ...


class LatentAttend(Attend, Protocol):
    """Attention over a store of latents, called with rows in place of keys and values."""

    def latents(self, layer: int, q: Queries, rows: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
        """Attention of ``q`` in layer ``layer`` after storing the tokens' rows ``[T, L + Dr]`` -> ``[T, H,
        Dv]``."""
        ...


class LatentAttention(nn.Module):
    """Multi-head latent attention around an :class:`~.layers.Attend`, which gets expanded keys and values, or
    a :class:`LatentAttend`."""

    _packed: MergedLinear | None = None

    def __init__(self, config: DecoderConfig, mla: MLAConfig, input_size: int) -> None:
        super().__init__()
        self.config, self.num_heads, bias = mla, config.num_heads, config.attention_bias
        queries = self.num_heads * mla.qk_head_dim
        if mla.q_lora_rank is None:
            self.q_proj = Linear(input_size, queries, bias=False)
        else:
            self.q_a_proj = Linear(input_size, mla.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(mla.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = Linear(mla.q_lora_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = Linear(input_size, mla.kv_lora_rank + mla.qk_rope_head_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, LATENT_NORM_EPS)
        per_head = mla.qk_nope_head_dim + mla.v_head_dim
        self.kv_b_proj = Linear(mla.kv_lora_rank, self.num_heads * per_head, bias=False)
        self.o_proj = Linear(
            self.num_heads * mla.v_head_dim, config.hidden_size, bias=config.attention_out_bias
        )

    def pack(self) -> None:
        """See :meth:`Linear.pack`; the projections that read the input are one matmul."""
        first = self.q_proj if self.config.q_lora_rank is None else self.q_a_proj
        self._packed = pack_merged(first, self.kv_a_proj_with_mqa)

    def queries_and_rows(self, x: torch.Tensor, rotation: Rotation) -> tuple[Queries, torch.Tensor]:
        """``x [T, H_in]`` -> queries and rows ``[T, L + Dr]``, both rotated."""
        mla = self.config
        has_bottleneck = mla.q_lora_rank is not None
        if self._packed is not None and takes_packed(x, self._packed.weight):
            q, row = self._packed.outputs(x)
        else:
            q = (self.q_a_proj if has_bottleneck else self.q_proj)(x)
            row = self.kv_a_proj_with_mqa(x)
        if has_bottleneck:
            q = self.q_b_proj(self.q_a_layernorm(q))
        sizes = (mla.qk_nope_head_dim, mla.qk_rope_head_dim)
        q_nope, q_rope = q.unflatten(-1, (self.num_heads, -1)).split_with_sizes(sizes, -1)
        latent, k_rope = row.split_with_sizes((mla.kv_lora_rank, mla.qk_rope_head_dim), -1)
        shared = k_rope[:, None]
        heads = torch.cat((q_rope, shared, shared), 1)  # the last argument, the values, is unused
        q_rope, k, _ = rope_store(heads, rotation, num_heads=self.num_heads, interleaved=mla.interleaved)
        rows = torch.cat((self.kv_a_layernorm(latent), k[:, 0]), -1)
        return Queries(q_nope, q_rope), rows

    def qkv(self, x: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``x [T, H_in]`` -> q and k ``[T, H, Dn + Dr]``, v ``[T, H, Dv]``: the expanded form."""
        q, rows = self.queries_and_rows(x, rotation)
        return q.whole, *self.expand(rows)

    def attended(self, x: torch.Tensor, rotation: Rotation, layer: int, attend: Attend) -> torch.Tensor:
        """Attention output before ``o_proj``: ``[T, H_in]`` -> ``[T, H, Dv]``."""
        q, rows = self.queries_and_rows(x, rotation)
        over_latents = getattr(attend, "latents", None)
        if over_latents is None:
            return attend(layer, q.whole, *self.expand(rows))
        return over_latents(layer, q, rows, self)

    def gated(self, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``attended``: there is no gate, see :meth:`Attention.gated`."""
        return attended

    def forward(self, x: torch.Tensor, rotation: Rotation, layer: int, attend: Attend) -> torch.Tensor:
        """``[T, H_in]`` -> ``[T, H_out]``."""
        return self.o_proj(self.attended(x, rotation, layer, attend).flatten(1))

    def expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`LatentHeads`."""
        mla = self.config
        latent, k_rope = rows.split((mla.kv_lora_rank, mla.qk_rope_head_dim), -1)
        made = self.kv_b_proj(latent).unflatten(-1, (self.num_heads, -1))
        k_nope, v = made.split((mla.qk_nope_head_dim, mla.v_head_dim), -1)
        return torch.cat((k_nope, k_rope[:, None].expand(-1, self.num_heads, -1)), -1), v

    def absorb(self, q: Queries) -> torch.Tensor:
        """See :class:`LatentHeads`."""
        w_uk = self._per_head()[:, : self.config.qk_nope_head_dim]
        return torch.cat((_multiply(q.nope, w_uk), q.rope), -1)

    def project(self, attended: torch.Tensor) -> torch.Tensor:
        """See :class:`LatentHeads`."""
        w_uv = self._per_head()[:, self.config.qk_nope_head_dim :]
        return _multiply(attended, w_uv.transpose(1, 2))

    def _per_head(self) -> torch.Tensor:
        """Weight of the expansion, W_UK above W_UV, ``[H, Dn + Dv, L]``."""
        weight = self.kv_b_proj.weight
        return weight.view(self.num_heads, -1, weight.shape[1])


def make_attention(config: DecoderConfig, input_size: int) -> Attention | LatentAttention:
    """Attention of a layer, grouped-query or latent, from ``[T, input_size]`` to ``[T, hidden_size]``."""
    if config.mla is not None:
        return LatentAttention(config, config.mla, input_size)
    return Attention(config, input_size)


def _multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x [T, H, A]`` times ``weight [H, A, B]`` head by head -> ``[T, H, B]``.

    On a CPU, inputs of few rows are padded (:mod:`eagle_kit.ops.cpu.summation`): a token's logits must not
    depend on the number of tokens in its window.
    """
    rows = x.transpose(0, 1)
    padded = pad_rows(rows) if x.device.type == "cpu" else rows
    return torch.bmm(padded, weight).transpose(0, 1)[: len(x)]
