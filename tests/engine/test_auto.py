"""Shapes chosen by measurements: measured once, kept, the same text, and shown."""

import itertools
import math
from dataclasses import replace

import pytest
from disabled import disabled
from sweep import sweep
from tiny import tiny_head, tiny_target

from eagle_kit.autotune import files
from eagle_kit.autotune.chooser import ShapeChooser
from eagle_kit.autotune.costs import Timing
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import NO_SPECULATION, ShapeTable, SpecShape
from eagle_kit.engine.calibrate import cycle_timing as timing
from eagle_kit.engine.calibrate import policies as tune
from eagle_kit.engine.calibrate.cycle_timing import Plan, Point, Visit, time_cycles
from eagle_kit.engine.graphs import cpu_graph
from eagle_kit.engine.graphs.cpu_graph import RECORD_AFTER, CpuGraphs
from eagle_kit.engine.llm import LLM
from eagle_kit.ops.cpu import cpp

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]
SAMPLING = {"greedy": {}, "seeded": {"temperature": 1.0, "seed": 5}}
SHAPES = tuple(map(SpecShape.parse, ("1,1,2", "3,2,6")))


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "folder", lambda: tmp_path)
    return tmp_path


def make(**options):
    target = tiny_target(vocab_size=31)
    head = tiny_head(target, draft_vocab_size=20)
    return LLM(target, head, **{"max_context": 128, "max_batch_size": 3, "graph_mode": "off", **options})


def texts(outputs):
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(
    ("sampling", "graph_mode"),
    sweep(itertools.product(SAMPLING, ("off", "cycle")), fast=[("greedy", "off"), ("seeded", "cycle")]),
)
def test_the_default_is_measured_and_its_text_is_that_of_plain_decoding(sampling, graph_mode, monkeypatch):
    llm = make(graph_mode=graph_mode)
    params = SamplingParams(max_tokens=60, **SAMPLING[sampling])
    policy = llm.engine().shapes
    assert isinstance(policy, ShapeChooser)
    forecast_of, decisions = policy._forecast_of, itertools.count()

    def forecast(requests, context):
        """A target of microseconds is fastest alone; here another candidate is fastest at every decision."""
        found = forecast_of(requests, context)
        seconds = found.seconds.copy()
        seconds[next(decisions) % len(seconds)] /= 8
        return found._replace(seconds=seconds, least_seconds=seconds)

    monkeypatch.setattr(policy, "_forecast_of", forecast)
    outputs = llm.generate(PROMPTS, params)
    used = set().union(*(output.shapes for output in outputs))
    assert NO_SPECULATION in used and len(used) > 1
    assert texts(outputs) == texts(llm.generate(PROMPTS, params, shape="none"))
    for output in outputs:
        drafting = [count for shape, count in output.shapes.items() if shape.steps]
        assert sum(drafting) == output.stats.num_verifies, "plain cycles verify nothing"
    lines = llm.engine().reasons()
    assert [line.partition(":")[0] for line in lines[:-1]] == ["batch 1", "batch 2"], "powers of two"
    assert "a short measurement" in lines[-1] and "an average head" in lines[-1]
    llm.engine().check()


def test_sampled_text_does_not_depend_on_whether_an_engine_was_measured_before():
    params = SamplingParams(max_tokens=20, temperature=1.0)
    cold, warm = ([output.token_ids for output in make().generate(PROMPTS, params)] for _ in range(2))
    assert cold == warm


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch, caplog):
    def fail(costs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tune, "save_costs", fail)
    assert make().generate(PROMPTS, SamplingParams(max_tokens=4))
    assert "cannot be kept" in caplog.text


@pytest.mark.usefixtures("measured_costs")
def test_a_target_of_nan_is_not_timed_for_ever():
    target = tiny_target(vocab_size=31)
    target.norm.weight.data.fill_(float("nan"))
    llm = LLM(target, tiny_head(target, draft_vocab_size=20), max_context=128, graph_mode="off")
    with pytest.warns(UserWarning, match="not finite.*default shape"):
        engine = llm.engine()
    assert engine.shapes == ShapeTable.parse(llm.default_shape)
    assert [each.finish_reason for each in llm.generate(PROMPTS[:1])] == ["error"]


@pytest.mark.usefixtures("measured_costs")
def test_an_engine_without_a_shape_runs_cycles_and_times_them(monkeypatch):
    monkeypatch.setattr(tune, "QUICK_ROUNDS", timing.LEAST_ROUNDS)
    llm = make(max_batch_size=1)
    timings = find_timings(llm)
    assert {each.shape for each in timings} >= {NO_SPECULATION, *tune.QUICK_SHAPES}
    assert all(0 < each.seconds < math.inf for each in timings)
    params = SamplingParams(max_tokens=20)
    assert texts(llm.generate(PROMPTS, params)) == texts(llm.generate(PROMPTS, params, shape="none"))


