"""Training of heads that draft all steps in one pass, P-EAGLE, DFlash and DSpark: loss and gradients against
the published forwards over dense masks, rows that are dropped, anchors, leaks."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from published_dflash import PublishedDFlash, PublishedDSpark
from published_p_eagle import PublishedPEagle
from tiny import packed_row, tiny_dflash, tiny_dspark, tiny_p_eagle, tiny_target
from torch.nn.functional import binary_cross_entropy_with_logits

from eagle_kit.config.training import RowSampling
from eagle_kit.drafts.files.draft import write_draft
from eagle_kit.drafts.registry import kind_of
from eagle_kit.objective.loss import Objective, TTTBatch
from eagle_kit.objective.row_drop import RowDrop, anchors_of
from eagle_kit.objective.row_plan import make_row_plan
from eagle_kit.objective.target_features import capture_features
from eagle_kit.objective.ttt import run_steps, ttt_forward, ttt_forward_backward

STEPS = 5
COD = RowDrop(RowSampling(0.7, 0.3), seed=1, step=2)
ANCHORS = RowDrop(RowSampling(most=4), seed=1, step=2)
SLIDING = {"sliding_window": 7, "sliding_layers": (0, 2)}
DSPARK = Objective({"ce": 0.1, "tv": 1.8}, confidence_weight=0.7)


class Case(NamedTuple):
    """A head of one kind, how its rows are dropped, and what it minimises."""

    make: Callable[..., Any]
    drop: RowDrop | None = None
    rule: str = "serving"
    objective: Objective = Objective()
    changes: Mapping[str, Any] = MappingProxyType({})


P_EAGLE = {"draft_vocab_size": 101}
CASES = {
    "p-eagle": Case(tiny_p_eagle, changes=P_EAGLE),
    "p-eagle, dropped": Case(tiny_p_eagle, COD, changes=P_EAGLE),
    "p-eagle, published rows": Case(tiny_p_eagle, COD, "published", changes=P_EAGLE),
    "p-eagle, sliding, Qwen3's layers": Case(
        tiny_p_eagle, COD, changes=P_EAGLE | SLIDING | {"qk_norm": True, "norm_before_fc": True}
    ),
    "dflash": Case(tiny_dflash),
    "dflash, sliding": Case(tiny_dflash, ANCHORS, changes=SLIDING),
    "dflash, sliding both ways": Case(tiny_dflash, ANCHORS, changes=SLIDING | {"sliding_both": True}),
    "dflash, next token, a large epsilon": Case(
        tiny_dflash, ANCHORS, "published", changes={"predicts_next": True, "rms_norm_eps": 0.1}
    ),
    "dflash, own output": Case(tiny_dflash, ANCHORS, changes={"draft_vocab_size": 101, "num_layers": 1}),
    "dflash, text": Case(tiny_dflash, ANCHORS, objective=Objective({}, text_weight=1.0)),
    "dflash, text, own output": Case(
        tiny_dflash,
        ANCHORS._replace(sampling=RowSampling(most=9)),
        objective=Objective({}, text_weight=0.7),
        changes={"draft_vocab_size": 101, "num_layers": 1},
    ),
    "dspark, text": Case(
        tiny_dspark,
        ANCHORS,
        objective=Objective({"tv": 1.8}, text_weight=0.1, confidence_weight=0.7),
        changes={"num_layers": 1},
    ),
    "dspark": Case(tiny_dspark, ANCHORS, "serving", DSPARK, {"block_size": 5}),
    "dspark, gated": Case(
        tiny_dspark, None, "serving", DSPARK, {"markov_form": "gated", "confidence_reads_token": False}
    ),
    "dspark, rnn": Case(tiny_dspark, ANCHORS, "published", DSPARK, {"markov_form": "rnn", "num_layers": 1}),
    "dspark, own row": Case(
        tiny_dspark, ANCHORS, "serving", DSPARK, {"predicts_next": False, "num_layers": 1}
    ),
    "dspark, ce": Case(tiny_dspark, ANCHORS, "serving", Objective(confidence_weight=1.0), {"num_layers": 1}),
}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def batch_of(target, head, drop: RowDrop | None = None, *, ids=None, rule: str = "serving"):
    own, response, doc_start = packed_row()
    ids, steps = own if ids is None else ids, head.most_steps or STEPS
    shares = uniforms = most = None
    if drop is not None:
        shares, most = drop.sampling.shares(steps), drop.sampling.most
        uniforms = drop.uniforms([3], [len(ids)])
    plan = make_row_plan(response, doc_start, steps, rule, shares, uniforms, most)
    features = capture_features(target, ids, doc_start, head.capture, plan.is_teacher)
    weights = [torch.full((n,), 0.9**k) for k, n in enumerate(plan.counts)]
    rows = target.head_weight if head.token_map is None else target.head_weight[head.token_map]
    return TTTBatch(ids, plan, weights, features, target.embed_tokens.weight, rows)


def with_parameters(published, head):
    """A published forward over a head's own parameters, in fp64, to be differentiated."""
    parts = kind_of(head.config).parts(head, ())
    for name, parameter in head.named_parameters():
        pieces = parameter.double().split([part.shape[0] for part in parts[name]])
        published.w |= {part.name: piece for part, piece in zip(parts[name], pieces, strict=True)}
    return published


