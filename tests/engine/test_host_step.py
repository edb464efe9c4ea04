"""What the host does in a step: page tables, prompts behind the cycle and in small parts, prefixes looked for
once, and text that is made elsewhere."""

import random
from collections import Counter

import pytest
import torch
from tiny_engine import PROMPTS, decode, make_engine
from tiny_run import make_target

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.request import Request

CHAIN = SpecShape(3, 1, 4)


@pytest.mark.parametrize("lag", [0, 1])
def test_page_tables_are_those_of_the_allocations_whoever_had_the_slot(models, lag):
    engine = make_engine(models, batch=3, page_size=4, max_context=96, kv_tokens=150, lag=lag)
    engine.use_shape(CHAIN)
    runner, seen = engine.runner, Counter()
    parts = {name: getattr(runner, name) for name in ("decode", "prefill")}

    def check(requests):
        table = runner.slots.page_table
        for request in requests:
            pages = request.sequence.allocation.table
            assert table[request.sequence.slot, : len(pages)].tolist() == pages
            assert (table[request.sequence.slot, len(pages) :] == runner.slots.dummy_page).all()
            seen["pages"] += len(pages)
        assert (table[runner.slots.dummy] == runner.slots.dummy_page).all()

    def decode_checked(requests, *rest):
        check(requests)
        return parts["decode"](requests, *rest)

    def prefill_checked(chunks):
        check([chunk.request for chunk in chunks])
        return parts["prefill"](chunks)

    runner.decode, runner.prefill = decode_checked, prefill_checked
    prompts = [[*PROMPTS[i % 5][: 6 + i], i] for i in range(9)] + [PROMPTS[3]] * 3
    params = [SamplingParams(max_tokens=10 + 9 * (i % 5)) for i in range(12)]
    requests = [Request(i, list(p), each) for i, (p, each) in enumerate(zip(prompts, params, strict=True))]
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        engine.step()
        engine.check()
    assert engine.totals.num_preemptions > 0 and seen["pages"] > 100
    for request, each in zip(requests, params, strict=True):
        (alone,) = decode(models, None, prompts=[request.prompt_ids], max_tokens=each.max_tokens)
        assert request.token_ids == alone.token_ids


@pytest.mark.parametrize("lag", [0, 1])
def test_prompts_are_sent_behind_the_cycle_of_their_step(models, lag):
    engine, sent = make_engine(models, batch=3, lag=lag), []
    engine.use_shape(CHAIN)
    runner = engine.runner
    cycle, prefill = runner.decode, runner.prefill
    runner.decode = lambda *args: sent.append("cycle") or cycle(*args)
    runner.prefill = lambda chunks: sent.append("prompts") or prefill(chunks)
    params, steps = SamplingParams(max_tokens=30, ignore_eos=True), []
    requests = [Request(i, list(p), params) for i, p in enumerate(PROMPTS)]
    for i in range(40):
        if i % 3 == 0 and requests:
            engine.add_request(requests.pop())
        sent.clear()
        engine.step()
        steps.append(tuple(sent))
    assert ("cycle", "prompts") in steps and ("prompts", "cycle") not in steps


def test_parts_of_prompts_are_small_while_their_own_group_decodes(models):
    engine, parts = make_engine(models, batch=3, prefill_tokens=64, decode_prefill_tokens=8), []
    prefill = engine.runner.prefill

    def noted(chunks):
        decodes = any(not request.is_prefilling for request in engine.scheduler.running)
        parts.append((decodes, sum(chunk.stop - chunk.start for chunk in chunks)))
        return prefill(chunks)

    engine.runner.prefill = noted
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = [[1, 2, 3], [(3 * i) % 11 for i in range(60)], [(5 * i) % 11 for i in range(61)]]
    first, *others = [Request(i, prompt, params, group=0) for i, prompt in enumerate(prompts)]
    engine.add_request(first)
    engine.step()
    for request in others:
        engine.add_request(request)
    while engine.has_work:
        engine.step()
    assert max(tokens for decodes, tokens in parts if decodes) == 8
    for request in (first, *others):
        (alone,) = decode(models, None, prompts=[request.prompt_ids], ignore_eos=True)
        assert request.token_ids == alone.token_ids, "whatever the parts"


