"""Training of DFlash: loss and gradients against the published forward over dense masks, anchors, leaks."""

import copy

import pytest
import torch
from published_dflash import PublishedDFlash
from tiny import packed_row, tiny_dflash, tiny_target

from eagle_kit.checkpoints.draft import write_draft
from eagle_kit.kinds.dflash import DFLASH
from eagle_kit.train.algorithm.loss import Objective, TTTBatch
from eagle_kit.train.algorithm.row_drop import RowDrop, anchors_of
from eagle_kit.train.algorithm.row_plan import plan_row
from eagle_kit.train.algorithm.target_features import capture_features
from eagle_kit.train.algorithm.ttt import run_steps, ttt_forward, ttt_forward_backward

STEPS, DROP = 5, RowDrop(1.0, 1.0, seed=1, step=2, most=4)
SLIDING = {"sliding_window": 7, "sliding_layers": (0, 2)}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def batch_of(target, head, *, drop: RowDrop | None = DROP, ids=None, rule: str = "serving"):
    own, reply, doc_start = packed_row()
    ids, steps = own if ids is None else ids, head.config.most_steps
    shares = uniforms = most = None
    if drop is not None:
        shares, uniforms, most = drop.shares(steps), drop.uniforms([3], [len(ids)]), drop.most
    plan = plan_row(reply, doc_start, steps, rule, shares, uniforms, most)
    features = capture_features(target, ids, doc_start, head.capture, plan.needed)
    weights = [torch.full((n,), 0.9**k) for k, n in enumerate(plan.counts)]
    rows = target.head_weight if head.token_map is None else target.head_weight[head.token_map]
    return TTTBatch(ids, plan, weights, features, target.embed_tokens.weight, rows)


class Differentiable(PublishedDFlash):
    """The published forward over a head's own parameters, in fp64."""

    def __init__(self, folder, head, target) -> None:
        super().__init__(folder, target.embed_tokens.weight, target.head_weight)
        parts = DFLASH.parts(head, ())
        for name, parameter in head.named_parameters():
            pieces = parameter.double().split([part.shape[0] for part in parts[name]])
            self.w |= {part.name: piece for part, piece in zip(parts[name], pieces, strict=True)}


@pytest.mark.parametrize(
    ("drop", "rule", "changes"),
    [
        (None, "serving", {}),
        (DROP, "serving", SLIDING),
        (DROP, "published", {"predicts_next": True}),
        (DROP, "serving", {"draft_vocab_size": 101, "num_layers": 1}),
    ],
)
def test_loss_and_every_gradient_equal_the_published_forward(tmp_path, target, drop, rule, changes):
    head = tiny_dflash(target, **changes)
    batch = batch_of(target, head, drop=drop, rule=rule)
    plan, ids = batch.plan, batch.ids
    files = DFLASH.write(head, torch.float32)
    write_draft(tmp_path / "head", files.tensors, files.config, metadata={})
    oracle = copy.deepcopy(head)
    result = ttt_forward_backward(head, batch)

    rows = plan.computed[0]
    logits = Differentiable(tmp_path / "head", oracle, target)(
        batch.features.aux, ids, plan.doc_start, rows + 1
    )
    full = (batch.features.hidden @ target.head_weight.t()).double()
    total = torch.zeros((), dtype=torch.float64)
    words = slice(None) if head.token_map is None else head.token_map
    for step, mine in enumerate(plan.rows):
        assert len(mine) > 3
        for i in mine.tolist():
            teacher = full[i + 1 + step]  # the target's prediction of the token that the row drafts
            if head.t2d[teacher.argmax()]:
                row = step + head.config.first_drafted
                log_q = logits[rows.tolist().index(i), row].log_softmax(-1)
                total = total - 0.9**step * (teacher[words].softmax(-1) * log_q).sum()
    total.backward()
    assert float(result.loss) == pytest.approx(float(total.detach()), rel=1e-5)
    for (name, ours), theirs in zip(head.named_parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=1e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_recomputed_layers_are_the_same(target):
    head = tiny_dflash(target)
    grads = []
    for recompute in (False, True):
        head.zero_grad()
        ttt_forward(head, batch_of(target, head), recompute=recompute).loss.backward()
        grads.append([parameter.grad.clone() for parameter in head.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("changes", [{}, SLIDING])
def test_a_block_depends_on_nothing_behind_its_anchor(target, changes):
    """Tokens behind an anchor, and states from it on, change nothing in its block."""
    head = tiny_dflash(target, **changes)
    batch = batch_of(target, head, drop=None)
    changed, row = batch.ids.clone(), int(batch.plan.rows[-1][4])
    changed[row + 2 :] = (changed[row + 2 :] + 11) % 131
    other = batch_of(target, head, drop=None, ids=changed)
    noisy = other.features.aux.clone()
    noisy[row + 1 :] += 1.0  # the anchor's own state, which serving does not know
    other = TTTBatch(
        changed, other.plan, other.row_weights, other.features._replace(aux=noisy), *batch_tail(other)
    )
    with torch.no_grad():
        outs = [run_steps(head, each) for each in (batch, other)]
    for rows, ours, theirs in zip(batch.plan.rows, *outs, strict=True):
        upto = rows <= row
        assert upto.any() and torch.equal(ours[upto], theirs[upto])
        assert not torch.equal(ours[rows > row + 1], theirs[rows > row + 1])


def batch_tail(batch: TTTBatch) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.embed_weight, batch.target_head


def test_anchors_are_drawn_for_every_document():
    rows = torch.tensor([2, 3, 4, 5, 11, 12, 13, 21])
    doc_start = torch.tensor([0] * 10 + [10] * 10 + [20] * 10)
    uniforms = torch.full((30,), 0.9)
    uniforms[[3, 5, 12, 13]] = torch.tensor([0.2, 0.1, 0.3, 0.4])
    assert anchors_of(rows, doc_start, uniforms, 2).tolist() == [3, 5, 12, 13, 21]
    assert anchors_of(rows, doc_start, uniforms, 1).tolist() == [5, 12, 21]
    assert anchors_of(rows, doc_start, uniforms, 9).tolist() == rows.tolist()


def test_anchors_are_others_in_every_step_and_the_same_at_all_depths(target):
    head = tiny_dflash(target)
    plans = [batch_of(target, head, drop=DROP._replace(step=step)).plan for step in (0, 1)]
    assert not torch.equal(plans[0].rows[0], plans[1].rows[0])
    for plan in plans:
        counts = torch.unique(plan.doc_start[plan.rows[0]], return_counts=True)[1]
        assert counts.max() == DROP.most
        for rows in plan.rows[1:]:
            assert torch.isin(rows, plan.rows[0]).all()


@pytest.mark.parametrize("dpace", [None, 0.5])
def test_every_row_of_a_block_learns(target, dpace):
    head = tiny_dflash(target, num_layers=2).requires_grad_(True)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    found = []
    for step in range(110):
        optimizer.zero_grad()
        batch = batch_of(target, head, drop=DROP._replace(step=step, most=16))
        out = ttt_forward_backward(head, batch, Objective(dpace_alpha=dpace))
        found.append(out.matches / out.learned)
        optimizer.step()
    first, last = torch.stack(found[:3]).mean(0), torch.stack(found[-3:]).mean(0)
    assert (last > first + 0.3).all(), (first, last)
