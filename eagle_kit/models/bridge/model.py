"""Targets whose layers are those of a model of transformers.

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
from eagle_kit.models.bridge.attention import (
    ATTENTION_NAME,
    QUERY_SCALE,
    AttendHandler,
    BridgedForward,
    current_forward,
    running,
)
from eagle_kit.models.bridge.config import BridgedConfig, decoder_of, layers_of, norm_of, pin_rope
from eagle_kit.models.bridge.records import GATHERED, GROUPED, LayerRecord, record_layers, use_experts
from eagle_kit.models.bridge.recurrence import replace_recurrence
from eagle_kit.models.targets.target import LogitForm, Target, TargetOutput
from eagle_kit.ops.attention.variant import AttentionVariant
from eagle_kit.ops.linear import Linear

MAX_GATHERED_ROWS = 64
MAX_GATHERED_BYTES = 2**30
"""Numbers of rows and of bytes up to which the weights of each token's experts are gathered. Gathered
experts give the same bits for any number of rows, and read nothing on the host."""


class BridgedLinear(Linear):
    """Linear layer for inputs with any number of dimensions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., K]`` -> ``[..., N]``."""
        return super().forward(x.flatten(0, -2)).view(*x.shape[:-1], self.out_features)


class BridgedModel(Target):
    """Target whose layers are those of a model of transformers.

    Args:
        config: architecture of the target.
        model: causal language model with our attention function. Its linear layers are replaced.

    Attributes:
        records: attention layers, empty until :meth:`record_layers`.
        experts: implementation of experts to use; None to choose by the number of rows.
        has_experts: whether some layers have experts.

    Raises:
        UserError: the layers of the model were not found.
    """

    def __init__(self, config: BridgedConfig, model: Any) -> None:
        super().__init__()
        self.config: BridgedConfig = config
        self.model = model
        self.logit_form = LogitForm(config.logit_scale, config.soft_cap)
        self.records: list[LayerRecord] = []
        self.experts: str | None = None

        # Replace parts of the model.
        _replace_linears(model)
        pin_rope(model)
        replace_recurrence(model)
        _replace_query_scaling(model)

        # Decoder and layers are submodules of the model already: in lists they are not registered again.
        decoder = decoder_of(model)
        layers = layers_of(decoder, config.num_layers)
        self._decoder = [decoder]
        self._layers = [layers]

        # Capture of hidden states.
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(_InputCapture(number), with_kwargs=True)
        layers[-1].register_forward_hook(_OutputCapture(config.num_layers))

        # Number of rows for which the weights of experts are gathered.
        bytes_per_row = 0
        for module in layers.modules():
            bytes_per_row = max(bytes_per_row, _gathered_bytes(module, config.num_chosen_experts))
        self.has_experts = bytes_per_row > 0
        self._max_gathered_rows = min(MAX_GATHERED_ROWS, MAX_GATHERED_BYTES // max(bytes_per_row, 1))
        self.working_bytes = min(MAX_GATHERED_ROWS * bytes_per_row, MAX_GATHERED_BYTES)

    def record_layers(self) -> None:
        """Set :attr:`records` from a forward of the model."""
        text = self.model.config.get_text_config()
        self.records = record_layers(self.model, self._decoder[0], text).records

    def host_read(self) -> str | None:
        """See :class:`~eagle_kit.models.targets.target.Target`. A forward over fake tensors finds it."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        text = self.model.config.get_text_config()
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                record_layers(self.model, self._decoder[0], text)
        except Exception as error:  # models raise errors of many kinds
            lines = str(error).strip().splitlines() or [""]
            return f"{type(error).__name__} {lines[0]}".strip()
        return None

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        """Layers of the decoder."""
        return self._layers[0]

    @property
    def embed_tokens(self) -> nn.Embedding:  # type: ignore[override]
        """Embedding of the model. Its weight has unscaled rows."""
        embedding: nn.Embedding = self.model.get_input_embeddings()
        return embedding

    @property
    def lm_head(self) -> Linear:  # type: ignore[override]
        """Output layer of the model."""
        output: Linear = self.model.get_output_embeddings()
        return output

    @property
    def variants(self) -> Sequence[AttentionVariant]:
        """See :class:`~eagle_kit.models.targets.target.Target`."""
        return [record.variant for record in self.records]

    def place_layers(self, devices: Sequence[torch.device] | None) -> None:
        """See :class:`~eagle_kit.models.targets.target.Target`. Raises UserError for several devices."""
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
        # Experts.
        experts = self.experts
        if experts is None:
            experts = GATHERED if len(ids) <= self._max_gathered_rows else GROUPED
        use_experts(self.model, experts)

        # The decoder, with our attention.
        handler = AttendHandler(attend, self.config.cache.head_dim, positions)
        with running(BridgedForward(handler, capture)) as forward:
            out = self._decoder[0](input_ids=ids[None], position_ids=positions[None], use_cache=False)
        hidden = out.last_hidden_state[0]

        # Captured hidden states, in the order of ``capture``.
        aux_hidden_states = hidden[:, :0]
        if capture:
            aux_hidden_states = torch.cat([forward.captured[i] for i in capture], -1)
        return TargetOutput(hidden, aux_hidden_states)


