"""Training-time test (EAGLE-3, arXiv 2503.01840): the head runs K steps on its own outputs, as when serving.

Step 0 runs over all rows, because its keys and values are everybody's prefix; everything after its attention,
and all later steps, run over the rows that carry loss only, now or later.

A head with a layer for every step (MTP modules) runs it at every row: layer k reads the state of layer k - 1
and the token of step k, and attends to all rows before it, as in DeepSeek-V3 (arXiv 2412.19437, 2.2).

P-EAGLE (arXiv 2602.01469) feeds nothing back: rows of step k >= 1 are masks at position i + k, which attend
to rows of step 0 up to row i and to their own row's masks, as above. So each of its layers runs once, over
the rows of all steps.

DFlash (arXiv 2602.06036) has a block of rows behind each anchor, of which row k drafts what step k - 1 would;
its keys are those of the target's states in front of the anchor, and the block's own. In DSpark (arXiv
2607.05147) the text's own token before a row corrects its logits.

Legend: T packed tokens, K steps, R_k rows of step k, H hidden, Hkv heads, Dv size of a value.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import embedding, pad
from torch.utils.checkpoint import checkpoint

from eagle_kit.drafts.dflash.head import DFlashHead
from eagle_kit.drafts.p_eagle.head import PEagleHead
from eagle_kit.models.draft_head import DraftHead, StepForm
from eagle_kit.objective.align import token_of
from eagle_kit.objective.loss import Objective, TTTBatch, TTTOutput, ttt_loss
from eagle_kit.objective.row_plan import RowPlan
from eagle_kit.objective.target_features import positions_of
from eagle_kit.ops.attention.ttt import QueryPlan, plan_rows, ttt_attention
from eagle_kit.ops.attention.ttt.anchored import anchored_attention

CROSS_ENTROPY = Objective()


def ttt_forward_backward(head: DraftHead, batch: TTTBatch, objective: Objective = CROSS_ENTROPY) -> TTTOutput:
    """:func:`ttt_forward`, then backward; gradients are added to ``.grad`` of the head."""
    out = ttt_forward(head, batch, objective)
    if out.loss.requires_grad:  # not when every token of the target is outside the draft vocabulary
        out.loss.backward()
    return out._replace(loss=out.loss.detach())


def ttt_forward(
    head: DraftHead, batch: TTTBatch, objective: Objective = CROSS_ENTROPY, *, recompute: bool = False
) -> TTTOutput:
    """All K steps on one packed row, and their loss.

    Args:
        recompute: keep only the inputs of every step, and run it again in the backward pass.
    """
    plan = batch.plan
    if plan.counts[0] == 0:
        zero = torch.zeros((), device=batch.ids.device)
        return TTTOutput.nothing(zero, len(plan.rows), batch.num_groups)
    outputs = run_steps(head, batch, detach_steps=objective.detach_steps, recompute=recompute)
    return ttt_loss(head, outputs, batch, objective)


def run_steps(
    head: DraftHead, batch: TTTBatch, *, detach_steps: bool = False, recompute: bool = False
) -> list[torch.Tensor]:
    """The head's output at the rows of each step that carry loss, K tensors ``[R_k, H]``."""
    return _RUNS[head.step_form](head, batch, detach_steps, recompute)


def _call(recompute: bool, function: Callable[..., Any], *args: torch.Tensor) -> Any:
    """``function(*args)``; with ``recompute``, only ``args`` are kept for the backward pass."""
    return checkpoint(function, *args, use_reentrant=False) if recompute else function(*args)


