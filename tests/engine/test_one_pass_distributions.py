"""Sampled chains of heads that draft in one pass have the target's distribution: DSpark's, whose tokens are
drawn behind each other, and DFlash's and P-EAGLE's, whose depths are drawn independently."""

from collections import Counter

import numpy as np
import pytest
import torch
from pair_counts import chi_square, pair_counts
from tiny import tiny_dflash, tiny_dspark, tiny_p_eagle
from tiny_engine import PROMPTS, decode
from tiny_trained import trained_models

from eagle_kit.autotune.chances import log_odds_of
from eagle_kit.autotune.policy import ShapePolicy
from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.base import sampled_one_pass
from eagle_kit.engine.llm import LLM
from eagle_kit.objective.loss import Objective, TTTBatch
from eagle_kit.objective.row_plan import make_row_plan
from eagle_kit.objective.target_features import capture_features
from eagle_kit.objective.ttt import ttt_forward_backward

HEADS = {
    "dspark": (tiny_dspark, {"block_size": 4}),
    "dspark, rnn": (tiny_dspark, {"block_size": 4, "markov_form": "rnn", "draft_vocab_size": 9}),
    "dflash": (tiny_dflash, {"block_size": 5}),
    "p-eagle": (tiny_p_eagle, {"draft_vocab_size": 9}),
}
COUNT, STEPS = 4_000, 4


@pytest.fixture(scope="module")
def target():
    return trained_models(train_head=False)[0]


@pytest.fixture(scope="module")
def plain_counts(target):
    return pair_counts((target, None), COUNT, shape="none")


@pytest.fixture(scope="module")
def pairs(target):
    """The target with a head of each name, which has learned its sampled responses."""
    responses = decode((target, None), prompts=[[i % 11, i % 7] for i in range(16)], temperature=1.0, seed=1)
    texts = [torch.tensor([*r.prompt_ids, *r.token_ids]) for r in responses]
    ids, lengths = torch.cat(texts), torch.tensor([len(text) for text in texts])
    doc_start = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    response = torch.arange(len(texts)).repeat_interleave(lengths)
    plan = make_row_plan(response, doc_start, STEPS)
    weights = [torch.full((n,), 1 / n) for n in plan.counts]

    def learned(make, changes):
        head = make(target, std=0.1, num_layers=1, **changes).requires_grad_(True)
        features = capture_features(target, ids, doc_start, head.capture, plan.is_teacher)
        rows = target.head_weight if head.token_map is None else target.head_weight[head.token_map]
        batch = TTTBatch(ids, plan, weights, features, target.embed_tokens.weight, rows)
        optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
        for _ in range(30):
            optimizer.zero_grad()
            sure = 1.0 if head.predicts_confidence else 0.0
            ttt_forward_backward(head, batch, Objective({"ce": 0.1, "tv": 1.8}, confidence_weight=sure))
            optimizer.step()
        return target, head.eval().requires_grad_(False)

    return {name: learned(*each) for name, each in HEADS.items()}


