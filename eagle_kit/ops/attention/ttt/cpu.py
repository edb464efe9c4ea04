"""Attention of training-time test on a CPU: flash attention over the prefix, own keys merged in by
log-sum-exp.

With prefix scores S, own scores s_j and the log-sum-exp L over both,

    out = exp(L0 - L) flash(q, k, v) + sum_j exp(s_j - L) v_j,      L0 the log-sum-exp over the prefix alone.

The gradient of a softmax needs only probabilities and D = sum(dout * out): P = exp(S - L), dS = P * (dout v^T
- D). So the backward of flash attention, *given the merged out and L*, yields exactly the prefix's part, and
the own keys' part is the same formula on J columns.

Legend: R query rows, T packed tokens, J own keys, Hq / Hkv heads, G = Hq / Hkv, D head size.
"""

from typing import Any

import torch

from eagle_kit.ops.attention.ttt.plan import QueryBlocks

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _heads_first(x: torch.Tensor, group: int) -> torch.Tensor:
    """``[n, H, D]`` -> ``[1, H * group, n, D]``, every head repeated ``group`` times."""
    return (x.repeat_interleave(group, 1) if group > 1 else x).transpose(0, 1)[None]


class TTTAttention(torch.autograd.Function):
    """``(q, k, v, own_k, own_v, blocks, scale) -> out``, as the reference; for fp32 on a CPU."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        own_k: torch.Tensor,
        own_v: torch.Tensor,
        blocks: QueryBlocks,
        scale: float,
    ) -> torch.Tensor:
        r, hq, d = q.shape
        hkv = k.shape[1]
        j = own_k.shape[2]
        group = hq // hkv

        # The prefix, a block of rows at a time: out [R, Hq, D] and log-sum-exp [R, Hq].
        keys = _heads_first(k, group)
        values = _heads_first(v, group)
        queries = _heads_first(q, 1)
        outs = []
        lses = []
        for start, stop, key_start, key_stop, mask in blocks:
            out, lse = _flash(
                queries[:, :, start:stop],
                keys[:, :, key_start:key_stop],
                values[:, :, key_start:key_stop],
                attn_mask=mask,
                scale=scale,
            )
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0].transpose(0, 1))
        out = torch.cat(outs)
        lse = torch.cat(lses)

        # Own keys, merged in.
        p_own = out.new_empty(0)
        if j:
            q_groups = q.reshape(r * hkv, group, d)
            own_keys = own_k.reshape(r * hkv, j, d)
            own_values = own_v.reshape(r * hkv, j, d)
            scores = torch.bmm(q_groups, own_keys.transpose(1, 2)) * scale
            scores = scores.view(r, hq, j)
            merged_lse = torch.logaddexp(lse, scores.logsumexp(-1))
            p_own = torch.exp(scores - merged_lse[..., None])
            own_out = torch.bmm(p_own.view(r * hkv, group, j), own_values).view(r, hq, d)
            out = torch.addcmul(own_out, out, torch.exp(lse - merged_lse)[..., None])
            lse = merged_lse
        ctx.save_for_backward(q, k, v, own_k, own_v, out, lse, p_own)
        ctx.blocks = blocks
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dout = grads[0].contiguous()
        q, k, v, own_k, own_v, out, lse, p_own = ctx.saved_tensors
        scale = ctx.scale
        r, hq, d = q.shape
        t, hkv = k.shape[:2]
        group = hq // hkv
        j = own_k.shape[2]

        # The prefix, by the merged out and log-sum-exp. Gradients of keys are summed over a group's heads.
        keys = _heads_first(k, group)
        values = _heads_first(v, group)
        queries = _heads_first(q, 1)
        douts = _heads_first(dout, 1)
        outs = _heads_first(out, 1)
        lses = lse.transpose(0, 1)[None]
        dq = torch.empty_like(q)
        dk, dv = torch.zeros(2, hkv, t, d, dtype=k.dtype)
        for start, stop, key_start, key_stop, mask in ctx.blocks:
            rows = slice(start, stop)
            columns = slice(key_start, key_stop)
            part_q, part_k, part_v = _flash_backward(
                douts[:, :, rows],
                queries[:, :, rows],
                keys[:, :, columns],
                values[:, :, columns],
                outs[:, :, rows],
                lses[:, :, rows].contiguous(),
                0.0,
                False,
                attn_mask=mask,
                scale=scale,
            )
            dq[rows] = part_q[0].transpose(0, 1)
            dk[:, columns] += part_k[0].unflatten(0, (hkv, group)).sum(1)
            dv[:, columns] += part_v[0].unflatten(0, (hkv, group)).sum(1)

        # Own keys, by the same formula: the query heads of a row and key head are one matrix.
        d_own_k = torch.zeros_like(own_k)
        d_own_v = torch.zeros_like(own_v)
        if j:
            delta = (dout * out).sum(-1).view(r * hkv, group, 1)
            p = p_own.view(r * hkv, group, j)
            dout_groups = dout.reshape(r * hkv, group, d)
            q_groups = q.reshape(r * hkv, group, d)
            own_keys = own_k.reshape(r * hkv, j, d)
            own_values = own_v.reshape(r * hkv, j, d)
            ds = p * (torch.bmm(dout_groups, own_values.transpose(1, 2)) - delta) * scale
            dq += torch.bmm(ds, own_keys).view(r, hq, d)
            d_own_k = torch.bmm(ds.transpose(1, 2), q_groups).view_as(own_k)
            d_own_v = torch.bmm(p.transpose(1, 2), dout_groups).view_as(own_v)
        return dq, dk.transpose(0, 1), dv.transpose(0, 1), d_own_k, d_own_v, None, None
