"""The number of graphs follows a budget of memory: what is left out is said, padded or run eagerly."""

import pytest

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.graphs.batch_kind import USUAL_KINDS
from eagle_kit.engine.graphs.graph_selection import main_sizes
from eagle_kit.engine.graphs.warm_up import Prepared
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.memory.graph_memory import BYTES_OF_LAUNCH, graphs_of
from tests.cuda_device import device
from tests.cuda_device.device import Phase, bytes_of_node, memory_of, phase
from tests.cuda_device.engines import made_up_results, small_llm
from tests.cuda_device.test_warm_up import RARE, USUAL, serve

pytestmark = pytest.mark.usefixtures("memory_of_its_own")
SIZES = {"max_batch_size": 6, "batch_sizes": (1, 2, 3, 4, 6), "shape": "3,1,4"}


def planned_for(llm: LLM, extent: str = "all"):
    return graphs_of(llm.target.config, llm.draft, llm.config, extent, chooses_shapes=False)


def warmed_up(llm: LLM, extent: str = "all") -> tuple[Prepared, Phase]:
    llm.engine()
    with phase() as found, made_up_results():
        return llm.warm_up(extent), found


def check_traffic(llm: LLM, kinds=(*USUAL, *RARE)) -> Phase:
    """Serve all kinds: nothing is captured and compiled."""
    with phase() as found, made_up_results():
        assert serve(llm, kinds) > 100
    assert found.counts["captures"] == 0 and found.counts["modules_loaded"] == 0
    return found


def test_a_budget_leaves_out_rare_kinds_and_sizes_between():
    whole = planned_for(small_llm(**SIZES))
    budget = whole.bytes // 3
    llm = small_llm(**SIZES, graph_memory=budget)
    with bytes_of_node(BYTES_OF_LAUNCH):
        prepared, _ = warmed_up(llm)
    engine = llm.engine()
    assert 0 < prepared.num_graphs == engine.num_graphs < whole.number / 2
    of_unit = 200 * BYTES_OF_LAUNCH
    assert 0.5 * budget < engine.runner.graphs.node_bytes <= budget + of_unit
    chosen = engine.runner.graph_selection.chosen
    for kind in USUAL_KINDS[:2]:
        assert {unit.size for unit in chosen if unit.kind == kind} >= set(main_sizes(llm.config.batch_sizes))
    assert not any(unit.size == 3 for unit in chosen)
    assert "batches of 3" in str(prepared) and "graph" in str(prepared)
    assert f"{engine.runner.graphs.node_bytes / 1e9:.2f} GB" in prepared.memory

    # Three requests run in the graph of four.
    seen = []
    run = engine.runner.graphs.run

    def watched(call):
        if call.name == "cycle":
            seen.append(len(call.inputs.slot_ids))
        return run(call)

    engine.runner.graphs.run = watched
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with phase() as found, made_up_results():
        llm.generate([[1, 2], [3, 4], [5, 6]], params)
    assert set(seen) == {4} and found.counts["captures"] == 0
    engine.runner.graphs.run = run
    check_traffic(llm)


@pytest.mark.parametrize(
    ("share_of_estimate", "fewer"), [(4, True), (0.25, False)], ids=["dearer", "cheaper"]
)
def test_what_graphs_take_is_measured_and_decides_how_many_there_are(share_of_estimate, fewer):
    """In a budget for half of the graphs by estimate."""
    whole = planned_for(small_llm(**SIZES))
    budget = whole.bytes // 2
    llm = small_llm(**SIZES, graph_memory=budget)
    llm.engine()
    assert llm.memory_plan is not None
    expected = llm.memory_plan.graphs.number
    with bytes_of_node(int(share_of_estimate * BYTES_OF_LAUNCH)):
        prepared, _ = warmed_up(llm)
    node_bytes = llm.engine().runner.graphs.node_bytes
    if fewer:
        assert 0 < prepared.num_graphs < expected / 2
        assert node_bytes <= budget + share_of_estimate * 200 * BYTES_OF_LAUNCH
    else:
        assert prepared.num_graphs > expected
        assert node_bytes < 0.5 * budget


def test_a_warm_up_without_memory_for_its_graphs_goes_on_with_fewer(caplog):
    """The device has less memory than was planned: graphs take more, behind which prompts still run."""
    llm = small_llm(**SIZES, graph_memory="8G")
    whole = planned_for(llm).number
    llm.engine()
    room = 40 * 120 * BYTES_OF_LAUNCH + (200 << 20)
    with memory_of(device.bytes_used() + room), bytes_of_node(4 * BYTES_OF_LAUNCH), made_up_results():
        prepared = llm.warm_up("all")
        engine = llm.engine()
        assert 0 < prepared.num_graphs < whole
        assert engine.runner.graphs.num_out_of_memory > 0
        assert len([text for text in caplog.messages if "out of memory" in text]) == 1
        check_traffic(llm)
    engine.check()


def test_too_little_memory_for_a_capture_in_traffic_stops_no_response():
    llm = small_llm(**SIZES)
    engine = llm.engine()
    with made_up_results():
        llm.warm_up("none")
        used = device.bytes_used()
        with memory_of(used + (40 << 20)), bytes_of_node(1 << 20), phase() as found:
            assert serve(llm, USUAL) > 100
        assert engine.runner.graphs.num_out_of_memory > 0
        assert found.counts["out_of_memory"] > 0
        engine.check()


@pytest.mark.smoke
def test_256_running_requests_have_graphs():
    """A server of that many requests on a small budget: kinds of all levels at powers of two."""
    sizes = {"max_batch_size": 256, "batch_sizes": None, "shape": "2,1,3", "kv_tokens": 40_000}
    llm = small_llm(changes={"num_layers": 1}, graph_memory="200M", **sizes)
    llm.engine()
    assert llm.memory_plan is not None
    assert 0 < llm.memory_plan.graphs.bytes <= 200e6
    assert "there are none for batches of" in str(llm.memory_plan)
    with bytes_of_node(BYTES_OF_LAUNCH):
        prepared, _ = warmed_up(llm, "usual")
    assert prepared.num_graphs >= 9 and "batches of" in str(prepared)
    engine = llm.engine()
    assert engine.runner.graphs.node_bytes <= 200e6
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    prompts = [[1 + i % 400, 2] for i in range(200)]
    with phase() as found, made_up_results():
        outputs = llm.generate(prompts, params)
    assert [len(output.token_ids) for output in outputs] == [4] * 200
    assert found.counts["captures"] == 0 and found.counts["graph_launches"] > 0


def test_without_captures_kernels_and_prompts_are_prepared():
    llm = small_llm()
    prepared, _ = warmed_up(llm, "none")
    assert llm.engine().num_graphs == prepared.num_graphs == 0
    assert any(work.what == "prefills" for work in prepared.works)
    with phase() as traffic, made_up_results():
        assert serve(llm, (*USUAL, *RARE)) > 100
    assert traffic.counts["captures"] > 0 and traffic.counts["modules_loaded"] == 0
