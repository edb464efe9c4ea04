"""A model of transformers as a target.

Legend: T packed tokens, H hidden, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from eagle_kit.core.errors import UserError
from eagle_kit.models.blocks.layers import Attend
from eagle_kit.models.bridge.attention import NAME, TUNING, Attended, Forward, current, running
from eagle_kit.models.bridge.config import BridgedConfig, decoder_of, layers_of, norm_of, pin_rope
from eagle_kit.models.bridge.records import GATHERED, GROUPED, LayerRecord, probe, use_experts
from eagle_kit.models.bridge.recurrence import take_over_recurrence
from eagle_kit.models.targets.target import LogitForm, Target, TargetOutput
from eagle_kit.ops.attention.variant import AttentionVariant
from eagle_kit.ops.linear import Linear

GATHERED_ROWS, GATHERED_BYTES = 64, 2**30
"""Rows, and bytes, up to which the weights of a token's experts are gathered: the same bits for any number of
rows, and nothing is read on the host."""


class BridgedLinear(Linear):
    """Linear layer that takes rows in any shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., K]`` -> ``[..., N]``."""
        return super().forward(x.flatten(0, -2)).view(*x.shape[:-1], self.out_features)


class BridgedModel(Target):
    """Target whose layers are those of a model of transformers.

    Args:
        model: causal language model whose attention function is ours; its linear layers are replaced.

    Attributes:
        experts: implementation of experts to use; None chooses by the number of rows.
        has_experts: some of its layers are mixtures.

    Raises:
        UserError: its layers cannot be told apart.
    """

    def __init__(self, config: BridgedConfig, model: Any) -> None:
        super().__init__()
        self.config: BridgedConfig = config
        self.model = model
        self.logit_form = LogitForm(config.logit_scale, config.soft_cap)
        _replace_linears(model)
        pin_rope(model)
        take_over_recurrence(model)
        _take_over_tuning(model)
        self._decoder = [decoder_of(model)]  # a list, since it is registered as a part of the model
        layers = layers_of(self._decoder[0], config.num_layers)
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(_Capture(number), with_kwargs=True)
        layers[-1].register_forward_hook(_capture_last(config.num_layers))
        self._layers = [layers]
        self.records: list[LayerRecord] = []
        self.experts: str | None = None
        per_row = max(
            (_gathered_bytes(module, config.num_chosen_experts) for module in layers.modules()), default=0
        )
        self.has_experts = per_row > 0
        self._gathered_rows = min(GATHERED_ROWS, GATHERED_BYTES // max(per_row, 1))
        self.working_bytes = min(GATHERED_ROWS * per_row, GATHERED_BYTES)

    def learn(self) -> None:
        """Learn how the layers attend, from a forward."""
        self.records = probe(self.model, self._decoder[0], self.model.config.get_text_config()).records

    def host_read(self) -> str | None:
        """See :class:`~eagle_kit.models.targets.target.Target`: found by a forward over fake tensors."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        text = self.model.config.get_text_config()
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                probe(self.model, self._decoder[0], text)
        except Exception as error:  # what a model does with a number that is not there
            reason = str(error).strip().splitlines() or [""]
            return f"{type(error).__name__} {reason[0]}".strip()
        return None

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        """The decoder's layers."""
        return self._layers[0]

    @property
    def embed_tokens(self) -> nn.Embedding:  # type: ignore[override]
        """The embedding; its plain rows are those of its weight."""
        embedding: nn.Embedding = self.model.get_input_embeddings()
        return embedding

    @property
    def lm_head(self) -> Linear:  # type: ignore[override]
        """The output layer."""
        output: Linear = self.model.get_output_embeddings()
        return output

    @property
    def variants(self) -> Sequence[AttentionVariant]:
        """See :class:`~eagle_kit.models.targets.target.Target`."""
        return [record.variant for record in self.records]

    def place_layers(self, devices: Sequence[torch.device] | None) -> None:
        """See :class:`~eagle_kit.models.targets.target.Target`; raises UserError unless all are on one
        device."""
        if devices is not None and len(set(devices)) > 1:
            raise UserError(
                f"A target of the type {self.config.model_type} cannot be spread over devices.",
                "Give each process the whole target, or train from states that were captured before.",
            )

    def final_norm(self, states: torch.Tensor) -> torch.Tensor:
        """See :class:`~eagle_kit.models.targets.target.Target`."""
        states = norm_of(self._decoder[0])(states)
        assert isinstance(states, torch.Tensor)
        return states

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend, capture: tuple[int, ...] = ()
    ) -> TargetOutput:
        """See :class:`~eagle_kit.models.targets.target.Target`."""
        use_experts(self.model, self.experts or (GATHERED if len(ids) <= self._gathered_rows else GROUPED))
        with running(Forward(Attended(attend, self.config.cache.head_dim, positions), capture)) as forward:
            out = self._decoder[0](input_ids=ids[None], position_ids=positions[None], use_cache=False)
        hidden = out.last_hidden_state[0]
        aux = torch.cat([forward.captured[i] for i in capture], -1) if capture else hidden[:, :0]
        return TargetOutput(hidden, aux)


def _gathered_bytes(module: nn.Module, num_chosen: int) -> int:
    """Bytes of the weights of a token's experts, where a module holds experts."""
    stacks = [p for p in module.parameters(recurse=False) if p.ndim == 3]
    return sum(p.nbytes // p.shape[0] for p in stacks) * num_chosen


class _Capture:
    """Hook that keeps a layer's input, where the forward under way asks for it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forward = current()
        if forward is not None and self._number in forward.capture:
            forward.captured[self._number] = _rows(args[0] if args else kwargs["hidden_states"])


def _capture_last(number: int) -> Any:
    """Hook that keeps the last layer's output under ``number``."""

    def keep(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        forward = current()
        if forward is not None and number in forward.capture:
            forward.captured[number] = _rows(out[0] if isinstance(out, tuple) else out)

    return keep


def _take_over_tuning(model: nn.Module) -> None:
    """Scale queries of Llama 4's layers without RoPE by their positions: it takes the number of the row."""
    module: Any
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            setattr(
                module, TUNING, partial(_temperature, float(module.floor_scale), float(module.attn_scale))
            )
            module.attn_temperature_tuning = False


def _temperature(floor_scale: float, scale: float, positions: torch.Tensor) -> torch.Tensor:
    return torch.log1p(torch.floor((positions.float() + 1.0) / floor_scale)) * scale + 1.0


@contextmanager
def as_published(model: Any) -> Iterator[None]:
    """Have a model run by itself, as transformers does, over one text at a time."""
    tuned = [module for module in model.modules() if hasattr(module, TUNING)]
    model.set_attn_implementation("eager")
    use_experts(model, "eager")
    for module in tuned:
        module.attn_temperature_tuning = True
    try:
        yield
    finally:
        model.set_attn_implementation(NAME)
        for module in tuned:
            module.attn_temperature_tuning = False


def _rows(states: torch.Tensor) -> torch.Tensor:
    """States ``[T, H]`` of ``[1, T, H]``; of several streams ``[S, 1, T, H]`` (Gemma 3n) the first, which
    is the one that layers compute on."""
    return states[0] if states.ndim == 3 else states[0, 0]


def _replace_linears(model: nn.Module) -> None:
    """Replace linear layers by ours, which share their weights."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                with torch.device("meta"):
                    ours = BridgedLinear(child.in_features, child.out_features, child.bias is not None)
                ours.weight, ours.bias = child.weight, child.bias
                setattr(parent, name, ours)
