"""Records of the layers of a model of transformers: the attention and the recurrent states that they ask
for."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.models.bridge.attention import AttentionCall, BridgedForward, running
from eagle_kit.models.cache_specs import RecurrenceSpec, StateSpec
from eagle_kit.ops.attention.variant import NO_LIMITS, AttentionVariant, Limits
from eagle_kit.ops.recurrence import Inputs

NUM_TOKENS = 3
"""Number of tokens of the forward that layers are recorded in."""
GATHERED = "batched_mm"
"""transformers' implementation of experts that gathers the weights of each token's experts."""
GROUPED = "grouped_mm"
"""transformers' implementation of experts that groups tokens by expert."""


@dataclass(frozen=True)
class LayerRecord:
    """Attention of one layer.

    Attributes:
        num_heads: number of query heads.
        num_kv_heads: number of key-value heads.
        head_dim: size of a query or key.
        value_dim: size of a value.
        scale: factor of the scores.
        limits: sliding window or chunks.
        soft_cap: soft cap of the scores; None without one.
        sinks: function that finds the sinks of the layer, which move with the weights of the model; None
            without sinks.
        layer: index of the decoder layer; None if its attention module does not have it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    limits: Limits = NO_LIMITS
    soft_cap: float | None = None
    sinks: Callable[[], torch.Tensor] | None = None
    layer: int | None = None

    @property
    def variant(self) -> AttentionVariant:
        """Variant of attention of the layer, with its present sinks."""
        sinks: torch.Tensor | None = None
        if self.sinks is not None:
            sinks = self.sinks()
        return AttentionVariant(self.scale, self.limits, self.soft_cap, sinks)


class RecordedLayers(NamedTuple):
    """Layers of a model.

    Attributes:
        records: attention layers, in the order of the forward.
        states: layout of the states of recurrent layers; None without any.
    """

    records: list[LayerRecord]
    states: StateSpec | None


class RecordingHandler:
    """Handler that records what layers ask for, and returns zeros.

    Args:
        config: transformers' config of the text model.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self.records: list[LayerRecord] = []
        self.convolutions: list[tuple[int, int]] = []
        self.recurrences: list[RecurrenceSpec] = []

    @property
    def recorded(self) -> RecordedLayers:
        """The layers that were recorded."""
        states: StateSpec | None = None
        if self.convolutions or self.recurrences:
            states = StateSpec(tuple(self.convolutions), tuple(self.recurrences))
        return RecordedLayers(self.records, states)

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See :class:`~eagle_kit.models.bridge.attention.LayerHandler`."""
        num_channels, width = weight.shape
        self.convolutions.append((num_channels, width))
        return torch.zeros_like(x)

    def recur(self, inputs: Inputs, *, delta: bool) -> torch.Tensor:
        """See :class:`~eagle_kit.models.bridge.attention.LayerHandler`."""
        _, num_heads, value_dim = inputs.v.shape
        _, num_key_heads, key_dim = inputs.k.shape
        spec = RecurrenceSpec(num_key_heads, num_heads, key_dim, value_dim, per_channel=inputs.g.ndim == 3)
        self.recurrences.append(spec)
        return torch.zeros_like(inputs.v)

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """See :class:`~eagle_kit.models.bridge.attention.LayerHandler`."""
        # Attention that is not causal over one text is not supported.
        num_tokens, num_heads, head_dim = call.q.shape
        num_keys, num_kv_heads, _ = call.k.shape
        value_dim = call.v.shape[-1]
        if not getattr(call.module, "is_causal", True):
            raise UserError(
                "A layer of this model attends to later tokens, or to another text.",
                "Use a model that writes from left to right.",
            )
        if num_keys != num_tokens:
            raise UserError(
                f"A layer of this model attends to {num_keys} keys for {num_tokens} tokens.",
                "Such attention is not supported.",
            )

        sinks: Callable[[], torch.Tensor] | None = None
        if call.sinks is not None:
            sinks = _parameter_finder(call.module, call.sinks)
        record = LayerRecord(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            scale=call.scale,
            limits=self._limits(call),
            soft_cap=call.soft_cap or None,
            sinks=sinks,
            layer=getattr(call.module, "layer_idx", None),
        )
        self.records.append(record)
        return call.q.new_zeros(num_tokens, num_heads, value_dim)

    def _limits(self, call: AttentionCall) -> Limits:
        """Limits by the keyword argument of the layer, or else by the config's types of layers."""
        layer = getattr(call.module, "layer_idx", None)
        types = getattr(self._config, "layer_types", None)
        layer_type: str | None = None
        if types and layer is not None and layer < len(types):
            layer_type = types[layer]
        if layer_type == "chunked_attention":
            return Limits(chunk=int(self._config.attention_chunk_size))
        window = call.window
        if window is None and (layer_type == "sliding_attention" or not types):
            window = getattr(self._config, "sliding_window", None)
        return Limits(window=int(window or 0))


def _parameter_finder(module: torch.nn.Module, sinks: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Make a function that finds the parameter ``sinks`` of a module. In a copy of the model it finds the
    parameter of the copy.

    Raises:
        UserError: ``sinks`` is no parameter of the module.
    """
    for name, parameter in module.named_parameters():
        if parameter is sinks:
            return partial(_parameter, module, name)
    raise UserError(
        "The sinks of a layer of this model are no parameter of it.", "Such attention is not supported."
    )


def _parameter(module: torch.nn.Module, name: str) -> torch.Tensor:
    return module.get_parameter(name).detach()


def use_experts(model: Any, implementation: str) -> None:
    """Select one of transformers' implementations of experts, :data:`GATHERED` or :data:`GROUPED`."""
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, "_experts_implementation_internal"):
            config._experts_implementation_internal = implementation


def record_layers(model: Any, decoder: Any, config: Any) -> RecordedLayers:
    """Run the decoder of a model once, and record its layers.

    Args:
        model: causal language model, perhaps on the meta device.
        decoder: text decoder of the model.
        config: transformers' config of the decoder.

    Raises:
        UserError: no layer calls the attention function.
    """
    handler = RecordingHandler(config)
    use_experts(model, GATHERED)
    device = model.get_input_embeddings().weight.device
    positions = torch.arange(NUM_TOKENS, device=device)[None]
    with torch.no_grad(), running(BridgedForward(handler)):
        decoder(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False)
    if not handler.records:
        raise UserError(
            f"No layer of {type(model).__name__} calls transformers' attention interface.",
            "Use a model of another family; docs/reference/targets.md lists those that work.",
        )
    return handler.recorded
