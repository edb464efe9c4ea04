"""Which graphs an engine captures, when, and in which order."""

import pytest
import torch
from restless import Restless

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.engine.graphs.batch_kind import USUAL_KINDS
from eagle_kit.engine.graphs.warm_up import warm_up
from eagle_kit.engine.memory.graph_memory import graphs_of
from tests.cuda_device.device import phase
from tests.cuda_device.engines import made_up_results, small_llm
from tests.cuda_device.test_warm_up import USUAL, prepared, serve


@pytest.mark.smoke
def test_a_warm_up_captures_the_largest_batches_first():
    llm, _ = prepared("usual", shape="3,1,4")
    keys = [key for _, key in llm.engine().runner.graphs._graphs]
    sizes = [key[0] for key in keys]
    assert sizes == [2] * len(USUAL_KINDS) + [1] * len(USUAL_KINDS)


def test_kinds_of_batches_with_graphs_are_few():
    """Draws without a filter, with any filter, with log-probabilities; and with penalties."""
    llm = small_llm("3,1,4", batch_sizes=(2,))
    graphs = llm.engine().runner.graphs
    filters = [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3, "min_p": 0.2}, {}]
    with made_up_results():
        for sampling in filters:
            for logprobs in (None, 0, 3, 17):
                params = SamplingParams(max_tokens=3, temperature=1.0, logprobs=logprobs, **sampling)
                llm.generate([[1, 2]], params)
        assert graphs.num_graphs == 3
        for adjusted in (
            {"repetition_penalty": 1.2},
            {"logit_bias": {1: 1.0}, "top_k": 3},
            {"temperature": 0.0},
        ):
            sampling = {"max_tokens": 3, "temperature": 1.0, "presence_penalty": 0.5, **adjusted}
            llm.generate([[1, 2]], SamplingParams(**sampling))
        assert graphs.num_graphs == 4


def test_shapes_that_change_behind_a_warm_up_capture_and_compile_nothing():
    """Plain cycles come between, behind which the draft reads its pending tokens."""
    llm = small_llm("none")
    engine = llm.engine("none")
    policy = Restless(0, [SpecShape.parse(shape) for shape in ("1,1,2", "3,2,6")], most_plain=5)
    engine.use_shape(policy)
    llm.engine = lambda shape=None: engine
    with made_up_results():
        prepared_for = warm_up(engine, "usual")
    assert prepared_for.num_graphs == len(USUAL_KINDS) * len(policy.shapes) * 2

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
    expected = {f"graphs of batches: {name}" for name in names}
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
