"""Conventions in which another trainer or converter may have written a head's tensors.

A head that is read with the wrong convention loads without an error, and its acceptance is low.
`eagle-kit diagnose` tries each convention and compares the acceptance.

Legend: H hidden, D head size.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from eagle_kit.models.blocks.layers import MLP, Attention, RMSNorm, Rope
from eagle_kit.models.config import DecoderConfig
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.ops.linear import Linear

ROPE_BASES = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0)
"""Bases of the targets of the field."""


@dataclass(frozen=True)
class Convention:
    """One convention that differs from how the head was read.

    Attributes:
        subject: what differs, a cause of :mod:`eagle_kit.eval.diagnose`.
        words: the convention, for the sentence "0.58 with ...".
        remedy: what the user does if it fits better, one sentence.
        change: converts a copy of the head, without packed weights, to this convention, in place.
        depth: first depth of a chain at which the acceptance differs.
    """

    subject: str
    words: str
    remedy: str
    change: Callable[[Any], None]
    depth: int = 1


def shared_conventions(head: DraftHead, target: DecoderConfig, joint: Iterable[str]) -> list[Convention]:
    """Conventions that every kind of head may have.

    Args:
        target: the target's architecture, whose RoPE is tried.
        joint: names of the linear layers that read ``[embedding; feature]``, ``[2 H]``.
    """
    return [*_norm_offsets(), *_ropes(head, target), *_orders(head, tuple(joint))]


def _norm_offsets() -> list[Convention]:
    """Gemma's norms multiply by ``1 + weight``, Llama's by ``weight``."""

    def add(offset: float) -> Callable[[DraftHead], None]:
        def change(head: DraftHead) -> None:
            for module in head.modules():
                if isinstance(module, RMSNorm):
                    module.weight.data.add_(offset)

        return change

    words = {1.0: "norms that multiply by 1 + weight", -1.0: "norm weights that have no 1 added to them"}
    remedy = {
        1.0: "Add 1 to every norm weight of the draft: its trainer stored them without.",
        -1.0: "Subtract 1 from every norm weight of the draft: it was added once too often.",
    }
    return [Convention("norm convention", words[by], remedy[by], add(by)) for by in words]


def _ropes(head: DraftHead, target: DecoderConfig) -> list[Convention]:
    layer = head.config.layer
    own = layer.rotation
    others = [target.rotation, (layer.rope_theta, None)]
    others += [(base, None) for base in (target.rope_theta, *ROPE_BASES)]
    others += [(base, layer.rope_scaling) for base in ROPE_BASES if layer.rope_scaling]
    found = []
    for theta, scaling in {repr(each): each for each in others if each != own}.values():
        found.append(
            Convention(
                "RoPE",
                f"the RoPE base {theta:g}{_scaled(scaling)} instead of {own[0]:g}{_scaled(own[1])}",
                f"Set rope_theta to {theta:g} and rope_scaling to {_shown(scaling)} in the draft's "
                "config.json, in rope_parameters too.",
                _rotates_by(layer.rope_dim, theta, scaling),
            )
        )
    return [*found, *_rope_pairs(head)]


def _shown(scaling: dict[str, Any] | None) -> str:
    return "null" if scaling is None else str(scaling)


def _scaled(scaling: dict[str, Any] | None) -> str:
    return "" if scaling is None else f" ({scaling['rope_type']} by {scaling['factor']:g})"


def _rotates_by(size: int, theta: float, scaling: dict[str, Any] | None) -> Callable[[DraftHead], None]:
    def change(head: DraftHead) -> None:
        head.rope = Rope(size, theta, scaling).to(head.device)

    return change


def _rope_pairs(head: DraftHead) -> list[Convention]:
    """Pairs of rotated elements are ``(d, d + D/2)``, or ``(2d, 2d + 1)`` in weights of other origin."""
    modules = head.attentions
    if not all(isinstance(module, Attention) for module in modules):
        return []
    order = torch.arange(head.config.layer.head_dim)
    rotated = head.config.layer.rope_dim
    split = torch.cat((order[:rotated:2], order[1:rotated:2], order[rotated:]))

    def reorder(by: torch.Tensor) -> Callable[[DraftHead], None]:
        def change(head: DraftHead) -> None:
            for module in head.attentions:
                assert isinstance(module, Attention)
                _reorder_heads(module, by)

        return change

    remedy = "Store the rows of q_proj and k_proj in the order of Hugging Face's Llama."
    return [
        Convention("RoPE", "RoPE pairs of neighbours (2d, 2d + 1)", remedy, reorder(split)),
        Convention("RoPE", "RoPE pairs reordered once less", remedy, reorder(split.argsort())),
    ]


def _reorder_heads(attention: Attention, by: torch.Tensor) -> None:
    """Reorder the elements of every query and key head."""
    linear = attention.qkv_proj
    size = attention.head_dim
    rotated = attention.num_heads + attention.num_kv_heads
    for parameter in (linear.weight, linear.bias):
        if parameter is not None:
            heads = parameter.data[: rotated * size].unflatten(0, (rotated, size))
            parameter.data[: rotated * size] = heads[:, by.to(heads.device)].flatten(0, 1)


def _orders(head: DraftHead, joint: tuple[str, ...]) -> list[Convention]:
    """Halves of a matrix in the other order."""

    def swap_joint(head: DraftHead) -> None:
        for name in joint:
            layer = head.get_submodule(name)
            assert isinstance(layer, Linear)
            layer.weight.data = torch.cat(layer.weight.data.chunk(2, 1)[::-1], 1)

    def swap_gates(head: DraftHead) -> None:
        for module in head.modules():
            if isinstance(module, MLP):
                module.gate_up_proj.weight.data = torch.cat(module.gate_up_proj.weight.data.chunk(2)[::-1])

    found = []
    if joint:
        remedy = f"Swap the halves of the columns of {', '.join(joint)} in the draft's weights."
        found.append(Convention("order of inputs", "feature before embedding", remedy, swap_joint))
    if any(isinstance(module, MLP) for module in head.modules()):
        remedy = "Exchange gate_proj and up_proj in the draft's weights."
        found.append(Convention("order of inputs", "gate and up projection exchanged", remedy, swap_gates))
    return found
