"""The engine: stops, the context's end, pages that come back, windows bit for bit, shapes by batch.

That no option changes a text is in `test_conformance`.
"""

import time

import pytest
import torch
from tiny import tiny_target
from tiny_engine import PROMPTS, check_next_turn, decode, make_engine, serve

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import ShapeTable, SpecShape
from eagle_kit.drafts.eagle1.static_tree import StaticDrafter
from eagle_kit.engine.calibrate import policies as tune
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.request import Request
from eagle_kit.ops.attention.window import ancestor_bits, chain_bits
from eagle_kit.ops.cpu import cpp
from eagle_kit.ops.tree_build import Tree
from eagle_kit.verify.proposal import DraftOutput


@pytest.fixture(scope="module")
def plain(models):
    """Requests that plain decoding has served."""
    return decode(models)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_max_tokens_is_exact_inside_an_accepted_run(models, plain, max_tokens):
    for request, full in zip(decode(models, "5,4,16", max_tokens=max_tokens), plain, strict=True):
        assert request.token_ids == full.token_ids[:max_tokens]
        assert request.finish_reason == "length"
        assert len(request.stats.spec.num_accepted_at) < max_tokens, "drafts behind the end were not accepted"


def test_a_stop_token_ends_the_response_inside_an_accepted_run(models, plain):
    stop = plain[2].token_ids[7]
    for request, full in zip(decode(models, "5,4,16", stop_token_ids=(stop,)), plain, strict=True):
        end = full.token_ids.index(stop) + 1 if stop in full.token_ids else 40
        assert request.token_ids == full.token_ids[:end]
        assert request.finish_reason == ("stop" if stop in full.token_ids else "length")
        num_text_tokens = end - (stop in full.token_ids)
        assert request.response.num_text_tokens == num_text_tokens, "the stop token is no part of the text"
        assert request.stats.spec.num_emitted_tokens == end - 1


def test_the_context_can_be_filled_to_its_last_token(models):
    for shape in (None, "4,1,5", "5,4,16"):
        for request in decode(models, shape, max_context=44, max_tokens=1000):
            assert request.num_tokens == 44 and request.finish_reason == "context"


def test_bad_prompts_are_refused_before_any_work(models, monkeypatch):
    monkeypatch.setattr(tune, "time_cycles", None)  # the engine would measure its cycles next
    llm = LLM(models[0], models[1], max_context=20)
    for prompt, word in (([], "empty"), ([1] * 20, "20 tokens"), ([11], "outside")):
        with pytest.raises(UserError, match=word):
            llm.generate([[1, 2], prompt])
    with pytest.raises(UserError, match="no draft"):
        LLM(models[0]).generate([[1, 2]], shape="4,1,5")
    with pytest.raises(UserError, match="vocabulary"):
        LLM(tiny_target(vocab_size=13), models[1])


def test_a_response_that_fits_no_pool_in_one_shape_is_served_in_another(models):
    """A deep shape needs more room behind a response. What was used before does not matter."""
    sizes = {"max_context": 32, "max_batch_size": 1, "kv_tokens": 48, "page_size": 4}
    llm = LLM(models[0], models[1], graph_mode="off", **sizes)
    deep = "30,1,31"
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    llm.generate([[1, 2]], SamplingParams(max_tokens=2), shape=deep)
    (output,) = llm.generate([[1, 2]], params, shape="none")
    assert len(output.token_ids) == 30
    with pytest.raises(UserError, match="do not fit"):
        llm.generate([[1, 2]], params, shape=deep)


def test_an_interrupted_call_gives_its_pages_back(models, plain):
    llm = LLM(*models, max_batch_size=2, max_context=256, shape="4,1,5")

    def interrupt(number, output):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2]] * 4, SamplingParams(max_tokens=10), on_finish=interrupt)
    again = llm.generate(PROMPTS, SamplingParams(max_tokens=40))
    assert [o.token_ids for o in again] == [r.token_ids for r in plain]


