"""Filters without a sort, distributions independent of the batch, uniform random numbers of a cycle,
parameters beyond fp32."""

from itertools import combinations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.ops.sampling import (
    DRAFT_UNIFORMS,
    TARGET_UNIFORMS,
    VERIFY_UNIFORMS,
    adjust_logits,
    make_sampling_batch,
    position_uniforms,
    sample,
    sample_distinct,
    target_probs,
    window_uniforms,
)
from eagle_kit.ops.sampling.nearest import nearest

CPU = torch.device("cpu")
SAMPLING_PARAMS = {
    "plain": SamplingParams(temperature=1.0),
    "greedy": SamplingParams(),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9),
    "top-k": SamplingParams(temperature=1.2, top_k=40),
    "all": SamplingParams(temperature=0.7, top_k=30, top_p=0.8, min_p=0.01, repetition_penalty=1.3),
    "biased": SamplingParams(temperature=1.0, frequency_penalty=0.5, logit_bias={7: 3.0}),
}


def distribution_of(batch_params, logits, vocab):
    """Distribution ``[B, N, V]`` of requests with the prompt (1, 2) after a window of roots 5."""
    b, n = logits.shape[:2]
    batch = make_sampling_batch(batch_params, [[1, 2]] * b, list(range(b)), vocab, CPU)
    window = torch.full((b, n), 5), torch.ones(b, n, dtype=torch.int64)
    return target_probs(adjust_logits(logits, batch, *window), batch)


@pytest.mark.parametrize("vocab", [1271, 49152])
def test_distributions_are_batch_invariant_to_the_bit(vocab):
    logits = torch.randn(len(SAMPLING_PARAMS), 2, vocab, generator=torch.Generator().manual_seed(0)) * 3
    together = distribution_of(list(SAMPLING_PARAMS.values()), logits, vocab)
    for i, (name, params) in enumerate(SAMPLING_PARAMS.items()):
        alone = distribution_of([params], logits[i : i + 1], vocab)
        assert torch.equal(alone[0], together[i]), name
        assert torch.equal(distribution_of([params], logits[i : i + 1, :1], vocab)[0], alone[0, :1]), name


def by_sorting(distance, weights, need):
    order = sorted(range(len(distance)), key=lambda i: (distance[i], i))
    total, kept = 0.0, set()
    for i in order:
        if total >= need:
            break
        kept.add(i)
        total += weights[i]
    return kept


def test_the_nearest_tokens_are_those_that_sorting_finds():
    generator = torch.Generator().manual_seed(1)
    sizes = set()
    for trial in range(60):
        v = int(torch.randint(1, 2500, (), generator=generator))
        logits = torch.randn(1, 2, v, generator=generator) * 4
        if trial % 2:
            logits = logits.round()  # many ties
        logits.masked_fill_(torch.rand(1, 2, v, generator=generator) < 0.3, float("-inf"))
        logits[..., -1] = 0.0
        distance = logits.amax(-1, keepdim=True) - logits
        weights = torch.ones_like(distance) if trial % 3 else (-distance).softmax(-1)
        # Powers of two make every partial sum exact, so that no rounding decides.
        weights = torch.where(weights > 0, weights.log2().round().exp2(), 0.0)
        need = float(weights.sum(-1).amax()) * float(torch.rand((), generator=generator)) * 1.1 + 1e-9
        kept = nearest(distance, weights, torch.full((1, 1, 1), need, dtype=torch.float64))
        for n in range(2):
            expected = by_sorting(distance[0, n].tolist(), weights[0, n].tolist(), need)
            assert set(kept[0, n].nonzero()[:, 0].tolist()) == expected
            sizes.add(len(expected))
    assert len(sizes) > 50


def test_a_filter_keeps_lower_ids_among_equals():
    logits = torch.zeros(1, 1, 8)
    for params, kept in (
        (SamplingParams(temperature=1.0, top_k=3), 3),
        (SamplingParams(temperature=1.0, top_p=0.5), 4),
        (SamplingParams(temperature=1.0, top_p=0.51), 5),
        (SamplingParams(temperature=1.0, top_k=6, top_p=0.5), 3),
        (SamplingParams(temperature=1.0, min_p=1.0), 8),
        (SamplingParams(), 1),
    ):
        expected = [1 / kept] * kept + [0.0] * (8 - kept)
        assert distribution_of([params], logits, 8)[0, 0].tolist() == pytest.approx(expected)


def test_params_beyond_fp32_leave_a_distribution():
    """All are valid parameters; none may give NaN, or a weight to a token that the grammar excludes."""
    logits = torch.tensor([[[1.0, 0.0, -2.0, float("-inf"), 40.0, -40.0, 0.5, 0.25]]])
    for settings in (
        {"temperature": 1e300},
        {"temperature": 1e-300},
        {"temperature": 1e-40},
        {"temperature": 1.0, "repetition_penalty": 1e-300},
        {"temperature": 1.0, "repetition_penalty": 1e300},
        {"temperature": 1.0, "top_p": 1e-300},
        {"temperature": 1.0, "top_k": 10**30},
        {"temperature": 1.0, "logit_bias": {0: 1e300, 1: -1e300}},
        {"temperature": 1.0, "min_p": 1.0},
    ):
        distribution = distribution_of([SamplingParams(**settings)], logits, 8)[0, 0]
        assert float(distribution.sum()) == pytest.approx(1.0) and distribution[3] == 0, settings


