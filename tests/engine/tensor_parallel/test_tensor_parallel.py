"""Tensor parallelism: responses of two and four processes are those of one, and all ranks see the same."""

import gzip
import hashlib
import itertools
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from families import family_config
from rank_processes import run_ranks
from restless import Restless
from tiny import tiny_head
from tiny_mixtures import GROUPED, randomised, v3
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, PreTrainedTokenizerFast
from uncaptured import UncapturedGraphs

from eagle_kit.autotune.policy import ShapePolicy
from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import RankLost, UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.core.structured_outputs import Grammar
from eagle_kit.engine import engine as engines
from eagle_kit.engine import llm as llms
from eagle_kit.engine import runner as runners
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.grammar import compiler
from eagle_kit.engine.graphs.cuda_graph import HostCopy
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.memory.graph_memory import graphs_of
from eagle_kit.engine.step_profile import ProfileSettings
from eagle_kit.engine.tensor_parallel.ranks import WORKER, WorkerArgs
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.share import load_share

PROMPTS = [[(7 * i + j * j) % 11 for j in range(3 + 9 * i)] for i in range(5)]
ALPHABET = "0123456789-"
OPTIONS = {"device": "cpu", "max_batch_size": 3, "max_context": 128, "page_size": 4, "seed": 5}
SHAPES = ("none", "4,1,5", "4,4,12")
PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "presence_penalty": 0.2}
DEMO_HEAD = Path(__file__).parents[3] / "checkpoints" / "smollm2-135m-eagle3"
MIXED = (
    SamplingParams(max_tokens=14),
    SamplingParams(max_tokens=14, temperature=0.9, top_p=0.9, seed=3),
    SamplingParams(max_tokens=14, temperature=0.8, **PENALTIES, logit_bias={3: 1.5}),
    SamplingParams(max_tokens=14, grammar=Grammar("regex", "[0-4]{3,5}-[5-9]+"), temperature=1.1, seed=1),
    SamplingParams(max_tokens=14, logprobs=3, stop=("77", "1"), bad_words=("5", "07", "22")),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A vocabulary of 12 lets random heads guess right; 6 query and 2 key-value heads are shared unevenly."""
    return save_llama(tmp_path_factory.mktemp("target"), 12)


def save_llama(place, vocab_size):
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=48,
        intermediate_size=97,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=11,
    )
    LlamaForCausalLM(config).save_pretrained(place)
    return save_tokenizer(place)


def save_tokenizer(place):
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate((*ALPHABET, "<end>"))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(place)
    return place


def head_of(folder):
    return tiny_head(load_target(folder), draft_vocab_size=9)


def make_llm(ranks, folder, head, **options):
    """The model of a rank, and after each step of its engine the hash of all tokens that it has taken in;
    ranks that are not the first are done then."""
    digest, take, step, steps = hashlib.sha256(), Engine._append_tokens, Engine.step, []

    def watched(engine, request, tokens, now):
        digest.update(f"{request.number} {tokens};".encode())
        return take(engine, request, tokens, now)

    def watched_step(engine):
        done = step(engine)
        steps.append(digest.hexdigest()[:16])
        return done

    Engine._append_tokens, Engine.step = watched, watched_step
    given = {**OPTIONS, **options}
    if not ranks.is_first:
        given["tokenizer"] = None
    worker = WorkerArgs(ranks.rank, None, folder, None, None)
    return LLM(folder, head, tensor_parallel=ranks.size, worker=worker, **given), steps


def responses(llm, params, shapes, prompts=PROMPTS):
    found = {}
    for shape in shapes:
        outputs = llm.generate(prompts, params, shape=shape)
        found[shape] = [(each.token_ids, each.text, each.finish_reason) for each in outputs]
    return found


def serve(ranks, folder, head, work, options):
    llm, steps = make_llm(ranks, folder, head, **options)
    found = None
    if ranks.is_first:
        found = work(llm), llm.current_engine.totals  # engine() might measure shapes first
        llm.close()
    return found, steps


def compare(folder, size, work, head=None, **options):
    """What ``work(llm)`` says of one process and of several, and the first of these ranks' counters."""
    of_ranks = "expert_parallel", "data_parallel_attention", "lag"
    alone = {name: value for name, value in options.items() if name not in of_ranks}
    expected = work(LLM(folder, head, **{**OPTIONS, **alone}))
    ((found, totals), first), *others = run_ranks(size, serve, folder, head, work, options, timeout_s=280)
    assert [steps for _, steps in others] == [first] * (size - 1)
    assert found == expected
    return totals


@pytest.mark.parametrize(
    ("size", "lag"), [(2, 1), *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((2, 0), (4, 1)))]
)
def test_responses_are_those_of_one_process(folder, size, lag):
    """Greedy for every shape, then greedy, seeded, penalised, by a grammar and with stop texts in one batch,
    with a pool so small that requests give way, and prompts that the prefix cache has by then."""

    def work(llm):
        greedy = responses(llm, SamplingParams(max_tokens=14), SHAPES)
        return greedy, responses(llm, MIXED, ("none", "4,1,5"))

    totals = compare(folder, size, work, head_of(folder), kv_tokens=104, lag=lag)
    assert totals.num_preemptions > 0 and totals.num_cached_prompt_tokens > 0
    assert totals.spec.num_emitted_tokens > totals.spec.num_verifies + 10  # drafts were accepted


