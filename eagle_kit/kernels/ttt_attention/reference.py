"""Attention of training-time test, written out with torch operations on any device.

Legend: R query rows, T packed tokens, J own keys of a row, Hq / Hkv heads, G = Hq / Hkv, D head size.
"""

import torch

from eagle_kit.kernels.ttt_attention.plan import QueryBlock


def ttt_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    blocks: list[QueryBlock],
    scale: float,
) -> torch.Tensor:
    """One softmax over the step-0 keys up to the row, in its document, and the row's own keys of later steps.

    Args:
        q: ``[R, Hq, D]``.
        k, v: ``[T, Hkv, D]``, step 0.
        own_k, own_v: ``[R, Hkv, J, D]``, steps 1..J of the same row; J = 0 at step 0.
        blocks: the query rows, from :func:`plan_rows`.

    Returns:
        ``[R, Hq, D]``; differentiable through autograd.
    """
    out = [q[:0]]
    hkv = k.shape[1]
    for start, stop, key_start, key_stop, mask in blocks:
        n = stop - start
        rows = q[start:stop].unflatten(1, (hkv, -1)).float()
        keys, values = k[key_start:key_stop].float(), v[key_start:key_stop].float()
        prefix = torch.einsum("nhgd,thd->nhgt", rows, keys) * scale + mask[:, None, None]
        own = torch.einsum("nhgd,nhjd->nhgj", rows, own_k[start:stop].float()) * scale
        weights = torch.cat((prefix, own), -1).softmax(-1)
        on_prefix, on_own = weights.split((keys.shape[0], own.shape[-1]), -1)
        block = torch.einsum("nhgt,thd->nhgd", on_prefix, values)
        block = block + torch.einsum("nhgj,nhjd->nhgd", on_own, own_v[start:stop].float())
        out.append(block.reshape(n, -1, q.shape[2]).to(q.dtype))
    return torch.cat(out)