def test_the_longest_chain_fits_the_pool(models):
    llm = LLM(*models, max_batch_size=1, max_context=64)
    output = llm.generate([[1, 2]], SamplingParams(max_tokens=64), shape="63,1,64")[0]
    assert output.finish_reason == "context" and len(output.token_ids) == 62


def test_what_a_rejected_token_left_behind_is_never_read(models):
    engine = make_engine(models, max_context=64)
    for kv in (engine.runner.kv, engine.runner.drafter.kv):
        kv.k[:, :, kv.trash_row] = kv.v[:, :, kv.trash_row] = float("nan")
    engine.use_shape(SpecShape(4, 1, 5))
    request = Request(0, [1, 2, 3], SamplingParams(max_tokens=20))
    serve(engine, [request])
    assert request.token_ids == decode(models, prompts=[[1, 2, 3]], max_tokens=20)[0].token_ids


@pytest.fixture(scope="module", params=[True, False], ids=["C++", "torch"])
def window_logits(request):
    """Logits of a window by tokens, positions and ancestor bits, of a target of SmolLM2's sizes."""
    patched = pytest.MonkeyPatch()
    if not request.param:
        patched.setattr(cpp, "available", lambda: False)
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
    llm = LLM(tiny_target(vocab_size=61, num_layers=2, std=0.05, **sizes), max_batch_size=1, max_context=64)
    engine = llm.engine(SpecShape.parse(None))

    @torch.no_grad()
    def logits(tokens, positions, bits):
        table = torch.arange(engine.config.max_pages)[None]
        attend = engine.runner.kv.window_attend(table, torch.tensor([0]), bits, len(tokens), 64)
        return llm.target.logits(llm.target(tokens, positions, attend).hidden)

    yield logits
    patched.undo()


def test_a_window_of_one_equals_larger_windows_bit_for_bit_on_packed_weights(window_logits):
    first = []
    for n in (1, 2, 5, 16):
        bits = chain_bits(n, torch.device("cpu"))[None]
        first.append(window_logits(torch.arange(n) + 3, torch.arange(n), bits)[0])
    assert all(torch.equal(logits, first[0]) for logits in first[1:])


def test_a_branch_of_a_tree_equals_a_chain_bit_for_bit_in_cpp(window_logits):
    if not cpp.available():
        pytest.skip("torch's sums over keys depend on their columns")
    parents = torch.tensor([[0, 0, 0, 1, 2, 2, 4, 5]])
    depths = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3])
    branch, tokens = [0, 2, 5, 7], torch.tensor([3, 40, 4, 41, 42, 5, 43, 6])
    tree = window_logits(tokens, depths, ancestor_bits(parents, 3))[branch]
    chain = window_logits(tokens[branch], torch.arange(4), chain_bits(4, torch.device("cpu"))[None])
    assert torch.equal(tree, chain)


class KnowsTheAnswer:
    """A proposer whose tree holds the true continuation on its last children, among wrong siblings."""

    supports_deferred_draft = False

    def __init__(self, proposer, answers, prompt_lens, wrong_at):
        self.real, self.answers, self.prompt_lens, self.wrong_at = proposer, answers, prompt_lens, wrong_at
        self.capture, self.empty_state = proposer.capture, proposer.empty_state
        self.verifiers, self.lookback = proposer.verifiers, proposer.lookback
        self.prefill, self.draft_extend = proposer.prefill, proposer.draft_extend
        self.check_shape, self.confidence = proposer.check_shape, lambda state: None
        self.num_appended, self.pad_candidates = proposer.num_appended, proposer.pad_candidates

    def propose(self, state, shape, num_columns, sampling):
        tree, proposal = self.real.propose(state, shape, num_columns)
        tokens, parents = tree.tokens.clone(), tree.parents.clone()
        for b, length in enumerate(state.seq_lens.tolist()):
            done = length - self.prompt_lens[b] + 1
            node = 0
            for depth in range(shape.steps):
                left, right = 1 + 2 * depth, 2 + 2 * depth
                truth = self.answers[b][done + depth] if done + depth < len(self.answers[b]) else 0
                wrong = (truth + 1) % 11
                tokens[b, left], tokens[b, right] = wrong, wrong if depth >= self.wrong_at else truth
                parents[b, left] = parents[b, right] = node
                node = right
        depths = torch.tensor([0] + [d for d in range(1, shape.steps + 1) for _ in (0, 1)]).expand_as(tokens)
        return DraftOutput(Tree(tokens, parents, depths, ancestor_bits(parents, shape.steps)), proposal)