@pytest.mark.nightly
def test_recorded_cycles_contain_the_collectives(folder):
    def work(llm):
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        found = responses(llm, params, ("none",), PROMPTS[:1])
        assert llm.engine().num_graphs > 0
        return found

    compare(folder, 2, work)


MIXTURES = {
    "deepseek-v3": v3(vocab_size=12, num_hidden_layers=3, num_nextn_predict_layers=0),
    "mixtral": MixtralConfig(**GROUPED | {"vocab_size": 12}, num_local_experts=5, num_experts_per_tok=2),
}

SHARED = [*itertools.product(MIXTURES, (2, 4), ("whole", "inside"))]


@pytest.mark.parametrize(
    ("name", "size", "experts"),
    [SHARED[0], *(pytest.param(*each, marks=pytest.mark.nightly) for each in SHARED[1:])],
)
def test_mixtures_and_latents_are_shared(name, size, experts, tmp_path):
    """Experts cut inside, or whole ones of each rank."""
    randomised(MIXTURES[name]).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)

    def work(llm):
        greedy = responses(llm, SamplingParams(max_tokens=14, ignore_eos=True), ("4,4,12",))
        return greedy, responses(llm, MIXED, ("4,1,5",))

    compare(tmp_path, size, work, head_of(tmp_path), expert_parallel=experts == "whole")


OWN = [("EAGLE3", 2, "whole"), *itertools.product(("EAGLE3", "NGRAM"), (2, 4), ("inside",))]


@pytest.mark.parametrize(
    ("algorithm", "size", "experts"),
    [OWN[0], *(pytest.param(*each, marks=pytest.mark.nightly) for each in OWN[1:])],
)
def test_requests_have_latents_on_one_rank(algorithm, size, experts, tmp_path):
    """Greedy for every shape, then all kinds of requests in one batch; ranks run out of latents, and have
    some prompts cached."""
    randomised(MIXTURES["deepseek-v3"]).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)

    def work(llm):
        params = SamplingParams(max_tokens=14)
        greedy = responses(llm, params, SHAPES), responses(llm, params, ("none",), PROMPTS[2:3] * 2)
        return greedy, responses(llm, MIXED, ("none", "4,1,5"))

    head = head_of(tmp_path) if algorithm == "EAGLE3" else None
    options = {"kv_tokens": 76 * size, "data_parallel_attention": True, "max_context": 72}
    options["expert_parallel"] = experts == "whole"
    totals = compare(tmp_path, size, work, head, algorithm=algorithm, **options)
    assert totals.num_cached_prompt_tokens > 0
    assert totals.spec.num_emitted_tokens > totals.spec.num_verifies


