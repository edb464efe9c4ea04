"""Speculation changes no text: strictly in fp32, and in bf16 up to near ties of the target's own logits."""

import copy

import pytest
import torch

from tests.gpu.engines import PROMPTS, accept_length, make, random_models, responses, trained
from tests.gpu.place import pick

TOKENS = pick(2000, 12)
MARGIN = 0.03
"""Of the largest logit. Sums of halves are taken in another order for a window than for one token: each logit
is off by some 2^-8 of itself, after layers that were off by as much, so two within 3 % may change places."""
MODELS = {"trained": trained, "random": random_models}


def first_difference(one: list[int], other: list[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


@pytest.mark.parametrize("shape", ["4,1,5", "5,4,16"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_plain_text_in_fp32(name, shape):
    llm = make(MODELS[name](), "cycle")
    plain, drafted = (responses(llm, s, tokens=TOKENS) for s in ("none", shape))
    for prompt, one, other in zip(PROMPTS, plain, drafted, strict=True):
        assert len(one) >= TOKENS
        at = first_difference(one, other)
        if at is not None:
            best = llm.logits(prompt + one[:at])[-1].topk(2)
            pytest.fail(f"token {at} is {other[at]} instead of {one[at]}; the best two logits are {best}")
    if name == "trained":
        assert accept_length(llm) > 1.2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", ["4,1,5", "5,4,16"])
@pytest.mark.parametrize("name", MODELS)
def test_in_halves_the_first_difference_is_a_near_tie(name, shape, dtype, capsys):
    models = MODELS[name](dtype)
    llm = make(models, "cycle")
    plain, drafted = (responses(llm, s, tokens=TOKENS) for s in ("none", shape))
    exact = make((copy.deepcopy(models[0]).float(), None))
    for number, (prompt, one, other) in enumerate(zip(PROMPTS, plain, drafted, strict=True)):
        at = first_difference(one, other)
        if at is None:
            continue
        logits = exact.logits(prompt + one[:at])[-1].float()
        top = logits.max()
        gap = float(top - logits[[one[at], other[at]]].min())
        share = gap / float(logits.abs().max())
        with capsys.disabled():
            print(f"\n{name} {shape} {dtype}, response {number}: token {at} differs, margin {share:.2%}")
        assert share < MARGIN
