"""What the forwards of training-time test share: recomputation, supervised rows, attention of a step.

Legend: T packed tokens, S steps so far, R_k supervised rows of step k, C_k computed rows of step k, H hidden,
Hq / Hkv heads, D size of a key, Dv size of a value.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from eagle_kit.objective.row_plan import RowPlan
from eagle_kit.ops.attention.ttt import QueryPlan, ttt_attention


def run_maybe_recomputed(recompute: bool, function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function(*args)``. With ``recompute`` only ``args`` are kept for the backward pass, which runs
    the function again."""
    if recompute:
        return checkpoint(function, *args, use_reentrant=False)
    return function(*args)


def supervised_outputs(computed: torch.Tensor, plan: RowPlan, step: int) -> torch.Tensor:
    """Select the outputs of ``step`` at its supervised rows, ``[R_k, H]``, from those at its computed rows,
    ``computed [C_k, H]``."""
    rows = plan.rows[step]
    computed_rows = plan.computed[step]
    if rows is computed_rows:
        return computed
    return computed[torch.searchsorted(computed_rows, rows)]


def step_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own_k: torch.Tensor | None,
    own_v: torch.Tensor | None,
    plan: QueryPlan,
    scale: float,
) -> torch.Tensor:
    """Attention of the rows of one step to the rows of step 0 and to their own rows of steps 1 to k.

    These are the attention masks of EAGLE-3, figure 6: causal over the text, and one diagonal for each
    later step.

    Values may be narrower than keys (latent attention): they are padded with zeros and the outputs are cut,
    both exactly.

    Args:
        q: queries ``[C_k, Hq, D]``.
        k: keys of step 0 ``[T, Hkv, D]``.
        v: values of step 0 ``[T, Hkv, Dv]``.
        own_k: keys of the same rows in steps 1 to k, ``[C_k, Hkv, S, D]``; None in step 0.
        own_v: their values ``[C_k, Hkv, S, Dv]``; None in step 0.
        plan: rows of step 0 that each query sees.
        scale: factor of the scores.

    Returns:
        ``[C_k, Hq, Dv]``.
    """
    # Step 0 has no rows of later steps.
    if own_k is None or own_v is None:
        own_k = k.new_empty(q.shape[0], k.shape[1], 0, k.shape[2])
        own_v = own_k

    # Values as wide as keys.
    key_size = k.shape[-1]
    value_size = v.shape[-1]
    if value_size < key_size:
        v = pad(v, (0, key_size - value_size))
        own_v = pad(own_v, (0, key_size - own_v.shape[-1]))

    return ttt_attention(q, k, v, own_k, own_v, plan, scale)[..., :value_size]