SIZES = {"vocab_size": 12, "bos_token_id": None, "pad_token_id": None, "eos_token_id": 11}
RECURRENT = {
    "qwen3_5_text": {"linear_num_value_heads": 6, "linear_num_key_heads": 3},
    "qwen3_next": {},
    "falcon_h1": {"mamba_n_groups": 1, "mamba_rms_norm": False},
}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("qwen3_5_text", 2),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in itertools.product(RECURRENT, (2, 4))),
    ],
)
def test_states_of_recurrent_layers_are_shared(name, size, tmp_path):
    """By value heads and the key heads that they share. Requests give way and go on from snapshots, prompts
    are found in the prefix cache."""
    config = family_config(name)
    for key, value in (SIZES | RECURRENT[name]).items():
        setattr(config, key, value)
    randomised(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)

    def work(llm):
        params = SamplingParams(max_tokens=14)
        greedy = responses(llm, params, ("none", "4,4,12"))
        return greedy, responses(llm, MIXED, ("4,1,5",)), responses(llm, params, SHAPES, PROMPTS[2:3])

    totals = compare(tmp_path, size, work, head_of(tmp_path), kv_tokens=104)
    assert totals.num_preemptions > 0 and totals.num_cached_prompt_tokens > 0
    assert totals.spec.num_emitted_tokens > totals.spec.num_verifies + 10


def everything_beside_responses(llm):
    """Results of the calls that all ranks make, apart from steps of the engine."""
    params = SamplingParams(max_tokens=8, ignore_eos=True, prompt_logprobs=1)
    before = llm.generate(PROMPTS[1:3], params, shape="2,1,3")
    (states,) = llm.hidden_states([PROMPTS[1]], layers=(1, 3))
    logits = llm.logits(PROMPTS[1])

    # The prefix cache is emptied, and graphs are replaced.
    engine = llm.engine("2,1,3")
    engine.forget_prefixes()
    engine.use_graphs("off")
    again = llm.generate(PROMPTS[1:3], params, shape="2,1,3")
    engine.use_graphs(None)
    assert engine.totals.num_cached_prompt_tokens == 0

    # Drafts are recorded in an engine of their own.
    requests = [llm.make_request(prompt, SamplingParams(max_tokens=8)) for prompt in PROMPTS[:2]]
    recording = llm.record_drafts(requests, SpecShape(2, 2, 5), lambda: None)

    # Without the draft there is another engine.
    llm.set_draft(None)
    plain = llm.generate(PROMPTS[1:3], params, shape="none")

    tokens = [[output.token_ids for output in each] for each in (before, again, plain)]
    logprobs = [entry.logprob for entry in before[0].prompt_logprobs[1:]]
    return tokens, logprobs, states, logits, recording.truth


def test_every_call_of_rank_0_is_made_by_all_ranks(folder):
    head = head_of(folder)
    tokens, logprobs, states, logits, truth = everything_beside_responses(LLM(folder, head, **OPTIONS))
    results = run_ranks(2, serve, folder, head, everything_beside_responses, {})
    (found, _), steps = results[0]
    assert [other for _, other in results] == [steps, steps]
    assert found[0] == tokens and torch.equal(found[4], truth)
    assert found[1] == pytest.approx(logprobs, abs=1e-4)
    check_close = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-4)
    check_close(found[2].final, states.final)
    check_close(found[2].layers, states.layers)
    check_close(found[3], logits)


def profile_steps(llm, traces):
    """Tokens beside a profile that ends by itself and one that is stopped, once all files are there."""
    engine = llm.engine("4,1,5")
    outputs = []
    for name, num_steps in (("first", 3), ("second", 1000)):
        engine.start_profile(ProfileSettings(traces / name, name, num_steps, ("CPU",)))
        outputs += llm.generate(PROMPTS[1:3], SamplingParams(max_tokens=8), shape="4,1,5")
        assert (engine.profile is None) == (name == "first")
        engine.stop_profile()
    last = time.monotonic() + 60
    while len(list(traces.rglob("*.gz"))) < 2 * llm.group.ranks.size:
        assert time.monotonic() < last
        time.sleep(0.01)
    return [output.token_ids for output in outputs]


def test_every_rank_writes_a_trace_of_the_same_steps(folder, tmp_path):
    head = head_of(folder)
    plain = LLM(folder, head, **OPTIONS)
    expected = plain.generate(PROMPTS[1:3], SamplingParams(max_tokens=8), shape="4,1,5")
    run = partial(profile_steps, traces=tmp_path)
    ((tokens, _), _), _ = run_ranks(2, serve, folder, head, run, {})
    assert tokens == 2 * [output.token_ids for output in expected]

    num_steps = {}
    for path in tmp_path.rglob("*.gz"):
        with gzip.open(path) as file:
            names = [event.get("name") for event in json.load(file)["traceEvents"]]
        num_steps[path.name.partition(".")[0]] = names.count("eagle_kit.step")
    assert num_steps["first-rank0"] == num_steps["first-rank1"] == 3
    assert num_steps["second-rank0"] == num_steps["second-rank1"] > 3


