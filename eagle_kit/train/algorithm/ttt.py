"""Training-time test (EAGLE-3, arXiv 2503.01840): the head runs K steps on its own outputs, as when serving.

Step 0 runs over all rows, because its keys and values are everybody's prefix; everything after its attention,
and all later steps, run over the rows that carry loss only, now or later. Head and loss run in blocks of
rows: a block's teacher is made once and used by all K steps.

A head of several layers (MTP modules) has one for every step: layer k reads, at every row, the state of layer
k - 1 and the token of step k, and attends to all rows before it, as in DeepSeek-V3 (arXiv 2412.19437, 2.2).

Legend: T packed tokens, K steps, R_k rows of step k, H hidden, Vd draft vocabulary, Hkv heads, Dv size of a
value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from eagle_kit.config.train import RegressionConfig
from eagle_kit.kernels.draft_loss import NEEDS_MASS, linear_draft_loss
from eagle_kit.kernels.soft_cross_entropy import SoftCrossEntropy, carried
from eagle_kit.kernels.ttt_attention import QueryPlan, plan_rows, ttt_attention
from eagle_kit.models.heads.draft_head import DraftHead
from eagle_kit.train.algorithm.align import published_rows, supervised_rows, teacher_of, token_of
from eagle_kit.train.algorithm.regression import regression_loss
from eagle_kit.train.algorithm.teacher import (
    TargetFeatures,
    draft_vocab_mass,
    draft_vocab_probs,
    positions_of,
)

LOSS_BLOCK, LOSS_BLOCK_ON_GPU = 256, 2048
"""Rows of step 0 whose teacher distributions exist together. Fewer blocks are better where there is memory:
each adds to the gradient of the whole output weight."""


@dataclass(frozen=True)
class RowPlan:
    """What the packed row alone decides, before any model has run.

    Attributes:
        rows: rows that carry loss at each step, int64 ``[R_k]``.
        computed: rows that carry loss at each step or at one after it, int64 ``[C_k]``, nested; the same as
            ``rows`` where those are nested.
        kept: for k >= 1, where the computed rows of step k are among those of step k - 1, int64 ``[C_k]``.
        attention: attention plan of each step, of the computed rows.
        needed: bool ``[T]``, positions that some row learns from.
        doc_start: int64 ``[T]``.
    """

    rows: list[torch.Tensor]
    computed: list[torch.Tensor]
    kept: list[torch.Tensor]
    attention: list[QueryPlan]
    needed: torch.Tensor
    doc_start: torch.Tensor

    @property
    def counts(self) -> list[int]:
        """R_k of each step."""
        return [int(rows.shape[0]) for rows in self.rows]


@dataclass(frozen=True)
class Objective:
    """What is minimised.

    Attributes:
        loss: of :func:`~eagle_kit.kernels.draft_loss.linear_draft_loss`.
        eta: of ``lk-hybrid``.
        target_head: the target's whole output layer ``[V, H_target]``, for losses in the acceptance rate when
            the draft vocabulary is a part of the target's; None otherwise.
        regression: EAGLE-1's loss with these weights, in place of ``loss``.
        detach_steps: no gradient flows through what a step hands to the next.
    """

    loss: str = "ce"
    eta: float = 3.0
    target_head: torch.Tensor | None = None
    regression: RegressionConfig | None = None
    detach_steps: bool = False

    @classmethod
    def of(cls, loss: str, eta: float, head: DraftHead, head_weight: torch.Tensor) -> "Objective":
        """The objective that a head's training needs; ``head_weight [V, H_target]``."""
        is_partial = loss in NEEDS_MASS and head.token_map is not None
        return cls(loss, eta, head_weight if is_partial else None)


class TTTResult(NamedTuple):
    """Sums over one packed row, detached; all but ``loss`` fp64 ``[K]``, one number per step.

    Attributes:
        loss: what was differentiated.
        losses: unweighted, of the rows that carry loss.
        matches: rows whose draft choice is the target's choice.
        leading: rows that match at this step and at all before.
        learned: rows that carry loss: supervised, and the target's choice is in the draft vocabulary.
        counts: supervised rows.
    """

    loss: float
    losses: torch.Tensor
    matches: torch.Tensor
    leading: torch.Tensor
    learned: torch.Tensor
    counts: torch.Tensor


