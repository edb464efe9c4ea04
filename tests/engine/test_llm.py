"""`LLM` where things go wrong or are unusual: interruptions, small pools, kinds of drafts."""

import pytest
import torch
from tiny import tiny_head, tiny_target
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import NGRAM_SHAPE, NO_SPECULATION, SpecShape
from eagle_kit.core.structured_outputs import Grammar
from eagle_kit.engine.cycle import CycleSettings
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.options import choose_device, dtype_of
from eagle_kit.engine.runner import CycleInputs

SAMPLED = SamplingParams(max_tokens=8, temperature=1.0, seed=1, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


def make(**options):
    target = tiny_target()
    return LLM(target, tiny_head(target), max_context=64, **{"max_batch_size": 4, **options})


@pytest.fixture(scope="module")
def llm():
    """A model without a tokenizer that drafts chains."""
    return make(shape="3,1,4")


def test_sampled_drafts_and_plain_decoding_go_with_one_another():
    llm = make(shape="3,1,4", sampled_drafts=True)
    plain = llm.generate([[1, 2]], SAMPLED, shape="none")[0]
    assert plain.token_ids == make().generate([[1, 2]], SAMPLED, shape="none")[0].token_ids
    assert len(llm.generate([[1, 2]], SAMPLED)[0].token_ids) == 8
    assert llm.generate([[1, 2]], SAMPLED, shape="none")[0].token_ids == plain.token_ids


def test_a_verifier_of_sampled_drafts_needs_sampled_drafts():
    with pytest.raises(UserError, match="BlockVerification does not fit"):
        LLM(tiny_target(), verifier="block").engine()


@pytest.mark.parametrize("lag", [0, 1])
def test_an_interrupted_call_leaves_nothing_to_the_next(lag):
    llm = make(shape="3,1,4", lag=lag)
    expected = llm.generate([[1, 2], [3]], GREEDY)

    def interrupt(index, output):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(
            [[1, 2], [3], [4, 5], [6]], SamplingParams(max_tokens=3, ignore_eos=True), on_finish=interrupt
        )
    seen = []
    again = llm.generate([[1, 2], [3]], GREEDY, on_finish=lambda index, output: seen.append(index))
    assert [a.token_ids for a in again] == [a.token_ids for a in expected] and sorted(seen) == [0, 1]
    assert llm.generate([[1, 2]], GREEDY, shape="none")[0].token_ids == expected[0].token_ids


def test_what_is_refused_is_refused_before_any_work():
    llm = make(shape="3,1,4")
    top = llm.target.config.vocab_size
    with pytest.raises(UserError, match="logit_bias names"):
        llm.generate([[1, 2], [3]], SamplingParams(max_tokens=4, logit_bias={top: 1.0}))
    assert not llm.engine().has_work and llm.engine().totals.num_finished == {}
    assert len(llm.generate([[1]], GREEDY, on_finish=lambda *_: None)) == 1


@pytest.mark.parametrize(
    ("prompts", "params", "cause"),
    [
        ("a text", None, "without a tokenizer"),
        ([{"role": "user", "content": "Hi"}], None, "generate was given a message"),
        ([[{"role": "user", "content": "Hi"}]], None, "generate was given messages"),
        (3, None, "3 is no prompt"),
        ([1.5], None, "1.5 is no prompt"),
        ([[1], [2], [3]], [GREEDY, GREEDY], "3 prompts have 2 sampling parameters"),
        ([[1], [2], []], None, "^Prompt 2 of 3: The prompt is empty"),
        ([[]], None, "^The prompt is empty"),
        (["a text"], None, "without a tokenizer"),
        ([[1]], SamplingParams(stop=("x",)), "stop text was given to a model without a tokenizer"),
        ([[1]], SamplingParams(grammar=Grammar("json_object")), "grammar needs a tokenizer"),
        ([[1]], SamplingParams(logit_bias={-1: 1.0}), "logit_bias names"),
    ],
)
def test_calls_that_cannot_be_served_are_refused(llm, prompts, params, cause):
    with pytest.raises(UserError, match=cause):
        llm.generate(prompts, params)
    assert not llm.engine().has_work


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"algorithm": "EAGEL3"}, "The algorithm 'EAGEL3' is not known"),
        ({"algorithm": "EAGLE3"}, "EAGLE3 needs a draft"),
        ({"algorithm": "NEXTN"}, "takes the modules in the target's folder: none is known"),
        ({"algorithm": "NGRAM", "draft": "a-draft"}, "NGRAM takes no draft, and a-draft was given"),
        ({"algorithm": "none", "draft": "a-draft"}, "NONE takes no draft"),
    ],
    ids=str,
)
def test_algorithms_are_refused_that_do_not_go_with_the_draft(options, cause):
    with pytest.raises(UserError, match=cause):
        LLM(tiny_target(num_layers=1), **options)


