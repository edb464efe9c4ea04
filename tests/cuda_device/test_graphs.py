"""Which graphs an engine captures, when, and in which order."""

from unittest import mock

import pytest
import torch
from restless import Restless

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.engine.graphs.batch_kind import USUAL_KINDS
from eagle_kit.engine.graphs.warm_up import warm_up
from eagle_kit.engine.measured import choice_file
from eagle_kit.engine.memory.graph_memory import graphs_of
from tests.cuda_device.device import phase
from tests.cuda_device.engines import made_up_results, small_llm
from tests.cuda_device.test_warm_up import USUAL, prepared, serve


@pytest.mark.smoke
def test_a_warm_up_captures_the_largest_batches_first():
    llm, _ = prepared("usual", shape="3,1,4")
    keys = [key for name, key in llm.engine().runner.graphs._graphs if name == "cycle"]
    sizes = [key[0] for key in keys]
    assert sizes == [2] * len(USUAL_KINDS) + [1] * len(USUAL_KINDS)


def num_cycles(engine) -> int:
    """Number of graphs of cycles."""
    return sum(name == "cycle" for name, _ in engine.runner.graphs._graphs)


def test_kinds_of_batches_with_graphs_are_few():
    """Draws without a filter, with any filter, with log-probabilities; and with penalties."""
    llm = small_llm("3,1,4", batch_sizes=(2,))
    engine = llm.engine()
    filters = [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3, "min_p": 0.2}, {}]
    with made_up_results():
        for sampling in filters:
            for logprobs in (None, 0, 3, 17):
                params = SamplingParams(max_tokens=3, temperature=1.0, logprobs=logprobs, **sampling)
                llm.generate([[1, 2]], params)
        assert num_cycles(engine) == 3
        for adjusted in (
            {"repetition_penalty": 1.2},
            {"logit_bias": {1: 1.0}, "top_k": 3},
            {"temperature": 0.0},
        ):
            sampling = {"max_tokens": 3, "temperature": 1.0, "presence_penalty": 0.5, **adjusted}
            llm.generate([[1, 2]], SamplingParams(**sampling))
        assert num_cycles(engine) == 4


def test_shapes_that_change_behind_a_warm_up_capture_and_compile_nothing():
    """Plain cycles come between, behind which the draft reads its pending tokens."""
    llm = small_llm("none")
    engine = llm.engine("none")
    policy = Restless(0, [SpecShape.parse(shape) for shape in ("1,1,2", "3,2,6")], most_plain=5)
    engine.use_shape(policy)
    llm.engine = lambda shape=None: engine
    with made_up_results():
        prepared_for = warm_up(engine, "usual")
    of_prompts = 2 * len(engine.runner.prompt_shapes)
    assert prepared_for.num_graphs == len(USUAL_KINDS) * len(policy.shapes) * 2 + of_prompts

    reserved = torch.cuda.memory_reserved()
    with phase() as found, made_up_results():
        serve(llm, USUAL)
    assert policy.used == set(policy.shapes)
    assert found.counts["captures"] == 0 and found.counts["modules_loaded"] == 0
    assert torch.cuda.memory_reserved() == reserved


def test_shapes_by_size_of_the_batch_are_prepared_for():
    llm, _ = prepared("usual", shape="3,2,6 2:none")
    engine = llm.engine()
    planned = graphs_of(llm.target.config, llm.draft, llm.config, "usual", chooses_shapes=False)
    assert engine.num_graphs == planned.number
    with phase() as found, made_up_results():
        serve(llm, USUAL)
    assert found.counts["captures"] == 0 and found.counts["modules_loaded"] == 0
    assert len(engine.totals.shapes) == 2


@pytest.mark.parametrize(
    ("extent", "left_out"), [("usual", "logprobs or grammars"), ("none", "graphs: captured when")]
)
def test_a_smaller_warm_up_says_what_it_leaves_out(extent, left_out):
    llm = small_llm("3,1,4")
    engine = llm.engine()
    progress = []
    with made_up_results():
        done = warm_up(engine, extent, on_step=lambda number, total: progress.append((number, total)))
    planned = graphs_of(llm.target.config, llm.draft, llm.config, extent, chooses_shapes=False)
    assert done.num_graphs == engine.num_graphs == planned.number
    assert left_out in str(done)
    assert [number for number, _ in progress] == list(range(1, len(progress) + 1))
    assert not progress or progress[-1][0] == progress[-1][1] > planned.number
    names = ("greedy", "sampled", "filtered", "penalties and biases")
    expected = {"graphs of prompts", *(f"graphs of batches: {name}" for name in names)}
    if extent == "none":
        expected = set()
    assert {work.what for work in done.works if work.what.startswith("graphs")} == expected
    assert engine.totals.num_prompt_tokens == 0
    assert engine.page_pool.num_available == engine.page_pool.num_pages


def test_linear_layers_are_measured_before_they_are_captured():
    timed = []

    def timer(form, size, device):
        assert not torch.cuda.is_current_stream_capturing()
        timed.append(size)
        return 5e-6 if form == "triton" else 1e-5

    llm = small_llm("3,1,4", batch_sizes=(2,))
    forms = llm.engine().runner.linear_backends
    forms.timer = timer
    with made_up_results():
        warm_up(llm.engine(), "usual")
    table = dict(forms.table)
    assert {2, 8} <= {size.rows for size in table}, "draft steps have a row a request, the window four"
    assert {size.dtype for size in table} == {torch.bfloat16} and len(timed) == 2 * len(table)
    with made_up_results():
        serve(llm, USUAL)
    assert forms.table == table and len(timed) == 2 * len(table)


def test_a_restart_makes_the_choices_that_were_measured_before():
    """Whatever the times are then; another driver measures again."""

    def started(seconds_of_triton):
        timed = []

        def timer(backend, size, device):
            timed.append(size)
            return seconds_of_triton if backend == "triton" else 1e-5

        llm = small_llm("3,1,4", batch_sizes=(2,))
        backends = llm.engine().runner.linear_backends
        backends.timer = timer
        with made_up_results():
            warm_up(llm.engine(), "usual")
        return backends, timed

    first, timed = started(5e-6)
    assert timed and {choice.backend for choice in first.table.values()} == {"triton"}
    again, timed = started(2e-5)
    assert not timed and again.table == first.table
    assert again.origin() == [
        f"{len(first.table)} of {len(first.table)} sizes read from {first.file.path}, where all are kept"
    ]
    with mock.patch.object(choice_file, "driver_version", lambda: "999"):
        other, timed = started(2e-5)
    assert timed and other.file.path != first.file.path


def test_a_forced_backend_runs_in_every_cycle_and_is_not_measured():
    launches = {}
    for backend in ("torch", "triton"):
        llm = small_llm("3,1,4", batch_sizes=(2,), linear_backend=backend)
        llm.engine().runner.linear_backends.timer = None
        with phase() as found, made_up_results():
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
        launches[backend] = found.counts
    assert launches["triton"]["library_launches"] < launches["torch"]["library_launches"]
    assert launches["triton"]["driver_launches"] > launches["torch"]["driver_launches"]


def test_products_of_half_types_are_added_up_in_fp32():
    """torch lets cuBLAS round the parts of a split product unless it is asked not to."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = True
    matmul.allow_fp16_reduced_precision_reduction = True
    small_llm("none").engine()
    assert not matmul.allow_bf16_reduced_precision_reduction
    assert not matmul.allow_fp16_reduced_precision_reduction
