"""Engines of the device over time: a warm-up, chats, other shapes and drafts, threads, neighbours."""

import threading
from typing import Any

import pytest
import torch
from conformance import MAX_TOKENS, PROMPTS

from eagle_kit.engine.graphs.warm_up import warm_up
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.request import Request
from tests.cuda_device.device import phase
from tests.cuda_device.values.models import KINDS, Models, make_request, on_device, serve_all

TARGET = "grouped queries"


def mixed(first: int, prompts: list[list[int]], max_tokens: int = MAX_TOKENS) -> list[Request]:
    """Requests for prompts, whose kinds follow from their numbers."""
    numbered = enumerate(prompts, first)
    return [make_request(i, prompt, KINDS[i % len(KINDS)], max_tokens) for i, prompt in numbered]


def texts_of(llm: LLM, requests: list[Request], shape: str | None = None) -> list[list[int]]:
    """Serve requests -> their texts."""
    return [request.token_ids for request in serve_all(llm, requests, shape)]


@pytest.fixture(scope="module")
def expected(models: Models) -> list[list[int]]:
    """Texts of plain decoding on the CPU."""
    return texts_of(models.llm("cpu", TARGET, "none", shape="none"), mixed(0, PROMPTS))


@pytest.mark.smoke
def test_traffic_behind_a_warm_up_needs_no_capture_and_has_the_same_texts(models, expected):
    llm = models.llm("cuda", TARGET, "eagle3", shape="3,2,6")
    engine = llm.engine()
    warm_up(engine, "all")
    num_graphs = engine.num_graphs
    with phase() as found:
        texts = texts_of(llm, mixed(0, PROMPTS))
    assert texts == expected
    assert found.counts["captures"] == 0 and engine.num_graphs == num_graphs
    assert found.counts["graph_launches"] > 0


def test_turns_of_a_chat_go_on_in_other_shapes(models):
    """Each turn of three chats begins with what the turn before it left in the prefix cache."""
    plain = models.llm("cpu", TARGET, "none", shape="none")
    llm = models.llm("cuda", TARGET, "eagle3", shape="3,1,4")
    chats = [[1, 2, 3], [7] * 20, [9, 8, 7, 6]]
    shapes = ("3,1,4", "none", "3,2,6", "1,1,2", "4,2,8 2:3,1,4 3:none", "3,1,4")
    for turn, shape in enumerate(shapes):
        want = texts_of(plain, mixed(3 * turn, chats, 8))
        responses = texts_of(llm, mixed(3 * turn, chats, 8), shape)
        assert responses == want, f"turn {turn}, in the shape {shape}"
        chats = [[*chat, *response, turn] for chat, response in zip(chats, want, strict=True)]
    assert llm.engine().totals.num_cached_prompt_tokens > 0


def test_one_draft_after_another(models, expected):
    llm = models.llm("cuda", TARGET, "eagle3", shape="3,1,4")
    assert texts_of(llm, mixed(0, PROMPTS)) == expected
    for kind in ("p-eagle", "whole model", "eagle3"):
        llm.set_draft(on_device(models.draft(TARGET, kind), "cuda"))
        assert texts_of(llm, mixed(0, PROMPTS)) == expected, kind
        assert llm.engine().totals.spec.accept_length > 1, kind


def test_graphs_read_the_weights_that_a_head_has_now(models, expected):
    """Validation beside training has a head that changes in place."""
    llm = models.llm("cuda", TARGET, "eagle3", shape="3,1,4")
    assert texts_of(llm, mixed(0, PROMPTS)) == expected
    totals = llm.engine().totals
    before = totals.spec.accept_length
    assert llm.head is not None
    with torch.no_grad():
        for weight in llm.head.parameters():
            weight.zero_()
    num_graphs = llm.engine().num_graphs
    num_verifies = totals.spec.num_verifies
    num_emitted = totals.spec.num_emitted_tokens
    assert texts_of(llm, mixed(0, PROMPTS)) == expected
    assert llm.engine().num_graphs == num_graphs
    later = (totals.spec.num_emitted_tokens - num_emitted) / (totals.spec.num_verifies - num_verifies)
    assert later < before


def test_two_engines_whose_steps_alternate(models, expected):
    llms = [models.llm("cuda", TARGET, "eagle3", shape=shape) for shape in ("3,1,4", "3,2,6")]
    served = [mixed(0, PROMPTS) for _ in llms]
    engines = [llm.engine() for llm in llms]
    for engine, requests in zip(engines, served, strict=True):
        for request in requests:
            engine.add_request(request)
    while any(engine.has_work for engine in engines):
        for engine in engines:
            if engine.has_work:
                engine.step()
                engine.check()
    for requests in served:
        assert [request.token_ids for request in requests] == expected


def test_another_thread_steps_the_engine(models, expected):
    llm = models.llm("cuda", TARGET, "eagle3", shape="3,2,6")
    found: list[Any] = []

    def serve() -> None:
        found.append(texts_of(llm, mixed(0, PROMPTS)))

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert found == [expected]
    assert texts_of(llm, mixed(0, PROMPTS)) == expected