@pytest.mark.parametrize("place", ["cuda", "cuda:0"])
def test_a_gpu_is_refused_where_there_is_none(monkeypatch, place):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=f"{place} was asked for, but CUDA is not there"):
        choose_device(place)
    assert choose_device("auto") == "cpu"


@pytest.mark.parametrize(
    ("name", "on_cpu", "on_gpu"),
    [
        ("auto", torch.float32, torch.bfloat16),
        ("float32", torch.float32, torch.float32),
        ("bfloat16", torch.bfloat16, torch.bfloat16),
        ("float16", torch.float16, torch.float16),
    ],
)
def test_a_dtype_is_the_one_that_is_named(name, on_cpu, on_gpu):
    assert (dtype_of(name, "cpu"), dtype_of(name, "cuda")) == (on_cpu, on_gpu)


def test_an_algorithm_may_be_written_in_small_letters():
    llm = LLM(tiny_target(num_layers=1), algorithm="ngram", max_context=64)
    assert llm.config.algorithm == "NGRAM" and llm.default_shape == NGRAM_SHAPE


def test_a_progress_bar_counts_responses(llm, capsys):
    llm.generate([[1, 2], [3], [4]], SamplingParams(max_tokens=2))
    assert not capsys.readouterr().err
    llm.generate([[1, 2], [3], [4]], SamplingParams(max_tokens=2), progress=True)
    assert "3/3" in capsys.readouterr().err


def test_a_pool_in_bytes_holds_the_tokens_that_fit_into_them(llm):
    plan = llm.memory_plan
    size = 200 * plan.bytes_per_token + plan.bytes_per_token // 2
    small = make(shape="3,1,4", kv_memory=size)
    assert small.engine().page_pool.num_pages == 200 // 16 + 1
    assert small.memory_plan.kv_tokens == 200 < plan.kv_tokens


def test_a_seed_of_0_is_a_seed(llm):
    """As any other it gives the same text again; requests without a seed draw one each."""
    texts = [
        llm.generate([[1, 2]], SamplingParams(max_tokens=12, temperature=1.5, seed=seed))[0].token_ids
        for seed in (0, 0, None, None)
    ]
    assert texts[0] == texts[1]
    assert texts[2] != texts[3]


def test_prompts_of_one_call_do_not_take_turns():
    llm = make(max_batch_size=1, shape="none", graph_mode="off")
    llm.generate([[1, 2], [3, 4]], SamplingParams(max_tokens=60, ignore_eos=True))
    assert llm.engine().totals.num_preemptions == 0


def test_requests_of_one_batch_have_the_alternatives_that_each_asked_for(llm):
    for wanted in ([1, 4, 0], [4, None, 1]):
        params = [SamplingParams(max_tokens=6, ignore_eos=True, logprobs=number) for number in wanted]
        for output, number in zip(llm.generate([[1, 2], [3], [4]], params), wanted, strict=True):
            entries = [] if number is None else [number] * 6
            assert [len(entry.top) for entry in output.logprobs] == entries


def test_a_pool_that_is_smaller_than_the_context_shortens_it():
    llm = make(shape="3,1,4", kv_tokens=40, page_size=8)
    with pytest.warns(UserWarning, match="holds 40 tokens, so the context is 30 instead of 64"):
        llm.engine()
    assert llm.max_context == 30
    assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=27, ignore_eos=True))[0].token_ids) == 27
    with pytest.raises(UserError, match="too few for any request"):
        make(kv_tokens=3, page_size=1).engine()


def test_more_logprobs_than_tokens():
    target = tiny_target(vocab_size=12)
    llm = LLM(target, tiny_head(target, 9), max_context=32, shape="3,1,4")
    params = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=20)
    answer = llm.generate([[1, 2]], params)[0]
    assert [len(entry.top) for entry in answer.logprobs] == [12] * 5


def test_ngram_counts_the_drafts_there_were_and_learns_the_last_tokens():
    llm = LLM(tiny_target(), algorithm="NGRAM", max_context=64, shape=NGRAM_SHAPE)
    engine = llm.engine()
    answer = llm.generate([[1, 2, 3]], GREEDY)[0]
    assert engine.totals.num_draft_tokens <= answer.stats.num_verifies * (llm.default_shape.tokens - 1)
    assert len(engine.ngram) == 3 + len(answer.token_ids)
    nothing = LLM(tiny_target(seed=5), algorithm="NGRAM", max_context=64, shape=NGRAM_SHAPE)
    nothing.generate([[1]], SamplingParams(max_tokens=1))
    assert nothing.engine().totals.num_draft_tokens == 0


def test_plain_cycles_are_no_verifies(llm):
    engine = llm.engine("none")
    (plain,) = llm.generate([[1, 2]], GREEDY, shape="none")
    assert (plain.stats.num_verifies, plain.stats.histogram, plain.stats.accept_length) == (0, [], 0.0)
    assert plain.shapes == {NO_SPECULATION: 7}
    (drafted,) = llm.generate([[1, 2]], GREEDY)
    assert drafted.stats.num_verifies == drafted.shapes[SpecShape(3, 1, 4)] == sum(drafted.stats.histogram)
    # /metrics counts the same verifies.
    assert engine.totals.num_drafts == engine.totals.spec.num_verifies


