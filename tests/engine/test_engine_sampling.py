"""Sampling in the engine: the distributions and log-probabilities are the target's.

That seeded responses depend on no draft and no batch is in `test_conformance`.
"""

import pytest
import torch
from pair_counts import chi_square, pair_counts
from restless import Restless
from tiny import tiny_target
from tiny_engine import PROMPTS, decode, make_engine, serve
from tiny_trained import trained_models

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.request import Request
from eagle_kit.ops.sampling import adjust_logits, make_sampling_batch, target_probs

PENALISED = {
    "temperature": 0.7,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "presence_penalty": -0.2,
    "logit_bias": {3: 1.5, 4: -100.0},
}

CHAINS, TREES = (tuple(map(SpecShape.parse, names)) for names in (("1,1,2", "3,1,4"), ("2,2,4", "3,3,8")))


@pytest.fixture(scope="module")
def greedy(models):
    """Responses of plain greedy decoding."""
    return [request.token_ids for request in decode(models, None)]


def test_requests_without_a_seed_draw_differently_and_repeat_with_the_engines_seed(models):
    def texts(seed):
        return [
            r.token_ids
            for r in decode(
                models, None, prompts=[[1, 2]] * 4, temperature=1.5, max_tokens=12, options={"seed": seed}
            )
        ]

    assert len(set(map(tuple, texts(0)))) == 4
    assert texts(0) == texts(0) != texts(1)


def test_the_first_two_tokens_of_a_response_are_drawn_independently():
    """Over equal logits a token is its uniform number, so one number for both would give the same token."""
    target = tiny_target(vocab_size=11, num_layers=1, std=0.0)
    prompts = [[1 + i % 9, 2, i % 7] for i in range(40)]
    requests = decode((target, None), None, prompts=prompts, temperature=1.0, max_tokens=2, batch=4)
    num_equal = sum(request.token_ids[0] == request.token_ids[1] for request in requests)
    assert num_equal < 15  # 40 / 11 are expected
    assert len({request.token_ids[0] for request in requests}) > 5


@pytest.mark.parametrize("shape", [None, "4,1,5", "5,4,16"])
def test_logprobs_equal_scoring_the_text_anew(models, shape):
    llm = LLM(*models, max_context=256)
    for params in ({}, PENALISED | {"seed": 1}):
        (request,) = decode(models, shape, prompts=PROMPTS[2:3], logprobs=3, **params)
        ids = request.prompt_ids + request.token_ids
        distributions = llm.logits(ids).log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
        assert len(request.response.logprobs) == len(request.token_ids)
        for row, token, entry in zip(
            distributions, request.token_ids, request.response.logprobs, strict=True
        ):
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
            values, _ = row.topk(3)
            assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)
            for token_id, value in entry.top:
                assert value == pytest.approx(float(row[token_id]), abs=1e-4)


def test_every_parameter_has_its_effect_alone(models, greedy):
    """In one batch, beside requests that lack it."""
    most_likely = {"temperature": 5.0, "seed": 1}
    cases = {
        "top_k": most_likely | {"top_k": 1},
        "top_p": most_likely | {"top_p": 1e-9},
        "min_p": most_likely | {"min_p": 1.0},
        "frequency": {"frequency_penalty": 2.0},
        "presence": {"presence_penalty": 2.0},
        "repetition": {"repetition_penalty": 30.0},
        "bias": {"logit_bias": {5: 1e300, 6: -1e300}},
        "sampled bias": {"logit_bias": {5: 1e300, 6: -1e300}, "temperature": 1.0, "seed": 1},
        "plain": {},
        "temperature": most_likely,
    }

    # All in one batch.
    prompt = PROMPTS[1]
    engine = make_engine(models, batch=4)
    requests = [
        Request(i, list(prompt), SamplingParams(max_tokens=10, ignore_eos=True, **params))
        for i, params in enumerate(cases.values())
    ]
    serve(engine, requests)
    found = {name: request.token_ids for name, request in zip(cases, requests, strict=True)}

    # The effect of each.
    plain = greedy[1][:10]
    assert found["plain"] == found["top_k"] == found["top_p"] == found["min_p"] == plain
    assert found["bias"] == found["sampled bias"] == [5] * 10
    assert len(set(plain)) < 10
    assert len(set(found["frequency"])) == len(set(found["presence"])) == 10, "no token comes twice"
    others = [found["repetition"], found["temperature"], found["frequency"]]
    assert all(each != plain for each in others) and found["repetition"] != found["frequency"]


