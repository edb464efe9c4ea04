"""Random traffic on the device: requests arrive, give way and are aborted, and every text is the CPU's."""

import random
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from conformance import VOCABULARY

from eagle_kit.core.shape import ShapeTable
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.request import Request
from tests.cuda_device.device import phase
from tests.cuda_device.values.models import KINDS, Models, compare, make_request, serve_all

NUM_EVENTS = 300
MOST_WAITING = 10
MOST_PROMPT = 60
MOST_RESPONSE = 30
SHARED = [[(3 * i * i + i) % VOCABULARY for i in range(length)] for length in (17, 32, 33)]
"""Beginnings that prompts share, around the end of a page."""
POOL = {"max_batch_size": 4, "batch_sizes": (1, 2, 4), "kv_tokens": 144, "max_context": 96}
PREFILL = {"prefill_tokens": 48, "decode_prefill_tokens": 24, "mixed_prefill_tokens": 16}


class Storm(NamedTuple):
    """A target, a draft and a shape of both engines, options of both, and options of the device's."""

    target: str
    draft: str
    shape: str
    options: Mapping[str, Any] = MappingProxyType({})
    device_options: Mapping[str, Any] = MappingProxyType({})

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in (self.options | self.device_options).items()]
        return "-".join((self.target, self.draft, self.shape, *options)).replace(" ", "_")


STORMS = (
    Storm("grouped queries", "eagle3", "3,2,6"),
    Storm("grouped queries", "eagle3", "3,1,4", device_options={"lag": 0, "page_size": 4}),
    Storm("grouped queries", "eagle3", "3,1,4", {"sampled_drafts": True}),
    Storm("grouped queries", "eagle3", "3,2,6 2:3,1,4 3:none"),
    Storm("recurrent layers", "dflash", "5,1,6"),
    Storm("latents", "one module", "3,1,4"),
    Storm("experts", "n-grams", "4,2,6"),
    Storm("sliding windows", "none", "none", device_options={"prefix_cache": False}),
)


def arrival(rng: random.Random, number: int, earlier: list[Request]) -> Request:
    """A request of a random kind: a prompt of an earlier one, or a new one that often begins as others do."""
    if earlier and rng.random() < 0.2:
        prompt = list(rng.choice(earlier).prompt_ids)
    else:
        rest = [rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 2, 5, 15, 16, 17, 40)))]
        prompt = [*rng.choice([[], *SHARED]), *rest][:MOST_PROMPT]
    kind = dict(rng.choice(KINDS))
    if rng.random() < 0.05:
        kind = {"bad_words": True}
    if rng.random() < 0.2:
        kind["stop_token_ids"] = (rng.randrange(VOCABULARY),)
    return make_request(number, prompt, kind, rng.choice((1, 3, 10, 20, MOST_RESPONSE, MOST_RESPONSE)))


def weather(llm: LLM, seed: int) -> tuple[list[Request], Counter[str]]:
    """Let random events happen to an engine, and then serve what is left -> all requests, and the events."""
    engine = llm.engine()
    rng = random.Random(seed)
    requests: list[Request] = []
    live: list[Request] = []
    events: Counter[str] = Counter()
    for _ in range(NUM_EVENTS):
        event = rng.choices(("arrive", "abort", "step"), (0.3, 0.03, 0.67))[0]
        if event == "arrive" and len(live) < MOST_WAITING:
            requests.append(arrival(rng, len(requests), requests))
            live.append(requests[-1])
            engine.add_request(requests[-1])
        elif event == "abort" and live:
            engine.abort(live.pop(rng.randrange(len(live))))
        elif engine.has_work:
            engine.step()
            engine.check()
            event = "step"
        events[event] += 1
        live = [request for request in live if request.finish_reason is None]
    while engine.has_work:
        engine.step()
        engine.check()
    return requests, events


def alone(models: Models, storm: Storm, requests: list[Request]) -> list[Request]:
    """The same requests on the CPU, where none gives way: by plain decoding, unless drafts are sampled."""
    shape = storm.shape if storm.options else "none"
    draft = storm.draft if storm.options else "none"
    options = {"max_context": 96, "kv_tokens": 2048, "max_batch_size": 4, "prefix_cache": False}
    llm = models.llm("cpu", storm.target, draft, shape=shape, **options, **storm.options)
    again = []
    for request in requests:
        again.append(Request(request.number, list(request.prompt_ids), request.params))
        again[-1].bad_word_ids = request.bad_word_ids
    return serve_all(llm, again)


@pytest.mark.parametrize("storm", STORMS, ids=str)
def test_every_text_of_a_storm_is_that_of_the_cpu(models: Models, storm: Storm):
    options = POOL | PREFILL | storm.options | storm.device_options
    llm = models.llm("cuda", storm.target, storm.draft, shape=storm.shape, **options)
    with phase() as found:
        requests, events = weather(llm, seed=len(str(storm)))
    expected = alone(models, storm, requests)
    assert compare(models.target(storm.target), expected, requests) <= 1

    # All that a storm is made of did happen.
    engine = llm.engine()
    assert engine.page_pool.num_available == engine.page_pool.num_pages
    totals = engine.totals
    assert min(events.values()) > 0 and totals.num_preemptions > 0
    reasons = totals.num_finished
    assert reasons["abort"] > 0 and reasons["stop"] > 0 and reasons["length"] > 10, reasons
    assert (totals.num_cached_prompt_tokens > 0) == engine.config.prefix_cache
    if storm.draft != "none":
        assert totals.spec.accept_length > 1
    assert len(totals.shapes) == len(ShapeTable.parse(storm.shape).shapes)
    assert found.counts["captures"] >= engine.num_graphs > 0
    assert found.counts["graph_launches"] > 100
    assert found.counts["uncomputed_launches"] == 0
