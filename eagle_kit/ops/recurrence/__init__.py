"""Recurrent layers (gated delta rule, Mamba-2, short convolutions) over windows of nodes and packed texts.

States lie in a pool ``states [S, H, K, V]`` fp32, the last columns of convolutions in ``tails [S, W - 1,
C]``; ``slots`` int64 ``[B]`` are those of a batch. What is written and when, and the legend, is in
:mod:`.reference`.

Cycles, prompts and captures of targets with recurrent layers call it. Decays of each channel and convolutions
are in torch only.
"""

import torch

from eagle_kit.ops.backend import Backend, is_differentiated, uses_triton
from eagle_kit.ops.recurrence import reference
from eagle_kit.ops.recurrence.plan import Text, TextPlan
from eagle_kit.ops.recurrence.reference import Inputs, Written, convolved_texts, path_columns

__all__ = [
    "Inputs",
    "Text",
    "TextPlan",
    "Written",
    "commit_recurrent",
    "convolved_texts",
    "moved_tail",
    "path_columns",
    "recurrent_texts",
    "recurrent_window",
    "window_convolution",
]


def recurrent_window(
    inputs: Inputs,
    states: torch.Tensor,
    slots: torch.Tensor,
    ancestors: torch.Tensor,
    *,
    delta: bool,
    backend: Backend | None = None,
) -> tuple[torch.Tensor, Written]:
    """Outputs of a window's nodes behind their requests' states, which stay as they are.

    Args:
        inputs: of ``[B, N]``.
        ancestors: int64 ``[B, N]``, bit j set when node j is an ancestor of the node or the node itself.
        delta: the gated delta rule; otherwise a node writes ``beta v``.

    Returns:
        ``[B, N, H, V]`` in the dtype of ``v``, and what :func:`commit_recurrent` needs.
    """
    if inputs.g.ndim == 3 and uses_triton("recurrence", states, backend):
        from eagle_kit.ops.recurrence import triton

        return triton.recurrent_window(inputs, states, slots, ancestors, delta=delta)
    return reference.recurrent_window(inputs, states[slots], ancestors, delta=delta)


def commit_recurrent(
    states: torch.Tensor,
    slots: torch.Tensor,
    written: Written,
    path: torch.Tensor,
    num_committed: torch.Tensor,
    *,
    backend: Backend | None = None,
) -> None:
    """Apply the first ``num_committed [B]`` nodes of ``path [B, m]``, root first, to the states in ``slots``;
    int64. Slots may repeat where nothing is committed."""
    if written.decay.ndim == 3 and uses_triton("recurrence", states, backend):
        from eagle_kit.ops.recurrence import triton

        return triton.commit_recurrent(states, slots, written, path, num_committed)
    states[slots] = reference.commit_recurrent(states[slots], written, path, num_committed)


def recurrent_texts(
    inputs: Inputs,
    states: torch.Tensor | None,
    plan: TextPlan,
    *,
    delta: bool,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Outputs of packed texts. The states that the plan names are read and written.

    Args:
        inputs: of ``[T]``.
        states: ``[S, H, K, V]``; None if all texts begin here and nothing is saved. The operation is then
            differentiable.

    Returns:
        ``[T, H, V]`` in the dtype of ``v``.
    """
    if inputs.g.ndim == 2 and uses_triton("recurrence", inputs.v, backend) and not is_differentiated(*inputs):
        from eagle_kit.ops.recurrence import triton

        return triton.recurrent_texts(inputs, states, plan, delta=delta)
    return reference.recurrent_texts(inputs, states, plan, delta=delta)


def window_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tails: torch.Tensor,
    slots: torch.Tensor,
    columns: torch.Tensor,
) -> torch.Tensor:
    """Causal depthwise convolution ``[B, N, C]`` of a window's nodes ``x [B, N, C]`` along their paths,
    behind the last columns of their requests; ``weight [C, W]``, ``bias [C]``, ``columns [B, N, W]`` of
    :func:`path_columns`."""
    return reference.window_convolution(x, weight, bias, tails[slots], columns)


def moved_tail(
    tails: torch.Tensor,
    slots: torch.Tensor,
    x: torch.Tensor,
    path: torch.Tensor,
    num_committed: torch.Tensor,
) -> torch.Tensor:
    """Tails of ``slots``, moved on by the first ``num_committed [B]`` nodes of ``path [B, m]``, whose columns
    are ``x [B, N, C]``. Nothing is written."""
    return reference.commit_tail(tails[slots], x, path, num_committed)