def plan_row(
    reply: torch.Tensor, doc_start: torch.Tensor, ttt_length: int, loss_rows: str = "serving"
) -> RowPlan:
    """``reply`` and ``doc_start`` int64 ``[T]`` of a packed row -> its plan.

    ``loss_rows`` is ``serving`` or ``published``, see :mod:`eagle_kit.train.algorithm.align`.
    """
    if loss_rows == "published":
        rows = published_rows(reply, doc_start, ttt_length)
        computed = [torch.unique(torch.cat(rows[k:])) for k in range(ttt_length)]
    else:
        rows = computed = supervised_rows(reply, ttt_length)
    kept = [torch.searchsorted(before, after) for before, after in pairwise(computed)]
    needed = torch.zeros_like(reply, dtype=torch.bool)
    for step, mine in enumerate(rows):
        needed[teacher_of(mine, step)] = True
    attention = [plan_rows(r, doc_start) for r in computed]
    return RowPlan(rows, computed, [computed[0], *kept], attention, needed, doc_start)


CROSS_ENTROPY = Objective()


class TTTOutput(NamedTuple):
    """What a forward gives: ``loss`` to differentiate, fp32 (without a graph when no row learns), and
    ``losses``, ``matches``, ``leading``, ``learned`` of :class:`TTTResult`."""

    loss: torch.Tensor
    losses: torch.Tensor
    matches: torch.Tensor
    leading: torch.Tensor
    learned: torch.Tensor


def ttt_forward_backward(
    head: DraftHead,
    embed_weight: torch.Tensor,
    ids: torch.Tensor,
    features: TargetFeatures,
    target_head: torch.Tensor,
    plan: RowPlan,
    row_weights: list[torch.Tensor],
    objective: Objective = CROSS_ENTROPY,
    *,
    inputs: TargetFeatures | None = None,
) -> TTTResult:
    """:func:`ttt_forward`, then backward; gradients are added to ``.grad`` of the head."""
    out = ttt_forward(
        head, embed_weight, ids, features, target_head, plan, row_weights, objective, inputs=inputs
    )
    if out.loss.requires_grad:  # not when every choice of the teacher is outside the draft vocabulary
        out.loss.backward()
    counts = torch.tensor(plan.counts if plan.counts[0] else [0] * len(plan.rows), dtype=torch.float64)
    return TTTResult(float(out.loss.detach()), *out[1:], counts)


def ttt_forward(
    head: DraftHead,
    embed_weight: torch.Tensor,
    ids: torch.Tensor,
    features: TargetFeatures,
    target_head: torch.Tensor,
    plan: RowPlan,
    row_weights: list[torch.Tensor],
    objective: Objective = CROSS_ENTROPY,
    *,
    inputs: TargetFeatures | None = None,
    recompute: bool = False,
) -> TTTOutput:
    """All K steps on one packed row.

    Args:
        embed_weight: the target's embedding ``[V, H]``, frozen.
        ids: int64 ``[T]``.
        features: the target's view of the row.
        target_head: the target's output rows of the draft vocabulary, ``[Vd, H_target]``.
        row_weights: fp32 ``[R_k]`` for every step: step weight times normalisation.
        objective: what is minimised.
        inputs: what the head reads in place of ``features``, which it then only learns from (noise).
        recompute: keep only what goes into every step, and run it again in the backward pass.
    """
    if plan.counts[0] == 0:
        nothing = torch.zeros(len(plan.rows), dtype=torch.float64)
        return TTTOutput(torch.zeros((), device=ids.device), nothing, nothing, nothing, nothing)
    run = run_steps if len(head.blocks) == 1 else _run_layers
    outputs = run(head, embed_weight, ids, inputs or features, plan, objective.detach_steps, recompute)
    return TTTOutput(*_loss(head, outputs, features, target_head, plan, row_weights, objective))


def _call(recompute: bool, function: Callable[..., Any], *args: torch.Tensor) -> Any:
    """``function(*args)``, with nothing but ``args`` kept for the backward pass when it is to recompute."""
    return checkpoint(function, *args, use_reentrant=False) if recompute else function(*args)