def test_large_windows_are_timed_where_one_request_may_have_them():
    shapes = {each.shape for each in find_timings(make(max_batch_size=1, shape="none"), "auto")}
    assert shapes >= {NO_SPECULATION, *tune.QUICK_SHAPES}


def test_what_would_be_chosen_is_timed_as_well():
    timed = {(each.batch_size, each.shape) for each in find_timings(make(max_batch_size=3))}
    assert {size for size, _ in timed} == {1, 3}
    assert {shape for _, shape in timed} - {NO_SPECULATION, *tune.QUICK_SHAPES}


def find_timings(llm, shape=None):
    engine = llm.engine(shape)
    return files.find_costs(tune.engine_key(engine), None).timings


@pytest.mark.parametrize("graph_mode", ["off", "cycle"])
def test_times_are_learnt_from_cycles_that_are_like_others(graph_mode):
    llm = make(graph_mode=graph_mode, max_batch_size=1, lag=0)
    policy, plan = llm.engine().shapes, [NO_SPECULATION] * 3 + [SHAPES[0]] * 3
    assert isinstance(policy, ShapeChooser)
    chosen, timed = [], []

    def choose(requests, context):
        chosen.append(plan[len(chosen) % len(plan)])
        return chosen[-1]

    policy.choose = choose
    policy.shapes = [*dict.fromkeys([*policy.shapes, SHAPES[0]])]
    policy.observe, policy.observe_time = lambda *_: None, lambda size, shape, *_: timed.append(shape)
    llm.generate(PROMPTS[:1], SamplingParams(max_tokens=100, ignore_eos=True))
    caught_up = sum(a != b and b.steps > 0 for a, b in itertools.pairwise(chosen))
    assert caught_up > 5
    if graph_mode == "off":
        assert len(timed) == len(chosen) - caught_up - 1  # nor is the one behind the prompt
        return
    warming_up = 2 * RECORD_AFTER - math.ceil(RECORD_AFTER / 3)  # of the two kinds; one of three catches up
    if cpp.available():
        assert len(timed) == len(chosen) - caught_up - warming_up
    else:  # and of each number of columns
        assert 0 < len(timed) < len(chosen) - caught_up - warming_up


def test_an_engine_is_measured_once_and_another_one_again(monkeypatch):
    make().engine()
    timed = []
    monkeypatch.setattr(
        tune, "time_cycles", lambda engine, plan, **options: timed.append(plan) or time_cycles(engine, plan)
    )
    make().engine()
    assert not timed
    make(kv_dtype="fp8_e4m3").engine()
    assert len(timed) == 2, "what any engine has timed, and what would be chosen by that"


def test_a_shape_that_is_given_is_used_and_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(tune, "time_cycles", None)
    llm = make(shape="2,1,3")
    [output] = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=20, ignore_eos=True))
    assert set(output.shapes) == {SpecShape(2, 1, 3)}
    assert llm.engine().shapes == ShapeTable.parse("2,1,3")
    assert not llm.chooses_shapes and llm.engine().reasons() == []


def test_whether_shapes_are_chosen_is_known_without_a_measurement(monkeypatch):
    monkeypatch.setattr(tune, "time_cycles", None)
    assert make().chooses_shapes
    plain = LLM(tiny_target(), max_context=64)
    assert not plain.chooses_shapes and plain.current_engine is None


def test_drafts_that_cannot_change_have_a_shape_by_default():
    llm = make(tree="static")
    assert not llm.chooses_shapes
    llm.generate([[1, 2]], SamplingParams(max_tokens=4))
    assert llm.engine().shapes == llm.config.shape != ShapeTable.parse(None)
    with pytest.warns(UserWarning, match="cannot change"):
        llm.generate([[1, 2]], SamplingParams(max_tokens=4), shape="auto")


def test_sampled_drafts_choose_among_chains():
    llm = make(sampled_drafts=True)
    llm.generate(PROMPTS, SamplingParams(max_tokens=30, temperature=1.0, seed=1))
    assert {shape.topk for shape in llm.engine().shapes.shapes} == {1}


@pytest.mark.usefixtures("measured_costs")
@pytest.mark.parametrize("lag", sweep([0, 1], fast=[1]))
def test_timing_leaves_an_engine_as_it_was(lag, monkeypatch):
    monkeypatch.setattr(timing, "_is_too_slow", lambda *_: False)  # as drafts of tiny models may be
    llm = make(lag=lag, shape="3,2,6")
    engine = llm.engine()
    before = texts(llm.generate(PROMPTS, SamplingParams(max_tokens=20)))
    totals, shapes = engine.totals, engine.shapes
    timings = time_cycles(engine, Plan([Point(1, 20), Point(3, 60)], SHAPES, 2, 3))
    assert [(t.batch_size, t.shape) for t in timings] == [
        (size, shape) for size in (1, 3) for shape in (NO_SPECULATION, *SHAPES)
    ]
    assert all(each.seconds > 0 for each in timings)
    contexts = [[t.context for t in timings if t.batch_size == size] for size in (1, 3)]
    assert all(max(mine) - min(mine) <= 8 for mine in contexts), "every shape begins at the same tokens"
    assert engine.totals is totals and engine.shapes == shapes and not engine.has_work
    engine.check()
    assert engine.page_pool.num_available == engine.page_pool.num_pages
    assert texts(llm.generate(PROMPTS, SamplingParams(max_tokens=20))) == before


