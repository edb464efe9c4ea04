"""Layouts of what a model stores of a text: keys and values, latents, and states of recurrent layers."""

import math
from dataclasses import dataclass

FP32_BYTES = 4
"""States and updates of recurrences are fp32, whatever the dtype of the model."""


@dataclass(frozen=True)
class KVSpec:
    """Cache layout of attention with heads: a key and a value of each head in each layer.

    Attributes:
        num_layers: number of attention layers.
        num_heads: number of key-value heads; the largest number where layers differ.
        head_dim: size of a key and of a value.
        heads: number of key-value heads of each layer; None where all layers have ``num_heads``.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    heads: tuple[int, ...] | None = None

    @property
    def values_per_token(self) -> int:
        """Number of cached values per token."""
        return 2 * self.num_layers * self.num_heads * self.head_dim


@dataclass(frozen=True)
class LatentSpec:
    """Cache layout of multi-head latent attention: one row in each layer, shared by all heads.

    Attributes:
        num_layers: number of attention layers.
        latent_dim: size of the latent, the first part of a row.
        rope_dim: size of the rotated part of a row.
        scale: factor of the attention scores.
    """

    num_layers: int
    latent_dim: int
    rope_dim: int
    scale: float

    @property
    def values_per_token(self) -> int:
        """Number of cached values per token."""
        return self.num_layers * (self.latent_dim + self.rope_dim)


CacheSpec = KVSpec | LatentSpec


@dataclass(frozen=True)
class RecurrenceSpec:
    """State of a recurrent layer: fp32 ``[num_heads, key_dim, value_dim]``.

    Attributes:
        num_key_heads: number of heads of queries and keys. ``num_heads / num_key_heads`` successive heads of
            values share one of them.
        num_heads: number of heads of values.
        key_dim: size of a query and of a key.
        value_dim: size of a value.
        per_channel: every channel of a key has a decay of its own, in place of one decay for each head.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    per_channel: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the state of a request."""
        return self.num_heads, self.key_dim, self.value_dim

    @property
    def values_per_node(self) -> int:
        """Number of values in the update of a window node: key, value and decay."""
        num_decays = self.num_heads
        if self.per_channel:
            num_decays *= self.key_dim
        return self.num_key_heads * self.key_dim + self.num_heads * self.value_dim + num_decays


@dataclass(frozen=True)
class StateSpec:
    """States of the recurrent layers of a target, whose size does not depend on the length of a text.

    Attributes:
        convolutions: (channels, width) of each convolution, in the order of the forward. The last
            ``width - 1`` inputs are stored.
        recurrences: state of each recurrence, in the order of the forward.
    """

    convolutions: tuple[tuple[int, int], ...] = ()
    recurrences: tuple[RecurrenceSpec, ...] = ()

    def num_bytes(self, itemsize: int) -> int:
        """Bytes of the states of a request, for activations of ``itemsize`` bytes."""
        num_inputs = sum((width - 1) * channels for channels, width in self.convolutions)
        num_values = sum(math.prod(recurrence.shape) for recurrence in self.recurrences)
        return num_inputs * itemsize + num_values * FP32_BYTES

    def num_bytes_of_node(self, itemsize: int) -> int:
        """Bytes that a window node needs until the window is committed, for activations of ``itemsize``
        bytes."""
        num_inputs = sum(channels for channels, _ in self.convolutions)
        num_values = sum(recurrence.values_per_node for recurrence in self.recurrences)
        return num_inputs * itemsize + num_values * FP32_BYTES

    @property
    def num_bytes_of_pair(self) -> int:
        """Bytes of intermediate results for a pair of window nodes, in a layer with decays per channel."""
        most = 0
        for recurrence in self.recurrences:
            if recurrence.per_channel:
                most = max(most, 3 * recurrence.num_heads * recurrence.key_dim)
        return most * FP32_BYTES
