"""Recurrent layers of models of transformers, computed by the handler of the running forward.

Recurrent layers call two functions of their modelling file: a causal convolution, and the scan of a
recurrence. Each function is replaced in its file, once, by one that calls the handler of the running
forward; outside of a bridged forward it calls the original. Lightning attention has no such functions, so
the forward of its module is replaced.

Legend: T packed tokens, H heads of values, G heads of keys, K key size, V value size, C channels, W width
of a convolution.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.nn import functional as F

from eagle_kit.core.errors import UserError
from eagle_kit.models.bridge.attention import LayerHandler, current_forward
from eagle_kit.ops.recurrence import Inputs

L2_NORM_EPS = 1e-6
"""Added to the squared lengths by which queries and keys are normalised."""


def replace_recurrence(model: torch.nn.Module) -> None:
    """Replace the functions of the recurrent layers of a model.

    Raises:
        UserError: the layers hold references to their functions, as in older versions of transformers.
    """
    # A function that a layer holds cannot be replaced in its file.
    for layer in model.modules():
        held = HELD_NAMES & vars(layer).keys()
        if held:
            raise UserError(
                f"A {type(layer).__name__} of this transformers keeps {min(held)} for itself.",
                "Upgrade transformers, or use a target that is written here.",
            )

    # Functions of the modelling files.
    for name in {type(module).__module__ for module in model.modules()}:
        file: Any = sys.modules[name]
        for function, ours in REPLACEMENTS.items():
            original = getattr(file, function, None)
            if original is not None and not hasattr(original, "replaces"):
                setattr(file, function, _replacement(original, ours))

    # Forwards of lightning attention.
    module: Any
    for module in model.modules():
        if type(module).__name__.endswith("LightningAttention") and hasattr(module, "slope_rate"):
            module.forward = _replacement(module.forward, _LightningAttention(module))


def _replacement(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that calls ``ours`` with the handler of the running forward; outside of one, or where
    the model runs by itself, it calls the original."""

    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        forward = current_forward()
        if forward is None or forward.handler is None:
            return original(*args, **kwargs)
        return ours(forward.handler, *args, **kwargs)

    function.replaces = original  # type: ignore[attr-defined]
    return function


def _convolution(
    handler: LayerHandler,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> torch.Tensor:
    """Causal depthwise convolution and its activation.

    Args:
        hidden_states: ``[1, C, T]``.
        weight: ``[C, W]``.
        bias: ``[C]``.

    Returns:
        ``[1, C, T]``.
    """
    from transformers.activations import ACT2FN

    x = hidden_states[0].t().to(weight.dtype)  # [T, C]
    out = handler.convolve(x, weight, bias)
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.t()[None].to(hidden_states.dtype)


def _delta_rule(
    handler: LayerHandler,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Gated delta rule.

    Args:
        query: ``[1, T, G, K]``.
        key: ``[1, T, G, K]``.
        value: ``[1, T, H, V]``.
        g: log decays ``[1, T, H]``, or by channel ``[1, T, H, K]``.
        beta: strengths of the updates ``[1, T, H]``.

    Returns:
        ``[1, T, H, V]``, and None for the state.
    """
    q = query[0].float()
    k = key[0].float()
    if use_qk_l2norm_in_kernel:
        q = _l2_norm(q)
        k = _l2_norm(k)
    inputs = Inputs(q * key.shape[-1] ** -0.5, k, value[0].float(), g[0].float(), beta[0].float())
    return handler.recur(inputs, delta=True)[None].to(query.dtype), None


def _l2_norm(x: torch.Tensor) -> torch.Tensor:
    """Divide ``x [..., K]`` by its length."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_NORM_EPS)


def _mamba2(
    handler: LayerHandler,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int = 0,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **others: Any,
) -> torch.Tensor:
    """Recurrence of Mamba-2.

    Args:
        hidden_states: values ``[1, T, H, V]``.
        dt: time steps ``[1, T, H]``.
        A: decay of each head ``[H]``.
        B: keys ``[1, T, G, K]``.
        C: queries ``[1, T, G, K]``.
        D: factors of a skip connection ``[H]``; None without one.

    Returns:
        fp32 ``[1, T, H, V]``.
    """
    # Time steps.
    step = dt[0]
    if dt_bias is not None:
        step = step + dt_bias.to(dt.dtype)
    if dt_softplus:
        step = F.softplus(step)
    step = step.clamp(*dt_limit).float()

    v = hidden_states[0].float()
    inputs = Inputs(C[0].float(), B[0].float(), v, A.float() * step, step)
    out = handler.recur(inputs, delta=False)
    if D is not None:
        out = out + D.float()[:, None] * v
    return out[None]


class _LightningAttention:
    """Forward of a lightning attention of MiniMax-Text, which has a constant decay for each head.

    Args:
        module: the module that it replaces the forward of.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(
        self, handler: LayerHandler, hidden_states: torch.Tensor, *args: Any, **others: Any
    ) -> tuple[torch.Tensor, None]:
        """``hidden_states [1, T, hidden]`` -> the same shape, and None for the weights of attention."""
        module = self._module
        num_tokens = hidden_states.shape[1]

        # Recurrence with a decay that is the same for all tokens.
        qkv = module.act_fn(module.qkv_proj(hidden_states))[0]
        heads = qkv.view(num_tokens, module.num_attention_heads, -1)
        q, k, v = heads.float().split(module.head_dim, -1)
        g = -module.slope_rate.float().view(1, -1).expand(num_tokens, -1)
        out = handler.recur(Inputs(q, k, v, g, torch.ones_like(g)), delta=False)

        # Norm, gate and output projection.
        out = module.norm(out.to(hidden_states.dtype).reshape(1, num_tokens, -1))
        gate = torch.sigmoid(module.output_gate(hidden_states))
        return module.out_proj(gate * out), None


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
}
"""Functions of modelling files by name, and the functions that they are replaced by."""
HELD_NAMES = {*REPLACEMENTS, "chunk_gated_delta_rule"}
"""Attributes of layers that hold a reference to such a function."""
