"""Recurrent layers of models of transformers, computed by a forward of ours.

Mixers call functions of their modelling file: a causal convolution, then the scan of a recurrence. Those are
replaced, once for a file, by functions that ask the forward under way, and are themselves where there is
none. Lightning attention has no such functions; its module's forward is replaced.

Legend: T packed tokens, H / G heads, K key size, V value size, C channels.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.nn import functional as F

from eagle_kit.core.errors import UserError
from eagle_kit.models.bridge.attention import Handler, current
from eagle_kit.ops.recurrence import Inputs

EPS = 1e-6
"""Added to the square of the length that queries and keys are divided by."""


def take_over_recurrence(model: torch.nn.Module) -> None:
    """Have the recurrent layers of a model computed by the forward under way.

    Raises:
        UserError: they have been given their functions already, as in older versions of transformers.
    """
    for layer in model.modules():
        if found := BOUND & vars(layer).keys():
            raise UserError(
                f"A {type(layer).__name__} of this transformers keeps {min(found)} for itself.",
                "Upgrade transformers, or use a target that is written here.",
            )
    for name in {type(module).__module__ for module in model.modules()}:
        file: Any = sys.modules[name]
        for function, make in REPLACED.items():
            original = getattr(file, function, None)
            if original is not None and not hasattr(original, "replaces"):
                setattr(file, function, _replacement(original, make))
    module: Any
    for module in model.modules():
        if type(module).__name__.endswith("LightningAttention") and hasattr(module, "slope_rate"):
            module.forward = _replacement(module.forward, _Lightning(module))


def _replacement(original: Callable[..., Any], make: Callable[..., Any]) -> Callable[..., Any]:
    """``make(handler, ...)`` for the forward under way; the original where it runs by itself."""

    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        forward = current()
        if forward is None or forward.handler is None:
            return original(*args, **kwargs)
        return make(forward.handler, *args, **kwargs)

    function.replaces = original  # type: ignore[attr-defined]
    return function


def _convolution(
    handler: Handler,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> torch.Tensor:
    """Causal convolution of ``hidden_states [1, C, T]`` by ``weight [C, W]``, with its activation."""
    from transformers.activations import ACT2FN

    out = handler.convolve(hidden_states[0].t().to(weight.dtype), weight, bias)
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.t()[None].to(hidden_states.dtype)


def _delta_rule(
    handler: Handler,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Gated delta rule over ``query`` and ``key [1, T, G, K]``, ``value [1, T, H, V]``, ``g [1, T, H]`` or by
    channel ``[1, T, H, K]``, ``beta [1, T, H]`` -> ``[1, T, H, V]``, and no state."""
    q, k = query[0].float(), key[0].float()
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS) for x in (q, k))
    inputs = Inputs(q * key.shape[-1] ** -0.5, k, value[0].float(), g[0].float(), beta[0].float())
    return handler.recur(inputs, delta=True)[None].to(query.dtype), None


def _mamba2(
    handler: Handler,
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
    """Mamba-2 over ``hidden_states [1, T, H, V]``, ``dt [1, T, H]``, ``A [H]``, ``B`` and ``C [1, T, G, K]``
    -> fp32 ``[1, T, H, V]``."""
    step = dt[0] if dt_bias is None else dt[0] + dt_bias.to(dt.dtype)
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit).float()
    x = hidden_states[0].float()
    inputs = Inputs(C[0].float(), B[0].float(), x, A.float() * step, step)
    out = handler.recur(inputs, delta=False)
    return (out if D is None else out + D.float()[:, None] * x)[None]


class _Lightning:
    """Forward of a lightning attention of MiniMax-Text: a constant decay of each head."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(
        self, handler: Handler, hidden_states: torch.Tensor, *args: Any, **others: Any
    ) -> tuple[torch.Tensor, None]:
        module, count = self._module, hidden_states.shape[1]
        heads = module.act_fn(module.qkv_proj(hidden_states))[0].view(count, module.num_attention_heads, -1)
        q, k, v = heads.float().split(module.head_dim, -1)
        g = -module.slope_rate.float().view(1, -1).expand(count, -1)
        out = handler.recur(Inputs(q, k, v, g, torch.ones_like(g)), delta=False)
        out = module.norm(out.to(hidden_states.dtype).reshape(1, count, -1))
        return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * out), None


REPLACED: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
}
"""Functions of modelling files and what they are replaced by."""
BOUND = {*REPLACED, "chunk_gated_delta_rule"}
"""Names that such a function has where a layer keeps it."""
