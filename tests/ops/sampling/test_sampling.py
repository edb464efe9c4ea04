"""Uniform random numbers depend on seed and position only; distributions equal those of transformers'
processors."""

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.ops.attention.window import ancestor_bits
from eagle_kit.ops.sampling import (
    adjust_logits,
    counts_after,
    make_sampling_batch,
    position_uniforms,
    sample,
    target_distribution,
    target_probs,
    token_logprobs,
)

CPU = torch.device("cpu")
V = 1271


def batch_of(*params, prompts=None):
    return make_sampling_batch(params, prompts or [[]] * len(params), list(range(len(params))), V, CPU)


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_random_numbers_are_uniform_and_streams_independent():
    seeds, positions = torch.arange(300), torch.arange(200).expand(300, 200)
    first, second = (position_uniforms(seeds, positions, stream).flatten() for stream in (0, 1))
    cells = (first * 16).long() * 16 + (second * 16).long()
    counts = torch.bincount(cells, minlength=256).double()
    assert chi_square(counts, torch.full_like(counts, 60_000 / 256)) < 255 + 4 * (2 * 255) ** 0.5
    # Neighbouring positions and neighbouring seeds
    for a, b in ((first.view(300, 200)[:, :-1], first.view(300, 200)[:, 1:]), (first[:-200], first[200:])):
        cells = (a.flatten() * 16).long() * 16 + (b.flatten() * 16).long()
        counts = torch.bincount(cells, minlength=256).double()
        assert chi_square(counts, counts.sum() / 256 * torch.ones(256)) < 255 + 4 * (2 * 255) ** 0.5


def test_uniforms_do_not_depend_on_the_batch_and_stay_below_one():
    seeds = torch.tensor([5, -(2**63), 2**63 - 1])
    positions = torch.arange(4000).expand(3, 4000)
    uniforms = position_uniforms(seeds, positions, 0)
    for i in range(3):
        assert torch.equal(
            position_uniforms(seeds[i : i + 1], positions[:1, 7:9], 0), uniforms[i : i + 1, 7:9]
        )
    assert uniforms.min() >= 0 and uniforms.max() < 1 and len(uniforms.unique()) == uniforms.numel()


def test_a_token_of_probability_zero_is_never_sampled():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.25, 0.25, 0.0]])
    just_below = 1 - 2.0**-53
    uniforms = torch.tensor([0.0, 0.4999, 0.5, 0.7499, 0.75, just_below], dtype=torch.float64)
    assert sample(probs.expand(6, 6), uniforms).tolist() == [1, 1, 3, 3, 4, 4]
    uneven = torch.rand(50, V, generator=torch.Generator().manual_seed(0))
    uneven[:, ::2] = 0
    for uniform in (0.0, just_below):
        sampled = sample(uneven, torch.full((50,), uniform, dtype=torch.float64))
        assert (uneven.gather(1, sampled[:, None]) > 0).all()


def test_samples_follow_the_distribution():
    probs = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.1])
    uniforms = position_uniforms(torch.arange(40), torch.arange(1000).expand(40, 1000), 0).flatten()
    sampled = torch.bincount(sample(probs.expand(40_000, 5), uniforms), minlength=5)
    kept = probs > 0
    assert sampled[1] == 0
    assert chi_square(sampled[kept].double(), 40_000 * probs[kept].double()) < 3 + 4 * 6**0.5


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.0, top_k=17),
        SamplingParams(temperature=1.3, top_p=0.83),
        SamplingParams(temperature=0.9, min_p=0.05),
        SamplingParams(temperature=0.6, top_k=40, top_p=0.7, min_p=0.02),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_p=1e-9),
    ],
)
def test_filters_equal_those_of_transformers(params):
    logits = torch.randn(2, 3, V, generator=torch.Generator().manual_seed(1)) * 3
    other = SamplingParams(temperature=1.0)
    ours = target_probs(logits, batch_of(params, other))
    scores = TemperatureLogitsWarper(params.temperature)(None, logits[0])
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    torch.testing.assert_close(ours[0], scores.softmax(-1), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(ours[1], logits[1].softmax(-1), rtol=1e-4, atol=1e-7)


def test_greedy_is_one_hot_and_a_tiny_temperature_does_not_overflow():
    logits = torch.tensor([[[1.0, 7.0, 7.0, -3.0]], [[30.0, -40.0, 29.0, 0.0]]])
    batch = make_sampling_batch(
        [SamplingParams(), SamplingParams(temperature=1e-38)], [[], []], [0, 1], 4, CPU
    )
    assert target_probs(logits, batch).tolist() == [[[0, 1, 0, 0]], [[1, 0, 0, 0]]]


def test_top_k_keeps_exactly_k_of_equal_tokens():
    batch = make_sampling_batch([SamplingParams(temperature=1.0, top_k=2)], [[]], [0], 4, CPU)
    assert target_probs(torch.zeros(1, 1, 4), batch).tolist() == [[[0.5, 0.5, 0, 0]]]


def test_penalties_follow_every_path_of_a_tree():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(1, 6, V, generator=generator) * 4
    parents = torch.tensor([[0, 0, 0, 1, 3, 2]])
    tokens = torch.tensor([[9, 4, 5, 4, 8, 9]])
    prompt, response = [1, 2, 2, 7], [5, 9]
    params = SamplingParams(
        temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.6,
        logit_bias={3: 2.5},
    )  # fmt: skip
    batch = batch_of(params, prompts=[prompt])
    batch = batch._replace(
        counts=counts_after(batch.counts, torch.tensor([[*response, 77]]), torch.tensor([2]))
    )
    ours = adjust_logits(logits, batch, tokens, ancestor_bits(parents, 5))
    for node, path in enumerate(([], [4], [5], [4, 4], [4, 4, 8], [5, 9])):
        said = response + path
        expected = RepetitionPenaltyLogitsProcessor(1.3)(
            torch.tensor([prompt + said]), logits[:, node].clone()
        )[0]
        for token in set(said):
            expected[token] -= 0.4 * said.count(token) + 0.6
        expected[3] += 2.5
        torch.testing.assert_close(ours[0, node], expected)


def test_what_nobody_asks_for_is_not_computed():
    batch = batch_of(SamplingParams(temperature=1.0), SamplingParams())
    assert all(field is None for field in batch[2:])
    logits = torch.zeros(2, 1, V)
    assert adjust_logits(logits, batch, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)) is logits


def test_logprobs_are_those_of_the_raw_logits():
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(3))
    tokens = torch.tensor([0, 3, 1270, 5, 5])
    chosen, ids, values = token_logprobs(logits, tokens, 4)
    distributions = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(chosen, distributions.log_prob(tokens))
    assert torch.equal(ids, logits.topk(4).indices) and (values[:, 0] >= chosen).all()
    assert token_logprobs(logits, tokens, 0)[1].shape == (5, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_logits_have_fp32_probabilities(dtype):
    logits = (torch.randn(2, 1, V, generator=torch.Generator().manual_seed(4)) * 3).to(dtype)
    tokens = torch.tensor([7, 1270])
    ours, theirs = (token_logprobs(x[:, 0], tokens, 3) for x in (logits, logits.float()))
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.dtype == wanted.dtype and torch.equal(mine, wanted)
    batch = batch_of(SamplingParams(temperature=0.7, top_p=0.9), SamplingParams(temperature=1.1, top_k=50))
    probs = target_distribution(logits, batch, backend="reference")
    assert probs.dtype == torch.float32 and torch.equal(probs, target_probs(logits.float(), batch))
