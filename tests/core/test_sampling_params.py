"""Sampling parameters: every bound is kept, on both sides."""

import math
import pickle
from dataclasses import replace

import pytest

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import REMEDIES, SamplingParams

REFUSED = {
    "max_tokens": (-1, -2, math.inf, None, 2.0, "8"),
    "temperature": (-0.01, math.inf, math.nan, "0.5", None, True),
    "top_k": (-2, 2.0),
    "top_p": (-0.1, 0.0, 1.01),
    "min_p": (-0.01, 1.01, math.nan),
    "repetition_penalty": (-1.0, 0.0, math.inf),
    "frequency_penalty": (-2.01, 2.01),
    "presence_penalty": (-2.01, 2.01),
    "logprobs": (-1, 21, True),
    "seed": (-(2**63) - 1, 2**63, 1.5),
    "ignore_eos": ("false", 1),
    "logit_bias": ({3: 1.0, 4: math.inf}, {3: math.nan}, [3], {"a": 1.0}, {3: "1"}, {1.5: 1.0}),
    "stop": (("a", ""),),
    "cache_salt": ("", "s" * 257, 5, b"s", ["s"]),
}
ALLOWED = {
    "max_tokens": (0, 1),
    "temperature": (0.0, 5.0),
    "top_k": (0, 10**6),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 3.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "logprobs": (None, 0, 20),
    "seed": (None, -(2**63), 2**63 - 1),
    "logit_bias": ({3: -100.0},),
    "stop": (("a",),),
    "cache_salt": (None, "s", "s" * 256, "\ud800"),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in REFUSED for value in REFUSED[name]])
def test_a_value_out_of_range_is_refused_by_its_name(name, value):
    with pytest.raises(UserError) as error:
        SamplingParams(**{name: value})
    assert name in error.value.cause


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in ALLOWED for value in ALLOWED[name]])
def test_the_ends_of_every_range_are_allowed(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_each_penalty_alone_makes_logits_depend_on_the_text():
    assert not SamplingParams(temperature=1.0, logit_bias={3: 1.0}).has_penalties
    assert SamplingParams(repetition_penalty=1.1).has_penalties
    assert SamplingParams(frequency_penalty=-0.1).has_penalties
    assert SamplingParams(presence_penalty=0.1).has_penalties


def test_other_engines_values_mean_the_same():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(logit_bias={"7042": -100}) == SamplingParams(logit_bias={7042: -100.0})
    assert SamplingParams(logit_bias=None) == SamplingParams()


@pytest.mark.parametrize("name", ["no_such_field", *REMEDIES])
def test_a_parameter_that_is_not_known_is_refused_with_what_to_write(name):
    with pytest.raises(UserError, match=f"no sampling parameter {name}") as error:
        SamplingParams(**{name: 1})
    assert error.value.remedy == REMEDIES.get(name, error.value.remedy)
    assert name not in SamplingParams.__dataclass_fields__
    with pytest.raises(UserError, match=name):
        replace(SamplingParams(), **{name: 1})
    assert pickle.loads(pickle.dumps(SamplingParams(n=2))) == SamplingParams(n=2)
