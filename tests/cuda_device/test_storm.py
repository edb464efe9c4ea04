"""Requests that arrive, end, give way and are aborted in random order, behind a warm-up."""

import random
from collections import Counter

import pytest
import torch

from eagle_kit.core.sampling_params import SamplingParams
from tests.cuda_device.device import phase
from tests.cuda_device.engines import made_up_results
from tests.cuda_device.test_warm_up import USUAL, prepared

MOST_WAITING = 12
SHARED = [[17 + i for i in range(length)] for length in (17, 32, 33)]
"""Beginnings that prompts share, around the end of a page."""


@pytest.mark.parametrize("num_events", [300, pytest.param(5000, marks=pytest.mark.nightly)])
def test_a_storm_of_requests_captures_compiles_and_reserves_nothing(num_events):
    """Four requests of up to 153 tokens share a pool of 288, so that some give way."""
    sizes = {"max_batch_size": 4, "batch_sizes": (1, 2, 4), "kv_tokens": 288, "prefill_tokens": 48}
    llm, _ = prepared("usual", **sizes)
    engine = llm.engine()
    rng = random.Random(num_events)
    reserved = torch.cuda.memory_reserved()
    num_graphs = engine.num_graphs
    live = []
    done = Counter()

    with phase() as found, made_up_results():
        for _ in range(num_events):
            event = rng.choices(("arrive", "abort", "step"), (0.2, 0.02, 0.78))[0]
            if event == "arrive" and len(live) < MOST_WAITING:
                beginning = rng.choice([[], *SHARED])
                rest = [rng.randrange(500) for _ in range(rng.randint(1, 60))]
                prompt = [*beginning, *rest]
                params = SamplingParams(max_tokens=rng.randint(1, 60), ignore_eos=True, **rng.choice(USUAL))
                live.append(llm.make_request(prompt, params))
                engine.add_request(live[-1])
            elif event == "abort" and live:
                engine.abort(live.pop(rng.randrange(len(live))))
            elif engine.has_work:
                engine.step()
                engine.check()
            done[event] += 1
            live = [request for request in live if request.finish_reason is None]
        for request in live:
            engine.abort(request)
        engine.drain()

    assert min(done.values()) > 0 and engine.totals.num_preemptions > 0
    assert engine.page_pool.num_available == engine.page_pool.num_pages
    assert found.counts["captures"] == 0 and engine.num_graphs == num_graphs
    assert found.counts["modules_loaded"] == 0
    assert torch.cuda.memory_reserved() == reserved