def test_a_cycle_without_matching_n_grams_is_no_verify():
    llm = LLM(tiny_target(), algorithm="NGRAM", max_context=64, ngram={"min_match_window_size": 8})
    (output,) = llm.generate([[1, 2, 3]], GREEDY, shape=NGRAM_SHAPE)
    totals = llm.engine(NGRAM_SHAPE).totals
    assert output.stats.num_verifies == totals.num_drafts == 0 and output.shapes == {NO_SPECULATION: 7}


def test_options_of_n_grams_are_those_of_the_engine_s():
    """A log of a few tokens, and matches that are too long to be found."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    drafted = {}
    for name, ngram in {"usual": {}, "few": {"capacity": 30}, "long": {"min_match_window_size": 12}}.items():
        llm = LLM(
            tiny_target(vocab_size=11),
            algorithm="NGRAM",
            shape=NGRAM_SHAPE,
            max_context=64,
            graph_mode="off",
            ngram=ngram,
        )
        llm.generate([[1, 2, 3, 1, 2]], params)
        engine = llm.engine()
        assert len(engine.ngram) == (30 if name == "few" else 45)
        drafted[name] = engine.totals.num_draft_tokens
    assert drafted["long"] < drafted["usual"]


class _HostTensors(TorchDispatchMode):
    """Counts tensors that are made from numbers of the host, which a CUDA graph cannot hold."""

    def __init__(self):
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found += func in (torch.ops.aten.lift_fresh.default, torch.ops.aten._local_scalar_dense.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, "4,1,5"),
        ({}, "5,4,16"),
        ({"sampled_drafts": True}, "4,1,5"),
        ({"tree": "static"}, "5,4,26"),
        ({"tree": "static", "sampled_drafts": True}, "5,4,26"),
    ],
    ids=str,
)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_no_cycle_makes_tensors_on_the_host(options, shape, sampling):
    llm = make(shape=shape, **options)
    engine = llm.engine()
    request = llm.make_request([1, 2, 3], sampling)
    engine.add_request(request)
    while request.is_prefilling or not request.token_ids:
        engine.step()
    runner = engine.runner
    inputs = CycleInputs(torch.tensor([request.sequence.slot]), runner._sampling.of_cycle([request], 0))
    shape = engine.shapes_at(1)[0]
    settings = CycleSettings(shape, 128, None, runner.verifier(shape))
    runner.run_cycle(inputs, settings)
    with torch.inference_mode(), _HostTensors() as host:
        runner.run_cycle(inputs, settings)
    # The reference of attention looks at lengths on a CPU: once a window, never in a kernel.
    windows = sum(level.depth > 0 for level in getattr(runner.drafter, "_levels", ())) or shape.steps - 1
    assert host.found <= windows + 2


def test_a_larger_draft_takes_an_engine_with_more_scratch_and_the_text_stays():
    """EAGLE-3's tree runs 70 nodes; smaller shapes stay in the larger engine."""
    llm = make()
    sizes = []
    tokens = []
    for shape in ("none", "5,4,16", "8,10,60", "13,10,60", "3,1,4"):
        for params in (GREEDY, SAMPLED):
            tokens.append(
                [output.token_ids for output in llm.generate([[1, 2, 3], [5]], params, shape=shape)]
            )
        engine = llm.engine(shape)
        drafter = engine.runner.drafter
        sizes.append(drafter.kv.window)
        assert engine.runner.kv.window == 64, "the target's scratch holds a window"
        assert drafter.kv.num_rows == drafter.kv.scratch_start + 4 * drafter.kv.window + 2
    assert sizes == [64, 64, 70, 120, 120]
    assert tokens[::2] == tokens[:1] * 5 and tokens[1::2] == tokens[1:2] * 5
    llm.set_draft(llm.head)
    assert llm.engine("5,4,16").runner.drafter.kv.window == 64, "another draft begins anew"


def test_the_options_name_the_largest_draft():
    llm = make(shape="5,4,16 2:8,10,60")
    assert llm.config.draft_scratch == 70
    small = llm.engine("5,4,16")
    assert llm.engine("8,10,60") is small, "it has room from the beginning"
    assert small.runner.drafter.kv.window == 70
    plan = make(shape="5,4,16")
    plan.engine()
    of_draft = 4 * llm.draft.cache.values_per_token  # bytes of a token in fp32
    assert llm.memory_plan.scratch - plan.memory_plan.scratch == 4 * (70 - 64) * of_draft


def test_an_engine_refuses_a_draft_that_its_scratch_cannot_hold():
    engine = make(shape="5,4,16").engine()
    with pytest.raises(UserError, match="70 nodes in the shape 8,10,60.* memory for 64") as refused:
        engine.use_shape(SpecShape(8, 10, 60))
    assert "LLM.engine" in refused.value.remedy
