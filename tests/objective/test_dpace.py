"""Weights of steps by confidence (D-PACE), against their definition and inside a training step."""

from dataclasses import replace

import pytest
import torch
from tiny import packed_row, tiny_head, tiny_target

from eagle_kit.objective.dpace import position_weights
from eagle_kit.objective.loss import Objective, TTTBatch, ttt_loss
from eagle_kit.objective.row_plan import make_row_plan
from eagle_kit.objective.target_features import capture_features
from eagle_kit.objective.ttt import run_steps

STEPS, ALPHA = 5, 0.3


def test_a_weight_is_the_gradient_of_the_expected_accept_length():
    """w_j = dS / d log q_j with S = sum_m prod_{j <= m} q_j, for confidences that are not smoothed."""
    log_q = torch.log(torch.rand(STEPS, 7, generator=torch.Generator().manual_seed(0)).double())
    log_q.requires_grad_()
    expected = log_q.cumsum(0).exp().sum()
    (gradient,) = torch.autograd.grad(expected, log_q)
    exists = torch.ones(STEPS, 7, dtype=torch.bool)
    torch.testing.assert_close(position_weights(log_q.detach().exp(), exists, 1e-12), gradient)


def test_steps_weigh_less_the_later_and_more_where_those_before_are_confident():
    confidence = torch.full((STEPS, 2), 0.5)
    confidence[0] = torch.tensor([0.1, 0.9])
    weights = position_weights(confidence, torch.ones(STEPS, 2, dtype=torch.bool), ALPHA)
    assert (weights.diff(dim=0) < 0).all()
    assert (weights[:, 1] > weights[:, 0]).all()


def test_alpha_of_one_counts_the_steps_to_come_and_missing_ones_weigh_nothing():
    exists = torch.tensor([[True, True, False], [True, False, True], [True, False, True]])
    weights = position_weights(torch.rand(3, 3), exists, 1.0)
    assert weights.tolist() == [[3, 1, 0], [2, 0, 2], [1, 0, 1]]


@pytest.mark.parametrize("rule", ["serving", "published"])
def test_a_training_step_weighs_every_row_by_its_own_steps(rule):
    """The loss over all rows of all steps, by a plain loop over rows."""
    target = tiny_target()
    head = tiny_head(target, 101).requires_grad_(True)
    ids, response, doc_start = packed_row()
    plan = make_row_plan(response, doc_start, STEPS, rule)
    features = capture_features(target, ids, doc_start, head.config.aux_layer_ids, plan.is_teacher)
    weights = [torch.linspace(0.5, 1.0, count) for count in plan.counts]
    rows = target.head_weight[head.token_map]
    batch = TTTBatch(ids, plan, weights, features, target.embed_tokens.weight, rows)
    objective = replace(Objective.of("ce", 3.0, head, target.head_weight), dpace_alpha=ALPHA)
    with torch.no_grad():
        outputs = run_steps(head, batch)
        out = ttt_loss(head, outputs, batch, objective)
        teacher = (features.hidden @ rows.t()).double().softmax(-1)
        expected = 0.0
        for row in range(len(ids)):
            steps = [k for k in range(STEPS) if row in plan.rows[k]]
            where = [int((plan.rows[k] == row).nonzero()) for k in steps]
            log_q = [
                (head.norm_for_lm_head(outputs[k][i]) @ head.lm_head.weight.t()).double().log_softmax(-1)
                for k, i in zip(steps, where, strict=True)
            ]
            in_draft_vocab = [bool(head.t2d[features.argmax[row + 1 + k]]) for k in steps]
            said = [
                float(q[teacher[row + 1 + k].argmax()].exp()) * can
                for q, k, can in zip(log_q, steps, in_draft_vocab, strict=True)
            ]
            for j, (k, i) in enumerate(zip(steps, where, strict=True)):
                credit, reached = 0.0, 1.0
                for m, q in enumerate(said):
                    reached *= (1 - ALPHA) * q + ALPHA
                    credit += reached * (m >= j)
                if in_draft_vocab[j]:
                    loss = -(teacher[row + 1 + k] * log_q[j]).sum()
                    expected += float(weights[k][i]) * credit * float(loss)
    assert float(out.loss) == pytest.approx(expected, rel=1e-4)
    assert expected > 0