def volume_of_cycle(llm, shape, params, prompts=PROMPTS[2:3]):
    """Bytes that a cycle gives to collectives, and its messages, of which the others wait for an answer."""
    engine, ranks = llm.engine(shape), llm.group.ranks
    requests = [llm.make_request(prompt, params) for prompt in prompts]
    for request in requests:
        request.group = requests[0].group
        engine.add_request(request)
    engine.step()  # the prompts
    before, agree, messages = ranks.volume.copy(), ranks.agree, []
    ranks.agree = lambda value: messages.append(value) or agree(value)
    engine.step()
    ranks.agree = agree
    assert all(len(request.token_ids) > 1 for request in requests)
    found = dict(ranks.volume - before)
    for request in requests:
        engine.abort(request)
    engine.drain()
    return found | {"messages": len(messages)}


VOLUMES = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "logprobs": {"logprobs": 2},
    "grammar": {"grammar": Grammar("regex", "[0-9]+")},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_cycle_communicates_what_its_formula_says(shape, tmp_path):
    """Two sums of the window's states in every layer; then a pair of numbers a node, or a rank's part of its
    logits, padded to the largest; the first rank's tree where it drafts, its path, what grammars allow."""
    hidden, layers, length, batch = 48, 3, 4, 2
    save_llama(tmp_path, vocab_size=37)
    given = [SamplingParams(max_tokens=24, seed=1, ignore_eos=True, **each) for each in VOLUMES.values()]
    steps, _, nodes = SpecShape.parse(shape)

    def work(llm):
        return [volume_of_cycle(llm, shape, params, PROMPTS[1:3]) for params in given]

    ((found, _), _), _ = run_ranks(2, serve, tmp_path, head_of(tmp_path), work, {})
    for regime, volume in zip(VOLUMES, found, strict=True):
        has_grammar = regime == "grammar"
        assert volume == {
            "sum": 2 * layers * batch * nodes * hidden * length,
            "stack": batch * nodes * (16 if regime == "greedy" else 19 * length),
            "first": 8 * batch * (2 * (steps + 1) + 1)
            + batch * nodes * (32 * (steps > 0) + 4 * 2 * has_grammar),
            "messages": batch * has_grammar,
        }


def test_attention_of_own_requests_is_gathered(tmp_path):
    """In place of one of the two sums, a rank gives the rows of as many requests as any rank has, or of twice
    as many as each has of an even batch, not of the 8 that a rank may have."""
    randomised(MIXTURES["deepseek-v3"]).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    short = [[i] * 3 for i in range(1, 9)]
    batches = [PROMPTS[2:3], short[:4], [PROMPTS[4], *short[4:7]]]  # a long prompt beside short ones

    def work(llm):
        return [volume_of_cycle(llm, "4,4,12", params, batch) for batch in batches]

    options = {"data_parallel_attention": True, "max_batch_size": 16}
    ((volumes, _), _), _ = run_ranks(2, serve, tmp_path, head_of(tmp_path), work, options)
    hidden, layers, nodes, length = 48, 3, 12, 4
    states = layers * nodes * hidden * length
    for per_cycle, size, most in zip(volumes, (1, 4, 4), (1, 2, 4), strict=True):
        assert (per_cycle["sum"], per_cycle["stack"]) == (states * size, states * most + 16 * nodes * size)


def serve_from_graphs(ranks, *args):
    engines._graphs = lambda target, config: UncapturedGraphs()
    return serve(ranks, *args)


