"""The GPU engine with true values: its texts are those of the CPU's engine of the same weights."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from conformance import MAX_TOKENS, PROMPTS, SHAPES

from eagle_kit.engine.request import Request
from tests.cuda_device.device import phase
from tests.cuda_device.values.models import KINDS, Models, compare, make_request, serve_all

GREEDY, *OTHERS = KINDS


class Case(NamedTuple):
    """A target, a draft, a shape, and options of both engines."""

    target: str
    draft: str
    shape: str
    options: Mapping[str, Any] = MappingProxyType({})

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.options.items()]
        return "-".join((self.target, self.draft, self.shape, *options)).replace(" ", "_")


LLAMA = "grouped queries"
SAMPLED = {"sampled_drafts": True}
STATIC_SHAPE = SHAPES["static tree"][0]
DIAGONAL = (
    Case(LLAMA, "eagle3", "4,1,5"),
    Case(LLAMA, "eagle3", "3,2,6"),
    Case(LLAMA, "eagle3", "3,1,4", SAMPLED),
    Case(LLAMA, "eagle3", "3,1,4", SAMPLED | {"verifier": "block"}),
    Case(LLAMA, "eagle3", "9,9,60"),
    Case("experts", "eagle1", "3,2,6"),
    Case(LLAMA, "static tree", STATIC_SHAPE),
    Case("experts", "static tree", STATIC_SHAPE, SAMPLED),
    Case(LLAMA, "p-eagle", "5,1,6"),
    Case("sliding windows", "p-eagle", "4,1,5", SAMPLED),
    Case("recurrent layers", "dflash", "5,1,6"),
    Case(LLAMA, "dspark", "5,1,6"),
    Case("state spaces", "dspark", "4,3,14"),
    Case("latents", "eagle3", "5,4,16"),
    Case("latents", "eagle3", "10,8,60"),
    Case("latents", "one module", "3,1,4"),
    Case("latents", "three modules", "3,4,14"),
    Case("sliding windows", "eagle3", "4,1,5"),
    Case("experts", "whole model", "4,1,5"),
    Case("recurrent layers", "eagle3", "3,2,6"),
    Case("state spaces", "n-grams", "4,1,5"),
    Case("latents", "n-grams", "5,4,16"),
    Case("sliding windows", "none", "none"),
    Case("state spaces", "none", "none"),
)
"""Every kind of draft, chains and trees, sampled drafts, and every kind of target."""
SMOKE = DIAGONAL[1:3]


def cases() -> list[Any]:
    """The diagonal, of which a few cases are marked."""
    found = []
    for case in DIAGONAL:
        marks = [pytest.mark.smoke] if case in SMOKE else []
        found.append(pytest.param(case, id=str(case), marks=marks))
    return found


def mixed_requests() -> list[Request]:
    """Requests of every kind of sampling: the first two are greedy, the last one has forbidden words."""
    kinds = [GREEDY, GREEDY, *OTHERS, {"bad_words": True, "temperature": 0.8, "seed": 8}]
    requests = []
    for number, kind in enumerate(kinds):
        prompt = PROMPTS[number % len(PROMPTS)]
        requests.append(make_request(number, prompt, kind, MAX_TOKENS))
    return requests


@pytest.mark.parametrize("case", cases())
def test_texts_are_those_of_the_engine_on_the_cpu(models: Models, case: Case):
    """Through captures and replays of real graphs, at lag 1; log-probabilities agree too."""
    target, draft, shape, options = case
    expected = serve_all(models.llm("cpu", target, draft, shape=shape, **options), mixed_requests())
    llm = models.llm("cuda", target, draft, shape=shape, **options)
    with phase() as found:
        requests = serve_all(llm, mixed_requests())

    assert compare(models.target(target), expected, requests) <= 1
    assert all(len(request.token_ids) == MAX_TOKENS for request in requests)
    engine = llm.engine()
    assert engine.config.lag == 1
    if draft != "none":
        assert engine.totals.spec.accept_length > 1
    assert found.counts["captures"] >= engine.num_graphs > 0
    assert found.counts["graph_launches"] > 0 and found.counts["driver_launches"] > 0
    assert found.counts["uncomputed_launches"] == 0 and found.counts["illegal_calls"] == 0