@pytest.mark.parametrize("wrong_at", [0, 2, 5])
def test_deep_acceptance_in_a_tree_commits_the_right_rows(models, plain, wrong_at):
    answers = [request.token_ids[:31] for request in plain]
    engine = make_engine(models, batch=5, max_context=128, page_size=3, mixed_prefill_tokens=128)
    engine.use_shape(SpecShape(5, 4, 11))
    engine.runner.drafter = KnowsTheAnswer(
        engine.runner.drafter, answers, [len(p) for p in PROMPTS], wrong_at
    )
    requests = [Request(i, list(p), SamplingParams(max_tokens=31)) for i, p in enumerate(PROMPTS)]
    serve(engine, requests)
    for request, full in zip(requests, answers, strict=True):
        assert request.token_ids == full
        assert request.stats.spec.accept_length == pytest.approx(wrong_at + 1, abs=0.01)


@pytest.mark.parametrize(("page_size", "shape"), [(1, "5,4,16"), (4, None)])
def test_a_cached_beginning_is_not_computed_again_and_changes_nothing(models, shape, page_size):
    engine = make_engine(models, batch=2, page_size=page_size, max_context=128)
    engine.use_shape(SpecShape.parse(shape))
    beginning = [(3 * i * i) % 11 for i in range(33)]
    prompts = [beginning + [2, 5], beginning + [7], list(beginning), beginning + [2, 5]]
    fresh = decode(models, shape, prompts=prompts, max_tokens=12)
    for i, prompt in enumerate(prompts):
        request = Request(i, list(prompt), SamplingParams(max_tokens=12))
        serve(engine, [request])
        assert (request.token_ids, request.stats.spec) == (fresh[i].token_ids, fresh[i].stats.spec)
        whole = (33 if i < 2 else len(prompt) - 1) // page_size * page_size
        assert request.stats.num_cached_tokens == (0 if i == 0 else whole)


def test_times_and_totals_count_everything_once(models, monkeypatch):
    """A prompt in three parts, one whose beginning is cached, and the first again behind a change of shapes:
    pages that were written without a draft lack its entries."""
    # A clock that goes on by 100 while a request waits and by 1 a step.
    engine = make_engine(models, page_size=4, prefill_tokens=8)
    now = [0.0]
    totals = engine.totals
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def response_to(number, prompt):
        request = Request(number, prompt, SamplingParams(max_tokens=5, ignore_eos=True), arrived_at=now[0])
        engine.add_request(request)
        now[0] += 100  # it waits
        while engine.has_work:
            now[0] += 1
            engine.step()
            if request.sequence.slot >= 0:
                share = len(request.sequence.allocation) / engine.page_pool.num_pages
                assert engine.kv_usage == pytest.approx(share)
        return request.output()

    # A prompt in three parts, then one whose beginning is cached.
    long = [(3 * i * i) % 11 for i in range(20)]
    first = response_to(0, long)
    assert (first.prefill_s, first.decode_s) == (2.0, 4.0)
    assert (totals.num_steps, totals.num_prompt_tokens, totals.num_cached_prompt_tokens) == (7, 20, 0)
    second = response_to(1, [*long, 9])
    assert (second.prefill_s, second.decode_s) == (0.0, 4.0)
    assert (totals.num_prompt_tokens, totals.num_cached_prompt_tokens) == (41, 20)
    assert totals.num_generated_tokens == 10 and totals.num_finished == {"length": 2}
    assert (totals.num_drafts, totals.num_draft_tokens) == (0, 0)

    # The first again, with drafts.
    engine.use_shape(SpecShape(4, 1, 5))
    third = response_to(2, list(long))
    assert third.num_cached_tokens == 0 and third.token_ids == first.token_ids
    assert totals.num_drafts == third.stats.num_verifies > 0
    assert totals.num_draft_tokens == 4 * totals.num_drafts


