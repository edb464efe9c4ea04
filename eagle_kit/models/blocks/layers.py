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
    """

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor: ...


class KVSlots(NamedTuple):
    """Slots to write a layer's keys and values to: T rows ``rows`` of ``k_rows`` and ``v_rows [Hkv, R,
    D]``."""

    k_rows: torch.Tensor
    v_rows: torch.Tensor
    rows: Rows


def kv_slots_of(attend: Attend, layer: int) -> KVSlots | None:
    """Slots to write the keys and values of ``layer`` to as soon as they are computed; ``attend`` is then
    called with empty ``k`` and ``v``. None when ``attend`` has no method ``kv_slots`` and takes them as
    arguments."""
    kv_slots = getattr(attend, "kv_slots", None)
    return None if kv_slots is None else kv_slots(layer)


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
    """Rows that ``attend`` computes; None where it computes all."""
    return getattr(attend, "shard_rows", None)


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension, computed in fp32 for half types."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., size]`` -> the same shape and dtype; in training with an fp32 weight that of the weight."""
        return self._rounded(rms_norm(x, self.weight, self.eps), x)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm of ``x + residual``, and the sum."""
        normed, total = add_rms_norm(x, residual, self.weight, self.eps)
        return self._rounded(normed, x), total

    def _rounded(self, normed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return normed if is_differentiated(self.weight) else normed.to(x.dtype)


class Rope(nn.Module):
    """Rotary positions, for pairs (d, d + D/2) or interleaved pairs (see ``rope_store``)."""

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
    """Inverse frequencies ``[D/2]``, fp32: plain, ``linear`` (position interpolation), ``llama3`` (Llama 3.1)
    or ``yarn`` (arXiv 2309.00071).

    Llama 3.1 and YaRN divide low frequencies by ``factor``, keep high ones, and interpolate in between: Llama
    by the wavelength between two thresholds, YaRN by the pair's index between those of two frequencies.
    """
    freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return freq
    if scaling["rope_type"] == "linear":
        return freq / scaling["factor"]
    if scaling["rope_type"] == "yarn":
        return _yarn(freq, theta, scaling)
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / freq
    smooth = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * freq / factor + smooth * freq


def _yarn(freq: torch.Tensor, theta: float, scaling: dict[str, Any]) -> torch.Tensor:
    """Keep pairs that turn more than ``beta_fast`` times in the original context, and divide the frequency of
    those that turn less than ``beta_slow`` times."""
    half, context = len(freq), scaling["original_max_position_embeddings"]

    def pair_of(turns: float) -> float:
        return half * math.log(context / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair_of(scaling.get("beta_fast") or 32), pair_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    slowed = ((torch.arange(half) - low) / (high - low if high > low else 0.001)).clamp(0, 1)
    return slowed * freq / scaling["factor"] + (1 - slowed) * freq


def rope_magnitude(scaling: dict[str, Any] | None) -> float:
    """Factor of cosines and sines under YaRN; 1 for other scalings. DeepSeek's configs move it into the scale
    of the scores: ``mscale`` over ``mscale_all_dim``."""
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if (given := scaling.get("attention_factor")) is not None:
        return float(given)
    factor, both = scaling["factor"], (scaling.get("mscale"), scaling.get("mscale_all_dim"))
    if both[0] and both[1]:
        return yarn_magnitude(factor, both[0]) / yarn_magnitude(factor, both[1])
    return yarn_magnitude(factor)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """``1 / (1 + exp(-x))``, computed in fp32; on a CPU the bits of torch's depend on an element's place."""
    return (1.0 / (1.0 + torch.exp(-x.float()))).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention around an :class:`Attend`; q, k and v are one matmul, in that order."""

    def __init__(self, config: DecoderConfig, input_size: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = size = config.head_dim
        all_heads = self.num_heads + 2 * self.num_kv_heads
        self.qkv_proj = Linear(input_size, all_heads * size, bias=config.attention_bias)
        self.gate_proj: Linear | None = None
        if config.gates_attention:
            self.gate_proj = Linear(input_size, self.num_heads * size, bias=config.attention_bias)
        self.o_proj = Linear(self.num_heads * size, config.hidden_size, bias=config.attention_out_bias)
        self.q_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None

    def qkv(
        self, x: torch.Tensor, rotation: Rotation, slots: KVSlots | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``x [T, input]`` -> q ``[T, Hq, D]``, k and v ``[T, Hkv, D]``, q and k rotated; with ``slots``, k
        and v are written there and returned empty."""
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        norms: dict[str, Any] = {}
        if self.q_norm is not None and self.k_norm is not None:
            q_weight, k_weight = (
                norm.weight.to(heads.dtype) if is_differentiated(norm.weight) else norm.weight
                for norm in (self.q_norm, self.k_norm)
            )
            norms = {"q_norm": q_weight, "k_norm": k_weight, "eps": self.q_norm.eps}
        stores = {} if slots is None else {**slots._asdict(), "returns_kv": False}
        return rope_store(heads, rotation, num_heads=self.num_heads, **norms, **stores)

    def attended(self, x: torch.Tensor, rotation: Rotation, layer: int, attend: Attend) -> torch.Tensor:
        """Attention output before ``o_proj``: ``[T, input]`` -> ``[T, Hq, D]``."""
        return self.gated(attend(layer, *self.qkv(x, rotation, kv_slots_of(attend, layer))), x)

    def gated(self, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``attended [T, Hq, D]`` times the sigmoid of a projection of ``x [T, input]``, where there is
        one."""
        if self.gate_proj is None:
            return attended
        return attended * sigmoid(self.gate_proj(x)).view_as(attended)

    def forward(self, x: torch.Tensor, rotation: Rotation, layer: int, attend: Attend) -> torch.Tensor:
        """``[T, input]`` -> ``[T, output]``."""
        return self.o_proj(self.attended(x, rotation, layer, attend).flatten(1))


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
        """Activation and output projection: ``[T, 2 I]`` -> ``[T, H]``."""
        return self.down_proj(swiglu(gate_up))
