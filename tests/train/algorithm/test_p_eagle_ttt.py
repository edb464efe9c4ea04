"""Training of P-EAGLE: loss and gradients against the published forward over one dense mask, the drop of
deeper rows, and leaks."""

import copy

import pytest
import torch
from published_p_eagle import PublishedPEagle
from tiny import packed_row, tiny_p_eagle, tiny_target

from eagle_kit.checkpoints.draft import write_draft
from eagle_kit.kinds.p_eagle import P_EAGLE
from eagle_kit.train.algorithm.loss import TTTBatch
from eagle_kit.train.algorithm.row_drop import RowDrop
from eagle_kit.train.algorithm.row_plan import plan_row
from eagle_kit.train.algorithm.target_features import capture_features
from eagle_kit.train.algorithm.ttt import run_steps, ttt_forward, ttt_forward_backward

STEPS, DROP = 5, RowDrop(0.7, 0.3, seed=1, step=2)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def batch_of(target, head, *, drop: RowDrop | None = DROP, ids=None, rule: str = "serving"):
    own, reply, doc_start = packed_row()
    ids = own if ids is None else ids
    shares = uniforms = None
    if drop is not None:
        shares, uniforms = drop.shares(STEPS), drop.uniforms([3], [len(ids)])
    plan = plan_row(reply, doc_start, STEPS, rule, shares, uniforms)
    features = capture_features(target, ids, doc_start, head.capture, plan.needed)
    weights = [torch.full((n,), 0.9**k) for k, n in enumerate(plan.counts)]
    rows = target.head_weight[head.target_ids]
    return TTTBatch(ids, plan, weights, features, target.embed_tokens.weight, rows)


class Differentiable(PublishedPEagle):
    """The published forward over a head's own parameters, in fp64."""

    def __init__(self, folder, head, embedding) -> None:
        super().__init__(folder, embedding)
        parts = P_EAGLE.parts(head, ())
        for name, parameter in head.named_parameters():
            pieces = parameter.double().split([part.shape[0] for part in parts[name]])
            self.w |= {part.name: piece for part, piece in zip(parts[name], pieces, strict=True)}


@pytest.mark.parametrize(("drop", "rule"), [(None, "serving"), (DROP, "serving"), (DROP, "published")])
def test_loss_and_every_gradient_equal_the_published_forward(tmp_path, target, drop, rule):
    head = tiny_p_eagle(target, 101)
    batch = batch_of(target, head, drop=drop, rule=rule)
    plan, ids = batch.plan, batch.ids
    files = P_EAGLE.write(head, torch.float32)
    write_draft(tmp_path / "head", files.tensors, files.config, metadata={})
    oracle = copy.deepcopy(head)
    result = ttt_forward_backward(head, batch)

    rows = [torch.arange(len(ids)), *plan.computed[1:]]
    published = Differentiable(tmp_path / "head", oracle, target.embed_tokens.weight)
    logits = published(batch.features.aux, ids.roll(-1), plan.doc_start, rows).split([len(r) for r in rows])
    full = (batch.features.hidden @ target.head_weight.t()).double()
    total = torch.zeros((), dtype=torch.float64)
    for step, mine in enumerate(plan.rows):
        assert len(mine) > 3
        for i in mine.tolist():
            teacher = full[i + 1 + step]
            if head.t2d[teacher.argmax()]:
                log_q = logits[step][rows[step].tolist().index(i)].log_softmax(-1)
                total = total - 0.9**step * (teacher[head.target_ids].softmax(-1) * log_q).sum()
    total.backward()
    assert float(result.loss) == pytest.approx(float(total.detach()), rel=1e-5)
    for (name, ours), theirs in zip(head.named_parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=1e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_recomputed_steps_are_the_same(target):
    head = tiny_p_eagle(target)
    grads = []
    for recompute in (False, True):
        head.zero_grad()
        ttt_forward(head, batch_of(target, head), recompute=recompute).loss.backward()
        grads.append([parameter.grad.clone() for parameter in head.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_row_depends_on_nothing_behind_it(target):
    """Tokens behind a row's own next token, and states behind the row, change nothing at any depth."""
    head = tiny_p_eagle(target)
    batch = batch_of(target, head, drop=None)
    changed, row = batch.ids.clone(), int(batch.plan.rows[-1][4])
    changed[row + 2 :] = (changed[row + 2 :] + 11) % 131
    other = batch_of(target, head, drop=None, ids=changed)
    assert not torch.equal(other.features.aux[row + 2], batch.features.aux[row + 2])
    with torch.no_grad():
        outs = [run_steps(head, each) for each in (batch, other)]
    for rows, ours, theirs in zip(batch.plan.rows, *outs, strict=True):
        upto = rows <= row
        assert upto.any() and torch.equal(ours[upto], theirs[upto])
        assert not torch.equal(ours[rows > row + 1], theirs[rows > row + 1])


def test_rows_are_dropped_at_the_published_shares_and_nested():
    reply, start = torch.zeros(20000, dtype=torch.int64), torch.zeros(20000, dtype=torch.int64)
    drop = RowDrop(0.8, 0.5, seed=0, step=0)
    plan = plan_row(reply, start, 5, "serving", drop.shares(5), drop.uniforms([0], [20000]))
    for depth, share in enumerate((1.0, 0.8, 0.64, 0.512, 0.5)):
        assert plan.counts[depth] / 20000 == pytest.approx(share, abs=0.01)
    for before, after in zip(plan.rows, plan.rows[1:], strict=False):
        assert torch.isin(after, before).all()


def test_dropped_rows_are_others_in_every_step_and_the_same_in_any_micro_batch():
    alone, beside = DROP.uniforms([5], [9]), DROP.uniforms([2, 5], [4, 9])
    assert torch.equal(beside[4:], alone)
    assert not torch.equal(DROP._replace(step=3).uniforms([5], [9]), alone)


@pytest.fixture(scope="module")
def learned(target):
    """A head after 60 steps on one packed row, and the share of its matches in the first and last steps."""
    head = tiny_p_eagle(target, 131, num_layers=2).requires_grad_(True)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    found = []
    for step in range(60):
        optimizer.zero_grad()
        out = ttt_forward_backward(head, batch_of(target, head, drop=DROP._replace(step=step)))
        found.append(out.matches / out.learned)
        optimizer.step()
    return head, torch.stack(found[:3]).mean(0), torch.stack(found[-3:]).mean(0)


def test_every_depth_learns(learned):
    _, first, last = learned
    assert (last > first + 0.3).all(), (first, last)


def test_matches_of_dropped_rows_are_estimated(target, learned):
    """Over many draws the leading matches are those without a drop."""
    head, *_ = learned
    with torch.no_grad():
        exact = ttt_forward(head, batch_of(target, head, drop=None)).leading
        drops = (RowDrop(0.5, 0.3, 0, step) for step in range(80))
        draws = [ttt_forward(head, batch_of(target, head, drop=drop)).leading for drop in drops]
    mean = torch.stack(draws).mean(0)
    assert exact.min() >= 4 and mean[0] == exact[0]
    torch.testing.assert_close(mean, exact, rtol=0.3, atol=0)