@pytest.mark.parametrize("shape", [None, "3,1,4", "3,3,8"])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1e30, "seed": 3},
        {"temperature": 1.0, "seed": 3, "top_p": 0.9, "frequency_penalty": 2.0, "presence_penalty": 2.0},
        {"temperature": 0.5, "seed": 3, "logit_bias": {5: 1e300, 6: -1e300, 7: -1e300}},
    ],
    ids=str,
)
def test_only_allowed_tokens_are_emitted(models, shape, params):
    """Whatever the temperature makes of the others, and whatever their biases are."""
    allowed = {"max_tokens": 24, "ignore_eos": True, "allowed_token_ids": (6, 7, 9), **params}
    found = [request.token_ids for request in decode(models, shape, prompts=PROMPTS[:3], **allowed)]
    assert {token for tokens in found for token in tokens} <= {6, 7, 9}
    assert found == [request.token_ids for request in decode(models, None, prompts=PROMPTS[:3], **allowed)]
    if params.get("temperature") == 1e30:
        assert {token for tokens in found for token in tokens} == {6, 7, 9}


def test_allowed_tokens_are_the_distribution_without_the_others(models):
    params = SamplingParams(temperature=0.8, allowed_token_ids=(2, 5, 9), logit_bias={5: 1.0})
    logits = torch.randn(1, 1, 131)
    batch = make_sampling_batch([params], [[1]], [0], 131, logits.device)
    root = torch.zeros(1, 1, dtype=torch.int64)
    probs = target_probs(adjust_logits(logits, batch, root, root + 1), batch)[0, 0]
    expected = torch.zeros(131)
    kept = torch.tensor([2, 5, 9])
    expected[kept] = ((logits[0, 0, kept] + torch.tensor([0.0, 1.0, 0.0])) / 0.8).softmax(0)
    assert torch.allclose(probs, expected, atol=1e-6) and int((probs > 0).sum()) == 3


@pytest.mark.parametrize("given", [{"allowed_token_ids": ()}, {"allowed_token_ids": (10**6,)}], ids=str)
def test_tokens_that_cannot_be_allowed_are_refused(models, given):
    with pytest.raises(UserError, match="allowed_token_ids"):
        decode(models, None, prompts=[[1]], **given)


def test_an_earlier_request_leaves_nothing_in_its_slot(models):
    """Neither tokens of its prompt, which one penalty counts, nor of its response, nor biases."""
    earlier = [{"repetition_penalty": 3.0, "logit_bias": {5: 3.0}}, {"frequency_penalty": 1.0}]
    earlier.append({"allowed_token_ids": (5, 6)})
    later = [{"repetition_penalty": 3.0}, {"frequency_penalty": 1.0}, {"presence_penalty": 1.0}]
    for before in earlier:
        for params in later:
            engine = make_engine(models)
            first = Request(0, list(range(11)), SamplingParams(max_tokens=5, ignore_eos=True, **before))
            second = Request(1, [1, 2], SamplingParams(max_tokens=12, ignore_eos=True, **params))
            serve(engine, [first, second])
            (fresh,) = decode(models, prompts=[[1, 2]], max_tokens=12, ignore_eos=True, **params)
            assert second.token_ids == fresh.token_ids


@pytest.mark.parametrize(
    "penalties", [{"frequency_penalty": 1.0}, {"presence_penalty": 1.0}, {"repetition_penalty": 1.5}], ids=str
)
def test_penalties_go_on_behind_a_turn_of_another(models, penalties):
    params = SamplingParams(max_tokens=60, ignore_eos=True, **penalties)
    long = Request(0, [1, 2], params)
    short = Request(1, [3], SamplingParams(max_tokens=3))
    engine = make_engine(models)
    engine.add_request(long)
    while len(long.token_ids) < 40:
        engine.step()
    serve(engine, [short])
    assert long.stats.num_preemptions == 1
    (alone,) = decode(models, prompts=[[1, 2]], max_tokens=60, ignore_eos=True, **penalties)
    assert long.token_ids == alone.token_ids