def test_a_next_turn_finds_the_response_of_the_last(models):
    check_next_turn(models, max_context=128)


def test_a_full_pool_sends_the_last_back_and_never_the_first(models, plain):
    engine = make_engine(models, batch=4, page_size=2, max_context=100, kv_tokens=130, lag=1)
    engine.use_shape(SpecShape(5, 4, 16))
    requests = [Request(i, list(PROMPTS[i]), SamplingParams(max_tokens=40)) for i in range(4)]
    serve(engine, requests)
    assert engine.totals.num_preemptions == sum(r.stats.num_preemptions for r in requests) > 0
    assert [r.token_ids for r in requests] == [r.token_ids for r in plain[:4]]
    assert requests[0].stats.num_preemptions == 0, "the first must not wait for those behind it"


def test_priority_goes_first_and_nobody_overtakes(models):
    engine = make_engine(models, batch=1)
    requests = [Request(i, [1, 2], SamplingParams(max_tokens=3), priority=p) for i, p in enumerate((0, 5, 0))]
    finished = []
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        finished += [r.number for r in engine.step() if r.finish_reason]
    assert finished == [1, 0, 2]


def test_abort_works_in_every_state(models):
    engine = make_engine(models, batch=2, page_size=4, prefill_tokens=8, lag=1)
    engine.use_shape(SpecShape(4, 1, 5))
    requests = [Request(i, [1] * 20, SamplingParams(max_tokens=50)) for i in range(4)]
    for request in requests:
        engine.add_request(request)
    engine.abort(requests[3])
    engine.step()
    assert requests[0].is_prefilling
    engine.abort(requests[0])
    for _ in range(8):
        engine.step()
        engine.check()
    engine.abort(requests[1])
    serve(engine, [])
    assert [r.finish_reason for r in requests] == ["abort", "abort", "length", "abort"]
    assert requests[1].token_ids and len(requests[2].token_ids) == 50


def test_a_response_that_can_never_fit_is_refused(models):
    engine = make_engine(models, kv_tokens=64)
    with pytest.raises(UserError, match="do not fit"):
        engine.add_request(Request(0, [1] * 40, SamplingParams(max_tokens=60)))


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ("5,4,16 2:4,1,5 3:1,2,3 4:none", {}),
        ("4,1,5 2:2,1,3 4:none", {"sampled_drafts": True}),
        (f"{StaticDrafter.topology.shape} 3:none", {"tree": "static"}),
    ],
)
def test_the_shape_follows_the_batch(models, plain, shapes, options):
    engine = make_engine(models, batch=4, lag=1, **options)
    table = ShapeTable.parse(shapes)
    engine.use_shape(table)
    used = set()
    run = engine.runner._run

    def run_and_record(matches, inputs, settings, *rest):
        used.add((len(inputs.slot_ids), settings.shape))
        return run(matches, inputs, settings, *rest)

    engine.runner._run = run_and_record
    requests = [Request(i, list(p), SamplingParams(max_tokens=8 + 8 * i)) for i, p in enumerate(PROMPTS)]
    serve(engine, requests)
    for i, request in enumerate(requests):
        assert request.token_ids == plain[i].token_ids[: 8 + 8 * i]
    assert {table.at(size) for size, _ in used} == set(table.shapes)
    assert all(shape == table.at(size) for size, shape in used)
