"""Log-probabilities of prompts, which the engine computes as it reads them."""

import conformance
import pytest
import torch
from tiny import tiny_head, tiny_target
from tiny_engine import resolved, serve
from tiny_run import make_target
from transformers import AutoModelForCausalLM

from eagle_kit import LLM, SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.base.draft_model import HeadDraftModel
from eagle_kit.engine import runner
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.request import Request

TOP = 3
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
SCORED = SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=TOP)
PROMPTS = [[(7 * i + 3 * j) % 90 + 1 for j in range(length)] for i, length in enumerate((2, 40, 17, 33))]


def make(draft=True, **options):
    target = tiny_target()
    sizes = {"max_context": 64, "max_batch_size": 4, "page_size": 4, "shape": "3,2,6" if draft else None}
    return LLM(target, tiny_head(target) if draft else None, **{**sizes, **options})


def check(llm, ids, entries, reference):
    """Compare the entries of a prompt with logits ``[T, V]``."""
    first, *others = entries
    assert first is None and len(others) == len(ids) - 1
    logprobs = reference.float().log_softmax(-1)
    for row, token, entry in zip(logprobs, ids[1:], others, strict=False):
        values, tokens = row.topk(TOP)
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [token for token, _ in entry.top] == tokens.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_they_are_those_of_transformers(tmp_path):
    folder = make_target(tmp_path / "target")
    ids = [5, 80, 12, 33, 7, 9, 101, 64]
    (output,) = LLM(folder, max_batch_size=2, max_context=64).generate([ids], SCORED)
    published = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = published(torch.tensor([ids])).logits[0]
    check(None, ids, output.prompt_logprobs, logits)


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("options", [{}, {"prefill_tokens": 8}, {"lag": 1}, {"kv_tokens": 96}])
def test_chunks_drafts_lag_and_preemption_do_not_matter(draft, options):
    llm = make(draft, **options)
    texts = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    outputs = llm.generate(PROMPTS, SCORED)
    assert [output.token_ids for output in outputs] == texts
    for ids, output in zip(PROMPTS, outputs, strict=True):
        check(llm, ids, output.prompt_logprobs, llm.logits(ids))


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("latents", "three modules"),  # a chunk is computed with the two tokens before it
        ("grouped queries", "three modules"),
        ("recurrent layers", "eagle3"),
        ("sliding windows", "eagle1"),
        ("experts", "p-eagle"),
    ],
)
@torch.no_grad()
def test_kinds_of_targets_and_drafts_do_not_matter(tmp_path, target, draft):
    model = conformance.make_target(target, tmp_path)
    head = HeadDraftModel(conformance.untrained_head(draft, model), model)
    config = resolved(3, 64, kv_tokens=120, page_size=3, prefill_tokens=7)
    scores = []
    for each in (None, head):
        engine = Engine(model, each, config)
        engine.use_shape(SpecShape.parse("3,1,4" if each else "none"))
        requests = [Request(i, list(ids), SCORED) for i, ids in enumerate(conformance.PROMPTS)]
        serve(engine, requests)
        scores.append([request.output().prompt_logprobs for request in requests])
    for ids, plain, drafted in zip(conformance.PROMPTS, *scores, strict=True):
        logits = model.logits(model(torch.tensor(ids), torch.arange(len(ids)), model.causal()).hidden)
        check(None, ids, plain, logits)
        check(None, ids, drafted, logits)


def test_a_request_that_is_preempted_while_its_prompt_is_read_is_scored_once():
    llm = make(prefill_tokens=8)
    engine = llm.engine()
    request = llm.make_request(PROMPTS[1], SCORED)
    engine.add_request(request)
    for _ in range(2):
        engine.step()
    assert 0 < len(request.response.prompt_logprobs.entries) < len(PROMPTS[1]) - 1
    engine.scheduler.send_back(request)
    while request.finish_reason is None:
        engine.step()
    check(llm, PROMPTS[1], request.output().prompt_logprobs, llm.logits(PROMPTS[1]))


def test_cached_pages_are_not_used_and_the_prompt_is_cached_for_others():
    llm = make()
    llm.generate([PROMPTS[1]], GREEDY)
    scored, later = (llm.generate([PROMPTS[1]], params)[0] for params in (SCORED, GREEDY))
    assert scored.num_cached_tokens == 0 < later.num_cached_tokens
    assert len(scored.prompt_logprobs) == len(PROMPTS[1])


def test_the_first_of_several_responses_scores_the_prompt_and_all_have_it():
    llm = make()
    params = SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=1, n=3, temperature=1.0, seed=0)
    (output,) = llm.generate([PROMPTS[2]], params)
    assert all(each.prompt_logprobs == output.prompt_logprobs for each in output.others)
    assert len(output.prompt_logprobs) == len(PROMPTS[2])
    assert output.others[0].num_cached_tokens > 0


def test_few_logits_exist_at_once(monkeypatch):
    llm = make()
    whole = llm.generate([PROMPTS[1]], SCORED)[0].prompt_logprobs
    rows = []
    logits = llm.target.logits
    monkeypatch.setattr(llm.target, "logits", lambda hidden: rows.append(len(hidden)) or logits(hidden))
    monkeypatch.setattr(runner, "MAX_SCORED_LOGITS", 5 * llm.target.config.vocab_size)
    parts = llm.generate([PROMPTS[1]], SCORED)[0].prompt_logprobs
    assert rows.count(5) == (len(PROMPTS[1]) - 1) // 5
    for entry, other in zip(whole[1:], parts[1:], strict=True):
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_no_token_at_all_may_be_asked_for():
    llm = make()
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    outputs = llm.generate([[5], *PROMPTS], params)
    for ids, output in zip([[5], *PROMPTS], outputs, strict=True):
        assert (output.token_ids, output.text, output.finish_reason) == ([], "", "length")
        assert len(output.prompt_logprobs) == len(ids)
    assert llm.engine().kv_usage == 0.0 and not llm.engine().has_work
    assert [each.token_ids for each in llm.generate(PROMPTS, GREEDY)] == [
        each.token_ids for each in make().generate(PROMPTS, GREEDY)
    ]
