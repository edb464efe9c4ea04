"""Forwards over whole texts, without a cache: hidden states, and logits of given tokens.

Legend: T tokens of a text, H hidden, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.models.targets.target import Target, TargetOutput
from eagle_kit.ops.backend import current_device


class TextStates(NamedTuple):
    """Hidden states of a text, in the target's dtype and on its device.

    Attributes:
        token_ids: the text as T tokens.
        layers: states ``[T, H]`` by layer: the input of that layer, which is ``hidden_states[layer]`` of
            transformers; under the number of layers the last one's output before the final norm.
        final: states ``[T, H]`` behind the final norm, from which the logits are made.
    """

    token_ids: list[int]
    layers: dict[int, torch.Tensor]
    final: torch.Tensor


def check_text(target: Target, ids: Sequence[int]) -> None:
    """Raise UserError for tokens that the target cannot read in one forward."""
    config = target.config
    if not ids:
        raise UserError("The text is empty.", "Give at least one token.")
    if len(ids) > config.max_position_embeddings:
        raise UserError(
            f"The text has {len(ids)} tokens, and the target's context is {config.max_position_embeddings}.",
            "Shorten it.",
        )
    if not 0 <= min(ids) <= max(ids) < config.vocab_size:
        raise UserError(
            f"The text has a token id outside 0..{config.vocab_size - 1}.",
            "Tokenise it with the target's tokenizer.",
        )


def check_layers(target: Target, layers: Sequence[int]) -> tuple[int, ...]:
    """Layers, each once, ascending, as they are captured. Raise UserError for one that the target does not
    have."""
    num_layers = target.config.num_layers
    for layer in layers:
        if not 0 <= layer <= num_layers:
            raise UserError(
                f"There is no layer {layer}.",
                f"Give 0 to {num_layers - 1} for inputs of layers, {num_layers} for the last one's output.",
            )
    return tuple(sorted(set(layers)))


@torch.no_grad()
def text_states(target: Target, ids: Sequence[int], layers: tuple[int, ...] = ()) -> TextStates:
    """Compute the hidden states of a text that :func:`check_text` takes, for the layers of
    :func:`check_layers`."""
    with current_device(target.embed_tokens.weight.device):
        out = _forward(target, ids, layers)
    parts = out.aux_hidden_states.split(target.config.hidden_size, -1) if layers else ()
    return TextStates(list(ids), dict(zip(layers, parts, strict=True)), out.hidden)


@torch.inference_mode()
def text_logits(target: Target, ids: Sequence[int]) -> torch.Tensor:
    """Compute the logits ``[T, V]`` after every token of a text."""
    with current_device(target.embed_tokens.weight.device):
        return target.logits(_forward(target, ids).hidden)


def _forward(target: Target, ids: Sequence[int], layers: tuple[int, ...] = ()) -> TargetOutput:
    """Run the target over one text."""
    device = target.embed_tokens.weight.device
    tokens = torch.tensor(ids, device=device)
    positions = torch.arange(len(ids), device=device)
    out: TargetOutput = target(tokens, positions, target.causal(), layers)
    return out
