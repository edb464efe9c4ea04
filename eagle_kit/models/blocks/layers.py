"""Layers shared by targets and draft heads.

Legend: T packed tokens, H hidden, Hq / Hkv query / key-value heads, D head size.
"""

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from eagle_kit.models.config import DecoderConfig, yarn_magnitude
from eagle_kit.ops.backend import is_differentiated
from eagle_kit.ops.linear import Linear
from eagle_kit.ops.norm import add_rms_norm, rms_norm
from eagle_kit.ops.rope import Rotation, Rows, rope_store
from eagle_kit.ops.swiglu import swiglu


class Attend(Protocol):
    """Attention as an argument of a model's forward: it defines the KV layout, which models do not depend on.

    ``q [T, Hq, D]``, ``k`` and ``v [T, Hkv, D]`` of layer ``layer``, RoPE applied -> ``[T, Hq, D]``. It may
    store ``k`` and ``v`` and must let every query attend to its own key. Values and outputs of latent
    attention may be narrower than D.

    Two members are optional: ``kv_rows(layer)``, the rows of a store that keys and values are written to as
    they are computed (:func:`kv_rows_of`), and ``shard_rows``, the rows that this rank attends for
    (:func:`shard_rows_of`).
    """

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor: ...


class KVRows(NamedTuple):
    """Rows of a store that the keys and values of a forward are written to.

    Attributes:
        k_rows: keys of a layer ``[Hkv, R, D]``.
        v_rows: values of a layer ``[Hkv, R, D]``.
        rows: the T rows of the tokens: of the pool for a prompt, of the scratch for a window.
    """

    k_rows: torch.Tensor
    v_rows: torch.Tensor
    rows: Rows


def kv_rows_of(attend: Attend, layer: int) -> KVRows | None:
    """Rows of the store that the keys and values of ``layer`` are written to as soon as they are computed.

    ``attend`` is then called with empty ``k`` and ``v``. None if ``attend`` has no method ``kv_rows``: it
    takes keys and values as arguments.
    """
    kv_rows = getattr(attend, "kv_rows", None)
    if kv_rows is None:
        return None
    rows: KVRows = kv_rows(layer)
    return rows


class ShardRows(NamedTuple):
    """Rows of a forward that this rank computes attention for, in data-parallel attention.

    Attributes:
        rows: int64 ``[m]``, the rows.
        indices: int64 ``[T]``, index of each row of the forward in the gathered rows, ``most`` of each rank.
        most: largest m of a rank.
    """

    rows: torch.Tensor
    indices: torch.Tensor
    most: int


def shard_rows_of(attend: Attend) -> ShardRows | None:
    """Rows of the forward that ``attend`` computes; None if it computes all."""
    return getattr(attend, "shard_rows", None)


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension, computed in fp32 for half types."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., size]`` -> the same shape and dtype; in training, the dtype of an fp32 weight."""
        return self._rounded(rms_norm(x, self.weight, self.eps), x)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm of ``x + residual``, and the sum; all ``[..., size]``."""
        normed, total = add_rms_norm(x, residual, self.weight, self.eps)
        return self._rounded(normed, x), total

    def _rounded(self, normed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Convert to the dtype of ``x``, except in training."""
        if is_differentiated(self.weight):
            return normed
        return normed.to(x.dtype)


