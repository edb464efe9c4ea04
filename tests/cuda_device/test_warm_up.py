"""What a warm-up prepares, and that traffic behind it captures, compiles and reserves nothing."""

from typing import Any

import pytest
import torch
from tiny_tokenizers import byte_level

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.graphs.warm_up import warm_up
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.memory.graph_memory import BYTES_OF_LAUNCH, graphs_of, graphs_of_prompts
from tests.cuda_device.device import LogKind, Phase, phase
from tests.cuda_device.engines import made_up_results, small_llm

USUAL = (
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_p": 0.9, "seed": 2},
    {"repetition_penalty": 1.2},
)
RARE = ({"logprobs": 2}, {"temperature": 0.7, "seed": 3, "logprobs": 1, "frequency_penalty": 0.1})
WITH_GRAMMARS = (*USUAL, *RARE, {"grammar": True}, {"grammar": True, "temperature": 1.0, "seed": 4})
PROMPTS = ([5, 6, 7], [1] * 40, [9, 8], [3] * 100, [2, 4])
WAITS = frozenset({"wait", "allowed_bits"})
"""Functions in which the host may wait for the device during traffic: for the results of a step, and for the
drafts that a grammar is to judge."""


class AnyToken:
    """A grammar of all texts, since the tokens of responses are made up."""

    is_complete = False
    is_stuck = False

    def fill(self, parents: Any, tokens: Any, bitmask: Any) -> None:
        """Allow every token."""
        bitmask[:] = -1

    def advance(self, tokens: Any) -> int:
        """Accept all tokens."""
        return len(tokens)


def prepared(extent: str, **options: Any) -> tuple[LLM, Phase]:
    """An engine after its warm-up, and what the warm-up did."""
    llm = small_llm(**options)
    engine = llm.engine()
    with phase(LogKind.SYNCHRONISATION) as found, made_up_results():
        warm_up(engine, extent)
    llm.tokenizer = None  # requests are token ids, and responses too
    return llm, found


def serve(llm: LLM, kinds: tuple[dict[str, Any], ...]) -> int:
    """Serve prompts of all kinds at once -> the tokens of the responses together."""
    engine = llm.engine()
    requests = []
    for i in range(max(len(PROMPTS), len(kinds))):
        sampling = dict(kinds[i % len(kinds)])
        has_grammar = sampling.pop("grammar", False)
        params = SamplingParams(max_tokens=24 + 3 * i, ignore_eos=True, **sampling)
        request = llm.make_request(list(PROMPTS[i % len(PROMPTS)]), params)
        if has_grammar:
            request.response.match = AnyToken()
        requests.append(request)
        engine.add_request(request)
    while engine.has_work:
        engine.step()
        engine.check()
    return sum(len(request.token_ids) for request in requests)


@pytest.mark.parametrize(
    ("extent", "kinds", "options"),
    [
        pytest.param("usual", USUAL, {}, marks=pytest.mark.smoke),
        ("all", WITH_GRAMMARS, {}),
        ("usual", USUAL, {"shape": "none"}),
        ("usual", USUAL, {"shape": "3,1,4", "sampled_drafts": True}),
        ("usual", USUAL, {"algorithm": "NGRAM"}),
    ],
    ids=["usual", "all", "no drafts", "sampled drafts", "n-grams"],
)
def test_traffic_behind_a_warm_up_is_prepared_for(extent, kinds, options):
    """The warm-up prepares for grammars where there is a tokenizer."""
    llm, warmed = prepared(extent, tokenizer=byte_level(), **options)
    engine = llm.engine()
    planned = graphs_of(llm.target.config, llm.draft, llm.config, extent, chooses_shapes=False)
    assert warmed.counts["captures"] >= engine.num_graphs == planned.number > 0
    reserved = torch.cuda.memory_reserved()

    with phase(LogKind.SYNCHRONISATION | LogKind.ALLOCATION) as found, made_up_results():
        num_tokens = serve(llm, kinds)
    assert num_tokens > 100
    assert found.counts["captures"] == 0 and engine.num_graphs == planned.number
    assert found.counts["modules_loaded"] == 0, "compiled in traffic"
    grown = torch.cuda.memory_reserved() - reserved
    assert grown == 0, [str(call) for call in found.of(LogKind.ALLOCATION)]
    waits = {call.place.function for call in found.of(LogKind.SYNCHRONISATION) if call.place}
    assert waits <= WAITS, [str(call) for call in found.of(LogKind.SYNCHRONISATION)]


def test_without_a_warm_up_nothing_is_captured_before_it_is_needed():
    llm, _ = prepared("none")
    assert llm.engine().num_graphs == 0, "measurements of linear layers have their own"
    with phase() as found, made_up_results():
        serve(llm, USUAL[:1])
    assert found.counts["captures"] >= llm.engine().num_graphs > 0


@pytest.mark.smoke
def test_a_decode_step_is_one_graph_and_a_copy_of_its_results():
    llm, _ = prepared("usual")
    engine = llm.engine()
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    requests = [llm.make_request([1, 2, 3], params) for _ in range(2)]
    with made_up_results():
        for request in requests:
            engine.add_request(request)
        for _ in range(4):
            engine.step()
        with phase() as found:
            for _ in range(5):
                engine.step()
        for request in requests:
            engine.abort(request)
        engine.drain()
    assert found.launches == 0 and found.counts["graph_launches"] == 5
    assert found.counts["copies"] == 5 * len(("tokens", "num_emitted", "is_finite"))
    assert found.counts["synchronisations"] == 5

    # A graph has no more launches than memory is planned for.
    planned = graphs_of(llm.target.config, llm.draft, llm.config, "usual", chooses_shapes=False)
    of_prompts = graphs_of_prompts(llm.target.config, llm.draft, llm.config, None)
    num_bytes = planned.bytes - of_prompts.bytes
    of_graph = num_bytes / (planned.number - of_prompts.number) / BYTES_OF_LAUNCH
    assert 0.7 * of_graph <= found.counts["replayed_nodes"] / 5 <= of_graph


def test_later_prompts_of_a_warm_up_find_room_in_what_the_first_reserved():
    """The first is the longest. Activations of 100 kB a token have segments of their own."""
    sizes = {"intermediate_size": 16384, "max_position_embeddings": 4096}
    llm = small_llm(changes=sizes, max_context=2200, prefill_tokens=2048, kv_tokens=6000)
    engine = llm.engine()
    reserved: list[int] = []
    prefill = engine.prefill

    def measured(requests: Any) -> Any:
        done = prefill(requests)
        reserved.append(torch.cuda.memory_reserved())
        return done

    engine.prefill = measured  # type: ignore[method-assign]
    with made_up_results():
        warm_up(engine, "usual")
    assert len(reserved) > 10
    assert reserved[-1] == reserved[0], [size >> 20 for size in reserved]
