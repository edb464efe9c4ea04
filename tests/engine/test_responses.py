"""What a response shows: text without the token that stopped it, figures that mean the prompt."""

import pytest
from tiny_run import make_target

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.llm import LLM
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.source import load_tokenizer


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = make_target(tmp_path_factory.mktemp("responses") / "target")
    return LLM(load_target(folder), tokenizer=load_tokenizer(folder), max_context=128, max_batch_size=4)


def test_the_text_ends_before_the_token_that_stopped_it(llm):
    plain = llm.generate(["Tell me."], SamplingParams(max_tokens=12, ignore_eos=True))[0]
    ids = plain.token_ids
    stop = next(token for i, token in enumerate(ids) if i > 2 and token not in ids[:i])
    params = SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(stop,))
    answer = llm.generate(["Tell me."], params)[0]
    assert answer.finish_reason == "stop" and answer.token_ids[-1] == stop
    before = answer.token_ids[:-1]
    assert answer.text == llm.tokenizer.decode(before, skip_special_tokens=True)
    assert answer.token_ids == ids[: len(answer.token_ids)]


def test_cached_tokens_are_the_prompts_also_behind_a_preemption(llm):
    small = LLM(
        llm.target, tokenizer=llm.tokenizer, max_context=128, max_batch_size=4, kv_tokens=160, page_size=4
    )
    engine = small.engine()
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    requests = [small.make_request([5 + i, 6, 7], params) for i in range(4)]
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        engine.step()
        engine.check()
    assert any(request.stats.num_preemptions for request in requests)
    assert [request.output().num_cached_tokens for request in requests] == [0] * 4