def test_uneven_batches_of_own_latents_have_graphs(tmp_path):
    """What was prepared and planned for is what runs, wherever the requests of a batch are."""
    randomised(MIXTURES["deepseek-v3"]).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    prompts = [PROMPTS[4], [1] * 3, [2] * 3]  # the first rank has the long one
    ends = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (4, 30, 20)]

    def work(llm):
        captured, seen = llm.warm_up().num_graphs, set()
        planned = graphs_of(llm.target.config, llm.draft, llm.config, "all", chooses_shapes=False).number
        graphs = llm.engine().runner.graphs
        run, known = graphs.run, graphs.num_warm_ups
        graphs.run = lambda call: (
            seen.add((len(call.inputs.slot_ids), len(call.inputs.shard.rows))) or run(call)
        )
        responses = [output.token_ids for output in llm.generate(prompts, ends)]
        return captured, planned, graphs.num_warm_ups - known, seen, responses

    options = {"data_parallel_attention": True, "max_batch_size": 4, "batch_sizes": (1, 2, 4)}
    args = serve_from_graphs, tmp_path, head_of(tmp_path), work, {**options, "shape": "2,1,3"}
    ((found, _), first), (_, steps) = run_ranks(2, *args)
    captured, planned, num_later, seen, responses = found
    assert captured == planned and num_later == 0 and steps == first
    assert seen == {(4, 2), (2, 2), (1, 1)}
    alone = LLM(tmp_path, head_of(tmp_path), **OPTIONS).generate(prompts, ends, shape="2,1,3")
    assert responses == [output.token_ids for output in alone]


def weather(llm, num_events, every=40):
    """Requests of all kinds arrive, are aborted, and give way, in shapes that change."""
    rng, live, engine = random.Random(4), [], llm.engine("none")
    for event in range(num_events):
        if not engine.has_work:
            shape = SpecShape.parse(rng.choice(SHAPES))
            changes = shape.steps and rng.random() < 0.5  # and packs windows
            engine.use_shape(Restless(event, (shape,), most_plain=3) if changes else shape)
        if rng.random() < 0.6 and event % every < 10:
            prompt = rng.choice(PROMPTS)[: rng.randint(1, 39)] + [rng.randrange(11)]
            request = llm.make_request(prompt, rng.choice(MIXED))
            engine.add_request(request)
            live.append(request)
        if live and rng.random() < 0.05:
            engine.abort(rng.choice(live))
        if engine.has_work:
            for request in engine.step():
                if request.has_stops:
                    request.decode_text()
                    engine.stop(request)
            engine.check()
        live = [request for request in live if request.finish_reason is None]
    for request in live:
        engine.abort(request)
    engine.drain()


def check_weather(results, num_events):
    (_, totals), first = results[0]
    assert all(steps == first for _, steps in results)
    assert len(first) > num_events / 3
    assert totals.num_preemptions > 0 and min(totals.num_finished[way] for way in ("abort", "stop")) > 0
    assert len(totals.shapes) > 1


STORMS = (2, 120), (4, 1200), (2, 20_000)


@pytest.mark.parametrize(
    ("size", "num_events"),
    [STORMS[0], *(pytest.param(*storm, marks=pytest.mark.nightly) for storm in STORMS[1:])],
)
def test_all_ranks_take_in_the_same_tokens_in_a_storm(folder, size, num_events):
    work = partial(weather, num_events=num_events)
    results = run_ranks(size, serve, folder, head_of(folder), work, {"kv_tokens": 88}, timeout_s=1800)
    check_weather(results, num_events)


@pytest.mark.parametrize(
    ("size", "num_events"),
    [STORMS[0], *(pytest.param(*storm, marks=pytest.mark.nightly) for storm in STORMS[1:])],
)
def test_all_ranks_take_in_the_same_tokens_in_a_storm_of_own_latents(size, num_events, tmp_path):
    randomised(MIXTURES["deepseek-v3"]).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    sizes = {"kv_tokens": 64 * size, "max_context": 58, "max_batch_size": 2 * size}
    options = {"data_parallel_attention": True, **sizes}
    work = partial(weather, num_events=num_events, every=50)
    results = run_ranks(size, serve, tmp_path, head_of(tmp_path), work, options, timeout_s=1800)
    check_weather(results, num_events)


class Sleepy(Engine):
    """Engine that takes its time, by chance, before steps and amid what it takes in."""

    rng = random.Random(8)

    def nap(self):
        time.sleep(self.rng.choice((0.0, 0.0, 0.0, 0.04)))

    def step(self):
        self.nap()
        return super().step()

    def _take(self, *args):
        self.nap()
        return super()._take(*args)


def serve_beside_a_slow_rank(ranks, *args):
    if not ranks.is_first:
        llms.Engine = Sleepy
    return serve(ranks, *args)


