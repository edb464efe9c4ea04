"""The test of samples against the target's distribution, and the distance of a lossy target from it."""

import random

import pytest
import torch

from eagle_kit.core.output import TokenLogprobs
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.eval.distribution import sample_places, total_variations, uniform_test
from eagle_kit.ops.sampling import make_sampling_batch, target_probs

VOCABULARY = 1271
LENGTH = 401


def logits_of(seed: int) -> torch.Tensor:
    """Logits as peaked as a language model's."""
    return 4 * torch.randn(LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def drawn(logits: torch.Tensor, params: SamplingParams) -> list[int]:
    """Tokens from the distribution of the target."""
    batch = make_sampling_batch([params], [[]], [0], VOCABULARY, logits.device)
    probs = target_probs(logits[None], batch)[0]
    generator = torch.Generator().manual_seed(params.seed or 0)
    return torch.multinomial(probs, 1, generator=generator)[:, 0].tolist()


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}], ids=str)
def test_samples_of_the_target_pass_and_their_p_values_are_spread(params: dict[str, float]) -> None:
    p_values = []
    for seed in range(24):
        given = SamplingParams(**params, seed=seed)
        logits = logits_of(seed)
        test = uniform_test(sample_places(logits, drawn(logits, given), given))
        assert test is not None and test.num_tokens == LENGTH
        p_values.append(test.p_value)
    # Of uniform p-values one of 24 is below 0.001 once in 42 times, and nearly always some are in each half.
    assert min(p_values) > 0.001
    assert min(p_values) < 0.3 and max(p_values) > 0.7


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_samples_that_are_too_flat_or_too_peaked_are_rejected(factor: float) -> None:
    params = SamplingParams(temperature=1.0, seed=3)
    places: list[float] = []
    for seed in range(4):
        logits = logits_of(seed)
        places += sample_places(logits, drawn(factor * logits, params), params)
    test = uniform_test(places)
    assert test is not None and test.p_value < 1e-4


def test_a_token_that_the_filters_exclude_has_the_last_place() -> None:
    logits = torch.tensor([[3.0, 2.0, -1.0]])
    assert sample_places(logits, [2], SamplingParams(temperature=1.0, top_p=0.5, seed=0)) == [1.0]
    (place,) = sample_places(logits, [0], SamplingParams(temperature=1.0, seed=0))
    assert 0 <= place <= float(logits.softmax(-1)[0, 0])
    (place,) = sample_places(logits, [1], SamplingParams(temperature=1.0, seed=0))
    assert float(logits.softmax(-1)[0, 0]) <= place <= float(logits.softmax(-1)[0, :2].sum())


def test_the_distance_is_that_of_the_distribution_functions_and_its_p_value_kolmogorovs() -> None:
    assert uniform_test([]) is None
    test = uniform_test([0.5])
    assert test is not None and test.distance == 0.5
    test = uniform_test([0.1, 0.2, 0.3])
    assert test is not None and test.distance == pytest.approx(0.7)
    numbers = random.Random(0)
    below = 0
    for _ in range(600):
        test = uniform_test([numbers.random() for _ in range(50)])
        assert test is not None
        below += test.p_value < 0.1
    assert 40 <= below <= 80, "a tenth of uniform numbers"


def test_total_variation_from_recorded_tokens_is_a_lower_bound_that_all_tokens_reach() -> None:
    ours, theirs = logits_of(0)[:9], logits_of(1)[:9]
    exact = 0.5 * (ours.softmax(-1) - theirs.softmax(-1)).abs().sum(-1)
    for count in (20, VOCABULARY):
        recorded = []
        for row in theirs.log_softmax(-1):
            top = row.topk(count)
            pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
            recorded.append(TokenLogprobs(0.0, pairs))
        found = torch.tensor(total_variations(ours, recorded))
        assert bool((found <= exact + 1e-5).all()) and bool((found > 0.3).all())
    assert torch.allclose(found, exact, atol=1e-5)