def _gathered_bytes(module: nn.Module, num_chosen: int) -> int:
    """Bytes of the weights of a token's experts in a module; 0 without experts, which are stacked in three
    dimensions."""
    total = 0
    for parameter in module.parameters(recurse=False):
        if parameter.ndim == 3:
            total += parameter.nbytes // parameter.shape[0]
    return total * num_chosen


class _InputCapture:
    """Hook that captures the input of layer ``number``, if the running forward asks for it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forward = current_forward()
        if forward is not None and self._number in forward.capture:
            states = args[0] if args else kwargs["hidden_states"]
            forward.captured[self._number] = _rows(states)


class _OutputCapture:
    """Hook that captures the output of the last layer as ``number``, if the running forward asks for it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        forward = current_forward()
        if forward is not None and self._number in forward.capture:
            states = out[0] if isinstance(out, tuple) else out
            forward.captured[self._number] = _rows(states)


def _replace_query_scaling(model: nn.Module) -> None:
    """Scale queries of Llama 4's layers without RoPE by their positions. The model scales them by the index
    of the row."""
    module: Any
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            scale = partial(_query_scale, float(module.floor_scale), float(module.attn_scale))
            setattr(module, QUERY_SCALE, scale)
            module.attn_temperature_tuning = False


def _query_scale(floor_scale: float, attn_scale: float, positions: torch.Tensor) -> torch.Tensor:
    """Factors of queries at ``positions`` int64 ``[T]``, as in Llama 4."""
    return torch.log1p(torch.floor((positions.float() + 1.0) / floor_scale)) * attn_scale + 1.0


@contextmanager
def as_published(model: Any) -> Iterator[None]:
    """Let a model run as in transformers, over one text at a time."""
    scaled = [module for module in model.modules() if hasattr(module, QUERY_SCALE)]
    model.set_attn_implementation("eager")
    use_experts(model, "eager")
    for module in scaled:
        module.attn_temperature_tuning = True
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
        for module in scaled:
            module.attn_temperature_tuning = False


def _rows(states: torch.Tensor) -> torch.Tensor:
    """Hidden states ``[T, H]`` from ``[1, T, H]``; from several streams ``[S, 1, T, H]`` (Gemma 3n) the
    first, on which layers compute."""
    if states.ndim == 3:
        return states[0]
    return states[0, 0]


def _replace_linears(model: nn.Module) -> None:
    """Replace linear layers by ours, which share their weights."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                with torch.device("meta"):
                    ours = BridgedLinear(child.in_features, child.out_features, child.bias is not None)
                ours.weight = child.weight
                ours.bias = child.bias
                setattr(parent, name, ours)
