"""Samples against the target's distribution, and distributions of a lossy target against the plain one's.

A token's *place* is the target's probability of all likelier tokens, plus a random part of its own. If
every token follows the target's distribution after the tokens before it, places are independent and uniform
in [0, 1), whatever the texts are. So one test takes the tokens of all responses: that of Kolmogorov and
Smirnov.

Legend: T tokens of a response, V vocabulary.
"""

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch

from eagle_kit.core.output import TokenLogprobs
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.ops.sampling import make_sampling_batch, target_probs

LEVEL = 0.001
"""Probability with which the tests of an evaluation, all together, reject settings that are lossless."""
PLACE_DIGITS = 6
"""Decimal places that are kept of a place."""


class UniformTest(NamedTuple):
    """Test of Kolmogorov and Smirnov that numbers are uniform in [0, 1).

    Attributes:
        distance: largest difference between their distribution function and the uniform one. Total variation
            between the samples' and the target's distributions is at least this, up to chance.
        p_value: probability of this distance or a larger one for uniform numbers.
        num_tokens: how many numbers.
    """

    distance: float
    p_value: float
    num_tokens: int


def sample_places(logits: torch.Tensor, token_ids: Sequence[int], params: SamplingParams) -> list[float]:
    """Places of a response's tokens in the target's distributions.

    Args:
        logits: fp32 ``[T, V]``, of the target before each token.
        token_ids: T tokens of the response.
        params: temperature, filters and seed of the response. The random part is drawn from the seed.

    Returns:
        A number in [0, 1] for each token; 1 for one that the target cannot emit.
    """
    vocab_size = logits.shape[-1]
    batch = make_sampling_batch([params], [[]], [0], vocab_size, logits.device)
    probs_TV = target_probs(logits.float()[None], batch)[0].double()

    # The share of likelier tokens; of equal ones those with lower ids.
    tokens = torch.tensor(token_ids, device=logits.device)[:, None]
    own = probs_TV.gather(1, tokens)
    ids = torch.arange(vocab_size, device=logits.device)
    is_before = (probs_TV > own) | ((probs_TV == own) & (ids < tokens))
    before = (probs_TV * is_before).sum(1)

    # A random part of the own share.
    numbers = random.Random(params.seed)
    places = []
    for start, share in zip(before.tolist(), own[:, 0].tolist(), strict=True):
        place = min(start + numbers.random() * share, 1.0) if share > 0 else 1.0
        places.append(round(place, PLACE_DIGITS))
    return places


def uniform_test(places: Sequence[float]) -> UniformTest | None:
    """Test whether places are uniform; None without any.

    The p-value is Kolmogorov's, with the correction of Stephens (1970) for few numbers.
    """
    count = len(places)
    if not count:
        return None
    distance = 0.0
    for index, place in enumerate(sorted(places)):
        distance = max(distance, place - index / count, (index + 1) / count - place)
    root = math.sqrt(count)
    x = (root + 0.12 + 0.11 / root) * distance
    p_value = 1.0
    if x > 0.2:  # below, the series converges slowly, and its sum is 1 to ten digits
        p_value = 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 40))
    return UniformTest(distance, min(max(p_value, 0.0), 1.0), count)


def total_variations(logits: torch.Tensor, recorded: Sequence[TokenLogprobs]) -> list[float]:
    """Total variation between recorded distributions and the plain target's, a number for each position.

    All tokens that were not recorded count as one, so it is a lower bound.

    Args:
        logits: fp32 ``[T, V]``, of the plain target before each token.
        recorded: T positions with their most likely tokens.
    """
    probs_TV = logits.double().softmax(-1)
    found = []
    for probs, entry in zip(probs_TV, recorded, strict=True):
        ids = torch.tensor([token for token, _ in entry.top], device=logits.device)
        theirs = torch.tensor([logprob for _, logprob in entry.top], dtype=torch.float64).exp()
        ours = probs[ids].cpu()
        rest = float((theirs.sum() - ours.sum()).abs())
        found.append(round(0.5 * (float((theirs - ours).abs().sum()) + rest), PLACE_DIGITS))
    return found