def test_first_tokens_follow_the_distribution_of_the_prompt(models):
    """2,000 draws of the first token against the distribution that the logits give."""
    params = SamplingParams(max_tokens=1, temperature=0.9, top_p=0.95)
    engine = make_engine(models, batch=50, max_context=16)
    requests = [Request(i, [1, 2, 3], params) for i in range(2000)]
    serve(engine, requests)
    counts = torch.bincount(torch.tensor([r.token_ids[0] for r in requests]), minlength=11).double()
    logits = LLM(models[0]).logits([1, 2, 3])[-1].view(1, 1, -1)
    batch = make_sampling_batch([params], [[1, 2, 3]], [0], 11, torch.device("cpu"))
    ones = torch.ones(1, 1, dtype=torch.int64)
    distribution = target_probs(adjust_logits(logits, batch, ones, ones), batch)[0, 0].double()
    assert counts[distribution == 0].sum() == 0
    expected = 2000 * distribution[distribution > 0]
    freedom = len(expected) - 1
    assert ((counts[distribution > 0] - expected) ** 2 / expected).sum() < freedom + 4 * (2 * freedom) ** 0.5


@pytest.fixture(scope="module")
def trained():
    return trained_models()


@pytest.fixture(scope="module", params=[4_000, pytest.param(20_000, marks=pytest.mark.nightly)])
def plain_counts(trained, request):
    return pair_counts(trained, request.param, shape=None)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"shape": "3,1,4", "seed": 1}, marks=pytest.mark.nightly),
        {"shape": "3,3,8", "seed": 2},
        {"shape": "3,1,4", "seed": 3, "sampled_drafts": True},
        pytest.param(
            {"shape": "3,1,4", "seed": 4, "sampled_drafts": True, "verifier": "rejection"},
            marks=pytest.mark.nightly,
        ),
        {"shape": "3,3,8", "seed": 5, "verifier": "relaxed"},
        {"shape": Restless(6, CHAINS, most_plain=2), "seed": 6, "sampled_drafts": True},
        pytest.param({"shape": Restless(7, TREES, most_plain=2), "seed": 7}, marks=pytest.mark.nightly),
    ],
)
def test_continuations_have_the_law_of_plain_sampling(trained, plain_counts, options):
    """Two samples of one distribution: chi-square of their difference, over pairs of later tokens."""
    distance, freedom = chi_square(pair_counts(trained, int(plain_counts.sum()), **options), plain_counts)
    assert distance < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.nightly
def test_a_lossy_verifier_is_seen_by_the_same_test(trained, plain_counts):
    options = {"shape": "3,3,8", "seed": 6, "accept_threshold_single": 0.1, "accept_threshold_acc": 0.3}
    distance, freedom = chi_square(pair_counts(trained, int(plain_counts.sum()), **options), plain_counts)
    assert distance > freedom + 10 * (2 * freedom) ** 0.5


def test_sampled_drafts_leave_greedy_requests_alone(models, greedy):
    sampled = decode(models, "4,1,5", batch=3, options={"sampled_drafts": True})
    assert [r.token_ids for r in sampled] == greedy
    engine = make_engine(models, batch=2, sampled_drafts=True)
    engine.use_shape(SpecShape(4, 1, 5))
    warm = SamplingParams(max_tokens=40, temperature=1.0, seed=1)
    requests = [Request(0, list(PROMPTS[0]), SamplingParams(max_tokens=40)), Request(1, [1, 2], warm)]
    serve(engine, requests)
    assert requests[0].token_ids == greedy[0]


def test_a_verifier_that_does_not_fit_the_drafts_is_refused(models):
    with pytest.raises(UserError, match="does not fit"):
        make_engine(models, sampled_drafts=True, verifier="relaxed")
    with pytest.raises(UserError, match="does not fit"):
        make_engine(models, verifier="rejection")
    with pytest.raises(UserError, match="is a tree"):
        make_engine(models, sampled_drafts=True).use_shape(SpecShape(5, 4, 16))
