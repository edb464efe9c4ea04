"""Recordings of operations: they give the bits of what was recorded, and an engine that replays them says
what one in Python says, whatever the drafter, the sampling, the batch and the lengths."""

import gc
import weakref

import numpy as np
import pytest
import torch
from fork_server import FORK_SERVER
from recorded_alone import record_without_compiler
from sweep import sweep
from tiny import tiny_head, tiny_target
from tiny_mixtures import randomised
from tiny_run import make_target
from versions import needs

from eagle_kit.core.errors import RankLost
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.structured_outputs import Grammar
from eagle_kit.engine.graphs import cpu_graph
from eagle_kit.engine.graphs.cpu_graph import CpuGraphs, Recording
from eagle_kit.engine.graphs.cuda_graph import CaptureError, GraphCall, Lengths
from eagle_kit.engine.llm import LLM
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.source import load_tokenizer
from eagle_kit.ops.cpu import cpp
from eagle_kit.ops.cpu.guards import guarded_choice
from eagle_kit.ops.experts import experts, pack_experts
from eagle_kit.ops.rows import gather_rows, write_rows
from tests.engine.test_moe_engine import TARGETS

pytestmark = pytest.mark.skipif(not cpu_graph.available(), reason="torch without TorchScript's graphs")
NO_LENGTHS = Lengths(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))


def recorded(llm, after=1):
    llm.engine().runner.graphs = CpuGraphs(after)
    return llm


def check_recorded(graphs):
    assert graphs.num_graphs > 0 and not graphs._refused


def record(body, inputs, lengths=NO_LENGTHS):
    recording = Recording(body, inputs)
    recording.compile(lengths)
    return recording