@pytest.mark.usefixtures("measured_costs")
def test_shapes_that_lost_in_a_smaller_batch_or_need_more_memory_are_not_timed():
    """They lost if a cycle takes longer than plain ones for 3 of 4 drafts and the bonus token would."""
    engine = make(max_batch_size=3, shape="1,1,2").engine()
    chain = SHAPES[0]
    tree = SHAPES[1]
    wide = SpecShape(3, 8, 22)
    assert 2 * wide.tokens <= engine.config.most_rows < 3 * wide.tokens
    plan = Plan([Point(1, 10), Point(2, 10), Point(3, 10)], [chain, tree, wide], 1, 1)
    seconds = {NO_SPECULATION: 1.0, chain: 1.8, tree: 3.2, wide: 3.2}
    first = [Timing(1, shape, 10, each) for shape, each in seconds.items()]
    timings = time_cycles(engine, plan, done={Visit(0, plan.points[0]): first})
    assert timings[:4] == first
    shapes = [[each.shape for each in timings if each.batch_size == size] for size in (2, 3)]
    assert chain not in shapes[0] + shapes[1]
    assert {tree, wide} == set(shapes[0]) - {NO_SPECULATION}
    assert wide not in shapes[1]


@pytest.mark.usefixtures("measured_costs")
def test_what_is_timed_is_recorded_and_takes_no_recordings_from_the_engine():
    llm = make(shape="3,2,6", graph_mode="cycle", max_batch_size=1)
    llm.generate(PROMPTS[:1], SamplingParams(max_tokens=60, ignore_eos=True))
    engine = llm.engine()
    graphs, count = engine.runner.graphs, engine.num_graphs
    assert isinstance(graphs, CpuGraphs) and count
    made = []

    def new_empty(graphs):
        made.append(CpuGraphs(record_after=1, is_bounded=False))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuGraphs, "new_empty", new_empty)
        patch.setattr(cpu_graph, "MAX_RECORDINGS", 2)
        time_cycles(engine, Plan([Point(1, 20), Point(1, 60)], SHAPES, 2, 3, num_passes=2))
    assert [each.num_graphs >= 1 + len(SHAPES) for each in made] == [True, True], "of each point, and kept"
    assert engine.runner.graphs is graphs and engine.num_graphs == count


@pytest.mark.usefixtures("measured_costs")
def test_an_interrupted_measurement_leaves_nothing(monkeypatch):
    llm = make(shape="3,1,4")
    engine = llm.engine()
    shapes = engine.shapes
    num_steps = itertools.count()
    step = engine.step

    def interrupted():
        if next(num_steps) == 5:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine, "step", interrupted)
        time_cycles(engine, Plan([Point(2, 20)], SHAPES, 1, 2))
    assert not engine.has_work
    assert engine.shapes == shapes
    assert len(llm.generate(PROMPTS, SamplingParams(max_tokens=5, ignore_eos=True))) == 3


def test_weights_and_sizes_tell_drafts_apart():
    target = tiny_target(vocab_size=31)
    llms = [
        LLM(target, tiny_head(target, draft_vocab_size=20, seed=seed), max_context=64) for seed in (1, 2, 1)
    ]
    keys = [tune.draft_key(llm.draft) for llm in llms]
    assert keys[0] == keys[2] != keys[1]
    engines = [tune.engine_key(llm.engine("none")) for llm in llms]
    assert engines[0] == engines[1]
    other = LLM(target, tiny_head(target, draft_vocab_size=21), max_context=64)
    assert tune.engine_key(other.engine("none")) != engines[0]


def test_costs_are_of_engines_that_run_the_same_cycles(monkeypatch):
    """Whatever takes another time, or none that was measured."""

    def key(**options):
        return tune.engine_key(make(**options).engine("none"))

    usual = key()
    others = [key(kv_dtype="fp8_e4m3"), key(graph_mode="cycle"), key(sampled_drafts=True)]
    monkeypatch.setattr(tune.torch, "get_num_threads", lambda: 77)
    others.append(key())
    with disabled("triton:norm"):
        others.append(key())
    assert all(other != usual for other in others)
    assert usual == key() | {"threads": usual["threads"]}


def test_what_is_measured_in_addition_keeps_what_was_known():
    """A table that ``tune`` has made stays one, with its measurements."""
    engine = make(max_batch_size=1).engine()
    known = replace(files.find_costs(tune.engine_key(engine), None), tuned_to=2)
    nothing_new = Plan([], SHAPES, 2, 1)
    found = tune.measure_costs(engine, nothing_new, before=known)
    assert found.tuned_to == 2 and found.timings == known.timings