class CountingDict(dict):
    """Counts look-ups."""

    def __init__(self, given, counts):
        super().__init__(given)
        self.counts = counts

    def get(self, key, default=None):
        self.counts["pages"] += 1
        return super().get(key, default)


def test_the_cached_prefix_of_a_waiting_request_is_looked_for_once(models):
    """Before, each of the steps in which it waited looked for all of its 20 pages."""
    engine, counts = make_engine(models, batch=2, page_size=4, max_context=128, kv_tokens=188), Counter()
    prompt = [(3 * i + i * i) % 11 for i in range(81)]
    engine.add_request(Request(0, prompt, SamplingParams(max_tokens=1)))
    while engine.has_work:
        engine.step()
    stack = [root for roots in engine.page_pool._roots for root in roots.values()]
    while stack:
        node = stack.pop()
        stack += node.children.values()
        node.children = CountingDict(node.children, counts)
    holder = Request(1, [7] * 100, SamplingParams(max_tokens=27, ignore_eos=True), priority=1)
    engine.add_request(holder)
    while holder.sequence.slot < 0 or holder.is_prefilling:
        engine.step()
    waiting = Request(2, prompt, SamplingParams(max_tokens=40))
    counts.clear()
    engine.add_request(waiting)
    waited = 0
    while waiting.sequence.slot < 0:
        engine.step()
        waited += 1
    assert waited > 5 and counts["pages"] <= 20 + 2 * waited
    while engine.has_work:
        engine.step()
    (alone,) = decode(models, None, prompts=[prompt], max_tokens=40)
    assert waiting.token_ids == alone.token_ids


def test_a_known_prefix_is_followed_where_pages_come_and_go():
    from eagle_kit.kv.page_pool import PagePool

    rng = random.Random(3)
    pool, texts = PagePool(24, 2), [[rng.randrange(2) for _ in range(16)] for _ in range(6)]
    known = {i: [] for i in range(6)}
    for _ in range(300):
        tokens = rng.choice(texts)
        held = pool.allocate(pool.match(tokens), 0)
        if pool.extend(held, 8 - len(held)):
            pool.cache_pages(held, tokens[: rng.randrange(17)])
        pool.release(held)
        for i in rng.sample(range(6), 2):
            known[i] = pool.match(texts[i], 15, known[i])
            assert known[i] == pool.match(texts[i][:15])
    assert pool.num_evicted > 50


class Noted:
    """A tokenizer that counts what it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.counts = tokenizer.backend_tokenizer, Counter()

    def decode(self, ids, skip_special_tokens=True):
        self.counts["decoded"] += 1
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def get_added_tokens_decoder(self):
        return self.tokenizer.get_added_tokens_decoder()

    def token_to_id(self, name):
        return self.tokenizer.token_to_id(name)

    def id_to_token(self, token):
        return self.tokenizer.id_to_token(token)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


def test_no_text_is_made_in_a_step_unless_a_stop_text_may_be_there(target_folder):
    llm = LLM(str(target_folder), max_context=64, lag=1)
    llm.tokenizer = noted = Noted(llm.tokenizer)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    plain, stopped = (
        llm.make_request([5, 6, 7], SamplingParams(**{**vars(params), "stop": stop}))
        for stop in ((), ("no such text",))
    )
    engine = llm.engine("none")
    engine.add_request(plain)
    engine.add_request(stopped)
    while engine.has_work:
        before = noted.counts["decoded"]
        engine.step()
        assert noted.counts["decoded"] == before or stopped.finish_reason is not None, "at its end only"
    assert plain.output().text == stopped.output().text != ""
    assert noted.counts["decoded"] > 0 and torch.is_inference_mode_enabled() is False
