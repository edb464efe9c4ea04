"""Training-time test against a dense oracle: every loss and every gradient."""

from itertools import pairwise

import pytest
import torch
from tiny import packed_row, tiny_head, tiny_target

from eagle_kit.config.training import RowSampling
from eagle_kit.objective.loss import Objective, TTTBatch
from eagle_kit.objective.row_drop import RowDrop
from eagle_kit.objective.row_plan import make_row_plan
from eagle_kit.objective.target_features import TargetFeatures, capture_features
from eagle_kit.objective.ttt import ttt_forward_backward
from eagle_kit.ops.rope.reference import rotate

STEPS = 5


ETA = 2.0


def published_mask(response, doc_start, step):
    """The loss mask of EAGLE-3's code for each conversation by itself: it begins one token before a response
    and ends two before the response's end, and is shifted left by the step, zeros coming in."""
    parts = []
    for start in doc_start.unique():
        mine = response[doc_start == start]
        mask = torch.zeros(len(mine) + step)
        for number in mine[mine >= 0].unique():
            places = torch.nonzero(mine == number)[:, 0]
            mask[max(int(places[0]) - 1, 0) : int(places[-1]) - 1] = 1
        parts.append(mask[step : step + len(mine)])
    return torch.cat(parts)


def row_loss(loss, distribution, words, log_q, text):
    """A loss of the draft's ``log_q [Vd]`` over ``words [Vd]`` against the target's ``distribution [V]``, or
    a token of the text."""
    if loss == "hard-ce":
        return -log_q[words.tolist().index(text)]
    p, q = distribution[words] / distribution[words].sum(), log_q.exp()
    accepted, kl = torch.minimum(distribution[words], q).sum(), (p * (p.log() - log_q)).sum()
    share = torch.exp(-ETA * accepted.detach())
    return {
        "ce": -(p * log_q).sum(),
        "kl": kl,
        "reverse-kl": (q * (log_q - p.log())).sum(),
        "tv": 1 - accepted,
        "lk-alpha": -accepted.log(),
        "lk-hybrid": share * kl + (1 - share) * (1 - accepted),
    }[loss]


def dense_oracle(
    head, target, ids, response, doc_start, features, step_weights, loss="ce", rows="serving", kept=None
):
    """EAGLE-3's published training step: all rows at every step, T x (T + k) masks, shifted inputs; of the
    losses those of rows in ``kept [K, T]``."""
    length = ids.shape[0]
    position = torch.arange(length) - doc_start
    same = doc_start[:, None] == doc_start[None]
    causal = same & (torch.arange(length)[None] <= torch.arange(length)[:, None])
    hidden, keys, values, losses = head.fuse(features.aux_hidden_states), [], [], []
    sa, layer = head.midlayer.self_attn, head.midlayer
    group = sa.num_heads // sa.num_kv_heads
    full = (features.hidden @ target.head_weight.t()).double()
    for k in range(len(step_weights)):
        token = ids[(torch.arange(length) + 1 + k).clamp(max=length - 1)]
        normed = layer.hidden_norm(hidden)
        x = torch.cat((layer.input_layernorm(target.embed(token)), normed), -1)
        qkv = (x @ sa.qkv_proj.weight.t()).view(length, -1, sa.head_dim)
        q, key, value = qkv.split((sa.num_heads, sa.num_kv_heads, sa.num_kv_heads), 1)
        table = head.rope.at(position + k).table
        keys.append(rotate(key, table).repeat_interleave(group, 1))
        values.append(value.repeat_interleave(group, 1))
        q = rotate(q, table)
        scores = torch.einsum("ihd,jhd->hij", q, keys[0]) / sa.head_dim**0.5
        seen = causal
        if window := head.config.sliding_window:
            seen = causal & (torch.arange(length)[:, None] + k - torch.arange(length) < window)
        scores = scores.masked_fill(~seen, float("-inf"))
        own = [((q * later).sum(-1) / sa.head_dim**0.5).t()[..., None] for later in keys[1:]]
        p = torch.cat([scores, *own], -1).softmax(-1)
        out = torch.einsum("hij,jhd->ihd", p[..., :length], values[0])
        for j, later in enumerate(values[1:]):
            out = out + p[..., length + j].t()[..., None] * later
        residual = normed if head.config.norm_before_residual else hidden
        h = residual + out.reshape(length, -1) @ sa.o_proj.weight.t()
        hidden = h + layer.mlp(layer.post_attention_layernorm(h))
        if head.config.norm_output:
            hidden = head.norm(hidden)
        log_q = (head.norm_for_lm_head(hidden) @ head.lm_head.weight.t()).double().log_softmax(-1)
        total, count, hits = log_q.new_zeros(()), 0, 0
        theirs = published_mask(response, doc_start, k)
        for i in range(length - 2 - k):
            ours = response[i + 1] >= 0 and response[i + 1] == response[i + 2 + k]
            if (ours if rows == "serving" else theirs[i]) and (kept is None or kept[k, i]):
                count += 1
                teacher = full[i + 1 + k]
                text = int(ids[i + 2 + k])
                if head.t2d[text if loss == "hard-ce" else teacher.argmax()]:
                    total = total + row_loss(loss, teacher.softmax(-1), head.token_map, log_q[i], text)
                    hits += int(head.token_map[log_q[i].argmax()] == teacher.argmax())
        losses.append((total, count, hits))
    return sum(w * t for w, (t, _, _) in zip(step_weights, losses, strict=True)), losses


