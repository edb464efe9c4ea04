"""Prompts through graphs of fixed shapes: texts, log-probabilities and acceptance are those of the CPU."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conformance import PROMPTS, VOCABULARY, untrained_head
from tiny import tiny_head, tiny_target

from eagle_kit.drafts.base.draft_model import StandaloneDraftModel
from eagle_kit.engine.graphs.cuda_graph import GraphRunner
from eagle_kit.engine.graphs.warm_up import warm_up
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.request import Request
from eagle_kit.models.targets.target import Target
from tests.cuda_device.device import phase
from tests.cuda_device.values.models import KINDS, Models, compare, make_request, serve_all
from tests.cuda_device.values.test_engine import DIAGONAL, Case, mixed_requests

EAGER_TARGETS = ("latents", "recurrent layers", "state spaces")
"""Targets whose prompts are not replayed."""
REPLAYED = [case for case in DIAGONAL if case.target not in EAGER_TARGETS]
LENGTHS = (1, 2, 17, 31, 512, 513)
DRAFTS = {
    "none": "none",
    "eagle3": "3,2,6",
    "whole model": "3,1,4",
    "p-eagle": "4,1,5",
    "dflash": "4,1,5",
}
"""Kinds of drafts whose prompts differ, each with a shape."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Calls of functions that are graphs, by name."""
    counted: Counter[str] = Counter()
    run = GraphRunner.run

    def counting(self: GraphRunner, call: Any) -> Any:
        counted[call.name] += 1
        return run(self, call)

    monkeypatch.setattr(GraphRunner, "run", counting)
    yield counted


def check_acceptance(expected: list[Request], found: list[Request]) -> None:
    """Check that equal texts have the same accepted drafts: those behind a prompt read its states."""
    for one, other in zip(expected, found, strict=True):
        if one.token_ids == other.token_ids:
            assert one.stats.spec == other.stats.spec, other.params


@pytest.mark.parametrize("case", [pytest.param(case, id=str(case)) for case in REPLAYED])
def test_drafts_behind_a_replayed_prompt_are_those_of_the_cpu(models: Models, calls, case: Case):
    target, draft, shape, options = case
    expected = serve_all(models.llm("cpu", target, draft, shape=shape, **options), mixed_requests())
    llm = models.llm("cuda", target, draft, shape=shape, **options)
    requests = serve_all(llm, mixed_requests())
    assert compare(models.target(target), expected, requests) <= 1
    if not options:  # whether drafts are drawn depends on the other requests of a cycle, and so on the lag
        check_acceptance(expected, requests)
    assert calls["prefill"] >= 3
    has_model = draft not in ("none", "n-grams")
    assert calls["prefill_draft"] == (calls["prefill"] if has_model else 0)


@pytest.mark.parametrize("case", [case for case in DIAGONAL if case.target in EAGER_TARGETS][:3], ids=str)
def test_prompts_of_other_targets_stay_eager(models: Models, calls, case: Case):
    llm = models.llm("cuda", case.target, case.draft, shape=case.shape, **case.options)
    serve_all(llm, [make_request(0, PROMPTS[0], {}, 4)])
    assert llm.engine().runner.prompt_shapes == [] and calls["prefill"] == 0


def test_the_switch_turns_graphs_of_prompts_off(models: Models, calls, monkeypatch):
    from eagle_kit.core import switches

    llm = models.llm("cuda", "grouped queries", "eagle3", shape="3,1,4")
    expected = serve_all(llm, mixed_requests())
    assert calls["prefill"] > 0
    monkeypatch.setenv(switches.VARIABLE, "prompt-graphs")
    switches.disabled_parts.cache_clear()
    try:
        calls.clear()
        llm = models.llm("cuda", "grouped queries", "eagle3", shape="3,1,4")
        requests = serve_all(llm, mixed_requests())
    finally:
        monkeypatch.undo()
        switches.disabled_parts.cache_clear()
    assert calls["prefill"] == 0
    assert [each.token_ids for each in requests] == [each.token_ids for each in expected]


# Lengths.


def long_target() -> Target:
    """A target of a longer context than that of the other tests."""
    return tiny_target(VOCABULARY, max_position_embeddings=1024)


def pair(kind: str, device: str) -> tuple[Target, Any]:
    """The target and an untrained draft of a kind, on a device."""
    target = long_target()
    if kind == "none":
        draft = None
    elif kind == "whole model":
        draft = StandaloneDraftModel(tiny_target(VOCABULARY, num_layers=2, std=0.25).to(device))
    else:
        draft = untrained_head(kind, target).to(device)
    return target.to(device), draft


def prompt(length: int, seed: int = 0) -> list[int]:
    """A prompt of a length."""
    return [(3 * i * i + i + seed) % VOCABULARY for i in range(length)]


def serve_lengths(kind: str, device: str, groups: list[list[int]], **options: Any) -> list[Request]:
    """Serve groups of prompts of some lengths, the prompts of a group together."""
    target, draft = pair(kind, device)
    sizes = {"max_batch_size": 4, "max_context": 560, "kv_tokens": 4096, "prefix_cache": False}
    place = {"graph_mode": "off"} if device == "cpu" else {"batch_sizes": (1, 4)}
    llm = LLM(target, draft, shape=DRAFTS[kind], **{**sizes, **place, **options})
    served = []
    for group in groups:
        requests = []
        for length in group:
            number = len(served) + len(requests)
            kind_of_sampling = KINDS[number % len(KINDS)]
            requests.append(make_request(number, prompt(length, number), kind_of_sampling, 6))
        served += serve_all(llm, requests)
    return served


