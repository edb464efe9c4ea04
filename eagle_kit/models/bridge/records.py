"""What each attention layer of a model of transformers wants, learned from one forward."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.models.bridge.attention import Call, Forward, running
from eagle_kit.models.cache_specs import RecurrenceSpec, StateSpec
from eagle_kit.ops.attention.variant import NO_LIMITS, AttentionVariant, Limits
from eagle_kit.ops.recurrence import Inputs

PROBE_TOKENS = 3
GATHERED, GROUPED = "batched_mm", "grouped_mm"
"""Experts that gather the weights of each token's, and that group tokens by expert."""


@dataclass(frozen=True)
class LayerRecord:
    """One attention layer: numbers of query and key heads, sizes of a key and of a value, and how it attends.

    Attributes:
        layer: number of the decoder layer, None where its attention does not say.
        sinks: finds the layer's sinks, which move with the model's weights; None where it has none.
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
        """How the layer attends, with its sinks as they are now."""
        sinks = None if self.sinks is None else self.sinks()
        return AttentionVariant(self.scale, self.limits, self.soft_cap, sinks)


class Learned(NamedTuple):
    """What a model's layers ask for: the ``records`` of its attention, and what recurrent layers keep, None
    without any."""

    records: list[LayerRecord]
    states: StateSpec | None


class Probe:
    """Handler that records what layers ask for, and gives zeros."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.records: list[LayerRecord] = []
        self.convolutions: list[tuple[int, int]] = []
        self.recurrences: list[RecurrenceSpec] = []

    @property
    def learned(self) -> "Learned":
        """What was recorded."""
        states = StateSpec(tuple(self.convolutions), tuple(self.recurrences))
        return Learned(self.records, states if self.convolutions or self.recurrences else None)

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See :class:`~eagle_kit.models.bridge.attention.Handler`."""
        channels, width = weight.shape
        self.convolutions.append((channels, width))
        return torch.zeros_like(x)

    def recur(self, inputs: Inputs, *, delta: bool) -> torch.Tensor:
        """See :class:`~eagle_kit.models.bridge.attention.Handler`."""
        _, heads, value_dim = inputs.v.shape
        spec = RecurrenceSpec(inputs.k.shape[1], heads, inputs.k.shape[2], value_dim, inputs.g.ndim == 3)
        self.recurrences.append(spec)
        return torch.zeros_like(inputs.v)

    def __call__(self, call: Call) -> torch.Tensor:
        """See :class:`~eagle_kit.models.bridge.attention.Handler`."""
        (_, heads, size), kv_heads, value_dim = call.q.shape, call.k.shape[1], call.v.shape[-1]
        if not getattr(call.module, "is_causal", True):
            raise UserError(
                "A layer of this model attends to later tokens, or to another text.",
                "Use a model that writes from left to right.",
            )
        if call.k.shape[0] != call.q.shape[0]:
            raise UserError(
                f"A layer of this model attends to {call.k.shape[0]} keys for {call.q.shape[0]} tokens.",
                "Such attention is not supported.",
            )
        limits = self._limits(call)
        sinks = None if call.sinks is None else _finder(call.module, call.sinks)
        layer = getattr(call.module, "layer_idx", None)
        kept = heads, kv_heads, size, value_dim, call.scale, limits, call.soft_cap or None, sinks, layer
        self.records.append(LayerRecord(*kept))
        return call.q.new_zeros(*call.q.shape[:2], value_dim)

    def _limits(self, call: Call) -> Limits:
        """Limits by the layer's keyword argument, or else by the config's types of layers."""
        number = getattr(call.module, "layer_idx", None)
        types = getattr(self._config, "layer_types", None)
        kind = types[number] if types and number is not None and number < len(types) else None
        if kind == "chunked_attention":
            return Limits(chunk=int(self._config.attention_chunk_size))
        window = call.window
        if window is None and (kind == "sliding_attention" or not types):
            window = getattr(self._config, "sliding_window", None)
        return Limits(window=int(window or 0))


def _finder(module: torch.nn.Module, sinks: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Function that finds the parameter of a module that is ``sinks``; a copy of a model has its own."""
    names = [name for name, value in module.named_parameters() if value is sinks]
    if not names:
        raise UserError(
            "The sinks of a layer of this model are no parameter of it.", "Such attention is not supported."
        )
    return partial(_parameter, module, names[0])


def _parameter(module: torch.nn.Module, name: str) -> torch.Tensor:
    return module.get_parameter(name).detach()


def use_experts(model: Any, implementation: str) -> None:
    """Have mixtures of a model compute by one of transformers' implementations of experts."""
    config = model.config
    for each in {id(each): each for each in (config, config.get_text_config())}.values():
        if hasattr(each, "_experts_implementation_internal"):
            each._experts_implementation_internal = implementation


def probe(model: Any, decoder: Any, config: Any) -> Learned:
    """Run ``decoder`` of a model once, on the device of its weights (perhaps meta) -> what its layers ask
    for.

    Raises:
        UserError: no layer calls the attention function.
    """
    handler = Probe(config)
    use_experts(model, GATHERED)
    device = model.get_input_embeddings().weight.device
    positions = torch.arange(PROBE_TOKENS, device=device)[None]
    with torch.no_grad(), running(Forward(handler)):
        decoder(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False)
    if not handler.records:
        raise UserError(
            f"No layer of {type(model).__name__} calls transformers' attention interface.",
            "Use a model of another family; docs/targets.md lists those that work.",
        )
    return handler.learned