@pytest.mark.parametrize(
    ("flags", "loss", "rows", "ratio"),
    [
        ({}, "ce", "serving", None),
        ({"fc_norm": True, "norm_output": True}, "ce", "serving", None),
        ({"norm_before_residual": True}, "ce", "serving", None),
        ({"sliding_window": STEPS + 3}, "ce", "serving", None),
        ({}, "ce", "published", None),
        ({}, "kl", "serving", None),
        ({}, "reverse-kl", "serving", None),
        ({}, "tv", "published", None),
        ({}, "lk-alpha", "serving", None),
        ({}, "lk-hybrid", "serving", None),
        ({}, "hard-ce", "serving", None),
        ({"norm_output": True}, "ce", "serving", 0.8),
        ({}, "ce", "published", 0.8),
    ],
)
def test_loss_and_every_gradient_equal_the_dense_oracle(flags, loss, rows, ratio):
    """With a ``ratio`` rows are left out of later steps, and the losses that are left are what they were."""
    target = tiny_target()
    head, oracle = tiny_head(target, 101, **flags), tiny_head(target, 101, **flags)
    ids, response, doc_start = packed_row()
    drop, kept = None if ratio is None else RowDrop(RowSampling(ratio, 0.2), seed=1, step=2), None
    drawn = (None, None)
    if drop is not None:
        drawn = drop.sampling.shares(STEPS), drop.uniforms([3], [len(ids)])
        kept = torch.stack([drawn[1] < ratio**k for k in range(STEPS)])
    plan = make_row_plan(response, doc_start, STEPS, rows, *drawn)
    features = capture_features(target, ids, doc_start, head.config.aux_layer_ids, plan.is_teacher)
    weights = [0.8**k for k in range(STEPS)]
    rows_weights = [torch.full((n,), w) for n, w in zip(plan.counts, weights, strict=True)]
    result = ttt_forward_backward(
        head,
        TTTBatch(
            ids, plan, rows_weights, features, target.embed_tokens.weight, target.head_weight[head.token_map]
        ),
        Objective.of(loss, ETA, head, target.head_weight),
    )
    total, per_step = dense_oracle(
        oracle, target, ids, response, doc_start, features, weights, loss, rows, kept
    )
    total.backward()
    assert plan.counts == [count for _, count, _ in per_step] and min(plan.counts) > 5
    assert drop is None or plan.counts[-1] < 0.6 * make_row_plan(response, doc_start, STEPS, rows).counts[-1]
    assert result.matches.tolist() == [hits for _, _, hits in per_step]
    torch.testing.assert_close(
        result.losses, torch.stack([t.detach() for t, _, _ in per_step]), rtol=1e-5, atol=1e-4
    )
    assert float(result.loss) == pytest.approx(float(total.detach()), rel=1e-5)
    for (name, ours), theirs in zip(head.named_parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=1e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_published_rows_are_ours_and_those_of_rounds_that_begin_in_the_prompt():
    _, response, doc_start = packed_row()
    ours, theirs = (make_row_plan(response, doc_start, STEPS, rule) for rule in ("serving", "published"))
    assert torch.equal(ours.is_teacher, theirs.is_teacher)  # so captured states serve both
    for k, (mine, published) in enumerate(zip(ours.rows, theirs.rows, strict=True)):
        extra = published[~torch.isin(published, mine)]
        assert torch.isin(mine, published).all() and (response[extra + 1] < 0).all()
        before = (5, 2, 13, 4)  # rows of its document in front of each response's first round
        assert extra.numel() == sum(min(k, room) for room in before)
        assert (doc_start[extra] == doc_start[extra + 1 + k]).all()
    for wider, narrower in pairwise(theirs.computed):
        assert torch.isin(narrower, wider).all()


def test_captured_states_are_those_of_each_document_alone():
    target = tiny_target()
    ids, _, doc_start = packed_row()
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    packed = capture_features(target, ids, doc_start, (1, 2, 4), everywhere)
    for start, stop in ((0, 17), (17, 44), (44, 61)):
        alone = capture_features(
            target,
            ids[start:stop],
            torch.zeros(stop - start, dtype=torch.int64),
            (1, 2, 4),
            everywhere[start:stop],
        )
        torch.testing.assert_close(
            packed.aux_hidden_states[start:stop], alone.aux_hidden_states, rtol=1e-4, atol=1e-5
        )
        assert torch.equal(packed.argmax[start:stop], alone.argmax)
    assert torch.equal(packed.argmax, (packed.hidden @ target.head_weight.t()).argmax(-1))


def test_a_row_without_a_response_changes_nothing():
    target = tiny_target()
    head = tiny_head(target)
    ids, response, doc_start = packed_row()
    plan = make_row_plan(torch.full_like(response, -1), doc_start, STEPS)
    features = TargetFeatures(torch.zeros(61, 144), torch.zeros(61, 48), torch.full((61,), -1))
    batch = TTTBatch(
        ids,
        plan,
        [torch.zeros(0)] * 5,
        features,
        target.embed_tokens.weight,
        target.head_weight[head.token_map],
    )
    result = ttt_forward_backward(head, batch)
    assert result.loss == 0.0 and not result.sums.any() and result.sums.shape == (4, 5)
    assert all(parameter.grad is None for parameter in head.parameters())