def excess(counts, plain_counts) -> float:
    """Chi-square of the difference beyond its mean, in its standard deviations."""
    distance, freedom = chi_square(counts, plain_counts)
    return (distance - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize(
    ("name", "verifier"),
    [
        # Both verify whole chains of this head in the fast tests below, among windows that are cut or packed.
        pytest.param("dspark", "block", marks=pytest.mark.nightly),
        pytest.param("dspark", "rejection", marks=pytest.mark.nightly),
        ("dspark, rnn", "block"),
        pytest.param("dflash", "block", marks=pytest.mark.nightly),
        ("p-eagle", "block"),
    ],
)
def test_drawn_chains_have_the_distribution_of_plain_sampling(pairs, plain_counts, name, verifier):
    options = {"shape": "3,1,4", "seed": 2, "sampled_drafts": True, "verifier": verifier}
    assert excess(pair_counts(pairs[name], COUNT, **options), plain_counts) < 4


@pytest.mark.parametrize("name", ["dspark", pytest.param("dflash", marks=pytest.mark.nightly)])
def test_responses_sampled_over_trees_have_the_distribution_of_plain_sampling(pairs, plain_counts, name):
    """Best-first over the block's candidates, DSpark's corrected by the token before."""
    assert excess(pair_counts(pairs[name], COUNT, shape="3,2,6", seed=4), plain_counts) < 4


@pytest.mark.nightly
def test_a_q_without_the_correction_is_seen_by_the_same_test(pairs, plain_counts, monkeypatch):
    """As if every token had been drawn from a flatter distribution than it was."""
    exact = sampled_one_pass.sample
    monkeypatch.setattr(sampled_one_pass, "sample", lambda q, u: exact(torch.softmax(q.log() * 3, -1), u))
    options = {"shape": "3,1,4", "seed": 2, "sampled_drafts": True}
    assert excess(pair_counts(pairs["dspark"], COUNT, **options), plain_counts) > 10


class Sure(ShapePolicy):
    """Verifies as many depths as the confidences of the first request call likely."""

    def __init__(self):
        shapes = [SpecShape(steps, 1, steps + 1) for steps in (1, 2, 3)]
        super().__init__({1: shapes})
        self.used = Counter()

    def observe_confidence(self, request, confidence):
        request.depth_log_odds = () if confidence is None else log_odds_of(confidence)

    def choose(self, requests, context):
        chances = 1 / (1 + np.exp(-np.array(requests[0].depth_log_odds or [-9.0] * 3)))
        likely = chances[:3].cumprod() > np.array([0.0, 0.45, 0.23])  # of the head at hand, each at times
        steps = int(likely.cumprod().sum())
        self.used[steps] += 1
        return SpecShape(steps, 1, steps + 1)


@pytest.mark.parametrize("verifier", ["rejection", pytest.param("block", marks=pytest.mark.nightly)])
def test_windows_cut_by_confidences_keep_the_distribution(pairs, plain_counts, verifier):
    """The confidences are those of the greedy chain: of the text, and not of what is drawn behind it."""
    policy = Sure()
    options = {"shape": policy, "seed": 3, "sampled_drafts": True, "verifier": verifier, "batch": 40}
    counts = pair_counts(pairs["dspark"], COUNT, **options)
    assert len(policy.used) == 3 and min(policy.used.values()) > 20, policy.used
    assert excess(counts, plain_counts) < 4


@pytest.fixture(scope="module")
def greedy(target):
    """Responses of plain greedy decoding."""
    return [r.token_ids for r in decode((target, None), prompts=PROMPTS[:3], max_tokens=25)]


@torch.no_grad()
@pytest.mark.parametrize("name", HEADS)
def test_sampled_drafts_leave_greedy_requests_alone(greedy, pairs, name):
    params = {"prompts": PROMPTS[:3], "max_tokens": 25}
    sampled = decode(pairs[name], "4,1,5", batch=3, options={"sampled_drafts": True}, **params)
    deterministic = decode(pairs[name], "4,1,5", batch=3, **params)
    assert [r.token_ids for r in sampled] == greedy
    assert [r.stats.spec for r in sampled] == [r.stats.spec for r in deterministic]


def test_drawn_chains_hold_together_where_they_are_corrected(pairs):
    """Each token follows from the one before, which independent draws do not know."""
    params = {"prompts": PROMPTS * 4, "temperature": 1.0, "seed": 1, "max_tokens": 40}
    accepted = {}
    for name in ("dspark", "dflash"):
        drawn = decode(pairs[name], "4,1,5", batch=4, options={"sampled_drafts": True}, **params)
        accepted[name] = sum(r.stats.spec.num_emitted_tokens for r in drawn) / sum(
            r.stats.spec.num_verifies for r in drawn
        )
    assert accepted["dspark"] > accepted["dflash"] + 0.3, accepted


def test_trees_are_not_sampled(pairs):
    with pytest.raises(UserError, match="is a tree, and drafts are to be sampled"):
        LLM(*pairs["dspark"], max_context=64, sampled_drafts=True, shape=SpecShape(2, 2, 4))