def published_rows(folder, head, target, batch):
    """Logits ``[Vd]`` of a row and step, and that of its acceptance or None."""
    plan, ids, aux = batch.plan, batch.ids, batch.features.aux_hidden_states
    if not hasattr(head.config, "block_size"):
        rows = [torch.arange(len(ids)), *plan.computed[1:]]
        published = with_parameters(PublishedPEagle(folder, target.embed_tokens.weight), head)
        logits = published(aux, ids.roll(-1), plan.doc_start, rows).split([len(r) for r in rows])
        return lambda i, step: (logits[step][rows[step].tolist().index(i)], None)
    anchored, first = plan.computed[0], head.config.first_drafted
    places, at = anchored.tolist(), (folder, target.embed_tokens.weight, target.head_weight)
    if not hasattr(head.config, "markov_rank"):
        logits = with_parameters(PublishedDFlash(*at), head)(aux, ids, plan.doc_start, anchored + 1)
        return lambda i, step: (logits[places.index(i), step + first], None)
    published = with_parameters(PublishedDSpark(*at), head)
    logits = published(aux, ids, plan.doc_start, anchored + 1)
    behind = anchored[:, None] + 1 + torch.arange(head.most_steps)
    logits, sure = published.corrected(logits, ids[behind.clamp(max=len(ids) - 1)], first)
    return lambda i, step: (logits[places.index(i), step], sure[places.index(i), step])


@pytest.mark.parametrize("name", CASES)
def test_loss_and_every_gradient_equal_the_published_forward(tmp_path, target, name):
    make, drop, rule, objective, changes = CASES[name]
    head = make(target, **changes)
    batch = batch_of(target, head, drop, rule=rule)
    plan = batch.plan
    files = kind_of(head.config).write(head, torch.float32)
    write_draft(tmp_path / "head", files.tensors, files.config, metadata={})
    oracle = copy.deepcopy(head)
    result = ttt_forward_backward(head, batch, objective)

    row_of = published_rows(tmp_path / "head", oracle, target, batch)
    full = (batch.features.hidden @ target.head_weight.t()).double()
    total = torch.zeros((), dtype=torch.float64)
    words = slice(None) if head.token_map is None else head.token_map
    mix = {"ce": 1.0} if objective.loss == "ce" else objective.loss
    for step, mine in enumerate(plan.rows):
        assert len(mine) > 3
        for i in mine.tolist():
            teacher = full[i + 1 + step]  # the target's prediction of the token that the row drafts
            said = batch.ids[i + 2 + step]
            if not head.t2d[teacher.argmax() if objective.needs_target else said]:
                continue
            logits, sure = row_of(i, step)
            p, q = teacher[words].softmax(-1), logits.softmax(-1)
            distance = (p - q).abs().sum() / 2
            log_q = logits.log_softmax(-1)
            loss = mix.get("tv", 0.0) * distance - mix.get("ce", 0.0) * (p * log_q).sum()
            if head.t2d[said]:
                word = said if head.token_map is None else head.token_map.tolist().index(said)
                loss = loss - objective.text_weight * log_q[word]
            if sure is not None:
                rate = (1 - distance).detach()
                loss = loss + objective.confidence_weight * binary_cross_entropy_with_logits(sure, rate)
            total = total + 0.9**step * loss
    total.backward()
    assert float(result.loss) == pytest.approx(float(total.detach()), rel=1e-5)
    for (key, ours), theirs in zip(head.named_parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=1e-3, atol=2e-4, msg=lambda m, n=key: f"{n}: {m}"
        )