@pytest.mark.nightly
def test_a_slow_rank_is_waited_for(folder):
    """Shapes are chosen by times, which are others on every rank, and responses are those of one process."""

    def work(llm):
        return responses(llm, MIXED, ("4,1,5", "auto"))

    expected = work(LLM(folder, head_of(folder), **OPTIONS))
    ((found, _), first), (_, slow) = run_ranks(
        2, serve_beside_a_slow_rank, folder, head_of(folder), work, {}, timeout_s=250
    )
    assert slow == first and found == expected


def test_the_first_rank_alone_follows_grammars(folder):
    """One that it gives up for its time, which no other rank would, ends the response on all; others have no
    tokenizer, and the one that it was given is not that of the folder."""

    def work(llm):
        slow, patient = SamplingParams(max_tokens=60, grammar=Grammar("regex", "[0-4]+")), SamplingParams()
        requests = [llm.make_request(PROMPTS[1], params) for params in (slow, patient)]
        engine, limit = llm.engine("4,1,5"), compiler.MAX_FILL_S
        for request in requests:
            engine.add_request(request)
        while engine.has_work:
            engine.step()
            if len(requests[0].token_ids) > 3:
                compiler.MAX_FILL_S = -1.0
        compiler.MAX_FILL_S = limit
        short = SamplingParams(max_tokens=5, grammar=slow.grammar)
        last = llm.generate(PROMPTS[:2], short, shape="4,1,5")
        return [request.output() for request in requests], last

    given = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=given, eos_token="<end>")
    results = run_ranks(2, serve, folder, head_of(folder), work, {"tokenizer": tokenizer})
    (((slow, patient), last), _), first = results[0]
    assert slow.finish_reason == "abort" and 3 < len(slow.token_ids) < 20
    assert all(each.finish_reason in ("stop", "length") for each in (patient, *last))
    assert all(each.text and set(each.text) <= set("01234") for each in last)
    assert [steps for _, steps in results] == [first] * 2


def test_what_ranks_cannot_share_is_refused_by_name(folder, monkeypatch):
    with pytest.raises(UserError, match="a loaded model was given"):
        LLM(load_target(folder), tensor_parallel=2)
    with pytest.raises(UserError, match="among the ranks of tensor parallelism, and there is one"):
        LLM(folder, expert_parallel=True)
    for errors in run_ranks(2, load_what_one_refuses, folder):
        assert "shares routed experts, and this llama has none" in errors
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match="torchrun has started 3 processes, and tensor_parallel is 2"):
        LLM(folder, tensor_parallel=2)


def test_ranks_end_with_their_siblings_and_parents_before_they_meet(folder, tmp_path, monkeypatch):
    worker = WorkerArgs(1, tmp_path, folder, None, EngineConfig(device="cpu", tensor_parallel=2))
    command = [sys.executable, "-m", WORKER]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        process.stdin.write(pickle.dumps(worker))
        process.stdin.flush()
        while worker.missing_ranks():
            assert process.poll() is None
            time.sleep(0.05)
        process.stdin.close()  # as the end of the process that has started it does
        assert process.wait(10) == 1
    monkeypatch.setattr(sys, "executable", "/bin/false")
    for _ in range(2):  # nothing is left of the first time
        with pytest.raises(UserError, match=r"^Rank 1 of tensor parallelism .* has ended with exit code 1\."):
            LLM(folder, tensor_parallel=2, device="cpu")


def interrupt(ranks, folder):
    """Ctrl-C amid a step, after an error that all ranks raise."""
    try:
        llm, _ = make_llm(ranks, folder, None)
    except RankLost as error:
        return str(error)
    with pytest.raises(UserError, match="there is no draft"):
        llm.generate(PROMPTS[:1], shape="4,1,5")
    take, found = Engine._append_tokens, llm.generate(PROMPTS[:1], SamplingParams(max_tokens=5))

    def interrupted(*args):
        raise KeyboardInterrupt

    Engine._append_tokens = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[:1])
    Engine._append_tokens = take
    for call in (partial(llm.generate, PROMPTS[:1]), partial(llm.logits, [1]), partial(llm.set_draft, None)):
        with pytest.raises(RankLost, match=r"was interrupted \(KeyboardInterrupt\)\. Make the LLM anew\."):
            call()
    llm.close()
    return len(found[0].token_ids)


def test_ranks_that_may_be_out_of_step_do_not_go_on(folder):
    assert run_ranks(2, interrupt, folder) == [5, "A rank has ended."]


