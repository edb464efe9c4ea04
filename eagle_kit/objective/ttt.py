"""Training-time test (EAGLE-3, arXiv 2503.01840): a head runs K steps on its own outputs, as when serving.

Two forwards are shared by heads with decoder layers of the usual kind:

* One layer that runs K times (EAGLE-1, EAGLE-3). Step 0 runs over all rows, because its keys and values are
  the prefix of every row. Everything after its attention, and all later steps, run only over the rows that
  have loss in this step or a later one.
* One layer for every step (MTP modules). Layer k runs at every row, reads the state of layer k - 1 and the
  token of step k, and attends to all rows before it, as in DeepSeek-V3 (arXiv 2412.19437, 2.2).

Other heads (P-EAGLE, DFlash) have a forward of their own, :meth:`DraftHead.training_steps`.

Legend: T packed tokens, K steps, R_k rows with loss of step k, C_k computed rows of step k, H hidden.
"""

from functools import partial

import torch
from torch.nn.functional import embedding

from eagle_kit.models.draft_head import DraftHead, StepForm
from eagle_kit.objective.align import token_of
from eagle_kit.objective.loss import Objective, TTTBatch, TTTOutput, ttt_loss
from eagle_kit.objective.step_parts import call, rows_with_loss, step_attention
from eagle_kit.objective.target_features import positions_of
from eagle_kit.ops.attention.ttt import plan_rows

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
    """Run all K steps of ``head`` on one packed row.

    Args:
        detach_steps: stop gradients between steps.
        recompute: keep only the inputs of every step, and run it again in the backward pass.

    Returns:
        The head's outputs at the rows with loss, K tensors ``[R_k, H]``.
    """
    if head.has_own_training_steps:
        assert not detach_steps, "no state is handed from step to step"
        return head.training_steps(batch, recompute=recompute)
    if head.step_form is StepForm.MODULES:
        return _run_layer_per_step(head, batch, detach_steps, recompute)
    return _run_one_layer(head, batch, detach_steps, recompute)


def _run_one_layer(
    head: DraftHead, batch: TTTBatch, detach_steps: bool, recompute: bool
) -> list[torch.Tensor]:
    """:func:`run_steps` of a head whose one layer runs K times."""
    ids = batch.ids
    plan = batch.plan
    features = batch.inputs or batch.features
    layer = head.blocks[0]
    scale = head.config.attention_scale
    window = head.config.layer.sliding_window
    positions = positions_of(plan.doc_start)
    all_rows = torch.arange(plan.length, device=ids.device)

    def first_step(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        embeds = embedding(ids[token_of(all_rows, 0)], head.embedding(batch.embed_weight))
        x, residual = layer.inputs(hidden, embeds)
        q, k, v = layer.self_attn.qkv(x, head.rope.at(positions[: plan.length]))

        # From here on only the rows that are needed again.
        rows = plan.computed[0]
        queries = plan.attention[0].within(window, 0)
        attended = step_attention(q[rows], k, v, None, None, queries, scale)
        attended = layer.self_attn.gated(attended, x[rows])
        return head.feed_back(layer.finish(residual[rows], attended)), k, v

    def later_step(
        step: int, before: torch.Tensor, k0: torch.Tensor, v0: torch.Tensor, *earlier: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = plan.computed[step]
        embeds = embedding(ids[token_of(rows, step)], head.embedding(batch.embed_weight))
        x, residual = layer.inputs(before[plan.kept[step]], embeds)
        q, k, v = layer.self_attn.qkv(x, head.rope.at(positions[rows] + step))

        # ``earlier`` has keys and values in turn, of steps 1 to step - 1.
        own_k = torch.stack((*earlier[::2], k), 2)
        own_v = torch.stack((*earlier[1::2], v), 2)
        queries = plan.attention[step].within(window, step)
        attended = step_attention(q, k0, v0, own_k, own_v, queries, scale)
        attended = layer.self_attn.gated(attended, x)
        return head.feed_back(layer.finish(residual, attended)), k, v

    hidden = head.features(features.hidden[: plan.length], features.aux[: plan.length])
    fed_back, k0, v0 = call(recompute, first_step, hidden)
    outputs = [rows_with_loss(fed_back, plan, 0)]
    own: list[torch.Tensor] = []
    for step in range(1, len(plan.rows)):
        if plan.computed[step].numel() == 0:
            outputs += [fed_back[:0]] * (len(plan.rows) - step)
            break

        # Keys and values of earlier steps, at the rows that go on.
        own = [part[plan.kept[step]] for part in own]
        before = fed_back
        if detach_steps:
            before = fed_back.detach()
        fed_back, k, v = call(recompute, partial(later_step, step), before, k0, v0, *own)
        own += [k, v]
        outputs.append(rows_with_loss(fed_back, plan, step))
    return outputs


def _run_layer_per_step(
    head: DraftHead, batch: TTTBatch, detach_steps: bool, recompute: bool
) -> list[torch.Tensor]:
    """:func:`run_steps` of a head with a layer for every step.

    A row whose token lies past the end of the text, or of its document, is computed with any token: only such
    rows attend to it.
    """
    ids = batch.ids
    plan = batch.plan
    features = batch.inputs or batch.features
    length = int(plan.on_host.rows[0][-1]) + 1
    all_rows = torch.arange(length, device=ids.device)
    queries = plan_rows(all_rows, plan.doc_start)
    positions = positions_of(plan.doc_start)[:length]

    def one_step(step: int, hidden: torch.Tensor) -> torch.Tensor:
        layer = head.blocks[step]
        tokens = ids[token_of(all_rows, step).clamp(max=len(ids) - 1)]
        x, residual = layer.inputs(hidden, embedding(tokens, head.embedding(batch.embed_weight)))
        q, k, v = layer.self_attn.qkv(x, head.rope.at(positions + step))
        attended = step_attention(q, k, v, None, None, queries, head.config.attention_scale)
        return head.feed_back(layer.finish(residual, layer.self_attn.gated(attended, x)))

    hidden = head.features(features.hidden[:length], features.aux[:length])
    outputs = []
    for step, rows in enumerate(plan.rows):
        hidden = call(recompute, partial(one_step, step), hidden)
        outputs.append(hidden[rows])
        if detach_steps:
            hidden = hidden.detach()
    return outputs