HEADS = {
    "p-eagle": (tiny_p_eagle, {}),
    "dflash": (tiny_dflash, {}),
    "dflash, sliding": (tiny_dflash, SLIDING),
    "dspark": (tiny_dspark, {"markov_form": "gated"}),
}


@pytest.mark.parametrize("name", HEADS)
def test_recomputed_layers_are_the_same(target, name):
    make, changes = HEADS[name]
    head, grads = make(target, **changes), []
    drop = ANCHORS if hasattr(head.config, "block_size") else COD
    for recompute in (False, True):
        head.zero_grad()
        ttt_forward(head, batch_of(target, head, drop), recompute=recompute).loss.backward()
        grads.append([p.grad.clone() for p in head.parameters() if p.grad is not None])
    assert len(grads[0]) > 10 and all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("name", HEADS)
def test_a_draft_depends_on_nothing_behind_it(target, name):
    """Tokens behind a row's own next token, and states behind the row, change nothing at any depth; only a
    correction reads the text's tokens, those before the one that it drafts."""
    make, changes = HEADS[name]
    head = make(target, **changes)
    batch = batch_of(target, head)
    changed, row = batch.ids.clone(), int(batch.plan.rows[-1][4])
    changed[row + 2 :] = (changed[row + 2 :] + 11) % 131
    other = batch_of(target, head, ids=changed)
    assert not torch.equal(
        other.features.aux_hidden_states[row + 2], batch.features.aux_hidden_states[row + 2]
    )
    if hasattr(head.config, "block_size"):  # the anchor's own state, which serving does not know
        noisy = other.features.aux_hidden_states.clone()
        noisy[row + 1 :] += 1.0
        shared = other.embed_weight, other.target_rows
        features = other.features._replace(aux_hidden_states=noisy)
        other = TTTBatch(changed, other.plan, other.row_weights, features, *shared)
    size = head.config.hidden_size
    with torch.no_grad():
        outs = [run_steps(head, each) for each in (batch, other)]
    for step, (rows, ours, theirs) in enumerate(zip(batch.plan.rows, *outs, strict=True)):
        upto = rows <= row
        assert upto.any() and torch.equal(ours[upto, :size], theirs[upto, :size])
        assert not torch.equal(ours[rows > row + 1], theirs[rows > row + 1])
        known = rows + step <= row
        assert torch.equal(ours[known], theirs[known])


def test_rows_are_dropped_at_the_published_shares_and_nested():
    response, start = torch.zeros(20000, dtype=torch.int64), torch.zeros(20000, dtype=torch.int64)
    drop = RowDrop(RowSampling(0.8, 0.5), seed=0, step=0)
    plan = make_row_plan(response, start, 5, "serving", drop.sampling.shares(5), drop.uniforms([0], [20000]))
    for depth, share in enumerate((1.0, 0.8, 0.64, 0.512, 0.5)):
        assert plan.counts[depth] / 20000 == pytest.approx(share, abs=0.01)
    for before, after in zip(plan.rows, plan.rows[1:], strict=False):
        assert torch.isin(after, before).all()


