"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values of all heads are projections of one latent per token. All heads share one key part with RoPE,
which is stored behind the latent. Attention has two mathematically equal forms: *expanded*, with a key and
a value for every head, and *absorbed*, with W_UK folded into the query and W_UV applied to the sum, so that
all heads attend to the latents themselves. The layer supports both; its ``attend`` argument selects one.

Legend: T tokens, H heads, Dn / Dr sizes of a head's part without / with RoPE, Dv of a value, L latent size, C
keys. A *row* has L + Dr values: the latent, then the key part with RoPE.
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
    """Queries of T tokens, with RoPE applied.

    Attributes:
        nope: parts without RoPE ``[T, H, Dn]``.
        rope: parts with RoPE ``[T, H, Dr]``.
    """

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
        """Attention outputs ``[T, H, Dv]`` from attended latents ``[T, H, L]``."""
        ...


class LatentAttend(Attend, Protocol):
    """Attention over a store of latents, called with rows in place of keys and values."""

    def latents(self, layer: int, q: Queries, rows: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
        """Store the rows of the tokens, and attend.

        Args:
            layer: layer of the store.
            q: queries of the tokens.
            rows: ``[T, L + Dr]``.
            heads: projections of the layer.

        Returns:
            ``[T, H, Dv]``.
        """
        ...


class LatentAttention(nn.Module):
    """Multi-head latent attention around an :class:`~.layers.Attend`, which receives expanded keys and
    values, or around a :class:`LatentAttend`, which receives rows."""

    _packed: MergedLinear | None = None

    def __init__(self, config: DecoderConfig, mla: MLAConfig, input_size: int) -> None:
        super().__init__()
        self.config = mla
        self.num_heads = config.num_heads
        self.row_sizes = (mla.kv_lora_rank, mla.qk_rope_head_dim)
        bias = config.attention_bias

        # Queries, through a bottleneck if the config has one.
        query_size = self.num_heads * mla.qk_head_dim
        if mla.q_lora_rank is None:
            self.q_proj = Linear(input_size, query_size, bias=False)
        else:
            self.q_a_proj = Linear(input_size, mla.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(mla.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = Linear(mla.q_lora_rank, query_size, bias=False)

        # Rows, and their expansion to keys and values.
        self.kv_a_proj_with_mqa = Linear(input_size, sum(self.row_sizes), bias=bias)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, LATENT_NORM_EPS)
        expanded_size = self.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        self.kv_b_proj = Linear(mla.kv_lora_rank, expanded_size, bias=False)

        value_size = self.num_heads * mla.v_head_dim
        self.o_proj = Linear(value_size, config.hidden_size, bias=config.attention_out_bias)

    @property
    def _first_q_proj(self) -> Linear:
        """Projection of queries that reads the input of the layer."""
        if self.config.q_lora_rank is None:
            return self.q_proj
        return self.q_a_proj

    def pack(self) -> None:
        """See :meth:`Linear.pack`; the projections that read the input are one matmul."""
        self._packed = pack_merged(self._first_q_proj, self.kv_a_proj_with_mqa)

    def queries_and_rows(self, x: torch.Tensor, rotation: Rotation) -> tuple[Queries, torch.Tensor]:
        """``x [T, input_size]`` -> queries and rows ``[T, L + Dr]``, with RoPE applied."""
        mla = self.config

        # Projections.
        if self._packed is not None and takes_packed(x, self._packed.weight):
            q, row = self._packed.outputs(x)
        else:
            q = self._first_q_proj(x)
            row = self.kv_a_proj_with_mqa(x)
        if mla.q_lora_rank is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        head_sizes = (mla.qk_nope_head_dim, mla.qk_rope_head_dim)
        q_nope, q_rope = q.unflatten(-1, (self.num_heads, -1)).split_with_sizes(head_sizes, -1)
        latent, k_rope = row.split_with_sizes(self.row_sizes, -1)

        # RoPE. ``rope_store`` also takes values, which are not needed: the key part is given in their place.
        shared = k_rope[:, None]
        heads = torch.cat((q_rope, shared, shared), 1)
        q_rope, k, _ = rope_store(heads, rotation, num_heads=self.num_heads, interleaved=mla.interleaved)
        rows = torch.cat((self.kv_a_layernorm(latent), k[:, 0]), -1)
        return Queries(q_nope, q_rope), rows

    def qkv(self, x: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Expanded queries and keys ``[T, H, Dn + Dr]`` and values ``[T, H, Dv]`` of ``x [T,
        input_size]``."""
        q, rows = self.queries_and_rows(x, rotation)
        k, v = self.expand(rows)
        return q.whole, k, v

    def attended(self, x: torch.Tensor, rotation: Rotation, layer: int, attend: Attend) -> torch.Tensor:
        """Output of attention before ``o_proj``: ``[T, input_size]`` -> ``[T, H, Dv]``."""
        q, rows = self.queries_and_rows(x, rotation)
        attend_latents = getattr(attend, "latents", None)
        if attend_latents is None:
            k, v = self.expand(rows)
            return attend(layer, q.whole, k, v)
        out: torch.Tensor = attend_latents(layer, q, rows, self)
        return out

    def gated(self, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return ``attended`` unchanged: latent attention has no gate. See :meth:`Attention.gated`."""
        return attended

    def forward(self, x: torch.Tensor, rotation: Rotation, layer: int, attend: Attend) -> torch.Tensor:
        """``[T, input_size]`` -> ``[T, hidden_size]``."""
        return self.o_proj(self.attended(x, rotation, layer, attend).flatten(1))

    def expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`LatentHeads`."""
        mla = self.config
        latent, k_rope = rows.split(self.row_sizes, -1)
        expanded = self.kv_b_proj(latent).unflatten(-1, (self.num_heads, -1))  # [C, H, Dn + Dv]
        k_nope, v = expanded.split((mla.qk_nope_head_dim, mla.v_head_dim), -1)
        shared = k_rope[:, None].expand(-1, self.num_heads, -1)
        return torch.cat((k_nope, shared), -1), v

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
    rows = x.transpose(0, 1)  # [H, T, A]
    if x.device.type == "cpu":
        rows = pad_rows(rows)
    return torch.bmm(rows, weight).transpose(0, 1)[: len(x)]