class Bag:
    """What a body closes over."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(6, 6, generator=generator)
        self.store = torch.zeros(4, 6)

    def body(self, inputs):
        x, at = inputs
        y = torch.nn.functional.linear(x, self.weight).mul_(2)
        first, second = y.split([2, 4], -1)
        y = torch.cat((second, first), -1)[:, None].flatten(1) + 1
        best, places = y.topk(3)
        self.store[at] = y
        self.store.index_add_(0, at, y, alpha=0.5)
        seen = torch.where(y > 0.5, y, float("-inf")).softmax(-1, dtype=torch.float32).nan_to_num_()
        kinds = torch.arange(3, dtype=torch.int32).to(torch.int64) << 2
        half = (y.bfloat16() * 1.5).view(-1, 3, 2).transpose(1, 2).any(-1)
        return best, (places % 4, kinds), seen, half, self.store[None, at], x


def test_a_replay_gives_the_bits_of_the_body_and_its_changes():
    ours, theirs = Bag(), Bag()
    generator = torch.Generator().manual_seed(1)
    with torch.inference_mode():
        example = torch.randn(2, 6, generator=generator), torch.tensor([1, 3])
        recording = record(ours.body, example)
        theirs.body(example)
        for _ in range(4):
            x, at = torch.randn(2, 6, generator=generator), torch.randperm(4, generator=generator)[:2]
            got, wanted = recording.replay((x, at)), theirs.body((x, at))
            assert torch.equal(ours.store, theirs.store)
            assert type(got) is tuple and type(got[1]) is tuple and got[5] is not None
            for mine, other in zip(cpu_graph.leaves(got), cpu_graph.leaves(wanted), strict=True):
                assert mine.dtype == other.dtype and torch.equal(mine, other)


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), RankLost("Rank 1 of two was ended by SIGKILL.")],
    ids=lambda e: type(e).__name__,
)
def test_an_error_of_an_operation_inside_a_replay_stays_what_it_is(error):
    """Ctrl-C reaches Python code only, which in a replay is that of our own operations; TorchScript has an
    error of its own for theirs."""
    raised = []

    def negated(x):
        if raised:
            raise error
        return -x

    library = torch.library.Library("eagle_kit_interrupted", "FRAGMENT")
    name = f"negated_or_{type(error).__name__}"
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, negated, "CPU")
    x = torch.ones(2)
    recording = record(getattr(torch.ops.eagle_kit_interrupted, name).default, x)
    assert recording.replay(x).tolist() == [-1.0, -1.0]
    raised.append(True)
    with pytest.raises(type(error)) as told:
        recording.replay(x)
    assert str(told.value) == str(error)


READS = {
    "item": lambda x: x * x[0].item(),
    "tolist": lambda x: x * x.tolist()[0],
    "bool": lambda x: x if x.sum() > 0 else -x,
    "index": lambda x: x[: int(x[0])],
    "nonzero": lambda x: torch.nonzero(x),
    "mask": lambda x: x[x > 0],
    "uint8 mask": lambda x: x[torch.tensor([1, 0], dtype=torch.uint8)],
    "places": lambda x: torch.where(x > 2)[0],
    "unique": lambda x: torch.unique(x),
    "array": lambda x: x * float(np.asarray(x)[0]),
}


@pytest.mark.parametrize("read", READS)
def test_a_body_that_looks_at_numbers_is_not_recorded_and_still_right(read):
    graphs = CpuGraphs(record_after=1)
    for x in (torch.tensor([2.0, 3.0]), torch.tensor([1.0, -4.0])):
        got = graphs.run(GraphCall("read", read, READS[read], x, lambda: None, NO_LENGTHS))
        assert torch.equal(got, READS[read](x))
    assert graphs.num_graphs == 0 and len(graphs._refused) == 1
    with pytest.raises(CaptureError, match="reads numbers on the host"):
        Recording(READS[read], x)


REFUSED = {
    "a rounded quotient": lambda x: torch.div(x, 2, rounding_mode="floor"),
    "a bool for a number": lambda x: torch.full((2,), True) & (x > 2),
    "a bool among numbers": lambda x: torch.where(x > 2, True, False),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_down_stays_right(name):
    graphs = CpuGraphs(record_after=1)
    with torch.inference_mode():
        for x in (torch.tensor([5.0, 7.0]), torch.tensor([1.0, 3.0])):
            wanted = REFUSED[name](x)
            got = graphs.run(GraphCall("refused", name, REFUSED[name], x, lambda: None, NO_LENGTHS))
            assert torch.equal(got, wanted) and got.dtype == wanted.dtype
    assert graphs.num_graphs == 0


def test_operations_without_a_result_and_tensors_that_come_twice():
    def body(pair):
        x = pair[0] + pair[1]
        torch._foreach_add_([x], 1)
        return x

    with torch.inference_mode():
        x = torch.ones(2)
        recording = record(body, (x, x))
        assert recording.replay((x, 3 * x)).tolist() == [5.0, 5.0]


def test_a_draw_is_refused_and_what_ran_does_not_run_twice():
    runs, graphs = [], CpuGraphs(record_after=1)

    def body(x):
        runs.append(x)
        return x + torch.rand(2, generator=torch.Generator().manual_seed(3))

    first = graphs.run(GraphCall("draw", 0, body, torch.ones(2), lambda: None, NO_LENGTHS))
    assert len(runs) == 1 and graphs.num_graphs == 0
    assert torch.equal(graphs.run(GraphCall("draw", 0, body, torch.ones(2), lambda: None, NO_LENGTHS)), first)


class Choosing:
    """Reads as many columns as lengths need."""

    def __init__(self):
        self.slots = torch.tensor([3, 9, 30, 31])

    def body(self, rows):
        sizes = guarded_choice(self.slots[rows] + 1, lambda lengths: tuple(-(-n // 8) for n in lengths))
        return torch.arange(8 * max(sizes)).sum()[None] + rows


def test_each_choice_has_its_recording():
    graphs, choosing = CpuGraphs(record_after=1), Choosing()

    def run(*rows):
        rows = torch.tensor(rows)
        lengths = Lengths(choosing.slots, rows)
        got = graphs.run(GraphCall("choose", 0, choosing.body, rows, lambda: rows, lengths))
        assert torch.equal(got, choosing.body(rows))
        return graphs.num_graphs

    assert [run(0), run(0), run(1), run(2), run(3), run(3)] == [1, 1, 2, 3, 3, 3]
    choosing.slots[0] = 15
    assert run(0) == 3, "of the size of row 1"
    choosing.slots[0] = 16
    assert run(0) == 4
    assert run(0, 0) == 5, "other shapes"
    assert run(0, 1) == 6, "requests that need different columns"


def test_choices_by_anything_else_are_refused():
    slots = torch.tensor([3, 9])
    lengths = Lengths(slots, torch.tensor([1]))

    def changed(rows):
        slots[rows] = slots[rows] + 1
        return slots[rows]

    others = (lambda rows: rows, lambda rows: slots[rows] * 2, lambda rows: slots[rows + 0])
    for by in (*others, lambda rows: slots[rows].add_(5), lambda rows: slots[rows].add_(5) + 1, changed):
        recording = Recording(lambda rows, by=by: rows * guarded_choice(by(rows), tuple)[0], lengths.slot_ids)
        with pytest.raises(CaptureError, match="not by lengths|changed"):
            recording.compile(lengths)


@pytest.mark.skipif(not cpp.available(), reason="needs a C++ compiler")
def test_choices_by_lengths_that_were_gathered_with_other_rows_are_traced_and_no_others():
    slots, others, place = torch.tensor([3, 9]), torch.tensor([5, 6]), torch.tensor([1])
    lengths = Lengths(slots, place)

    def gathered(rows):
        return gather_rows([others, slots], rows, backend="cpp")

    def changed(rows):
        write_rows([slots], rows, [slots[:1] * 1], backend="cpp")
        return gathered(rows)[1]

    def record_choice(by):
        recording = Recording(lambda rows: rows * guarded_choice(by(rows), tuple)[0], place)
        recording.compile(lengths)
        return recording

    recording = record_choice(lambda rows: gathered(rows)[1] + 4)
    assert [condition([9]) for condition in recording.conditions] == [(13,)]
    assert recording.replay(place).tolist() == [13]
    for by in (lambda rows: gathered(rows)[0], lambda rows: gathered(rows + 0)[1], changed):
        with pytest.raises(CaptureError, match="not by lengths|changed"):
            record_choice(by)


def test_a_recording_keeps_no_tensor_of_the_run_that_made_it():
    made = []

    def body(x):
        first = x * 2
        made.append(weakref.ref(first))
        return first + 0.0, first + -0.0 * first, first.add(-0.0).reciprocal()

    recording = record(body, torch.zeros(3))
    gc.collect()
    assert made[0]() is None
    assert recording.replay(torch.tensor([1.0, 0.0, -0.0]))[2].tolist() == [0.5, float("inf"), -float("inf")]


def test_recordings_are_few(monkeypatch):
    monkeypatch.setattr(cpu_graph, "MAX_RECORDINGS", 3)
    monkeypatch.setattr(cpu_graph, "MAX_COUNTED", 5)
    graphs = CpuGraphs(record_after=2)
    for turn in range(3):
        for size in range(1, 9):
            x = torch.ones(size)
            graphs.run(GraphCall("many", 0, lambda x: x * 2, x, lambda: None, NO_LENGTHS))
            graphs.run(GraphCall("many", 0, lambda x: x * 2, x, lambda: None, NO_LENGTHS))
            assert graphs.num_graphs == min(3, 8 * turn + size) and len(graphs._runs) <= 5


def test_batches_that_change_too_often_are_recorded_ever_less(monkeypatch):
    monkeypatch.setattr(cpu_graph, "MAX_RECORDINGS", 3)
    graphs, recorded = CpuGraphs(record_after=2), []
    record = graphs._record
    monkeypatch.setattr(graphs, "_record", lambda *args: recorded.append(0) or record(*args))

    def run(size, times):
        x = torch.ones(size)
        for _ in range(times):
            assert (
                graphs.run(GraphCall("many", 0, lambda x: x * 2, x, lambda: None, NO_LENGTHS)).sum()
                == 2 * size
            )

    for _ in range(200):
        for size in range(1, 9):
            run(size, 3)
    assert len(recorded) < 60, "of 1,600 turns"
    run(20, 4000)
    before = len(recorded)
    run(20, 1000)
    assert len(recorded) == before and graphs.num_graphs == 3, "what runs often is recorded all the same"


def test_engines_of_a_process_share_the_bound(monkeypatch):
    monkeypatch.setattr(cpu_graph, "MAX_RECORDINGS", 3)
    engines, x = [CpuGraphs(record_after=1) for _ in range(5)], torch.ones(2)
    for count, graphs in enumerate(engines, 1):
        for name in "ab":
            graphs.run(GraphCall(name, 0, lambda x: x * 2, x, lambda: None, NO_LENGTHS))
        assert sum(each.num_graphs for each in engines) == min(3, 2 * count)
    del engines[-1], graphs
    last = engines[-1]
    for name in "abababab":  # it dropped what it had not used, and waits for longer
        assert last.run(GraphCall(name, 0, lambda x: x * 2, x, lambda: None, NO_LENGTHS)).tolist() == [2, 2]
    assert last.num_graphs == 2, "recordings of an engine that is gone do not count"


@pytest.mark.parametrize(
    ("tree", "sampled", "in_cpp"),
    [
        ("dynamic", False, False),
        pytest.param("static", True, False, marks=pytest.mark.nightly),
        pytest.param("dynamic", True, True, marks=pytest.mark.nightly),
        pytest.param("static", False, True, marks=pytest.mark.nightly),
    ],
)
def test_lengths_that_grow_over_columns_change_nothing(tree, sampled, in_cpp, monkeypatch):
    if not in_cpp:
        monkeypatch.setattr(cpp, "available", lambda: False)
    target = tiny_target(vocab_size=64)
    head = tiny_head(target, 50)
    options = {"max_context": 400, "tree": tree, "page_size": 16, "max_batch_size": 1}
    sampling = {"temperature": 0.9, "seed": 5} if sampled else {}
    if tree == "dynamic":
        options |= {"sampled_drafts": sampled, "shape": "3,1,4" if sampled else "3,2,6"}
    # Columns come in steps of 64.
    prompts = [[5] * 50, [6, 7] * 60, [9] * 180]
    params = SamplingParams(max_tokens=24, ignore_eos=True, **sampling)
    expected = LLM(target, head, graph_mode="off", **options).generate(prompts, params)
    llm = recorded(LLM(target, head, **options))
    for _ in range(2):
        got = llm.generate(prompts, params)
        assert [a.token_ids for a in got] == [a.token_ids for a in expected]
    check_recorded(llm.engine().runner.graphs)
    if cpp.available():
        assert llm.engine().runner.graphs.num_graphs == 1
    else:  # torch's attention has a recording for each number of columns
        assert llm.engine().runner.graphs.num_graphs > 3


@pytest.mark.parametrize("shape", sweep(["none", "3,2,6"], fast=["3,2,6"]))
def test_requests_of_different_lengths_share_a_recording(shape):
    target = tiny_target(vocab_size=64)
    head = tiny_head(target, 50)
    options = {"max_context": 400, "page_size": 16, "max_batch_size": 3, "shape": shape}
    prompts = [[5] * 40, [6, 7] * 70, [9] * 3]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    expected = LLM(target, head, graph_mode="off", **options).generate(prompts, params)
    llm = recorded(LLM(target, head, **options))
    got = llm.generate(prompts, params)
    assert [a.token_ids for a in got] == [a.token_ids for a in expected]
    graphs = llm.engine().runner.graphs
    check_recorded(graphs)
    of_three = [kind for kind, _ in graphs._recordings if kind[2][0][0] == 3]
    assert len(of_three) == 1, "one recording for all lengths that three requests have"


def test_grammars_and_ngrams_are_recorded_in_parts(text_target):
    options = {"tokenizer": text_target[1], "max_context": 128, "max_batch_size": 2}
    target = text_target[0]
    head = tiny_head(target, draft_vocab_size=250)
    strict = SamplingParams(max_tokens=30, grammar=Grammar("regex", "(ab|cd){6}"))
    free = SamplingParams(max_tokens=40)
    worded = SamplingParams(max_tokens=30, ignore_eos=True, bad_words=("$y", "=", "y"))
    drafted = {"draft": head, "shape": "3,1,4"}
    ngram = {"algorithm": "NGRAM", "shape": "8,4,12"}
    for draft, params in ((drafted, strict), (drafted, worded), (ngram, free)):
        expected = LLM(target, graph_mode="off", **draft, **options).generate(["Say.", "Go."], params)
        llm = recorded(LLM(target, **draft, **options))
        got = llm.generate(["Say.", "Go."], params)
        assert [a.token_ids for a in got] == [a.token_ids for a in expected]
        check_recorded(llm.engine().runner.graphs)


@pytest.fixture
def text_target(tmp_path):
    folder = make_target(tmp_path / "target")
    return load_target(folder), load_tokenizer(folder)


def test_packed_experts_go_where_each_token_is_sent():
    generator = torch.Generator().manual_seed(2)
    gate_up, down = torch.randn(6, 32, 16, generator=generator), torch.randn(6, 16, 16, generator=generator)
    packed = pack_experts(gate_up, down)
    if packed is None:
        pytest.skip("needs oneDNN")

    def body(inputs):
        return experts(*inputs, gate_up, down, packed)

    def inputs():
        ids = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(3)])
        return torch.randn(3, 16, generator=generator), ids, torch.rand(3, 2, generator=generator)

    with torch.inference_mode():
        recording = record(body, inputs())
        for _ in range(3):
            given = inputs()
            assert torch.equal(recording.replay(given), body(given))


def test_a_recording_outlives_what_packed_its_experts(tmp_path):
    randomised(TARGETS["mixtral"]).save_pretrained(tmp_path)
    target = load_target(tmp_path)
    first = recorded(LLM(target, max_context=128))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = first.generate([[1, 2, 3]], params)[0].token_ids
    check_recorded(first.engine().runner.graphs)
    assert LLM(target, max_context=128).generate([[1, 2, 3]], params)[0].token_ids == expected
    gc.collect()
    assert first.generate([[1, 2, 3]], params)[0].token_ids == expected


def test_a_pool_of_fp8_is_recorded():
    target = tiny_target(vocab_size=64)
    options = {"max_context": 128, "kv_dtype": "fp8_e4m3"}
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    expected = LLM(target, graph_mode="off", **options).generate([[1, 2, 3]], params)
    llm = recorded(LLM(target, **options))
    assert llm.generate([[1, 2, 3]], params)[0].token_ids == expected[0].token_ids
    check_recorded(llm.engine().runner.graphs)


def test_the_default_on_a_cpu_records_what_runs_often():
    target = tiny_target(vocab_size=64)
    llm = LLM(target, max_context=128)
    assert isinstance(llm.engine().runner.graphs, CpuGraphs)
    llm.generate([[1, 2]], SamplingParams(max_tokens=cpu_graph.RECORD_AFTER - 2, ignore_eos=True))
    assert llm.engine().runner.graphs.num_graphs == 0
    llm.generate([[1, 2]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert llm.engine().runner.graphs.num_graphs == 1
    assert not isinstance(LLM(target, graph_mode="off").engine().runner.graphs, CpuGraphs)


@needs("torch", "2.13", "TorchScript imports the compiler before it")
def test_a_recording_does_not_import_torchs_compiler():
    """That takes longer than some hundred cycles of a small model."""
    process = FORK_SERVER.Process(target=record_without_compiler)
    process.start()
    process.join()
    assert process.exitcode == 0