def test_dropped_rows_are_others_in_every_step_and_the_same_in_any_micro_batch():
    alone, beside = COD.uniforms([5], [9]), COD.uniforms([2, 5], [4, 9])
    assert torch.equal(beside[4:], alone)
    assert not torch.equal(COD._replace(step=3).uniforms([5], [9]), alone)


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
    plans = [batch_of(target, head, ANCHORS._replace(step=step)).plan for step in (0, 1)]
    assert not torch.equal(plans[0].rows[0], plans[1].rows[0])
    for plan in plans:
        counts = torch.unique(plan.doc_start[plan.rows[0]], return_counts=True)[1]
        assert counts.max() == ANCHORS.sampling.most
        for rows in plan.rows[1:]:
            assert torch.isin(rows, plan.rows[0]).all()


LEARNING = {
    "p-eagle": (tiny_p_eagle, 60, COD, Objective(), {"draft_vocab_size": 131}),
    "dflash": (tiny_dflash, 110, ANCHORS._replace(sampling=RowSampling(most=16)), Objective(), {}),
    "dflash, D-PACE": (
        tiny_dflash,
        110,
        ANCHORS._replace(sampling=RowSampling(most=16)),
        Objective(dpace_alpha=0.5),
        {},
    ),
    "dspark": (tiny_dspark, 110, ANCHORS._replace(sampling=RowSampling(most=16)), DSPARK, {"block_size": 5}),
}


def learn(target, name: str):
    """A head after so many steps on one packed sequence, and the share of its matches in the first and
    last."""
    make, steps, drop, objective, changes = LEARNING[name]
    head = make(target, num_layers=2, **changes).requires_grad_(True)
    optimizer, found = torch.optim.AdamW(head.parameters(), lr=3e-3), []
    for step in range(steps):
        optimizer.zero_grad()
        out = ttt_forward_backward(head, batch_of(target, head, drop._replace(step=step)), objective)
        found.append(out.matches / out.learned)
        optimizer.step()
    return head, torch.stack(found[:3]).mean(0), torch.stack(found[-3:]).mean(0)


@pytest.mark.parametrize(
    "name", ["dflash", pytest.param("dflash, D-PACE", marks=pytest.mark.nightly), "dspark"]
)
def test_every_row_of_a_block_learns(target, name):
    _, first, last = learn(target, name)
    assert (last > first + 0.3).all(), (first, last)


@pytest.fixture(scope="module")
def learned(target):
    return learn(target, "p-eagle")


def test_every_depth_learns(learned):
    _, first, last = learned
    assert (last > first + 0.3).all(), (first, last)


def test_matches_of_dropped_rows_are_estimated(target, learned):
    """Over many draws the leading matches are those without a drop."""
    head, *_ = learned
    with torch.no_grad():
        exact = ttt_forward(head, batch_of(target, head)).leading
        drops = (RowDrop(RowSampling(0.5, 0.3), 0, step) for step in range(80))
        outputs = [ttt_forward(head, batch_of(target, head, drop)) for drop in drops]
    for out in outputs:  # of all groups together they are the same estimate
        torch.testing.assert_close(out.leading_of.sum(), out.leading.sum())
    mean = torch.stack([out.leading for out in outputs]).mean(0)
    assert exact.min() >= 4 and mean[0] == exact[0]
    torch.testing.assert_close(mean, exact, rtol=0.3, atol=0)


def test_matches_of_each_group_are_estimated_where_rows_are_dropped():
    """Groups divide the rows, so that their estimates add up to that of all."""
    target = tiny_target(vocab_size=3)  # of which a random head guesses many
    head = tiny_p_eagle(target, draft_vocab_size=3, mask_token_id=2)
    ids, *_ = packed_row()
    batch = batch_of(target, head, RowDrop(RowSampling(0.8, 0.5), seed=0, step=0), ids=ids % 3)
    thirds = torch.arange(len(batch.ids)) % 3
    with torch.no_grad():
        whole = ttt_forward(head, batch)
        groups = ttt_forward(head, replace(batch, group=thirds, num_groups=3))
    assert whole.leading.sum() > whole.leading[0], "matches behind the first step are needed"
    torch.testing.assert_close(whole.leading_of, whole.leading.sum(0, keepdim=True))
    torch.testing.assert_close(groups.leading_of.sum(), whole.leading.sum())
    assert (groups.leading_of > 0).sum() > 1
