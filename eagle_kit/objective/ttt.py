"""Training-time test (EAGLE-3, arXiv 2503.01840, section 3.2): a head runs K steps on its own outputs.

Row i is token position i of a packed sequence, and stands for the draft round whose root is x[i + 1]
(:mod:`eagle_kit.objective.align`). Step 0 is the paper's native training step: the head reads g, the fused
target states. Steps 1 to K - 1 are its simulated steps: the head reads a, its own output of the step before.
Figure 6 of the paper shows the attention masks: a row of step k sees the rows of step 0 up to itself, and its
own row of steps 1 to k (:func:`~eagle_kit.objective.step_parts.step_attention`). Gradients flow through all
steps, as in the published code; ``detach_steps`` stops them between steps (HASS). K is
``training.ttt_length``.

Two forwards are shared by heads of several kinds:

* One layer that runs K times (EAGLE-1, EAGLE-3). Step 0 computes keys and values of all rows. The rest of
  step 0, and all later steps, run over the rows that are supervised in this step or in a later one. This is
  exact: a row of a later step attends to keys of step 0 and to its own keys only.
* One layer for every step (MTP modules). Layer k runs at every row, reads the state of layer k - 1 and the
  token of step k, and attends to all rows before it, as in DeepSeek-V3 (arXiv 2412.19437, 2.2).

Other heads (P-EAGLE, DFlash) have a forward of their own, :meth:`DraftHead.training_steps`.

Legend: T packed tokens, P tokens up to the last computed row, K steps (``ttt_length``), R_k supervised
rows of step k, C_k computed rows of step k, H / H_target hidden of head / target, L captured layers, Hq / Hkv
heads, D head size.
"""

from functools import partial

import torch
from torch.nn.functional import embedding

from eagle_kit.models.draft_head import DraftHead, StepForm
from eagle_kit.objective.align import token_of
from eagle_kit.objective.loss import Objective, TTTBatch, TTTOutput, ttt_loss
from eagle_kit.objective.step_parts import run_maybe_recomputed, step_attention, supervised_outputs
from eagle_kit.objective.target_features import positions_of
from eagle_kit.ops.attention.ttt import plan_queries

CROSS_ENTROPY = Objective()


def ttt_forward_backward(head: DraftHead, batch: TTTBatch, objective: Objective = CROSS_ENTROPY) -> TTTOutput:
    """Run :func:`ttt_forward` and backward. Gradients are added to ``.grad`` of the head's parameters."""
    out = ttt_forward(head, batch, objective)

    # The loss has no graph if every target token is outside the draft vocabulary.
    if out.loss.requires_grad:
        out.loss.backward()
    return out._replace(loss=out.loss.detach())


def ttt_forward(
    head: DraftHead, batch: TTTBatch, objective: Objective = CROSS_ENTROPY, *, recompute: bool = False
) -> TTTOutput:
    """Run all K steps on one packed sequence, and compute their loss.

    Args:
        recompute: keep only the inputs of every step, and run it again in the backward pass.
    """
    plan = batch.plan
    if plan.counts[0] == 0:
        zero = torch.zeros((), device=batch.ids.device)
        return TTTOutput.zeros(zero, len(plan.rows), batch.num_groups)
    outputs = run_steps(head, batch, detach_steps=objective.detach_steps, recompute=recompute)
    return ttt_loss(head, outputs, batch, objective)


def run_steps(
    head: DraftHead, batch: TTTBatch, *, detach_steps: bool = False, recompute: bool = False
) -> list[torch.Tensor]:
    """Run all K steps of ``head`` on one packed sequence.

    Args:
        detach_steps: stop gradients between steps.
        recompute: keep only the inputs of every step, and run it again in the backward pass.

    Returns:
        The head's outputs at the supervised rows of each step, K tensors ``[R_k, H]``.
    """
    if head.step_form is StepForm.FED_BACK:
        return _run_one_layer(head, batch, detach_steps, recompute)
    if head.step_form is StepForm.MODULES:
        return _run_layer_per_step(head, batch, detach_steps, recompute)
    assert not detach_steps, "no state is handed from step to step"
    return head.training_steps(batch, recompute=recompute)