class WorkOfOthers:
    """Event of work on a GPU that waits for another rank: for so many looks at it, or for ever."""

    num_looks = 3

    def __init__(self):
        self.left = self.num_looks

    def query(self):
        self.left -= 1
        return self.left < 0


class CopyBehindWorkOfOthers(HostCopy):
    """Results that are there when such work is done."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self._event = WorkOfOthers()


def wait_for_work(ranks, folder, lost):
    """Results that come, then some that do not: another rank has ended, or does not answer."""
    try:
        llm, _ = make_llm(ranks, folder, None)
    except RankLost as error:
        return str(error)
    runners.HostCopy = CopyBehindWorkOfOthers
    found = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=5))
    WorkOfOthers.num_looks = sys.maxsize
    if lost is None:
        llm.group.ranks.timeout_s = 0.3
    else:
        threading.Timer(0.3, llm.group.ranks.lose, [lost]).start()
    with pytest.raises(RankLost) as error:
        llm.generate(PROMPTS[:1])
    llm.close()
    return len(found[0].token_ids), str(error.value)


@pytest.mark.parametrize("lost", ["Rank 1 has been ended.", None])
def test_results_are_waited_for_as_long_as_all_ranks_answer(folder, lost):
    first, second = run_ranks(2, wait_for_work, folder, lost)
    assert first == (5, lost or "A rank has not answered for 0.3 seconds.")
    assert second == "A rank has ended."


@pytest.mark.nightly
def test_a_call_names_the_rank_that_was_killed(folder):
    llm = LLM(folder, tensor_parallel=2, **OPTIONS)
    assert llm.generate(PROMPTS[:1], SamplingParams(max_tokens=5))[0].token_ids
    (pid,) = llm.group.workers.pids
    os.kill(pid, signal.SIGKILL)
    last = time.monotonic() + 30
    while llm.group.ranks.lost is None:
        assert time.monotonic() < last
        time.sleep(0.01)
    with pytest.raises(RankLost, match=rf"^Rank 1 of .* \(process {pid}\) was ended by SIGKILL\.$"):
        llm.generate(PROMPTS[:1])
    llm.close()


def load_without_a_hub(ranks, folder):
    """Of each rank, the error of a draft that only the second one cannot find."""

    def find(*args):
        if ranks.is_first:
            return opened
        raise UserError("The hub cannot be reached.", "Try again.")

    opened = llms.DraftFolder.open(folder)
    llms.DraftFolder.open = find
    worker = WorkerArgs(ranks.rank, None, folder, None, None)
    with pytest.raises(UserError) as error:
        LLM(folder, "org/head", tensor_parallel=2, worker=worker, **OPTIONS)
    return error.value.cause


def test_a_draft_that_one_rank_cannot_find_is_an_error_of_all(folder):
    assert run_ranks(2, load_without_a_hub, folder) == ["The hub cannot be reached."] * 2


def load_what_one_refuses(ranks, folder):
    """Of each rank, the error of what only the first one finds."""
    with pytest.raises(UserError) as error:
        ranks.together(lambda: load_share(folder, ranks, expert_parallel=ranks.is_first))
    return error.value.cause


@pytest.mark.nightly
def test_shapes_that_the_first_rank_measures_are_those_of_all(folder):
    def work(llm):
        found = responses(llm, SamplingParams(max_tokens=30, ignore_eos=True), ("auto", "none", "auto"))
        assert isinstance(llm.engine().shapes, ShapePolicy)
        return found

    compare(folder, 2, work, head_of(folder))


@pytest.mark.nightly
@pytest.mark.real
@pytest.mark.parametrize(("size", "shape"), [(2, "4,1,5"), (3, "5,4,16")])
def test_the_demo_speaks_the_same_on_several_ranks(size, shape):
    """9 query and 3 key-value heads: on two ranks 6 and 3."""
    prompts = ["What is the capital of France?", "Write the numbers from one to ten as words."]
    options = {"max_batch_size": 2, "max_context": 256}
    params = [SamplingParams(max_tokens=48), SamplingParams(max_tokens=48, temperature=0.8, seed=3)]

    def work(llm):
        return responses(llm, params, (shape,), prompts)

    totals = compare("smollm2-135m-instruct", size, work, DEMO_HEAD, **options)
    assert totals.spec.accept_length > 1.3