def run_steps(
    head: DraftHead,
    embed_weight: torch.Tensor,
    ids: torch.Tensor,
    features: TargetFeatures,
    plan: RowPlan,
    detach_steps: bool = False,
    recompute: bool = False,
) -> list[torch.Tensor]:
    """The head's output at the rows of each step that carry loss, K tensors ``[R_k, H]``."""
    layer, scale = head.blocks[0], head.config.attention_scale
    positions = positions_of(plan.doc_start)
    length = int(plan.computed[0][-1]) + 1
    everything = torch.arange(length, device=ids.device)

    def first(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        embeds = torch.nn.functional.embedding(ids[token_of(everything, 0)], embed_weight)
        x, residual = layer.inputs(hidden, embeds)
        q, k, v = layer.self_attn.qkv(x, head.rope.table(positions[:length]))
        rows = plan.computed[0]
        attended = _attention(q[rows], k, v, None, None, plan.attention[0], scale)
        return head.feed_back(layer.finish(residual[rows], attended)), k, v

    def later(
        step: int, before: torch.Tensor, k0: torch.Tensor, v0: torch.Tensor, *earlier: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, kept = plan.computed[step], plan.kept[step]
        embeds = torch.nn.functional.embedding(ids[token_of(rows, step)], embed_weight)
        x, residual = layer.inputs(before[kept], embeds)
        q, k, v = layer.self_attn.qkv(x, head.rope.table(positions[rows] + step))
        own_k, own_v = torch.stack((*earlier[::2], k), 2), torch.stack((*earlier[1::2], v), 2)
        attended = _attention(q, k0, v0, own_k, own_v, plan.attention[step], scale)
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
    """``[C_k, H]`` -> ``[R_k, H]``: what was computed at the rows that carry loss at ``step``."""
    rows, everywhere = plan.rows[step], plan.computed[step]
    return computed if rows is everywhere else computed[torch.searchsorted(everywhere, rows)]


def _run_layers(
    head: DraftHead,
    embed_weight: torch.Tensor,
    ids: torch.Tensor,
    features: TargetFeatures,
    plan: RowPlan,
    detach_steps: bool = False,
    recompute: bool = False,
) -> list[torch.Tensor]:
    """:func:`run_steps` of a head with a layer for every step. Rows whose token is past the end of the text
    or of their document are computed with whatever is there: only such rows see them."""
    length = int(plan.rows[0][-1]) + 1
    everything = torch.arange(length, device=ids.device)
    blocks = plan_rows(everything, plan.doc_start)
    positions = positions_of(plan.doc_start)[:length]
    hidden, outputs = head.features(features.hidden[:length], features.aux[:length]), []

    def one(step: int, hidden: torch.Tensor) -> torch.Tensor:
        layer = head.blocks[step]
        tokens = ids[token_of(everything, step).clamp(max=len(ids) - 1)]
        x, residual = layer.inputs(hidden, torch.nn.functional.embedding(tokens, embed_weight))
        q, k, v = layer.self_attn.qkv(x, head.rope.table(positions + step))
        attended = _attention(q, k, v, None, None, blocks, head.config.attention_scale)
        return head.feed_back(layer.finish(residual, attended))

    for step, rows in enumerate(plan.rows):
        hidden = _call(recompute, partial(one, step), hidden)
        outputs.append(hidden[rows])
        hidden = hidden.detach() if detach_steps else hidden
    return outputs


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own_k: torch.Tensor | None,
    own_v: torch.Tensor | None,
    plan: QueryPlan,
    scale: float,
) -> torch.Tensor:
    """``ttt_attention`` where values ``[T, Hkv, Dv]`` may be narrower than keys: zeros fill them up, and what
    comes of the zeros is cut off again, both exactly. Without own keys ``own_k`` and ``own_v`` are None."""
    if own_k is None or own_v is None:
        own_k = own_v = k.new_empty(q.shape[0], k.shape[1], 0, k.shape[2])
    size, width = v.shape[-1], k.shape[-1]
    if size < width:
        v, own_v = pad(v, (0, width - size)), pad(own_v, (0, width - own_v.shape[-1]))
    return ttt_attention(q, k, v, own_k, own_v, plan, scale)[..., :size]


def _loss(
    head: DraftHead,
    outputs: list[torch.Tensor],
    features: TargetFeatures,
    target_head: torch.Tensor,
    plan: RowPlan,
    row_weights: list[torch.Tensor],
    objective: Objective,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weighted loss over all steps; then ``losses, matches, leading, learned`` of :class:`TTTResult`.

    A row whose teacher's choice is outside the draft vocabulary carries no loss and counts as a miss.
    """
    steps = len(plan.rows)
    losses, matches, leading, learned = torch.zeros(4, steps, dtype=torch.float64)
    normed = [head.norm_for_head(out) for out in outputs]
    total = outputs[0].new_zeros((), dtype=torch.float32)
    weight, weight_grad = head.output.weight, None
    if weight.requires_grad and torch.is_grad_enabled():
        weight_grad = torch.zeros_like(weight)
    first_rows = plan.computed[0]
    block = LOSS_BLOCK_ON_GPU if first_rows.is_cuda else LOSS_BLOCK
    for start in range(0, first_rows.shape[0], block):
        low = int(first_rows[start])
        high = int(first_rows[min(start + block, first_rows.shape[0]) - 1])
        h, at, weights, mine = [], [], [], []
        for step, rows in enumerate(plan.rows):
            inside = torch.nonzero((rows >= low) & (rows <= high))[:, 0]
            teacher = teacher_of(rows[inside], step)
            sayable = head.t2d[features.argmax[teacher]]
            inside, teacher = inside[sayable], teacher[sayable]
            h.append(normed[step][inside])
            at.append(teacher)
            weights.append(row_weights[step][inside])
            mine.append(rows[inside])
        teachers = torch.cat(at)
        if teachers.numel() == 0:
            continue
        wanted, index = torch.unique(teachers, return_inverse=True)
        probs = draft_vocab_probs(features.hidden[wanted], target_head)
        result = _block_loss(
            objective,
            features.hidden[wanted],
            probs,
            index,
            head,
            torch.cat(h),
            target_head,
            torch.cat(weights),
            weight_grad,
        )
        total = total + result.loss
        is_match = head.to_target(result.best) == features.argmax[teachers]
        sizes = [rows.shape[0] for rows in mine]
        alive = torch.ones_like(plan.needed)
        for step, (hits, row_losses) in enumerate(
            zip(is_match.split(sizes), result.row_losses.split(sizes), strict=True)
        ):
            still = torch.zeros_like(alive)
            still[mine[step]] = hits & alive[mine[step]]
            alive = still
            matches[step] += hits.sum().double().cpu()
            leading[step] += alive.sum().double().cpu()
            losses[step] += row_losses.sum().double().cpu()
            learned[step] += sizes[step]
    if weight_grad is not None and total.requires_grad:
        total = total + carried(weight, weight_grad)
    return total, losses, matches, leading, learned


def _block_loss(
    objective: Objective,
    hidden: torch.Tensor,
    probs: torch.Tensor,
    index: torch.Tensor,
    head: DraftHead,
    states: torch.Tensor,
    target_head: torch.Tensor,
    row_weights: torch.Tensor,
    weight_grad: torch.Tensor | None,
) -> SoftCrossEntropy:
    """What ``objective`` says of a block's rows: ``states [M, H]`` learn from the positions ``index [M]`` of
    the target's ``hidden [P, H]`` and its distributions ``probs [P, Vd]``. The gradient of the head's output
    layer, if it learns, is added to ``weight_grad``."""
    weight = head.output.weight
    if objective.regression is not None:
        return regression_loss(states, weight, hidden, probs, index, row_weights, objective.regression)
    mass = None
    if objective.target_head is not None:
        mass = draft_vocab_mass(hidden, target_head, objective.target_head)
    return linear_draft_loss(
        states,
        weight,
        probs,
        index,
        row_weights,
        loss=objective.loss,
        mass=mass,
        eta=objective.eta,
        weight_grad=weight_grad,
    )