def _run_one_layer(
    head: DraftHead, batch: TTTBatch, detach_steps: bool, recompute: bool
) -> list[torch.Tensor]:
    """:func:`run_steps` of a head whose one layer runs K times (EAGLE-1, EAGLE-3)."""
    ids = batch.ids
    plan = batch.plan
    target_features = batch.inputs or batch.features  # with noise, if there is any
    layer = head.blocks[0]
    scale = head.config.attention_scale
    window = head.config.layer.sliding_window
    positions = positions_of(plan.doc_start)
    all_rows = torch.arange(plan.length, device=ids.device)

    def first_step(feature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The native training step, over g ``[P, H]``. Returns a ``[C_0, H]``, and keys and values of all
        rows ``[P, Hkv, D]``."""
        embeds = embedding(ids[token_of(all_rows, 0)], head.embedding(batch.embed_weight))  # [P, H]
        x, residual = layer.inputs(feature, embeds)  # [P, 2 H], [P, H]
        q, k, v = layer.self_attn.qkv(x, head.rope.at(positions[: plan.length]))  # [P, Hq or Hkv, D]

        # Every row has a key and a value. Rows that are supervised in no step need nothing else.
        rows = plan.computed[0]
        queries = plan.attention[0].with_window(window, 0)
        attended = step_attention(q[rows], k, v, None, None, queries, scale)  # [C_0, Hq, D]
        attended = layer.self_attn.gated(attended, x[rows])  # no-op without a gate
        out = layer.finish(residual[rows], attended)  # [C_0, H]
        return head.feed_back(out), k, v

    def later_step(
        step: int,
        feature: torch.Tensor,
        k0: torch.Tensor,
        v0: torch.Tensor,
        own_keys: tuple[torch.Tensor, ...],
        own_values: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A simulated training step, over a of the step before ``[C_(k-1), H]``. Returns a ``[C_k, H]``, and
        keys and values of the rows ``[C_k, Hkv, D]``."""
        rows = plan.computed[step]
        embeds = embedding(ids[token_of(rows, step)], head.embedding(batch.embed_weight))  # [C_k, H]
        x, residual = layer.inputs(feature[plan.index_in_previous[step]], embeds)  # [C_k, 2 H], [C_k, H]
        q, k, v = layer.self_attn.qkv(x, head.rope.at(positions[rows] + step))  # [C_k, Hq or Hkv, D]

        # Figure 6: keys of step 0 under the causal mask, and the row's own keys of steps 1 to k, the
        # diagonals.
        own_k = torch.stack((*own_keys, k), 2)  # [C_k, Hkv, k, D]
        own_v = torch.stack((*own_values, v), 2)  # [C_k, Hkv, k, D]
        queries = plan.attention[step].with_window(window, step)
        attended = step_attention(q, k0, v0, own_k, own_v, queries, scale)  # [C_k, Hq, D]
        attended = layer.self_attn.gated(attended, x)
        out = layer.finish(residual, attended)  # [C_k, H]
        return head.feed_back(out), k, v

    # Step 0 reads the fused target states.
    hidden = target_features.hidden[: plan.length]  # [P, H_target]
    aux_hidden_states = target_features.aux_hidden_states[: plan.length]  # [P, L * H_target]
    feature = head.features(hidden, aux_hidden_states)  # [P, H]
    fed_back, k0, v0 = run_maybe_recomputed(recompute, first_step, feature)
    outputs = [supervised_outputs(fed_back, plan, 0)]

    # Later steps read the output of the step before.
    own_keys: list[torch.Tensor] = []
    own_values: list[torch.Tensor] = []
    for step in range(1, len(plan.rows)):
        if plan.computed[step].numel() == 0:
            # No row is left; the other steps are empty.
            outputs += [fed_back[:0]] * (len(plan.rows) - step)
            break

        # Keys and values of earlier steps, at the computed rows of this step.
        own_keys = [part[plan.index_in_previous[step]] for part in own_keys]
        own_values = [part[plan.index_in_previous[step]] for part in own_values]
        feature = fed_back
        if detach_steps:
            feature = fed_back.detach()
        fed_back, k, v = run_maybe_recomputed(
            recompute, partial(later_step, step), feature, k0, v0, tuple(own_keys), tuple(own_values)
        )
        own_keys.append(k)
        own_values.append(v)
        outputs.append(supervised_outputs(fed_back, plan, step))
    return outputs


def _run_layer_per_step(
    head: DraftHead, batch: TTTBatch, detach_steps: bool, recompute: bool
) -> list[torch.Tensor]:
    """:func:`run_steps` of a head with a layer for every step (MTP modules).

    A row whose token is past the end of its document reads another token: no supervised row attends to it.
    """
    ids = batch.ids
    plan = batch.plan
    features = batch.inputs or batch.features  # with noise, if there is any
    length = int(plan.on_host.rows[0][-1]) + 1
    all_rows = torch.arange(length, device=ids.device)
    queries = plan_queries(all_rows, plan.doc_start)
    positions = positions_of(plan.doc_start)[:length]

    # One step at all rows.
    def one_step(step: int, hidden: torch.Tensor) -> torch.Tensor:
        layer = head.blocks[step]
        tokens = ids[token_of(all_rows, step).clamp(max=len(ids) - 1)]
        embeds = embedding(tokens, head.embedding(batch.embed_weight))
        x, residual = layer.inputs(hidden, embeds)
        q, k, v = layer.self_attn.qkv(x, head.rope.at(positions + step))
        attended = step_attention(q, k, v, None, None, queries, head.config.attention_scale)
        return head.feed_back(layer.finish(residual, layer.self_attn.gated(attended, x)))

    # Each layer reads the state of the one before.
    hidden = head.features(features.hidden[:length], features.aux_hidden_states[:length])
    outputs = []
    for step, rows in enumerate(plan.rows):
        hidden = run_maybe_recomputed(recompute, partial(one_step, step), hidden)
        outputs.append(hidden[rows])
        if detach_steps:
            hidden = hidden.detach()
    return outputs