def _run_one_layer(
    head: DraftHead, batch: TTTBatch, detach_steps: bool, recompute: bool
) -> list[torch.Tensor]:
    """:func:`run_steps` of a head whose one layer runs K times."""
    ids, plan, features = batch.ids, batch.plan, batch.inputs or batch.features
    layer, scale, window = head.blocks[0], head.config.attention_scale, head.config.layer.sliding_window
    positions = positions_of(plan.doc_start)
    length = plan.length
    everything = torch.arange(length, device=ids.device)

    def first(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        embeds = embedding(ids[token_of(everything, 0)], head.embedding(batch.embed_weight))
        x, residual = layer.inputs(hidden, embeds)
        q, k, v = layer.self_attn.qkv(x, head.rope.at(positions[:length]))
        rows = plan.computed[0]
        attended = _attention(q[rows], k, v, None, None, plan.attention[0].within(window, 0), scale)
        attended = layer.self_attn.gated(attended, x[rows])
        return head.feed_back(layer.finish(residual[rows], attended)), k, v

    def later(
        step: int, before: torch.Tensor, k0: torch.Tensor, v0: torch.Tensor, *earlier: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, kept = plan.computed[step], plan.kept[step]
        embeds = embedding(ids[token_of(rows, step)], head.embedding(batch.embed_weight))
        x, residual = layer.inputs(before[kept], embeds)
        q, k, v = layer.self_attn.qkv(x, head.rope.at(positions[rows] + step))
        own_k, own_v = torch.stack((*earlier[::2], k), 2), torch.stack((*earlier[1::2], v), 2)
        attended = _attention(q, k0, v0, own_k, own_v, plan.attention[step].within(window, step), scale)
        attended = layer.self_attn.gated(attended, x)
        return head.feed_back(layer.finish(residual, attended)), k, v

    hidden = head.features(features.hidden[:length], features.aux[:length])
    fed_back, k0, v0 = _call(recompute, first, hidden)
    outputs = [_at_rows(fed_back, plan, 0)]
    own: list[torch.Tensor] = []
    for step in range(1, len(plan.rows)):
        if plan.computed[step].numel() == 0:
            outputs += [fed_back[:0]] * (len(plan.rows) - step)
            break
        own = [part[plan.kept[step]] for part in own]
        before = fed_back.detach() if detach_steps else fed_back
        fed_back, k, v = _call(recompute, partial(later, step), before, k0, v0, *own)
        own += [k, v]
        outputs.append(_at_rows(fed_back, plan, step))
    return outputs


def _at_rows(computed: torch.Tensor, plan: RowPlan, step: int) -> torch.Tensor:
    """Select the rows that carry loss at ``step``: ``[C_k, H]`` -> ``[R_k, H]``."""
    rows, everywhere = plan.rows[step], plan.computed[step]
    return computed if rows is everywhere else computed[torch.searchsorted(everywhere, rows)]


def _run_layers(head: DraftHead, batch: TTTBatch, detach_steps: bool, recompute: bool) -> list[torch.Tensor]:
    """:func:`run_steps` of a head with a layer for every step.

    A row whose token is past the end of the text, or of its document, is computed with whatever token is
    there: only such rows attend to it.
    """
    ids, plan, features = batch.ids, batch.plan, batch.inputs or batch.features
    length = int(plan.on_host.rows[0][-1]) + 1
    everything = torch.arange(length, device=ids.device)
    blocks = plan_rows(everything, plan.doc_start)
    positions = positions_of(plan.doc_start)[:length]
    hidden, outputs = head.features(features.hidden[:length], features.aux[:length]), []

    def one(step: int, hidden: torch.Tensor) -> torch.Tensor:
        layer = head.blocks[step]
        tokens = ids[token_of(everything, step).clamp(max=len(ids) - 1)]
        x, residual = layer.inputs(hidden, embedding(tokens, head.embedding(batch.embed_weight)))
        q, k, v = layer.self_attn.qkv(x, head.rope.at(positions + step))
        attended = _attention(q, k, v, None, None, blocks, head.config.attention_scale)
        return head.feed_back(layer.finish(residual, layer.self_attn.gated(attended, x)))

    for step, rows in enumerate(plan.rows):
        hidden = _call(recompute, partial(one, step), hidden)
        outputs.append(hidden[rows])
        hidden = hidden.detach() if detach_steps else hidden
    return outputs


def _run_masked(head: PEagleHead, batch: TTTBatch, detach_steps: bool, recompute: bool) -> list[torch.Tensor]:
    """:func:`run_steps` of a head whose later steps are masks, layer by layer."""
    assert not detach_steps, "no state is handed on"
    ids, plan, features = batch.ids, batch.plan, batch.inputs or batch.features
    length, scale, stack = plan.length, head.config.attention_scale, head.stack
    everything, masked = torch.arange(length, device=ids.device), plan.computed[1:]
    causal = plan_rows(everything, plan.doc_start)
    positions = positions_of(plan.doc_start)
    depths = [positions[:length], *(positions[rows] + step for step, rows in enumerate(masked, start=1))]
    rotation = head.rope.at(torch.cat(depths))

    def joined(hidden: torch.Tensor, aux: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embeds = embedding(ids[token_of(everything, 0)], head.embedding(batch.embed_weight))
        x, residual = head.midlayer.inputs(head.features(hidden, aux), embeds)
        masks = [part.expand(sum(map(len, masked)), -1) for part in head.mask_inputs()]
        return torch.cat((x, masks[0])), torch.cat((residual, masks[1]))

    def attend(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: QueryPlan) -> torch.Tensor:
        """Attention in layer ``i`` of the rows ``first`` of step 0 and of all rows of later ones."""
        window = head.config.windows[i]
        sizes = [length, *map(len, masked)]
        (k0, *later_k), (v0, *later_v) = k.split(sizes), v.split(sizes)
        q0, *later_q = q.split([len(first.rows), *map(len, masked)])
        out = [_attention(q0, k0, v0, None, None, first.within(window, 0), scale)]
        own = list[torch.Tensor]()
        for step, each in enumerate(later_q, start=1):
            if not len(each):
                break
            if step > 1:
                own = [part[plan.kept[step]] for part in own]
            own += [later_k[step - 1], later_v[step - 1]]
            own_k, own_v = torch.stack(own[::2], 2), torch.stack(own[1::2], 2)
            seen = plan.attention[step].within(window, step)
            out.append(_attention(each, k0, v0, own_k, own_v, seen, scale))
        return torch.cat(out)

    def one(i: int, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = stack[i].self_attn.qkv(x, rotation)
        return head.next_inputs(i, residual, stack[i].self_attn.gated(attend(i, q, k, v, causal), x))

    def last(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        q, k, v = stack[-1].self_attn.qkv(x, rotation)
        q, x, residual = (torch.cat((part[plan.computed[0]], part[length:])) for part in (q, x, residual))
        attended = stack[-1].self_attn.gated(attend(len(stack) - 1, q, k, v, plan.attention[0]), x)
        return stack[-1].finish(residual, attended)

    x, residual = _call(recompute, joined, features.hidden[:length], features.aux[:length])
    for i in range(len(stack) - 1):
        x, residual = _call(recompute, partial(one, i), x, residual)
    out = _call(recompute, last, x, residual).split([len(rows) for rows in plan.computed])
    return [_at_rows(mine, plan, step) for step, mine in enumerate(out)]


def _run_blocks(head: DFlashHead, batch: TTTBatch, detach_steps: bool, recompute: bool) -> list[torch.Tensor]:
    """:func:`run_steps` of a head that drafts blocks; the token behind each row of step 0 is an anchor."""
    assert not detach_steps, "no state is handed on"
    plan, features, config = batch.plan, batch.inputs or batch.features, head.config
    length, anchored, rows = plan.length, plan.attention[0], plan.computed[0]
    size = len(plan.rows) + config.first_drafted
    positions, numbers = positions_of(plan.doc_start), torch.arange(size, device=rows.device)
    before = head.rope.at(positions[:length])
    rotation = head.rope.at((positions[rows, None] + 1 + numbers).flatten())
    context = _call(recompute, head.features, features.hidden[:length], features.aux[:length])
    h = head.block_inputs(batch.ids[token_of(rows, 0)], head.embedding(batch.embed_weight), size).flatten(
        0, 1
    )

    def one(i: int, context: torch.Tensor, normed: torch.Tensor, h: torch.Tensor) -> Any:
        attention = head.plain[i].self_attn
        _, k, v = attention.qkv(context, before)
        mine = [part.unflatten(0, (-1, size)) for part in attention.qkv(normed, rotation)]
        q, own_k, own_v = mine
        attended = anchored_attention(
            *(q, k, v, own_k, own_v, anchored, config.attention_scale, config.windows[i]),
            is_causal=config.causal[i],
        )
        return head.end_layer(i, h, attended.flatten(0, 1))

    normed = head.plain[0].input_layernorm(h)
    for i in range(config.num_layers):
        normed, h = _call(recompute, partial(one, i), context, normed, h)
    drafted = normed.unflatten(0, (-1, size))[:, config.first_drafted :]
    tokens = (rows[:, None] + token_of(numbers[: len(plan.rows)], 0)).clamp(max=len(batch.ids) - 1)
    blocks = head.corrected(drafted, batch.ids[tokens])
    return [blocks[torch.searchsorted(rows, mine), step] for step, mine in enumerate(plan.rows)]


_RUNS: dict[StepForm, Callable[..., list[torch.Tensor]]] = {
    StepForm.FED_BACK: _run_one_layer,
    StepForm.MODULES: _run_layers,
    StepForm.MASKED: _run_masked,
    StepForm.BLOCK: _run_blocks,
}


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own_k: torch.Tensor | None,
    own_v: torch.Tensor | None,
    plan: QueryPlan,
    scale: float,
) -> torch.Tensor:
    """``ttt_attention`` whose values ``[T, Hkv, Dv]`` may be narrower than keys: they are padded with zeros,
    and the outputs cut to Dv, both exactly. Without own keys ``own_k`` and ``own_v`` are None."""
    if own_k is None or own_v is None:
        own_k = own_v = k.new_empty(q.shape[0], k.shape[1], 0, k.shape[2])
    size, width = v.shape[-1], k.shape[-1]
    if size < width:
        v, own_v = pad(v, (0, width - size)), pad(own_v, (0, width - own_v.shape[-1]))
    return ttt_attention(q, k, v, own_k, own_v, plan, scale)[..., :size]
