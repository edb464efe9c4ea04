"""Targets of models that are in memory already."""

import copy
from typing import Any

import torch
from torch import nn

from eagle_kit.core.errors import UserError
from eagle_kit.models.bridge.attention import ATTENTION_NAME, register
from eagle_kit.models.bridge.config import BridgedConfig
from eagle_kit.models.bridge.load import bridge
from eagle_kit.models.loading.loader import IGNORED_SUFFIXES, assemble, check_activation, parse_target
from eagle_kit.models.targets.target import Target


def loaded_target(model: nn.Module) -> Target:
    """Make a target of a loaded causal language model of transformers; a target is returned as it is.

    The weights are shared where the layers hold them as the model does. The model itself stays as it is.

    Raises:
        UserError: another kind of module, a model with quantised weights, or one of an architecture that is
            not supported.
    """
    if isinstance(model, Target):
        return model
    from transformers import PreTrainedModel

    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"The target is a loaded {name}, which is no causal language model of transformers.",
            "Load it with AutoModelForCausalLM, give a folder, or make it a subclass of "
            "eagle_kit.models.targets.target.Target.",
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise UserError(
            f"The loaded {name} has quantised weights.",
            "Load it without quantization_config, or give a folder.",
        )

    # Its architecture, as a folder would have it.
    where = f"the loaded {name}"
    source: dict[str, Any] = model.config.to_dict() | {"architectures": [name]}
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is not None:
        source["eos_token_id"] = eos
    config = parse_target(source, where)

    # A model of transformers whose attention is ours, or our own layers with its weights.
    if isinstance(config, BridgedConfig):
        register()
        shared = _sharing_weights(model)
        shared.set_attn_implementation(ATTENTION_NAME)
        return bridge(shared, config)
    check_activation(source, where)
    return assemble(config, None, _published(model), where, model.dtype, model.device)


def _sharing_weights(model: Any) -> Any:
    """A second module over the same memory, whose attention, hooks and gradients can be switched apart."""
    copies: dict[int, Any] = {}
    for weight in model.parameters():
        copies[id(weight)] = nn.Parameter(weight.detach(), requires_grad=False)
    for buffer in model.buffers():
        copies[id(buffer)] = buffer
    return copy.deepcopy(model, copies).eval()


def _published(model: Any) -> dict[str, torch.Tensor]:
    """The model's tensors under the names of a model folder."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if not name.endswith(IGNORED_SUFFIXES):
            tensors[name.removeprefix("model.")] = tensor.detach()
    return tensors