def test_a_row_that_is_no_distribution_still_gives_a_token():
    rows = torch.stack((torch.zeros(5), torch.full((5,), float("nan"))))
    assert all(0 <= token < 5 for token in sample(rows, torch.full((2,), 0.5, dtype=torch.float64)))


def chi_square(first: torch.Tensor, second: torch.Tensor, cells: int) -> tuple[float, float]:
    """Chi-square statistic of independence and uniformity of pairs of uniforms, and its bound."""
    index = (first * cells).long() * cells + (second * cells).long()
    counts = torch.bincount(index.flatten(), minlength=cells**2).double()
    expected, freedom = counts.sum() / cells**2, cells**2 - 1
    return float(((counts - expected) ** 2 / expected).sum()), freedom + 4 * (2 * freedom) ** 0.5


def test_uniforms_of_a_cycle_are_independent_of_all_others():
    seeds, roots = torch.arange(2000), torch.arange(2000) % 50
    uniforms = window_uniforms(seeds, roots, 40, VERIFY_UNIFORMS)
    assert uniforms.min() >= 0 and uniforms.max() < 1
    places = torch.arange(40).expand(2000, 40)
    for other in (
        window_uniforms(seeds, roots, 40, DRAFT_UNIFORMS),
        window_uniforms(seeds, roots + 1, 40, VERIFY_UNIFORMS),
        window_uniforms(seeds + 1, roots, 40, VERIFY_UNIFORMS),
        position_uniforms(seeds, places, VERIFY_UNIFORMS),
        position_uniforms(seeds, roots[:, None] + places, VERIFY_UNIFORMS),
        uniforms.roll(1, 1),
    ):
        value, bound = chi_square(uniforms, other, 16)
        assert value < bound
    alone = window_uniforms(seeds[7:8], roots[7:8], 3, VERIFY_UNIFORMS)
    assert torch.equal(alone, uniforms[7:8, :3])


STREAMS = TARGET_UNIFORMS, DRAFT_UNIFORMS, VERIFY_UNIFORMS


@pytest.mark.parametrize("pair", list(combinations(STREAMS, 2)), ids=str)
def test_uniforms_of_all_purposes_are_independent(pair):
    """Else a draft would be drawn, accepted, or replaced by one number."""
    seeds = torch.arange(300)
    positions = torch.arange(200).expand(300, 200)
    value, bound = chi_square(*(position_uniforms(seeds, positions, stream) for stream in pair), 16)
    assert value < bound


def hashed(seed: int, position: int, stream: int) -> float:
    """Uniform in Python integers, taken modulo 2^64."""

    def mix(x):
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = ((x ^ (x >> 33)) * factor) % 2**64
        return x ^ (x >> 33)

    golden = 0x9E3779B97F4A7C15
    key = mix((seed + golden) % 2**64) + position * golden + stream * 0x5851F42D4C957F2D
    return (mix(key % 2**64) >> 11) * 2.0**-53


def test_uniforms_are_the_same_wherever_integers_overflow():
    for seed, position, stream in ((0, 0, 0), (-(2**63), 131071, 2), (2**63 - 1, 5, 1), (-1, 2**40, 0)):
        uniform = position_uniforms(torch.tensor([seed]), torch.tensor([[position]]), stream)
        assert uniform.item() == hashed(seed, position, stream)


def test_sampling_without_replacement_follows_the_renormalised_distribution():
    probs, b = torch.tensor([0.5, 0.0, 0.3, 0.2]), 40_000
    uniforms = window_uniforms(torch.arange(b), torch.zeros(b, dtype=torch.int64), 2, DRAFT_UNIFORMS)
    sampled = sample_distinct(probs.expand(b, 4), uniforms)
    counts = torch.bincount(sampled[:, 0] * 4 + sampled[:, 1], minlength=16).view(4, 4).double()
    distribution = probs[:, None] * probs / (1 - probs[:, None]) * (1 - torch.eye(4))
    assert counts[distribution == 0].sum() == 0
    expected = b * distribution[distribution > 0]
    assert ((counts[distribution > 0] - expected) ** 2 / expected).sum() < 5 + 4 * 10**0.5


def test_distributions_and_uniforms_need_no_host():
    with FakeTensorMode():
        logits = torch.randn(3, 2, 1271)
        distribution = distribution_of(
            [SAMPLING_PARAMS["all"], SAMPLING_PARAMS["biased"], SAMPLING_PARAMS["greedy"]], logits, 1271
        )
        uniforms = window_uniforms(torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64), 2, 0)
        assert sample(distribution, uniforms).shape == (3, 2)
