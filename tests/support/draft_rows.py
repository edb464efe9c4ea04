"""Logits of our heads for all steps of a text in one pass, as speculators' training forwards give them."""

import torch

from eagle_kit.drafts.dflash.head import DFlashHead
from eagle_kit.models.draft_chain import ChainRows


@torch.no_grad()
def eagle3_logits(head, embed, aux: torch.Tensor, ids: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Our head over the same steps. Row i of step s sees the keys of step 0 up to i, and its own of later
    steps; it reads the embedding of id i + s, zero behind the end, at position 1 + i + s. A sliding window is
    that of their trainer, which does not move with the steps."""
    length = len(ids)
    keys = []
    out = []
    hidden = head.fuse(aux)
    groups = head.config.num_heads // head.config.num_kv_heads

    def attend(layer, q, k, v):
        keys.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        every_k, every_v = (torch.cat(parts) for parts in zip(*keys, strict=True))
        row = torch.arange(length)
        own = [row[:, None] == row for _ in keys[1:]]
        near = row[:, None] - row < (head.config.sliding_window or length)
        mask = torch.cat([(row[:, None] >= row) & near, *own], 1)
        scores = torch.einsum("qhd,khd->hqk", q, every_k) * head.config.attention_scale
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), every_v)

    for step in range(steps):
        shifted = torch.cat((ids[step:], ids.new_zeros(step)))
        hidden = head(hidden, embed(shifted), torch.arange(length) + 1 + step, attend)
        out.append(head.logits(hidden))
    return out


@torch.no_grad()
def p_eagle_logits(head, embed, aux: torch.Tensor, ids: torch.Tensor, row: torch.Tensor, depth: torch.Tensor):
    """Our head over those rows of those depths, in one pass."""
    emitted = head.midlayer.inputs(head.fuse(aux[row]), embed(ids[row]))
    inputs = [
        torch.where((depth > 0)[:, None], mask, own)
        for mask, own in zip(head.mask_inputs(), emitted, strict=True)
    ]
    before = (depth[None] == 0) & (row[None] <= row[:, None])
    seen = before | ((row[None] == row[:, None]) & (depth[None] <= depth[:, None]))
    groups = head.config.num_heads // head.config.num_kv_heads

    def attend(layer, q, k, v):
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        window = head.config.windows[layer] or len(ids) + len(depth)
        inside = (row + depth)[:, None] - (row + depth) < window
        scores = torch.einsum("qhd,khd->hqk", q, k) * head.config.attention_scale
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~(seen & inside), -torch.inf).softmax(-1), v)

    return head.logits(head.step((inputs[0], inputs[1]), 1 + row + depth, attend).fed_back)


@torch.no_grad()
def block_logits(head: DFlashHead, embed, aux, ids, doc_start, anchors) -> torch.Tensor:
    """Our head's logits ``[A, S, Vd]`` of the rows that draft, and of their confidence ``[A, S]`` or None."""

    def tokens(rows: torch.Tensor, step: int) -> torch.Tensor:
        return ids[rows + 1 + step]

    def embeds(rows: torch.Tensor, step: int) -> torch.Tensor:
        return embed(tokens(rows, step))

    def mask(token: int) -> torch.Tensor:
        return embed(torch.tensor([token]))

    given = ChainRows(head.features(aux, aux), tokens, embeds, mask, anchors - 1, doc_start)
    read = head.chain(given, head.config.most_steps)
    sure = [head.confidence_logits(h, tokens(given.rows, step)) for step, h in enumerate(read)]
    logits = torch.stack([head.logits(h) for h in read], 1)
    return logits, None if sure[0] is None else torch.stack(sure, 1)