class Rope(nn.Module):
    """Rotary position embedding, for pairs (d, d + D/2) or interleaved pairs (see ``rope_store``).

    Attributes:
        inv_freq: fp32 ``[D/2]``, inverse frequencies.
        magnitude: factor of cosines and sines.
    """

    inv_freq: torch.Tensor

    def __init__(self, head_dim: int, theta: float, scaling: dict[str, Any] | None) -> None:
        super().__init__()
        self.magnitude = rope_magnitude(scaling)
        self.register_buffer("inv_freq", rope_frequencies(head_dim, theta, scaling), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> "Rope":
        """Move the frequencies without changing their dtype: in a half dtype, late positions would have wrong
        angles."""
        exact = self.inv_freq
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != exact.dtype:
            self.inv_freq = exact.to(self.inv_freq.device)
        return self

    def at(self, positions: torch.Tensor) -> Rotation:
        """Rotation at ``positions [T]``, for ``rope_store``."""
        return Rotation(positions, self.inv_freq, self.magnitude)


def rope_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> torch.Tensor:
    """Inverse frequencies fp32 ``[D/2]``: unscaled, ``linear`` (position interpolation), ``llama3`` (Llama
    3.1) or ``yarn`` (arXiv 2309.00071).

    Llama 3.1 and YaRN divide low frequencies by ``factor``, keep high ones, and interpolate in between.
    Llama 3.1 interpolates by the wavelength, YaRN by the index of the pair.

    Args:
        head_dim: D.
        theta: base.
        scaling: parameters of the scaling with their ``rope_type``; None without scaling.
    """
    freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return freq
    if scaling["rope_type"] == "linear":
        return freq / scaling["factor"]
    if scaling["rope_type"] == "yarn":
        return _yarn(freq, theta, scaling)
    return _llama3(freq, scaling)


def _llama3(freq: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1's scaling of inverse frequencies ``[D/2]``."""
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    wavelength = 2 * math.pi / freq
    num_turns = scaling["original_max_position_embeddings"] / wavelength
    smooth = ((num_turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * freq / scaling["factor"] + smooth * freq


def _yarn(freq: torch.Tensor, theta: float, scaling: dict[str, Any]) -> torch.Tensor:
    """YaRN's scaling of inverse frequencies ``[D/2]``.

    Pairs that turn more than ``beta_fast`` times in the original context keep their frequency. Pairs that
    turn less than ``beta_slow`` times have theirs divided by ``factor``.
    """
    num_pairs = len(freq)
    context = scaling["original_max_position_embeddings"]

    def pair_index(num_turns: float) -> float:
        """Index of the pair that turns ``num_turns`` times in the original context."""
        return num_pairs * math.log(context / (num_turns * 2 * math.pi)) / math.log(theta)

    # Bounds of the pairs between which frequencies are interpolated.
    low = pair_index(scaling.get("beta_fast") or 32)
    high = pair_index(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, 2 * num_pairs - 1)
    width = high - low
    if width <= 0:
        width = 0.001

    slowed = ((torch.arange(num_pairs) - low) / width).clamp(0, 1)
    return slowed * freq / scaling["factor"] + (1 - slowed) * freq


def rope_magnitude(scaling: dict[str, Any] | None) -> float:
    """Factor of cosines and sines under YaRN; 1 for other scalings.

    DeepSeek's configs give the ratio of two magnitudes, ``mscale`` and ``mscale_all_dim``. The latter is
    part of the scale of the attention scores (``DecoderConfig.attention_scale``).
    """
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    attention_factor = scaling.get("attention_factor")
    if attention_factor is not None:
        return float(attention_factor)
    factor = scaling["factor"]
    mscale = scaling.get("mscale")
    mscale_all_dim = scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    return yarn_magnitude(factor)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """``1 / (1 + exp(-x))``, computed in fp32. The last bits of torch's own on a CPU depend on the position
    of an element in its tensor. In training the result below -80 is that of -80, 1.8e-35, because the
    gradient of an overflowing ``exp`` would be NaN."""
    wide = x.float()
    if wide.requires_grad:
        wide = wide.clamp(min=-80.0)
    return (1.0 / (1.0 + torch.exp(-wide))).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention around an :class:`Attend`; q, k and v are one matmul, in that order."""

    def __init__(self, config: DecoderConfig, input_size: int) -> None:
        super().__init__()
        size = config.head_dim
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = size
        all_heads = self.num_heads + 2 * self.num_kv_heads
        self.qkv_proj = Linear(input_size, all_heads * size, bias=config.attention_bias)
        self.gate_proj: Linear | None = None
        if config.gates_attention:
            self.gate_proj = Linear(input_size, self.num_heads * size, bias=config.attention_bias)
        self.o_proj = Linear(self.num_heads * size, config.hidden_size, bias=config.attention_out_bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(size, config.rms_norm_eps)
            self.k_norm = RMSNorm(size, config.rms_norm_eps)

    def qkv(
        self, x: torch.Tensor, rotation: Rotation, kv_rows: KVRows | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of a layer, with RoPE applied.

        Args:
            x: ``[T, input_size]``.
            rotation: rotation at the T positions.
            kv_rows: rows that keys and values are written to; None to return them.

        Returns:
            q ``[T, Hq, D]``, k and v ``[T, Hkv, D]``; with ``kv_rows``, k and v are empty.
        """
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # [T, Hq + 2 Hkv, D]
        options: dict[str, Any] = {}
        if self.q_norm is not None and self.k_norm is not None:
            options["q_norm"] = _norm_weight(self.q_norm, heads.dtype)
            options["k_norm"] = _norm_weight(self.k_norm, heads.dtype)
            options["eps"] = self.q_norm.eps
        if kv_rows is not None:
            options.update(kv_rows._asdict())
            options["returns_kv"] = False
        return rope_store(heads, rotation, num_heads=self.num_heads, **options)

    def attended(self, x: torch.Tensor, rotation: Rotation, layer: int, attend: Attend) -> torch.Tensor:
        """Output of attention before ``o_proj``: ``[T, input_size]`` -> ``[T, Hq, D]``."""
        q, k, v = self.qkv(x, rotation, kv_rows_of(attend, layer))
        return self.gated(attend(layer, q, k, v), x)

    def gated(self, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Multiply ``attended [T, Hq, D]`` by the sigmoid of a projection of ``x [T, input_size]``;
        returned as it is in a layer without a gate."""
        if self.gate_proj is None:
            return attended
        return attended * sigmoid(self.gate_proj(x)).view_as(attended)

    def forward(self, x: torch.Tensor, rotation: Rotation, layer: int, attend: Attend) -> torch.Tensor:
        """``[T, input_size]`` -> ``[T, H]``."""
        return self.o_proj(self.attended(x, rotation, layer, attend).flatten(1))


def _norm_weight(norm: RMSNorm, dtype: torch.dtype) -> torch.Tensor:
    """Weight of a norm of queries or keys; in training converted to ``dtype``."""
    if is_differentiated(norm.weight):
        return norm.weight.to(dtype)
    return norm.weight


class MLP(nn.Module):
    """SwiGLU; gate and up are one matmul, in that order."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` -> ``[T, H]``."""
        return self.down_proj(self.gate_up_proj.swiglu(x))

    def down(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Activation and output projection of gate and up, I values each: ``[T, 2 I]`` -> ``[T, H]``."""
        return self.down_proj(swiglu(gate_up))
