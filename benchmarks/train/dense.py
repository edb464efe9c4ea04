"""Training-time test without our short cuts: every row at every step, and logits that are kept.

For ``python benchmarks train`` only. Each way starts from the target's states of a packed sequence and ends
with the gradients of the head; all give the same loss, which the benchmark checks. They share the head's own
modules, so that they differ in rows, attention and loss alone.

Legend: T packed tokens, K steps, R_k rows of step k, H hidden, V / Vd target / draft vocabulary, Hq heads, D
size of a head.
"""

from typing import NamedTuple

import torch

from eagle_kit.drafts.eagle3.head import Eagle3Head
from eagle_kit.objective.align import teacher_of, token_of
from eagle_kit.objective.loss import TTTBatch
from eagle_kit.objective.row_plan import RowPlan
from eagle_kit.objective.target_features import TargetFeatures, positions_of, vocab_argmax
from eagle_kit.objective.ttt import run_steps, ttt_forward_backward
from eagle_kit.ops.attention.ttt import plan_queries
from eagle_kit.ops.linear import linear


class DenseInputs(NamedTuple):
    """One packed sequence behind the target's layers.

    Attributes:
        embed_weight, head_weight: the target's embedding and output layer ``[V, H]``.
        target_rows: of ``head_weight``, those of the draft vocabulary ``[Vd, H]``.
        ids: int64 ``[T]``.
        aux, hidden: the target's captured states ``[T, 3 H]`` and its final-normed ones ``[T, H]``.
        plan: the supervised rows of each step.
        row_weights: K tensors fp32 ``[R_k]``.
    """

    embed_weight: torch.Tensor
    head_weight: torch.Tensor
    target_rows: torch.Tensor
    ids: torch.Tensor
    aux: torch.Tensor
    hidden: torch.Tensor
    plan: RowPlan
    row_weights: list[torch.Tensor]

    def features(self) -> TargetFeatures:
        """The states with the target's choices where the plan needs them."""
        argmax = torch.full_like(self.ids, -1)
        argmax[self.plan.is_teacher] = vocab_argmax(self.hidden[self.plan.is_teacher], self.head_weight)
        return TargetFeatures(self.aux, self.hidden, argmax)

    def batch(self) -> TTTBatch:
        """The row as the trainer has it."""
        return TTTBatch(
            ids=self.ids,
            plan=self.plan,
            row_weights=self.row_weights,
            features=self.features(),
            embed_weight=self.embed_weight,
            target_rows=self.target_rows,
        )


def our_way(head: Eagle3Head, work: DenseInputs) -> float:
    """The trainer's step -> the loss, as all of these return it."""
    return float(ttt_forward_backward(head, work.batch()).loss)


def every_row(work: DenseInputs) -> DenseInputs:
    """``work`` with a plan of all rows at all steps, those without loss at the weight 0: :func:`our_way` with
    it tells what skipping rows alone is worth."""
    length, device = work.ids.shape[0], work.ids.device
    rows, weights = [], []
    for step, learned in enumerate(work.plan.rows):
        rows.append(torch.arange(max(length - 2 - step, 0), device=device))
        weights.append(torch.zeros(rows[-1].shape, dtype=torch.float32, device=device))
        weights[-1][learned] = work.row_weights[step]
    attention = [plan_queries(mine, work.plan.doc_start) for mine in rows]
    is_teacher = torch.ones_like(work.plan.is_teacher)
    # Row i has index i in every step.
    return work._replace(
        plan=RowPlan(rows, rows, rows, attention, is_teacher, work.plan.doc_start, work.plan.keep_rates),
        row_weights=weights,
    )


def dense_way(head: Eagle3Head, work: DenseInputs) -> float:
    """The published step (arXiv 2503.01840; class ``Model`` in ``eagle/traineagle3/cnets.py`` of
    SafeAILab/EAGLE): target logits ``[T, V]``; at every step all T rows, attention scores ``[Hq, T, T + k]``,
    choice, teacher, logits and log-softmax, a mask where the loss is taken, and the share of matches.

    Ours in it: the mask of documents, since rows are packed, and the serving-exact loss mask.
    """
    layer, scale = head.blocks[0], head.config.attention_scale
    ids, plan, length = work.ids, work.plan, work.ids.shape[0]
    everything = torch.arange(length, device=ids.device)
    positions = positions_of(plan.doc_start)
    with torch.no_grad():
        target_logits = linear(work.hidden, work.head_weight)
    hidden_from = (everything[:, None] < everything) | (plan.doc_start[:, None] != plan.doc_start)
    bias = torch.zeros(length, length, device=ids.device).masked_fill(hidden_from, float("-inf"))
    fed_back = head.features(work.hidden, work.aux)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    loss = fed_back.new_zeros((), dtype=torch.float32)
    for step, rows in enumerate(plan.rows):
        tokens = ids[token_of(everything, step).clamp(max=length - 1)]
        x, residual = layer.inputs(fed_back, torch.nn.functional.embedding(tokens, work.embed_weight))
        q, k, v = layer.self_attn.qkv(x, head.rope.at(positions + step))
        keys.append(k.repeat_interleave(q.shape[1] // k.shape[1], 1))
        values.append(v.repeat_interleave(q.shape[1] // v.shape[1], 1))
        attended = _dense_attention(q, keys, values, bias, scale)
        fed_back = head.feed_back(layer.finish(residual, attended))
        with torch.no_grad():
            shifted = target_logits.roll(-1 - step, 0)
            mask = torch.zeros(length, dtype=torch.float32, device=ids.device)
            mask[rows] = work.row_weights[step]
            mask = mask * head.t2d[shifted.argmax(-1)]
            teacher = shifted[:, head.token_map].float().softmax(-1)
        logits = head.logits(fed_back).float()
        loss = loss - (mask[:, None] * (teacher * logits.log_softmax(-1))).sum()
        with torch.no_grad():
            ((logits.argmax(-1) == teacher.argmax(-1)) & (mask > 0)).sum().item()
    loss.backward()
    return float(loss.detach())


def _dense_attention(
    q: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    bias: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Step k's queries over the keys of step 0 and over the k keys of their own row: ``[T, Hq, D]``."""
    scores = torch.einsum("thd,shd->hts", q, keys[0]) * scale + bias
    own = [(q * key).sum(-1).T[:, :, None] * scale for key in keys[1:]]
    weights = torch.cat((scores, *own), -1).float().softmax(-1).to(q.dtype)
    out = torch.einsum("hts,shd->thd", weights[..., : q.shape[0]], values[0])
    for i, value in enumerate(values[1:]):
        out = out + weights[..., q.shape[0] + i].T[:, :, None] * value
    return out


def kept_logits_way(head: Eagle3Head, work: DenseInputs) -> float:
    """Our rows and attention, but teachers, logits and log-softmax ``[R_k, Vd]`` of all K steps are kept for
    the backward pass, as autograd does."""
    batch = work.batch()
    outputs = run_steps(head, batch)
    with torch.no_grad():
        teacher = linear(work.hidden, work.target_rows).float().softmax(-1)
    loss = outputs[0].new_zeros((), dtype=torch.float32)
    for step, (rows, out) in enumerate(zip(work.plan.rows, outputs, strict=True)):
        at = teacher_of(rows, step)
        weight = work.row_weights[step] * head.t2d[batch.features.argmax[at]]
        loss = loss - (weight * (teacher[at] * head.logits(out).float().log_softmax(-1)).sum(-1)).sum()
    loss.backward()
    return float(loss.detach())