@pytest.mark.parametrize("kind", DRAFTS)
def test_prompts_of_all_lengths_alone_and_together(calls, kind):
    """513 rows are eager, and so are all prompts together."""
    groups = [*([length] for length in LENGTHS), [17, 2, 31, 1], [200, 150, 160, 2], list(LENGTHS[-4:])]
    expected = serve_lengths(kind, "cpu", groups)
    calls.clear()
    found = serve_lengths(kind, "cuda", groups)
    assert compare(long_target(), expected, found) == 0
    check_acceptance(expected, found)
    assert calls["prefill"] == 5 + 2


@pytest.mark.parametrize("kind", DRAFTS)
def test_chunks_of_prompts_and_cached_prefixes(calls, kind):
    """Chunks of 40 rows of several prompts, of which one goes on behind what another one left."""
    target, _ = pair(kind, "cpu")
    engines = {}
    for device in ("cpu", "cuda"):
        made, draft = pair(kind, device)
        place = {"graph_mode": "off"} if device == "cpu" else {"batch_sizes": (1, 4)}
        sizes = {"max_batch_size": 4, "max_context": 300, "kv_tokens": 2048, "page_size": 4}
        chunks = {"prefill_tokens": 40, "decode_prefill_tokens": 33, "mixed_prefill_tokens": 20}
        engines[device] = LLM(made, draft, shape=DRAFTS[kind], **sizes, **chunks, **place)
    calls.clear()
    known = prompt(50)
    turns = [[known, prompt(90, 1), prompt(3, 2)], [[*known, 7], known, [*known[:30], 1, 2], prompt(41, 5)]]
    number = 0
    for turn in turns:
        served = {}
        for device, llm in engines.items():
            requests = []
            for i, each in enumerate(turn, number):
                requests.append(make_request(i, each, KINDS[i % len(KINDS)], 8))
            served[device] = serve_all(llm, requests)
        number += len(turn)
        assert compare(target, served["cpu"], served["cuda"]) == 0
        check_acceptance(served["cpu"], served["cuda"])
    assert engines["cuda"].engine().totals.num_cached_prompt_tokens > 100
    assert calls["prefill"] > 6


def test_many_prompts_of_a_step_need_no_capture_behind_a_warm_up(calls):
    """Twelve requests have a shape of their own, more requests than the shapes of few."""
    expected = serve_lengths("eagle3", "cpu", [[3 + i for i in range(12)], [2]], max_batch_size=12)
    target, head = pair("eagle3", "cuda")
    sizes = {"max_batch_size": 12, "max_context": 560, "kv_tokens": 8192, "prefix_cache": False}
    llm = LLM(target, head, shape=DRAFTS["eagle3"], batch_sizes=(1, 12), **sizes)
    engine = llm.engine()
    warm_up(engine, "all")
    num_graphs = engine.num_graphs
    calls.clear()
    with phase() as found:
        requests = []
        for i in range(12):
            requests.append(make_request(i, prompt(3 + i, i), KINDS[i % len(KINDS)], 6))
        served = serve_all(llm, requests)
        served += serve_all(llm, [make_request(12, prompt(2, 12), KINDS[12 % len(KINDS)], 6)])
    assert compare(long_target(), expected, served) == 0
    check_acceptance(expected, served)
    assert calls["prefill"] == calls["prefill_draft"] == 2
    assert found.counts["captures"] == 0 and engine.num_graphs == num_graphs


BAD = 100
"""Token whose embedding is NaN in :func:`test_a_prompt_with_nan_ends_alone`, which the target never emits."""
GOOD = [[3, 4, 5, 6], [9, 8, 7], [1] * 20]


def serve_with_nan(device: str) -> list[Request]:
    """Serve prompts of which the second holds ``BAD``, and then the others again."""
    target = tiny_target(tie_word_embeddings=False)
    head = tiny_head(target).to(device)
    with torch.no_grad():
        target.embed_tokens.weight[BAD] = math.nan
    place = {"graph_mode": "off"} if device == "cpu" else {"batch_sizes": (1, 4)}
    sizes = {"max_batch_size": 4, "max_context": 96, "kv_tokens": 256}
    llm = LLM(target.to(device), head, shape="3,1,4", **sizes, **place)
    served: list[Request] = []
    for prompts in ([GOOD[0], [5, BAD, 2], *GOOD[1:]], GOOD):
        numbered = enumerate(prompts, len(served))
        served += serve_all(llm, [make_request(number, each, {}, 8) for number, each in numbered])
    return served


def test_a_prompt_with_nan_ends_alone(calls):
    """Its numbers reach neither the requests of its step nor later ones in its pages."""
    expected = serve_with_nan("cpu")
    calls.clear()
    found = serve_with_nan("cuda")
    assert calls["prefill"] == 2
    for requests in (expected, found):
        assert [request.finish_reason == "error" for request in requests] == [False, True, *[False] * 5]
        assert requests[1].token_ids == [] and len(requests[0].token_ids) == 8
    assert [request.token_ids for request in found] == [request.token_ids for request in expected]
