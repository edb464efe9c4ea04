"""Choice of graphs within a budget, and batches whose own graph is left out."""

import pytest
from tiny import tiny_head, tiny_target
from uncaptured import UncapturedGraphs

from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.base.draft_model import HeadDraftModel
from eagle_kit.engine.graphs.batch_kind import (
    GRAMMAR_KINDS,
    LOGPROBS_KINDS,
    USUAL_KINDS,
    BatchKind,
    Level,
    kinds,
)
from eagle_kit.engine.graphs.graph_selection import (
    GraphSelection,
    GraphUnit,
    UnitCost,
    by_frequency,
    describe,
    main_sizes,
)
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.memory.graph_memory import select_graphs

ALL_KINDS = tuple(kinds("all", can_have_grammars=True))
SIZES = (1, 2, 4, 8, 16, 24, 32, 40)
GREEDY, SAMPLED, FILTERED, ADJUSTED = USUAL_KINDS


def selection_of(num_units: int | None, sizes=SIZES, launches: int = 10) -> GraphSelection:
    """A selection whose budget has room for some units of 1,000 bytes a launch."""
    costs = {unit: UnitCost(1, launches, 0) for unit in by_frequency(sizes, ALL_KINDS)}
    budget = None if num_units is None else num_units * launches * 1000
    return GraphSelection(costs, budget, 1000)


def test_kinds_come_in_order_of_frequency_and_sizes_between_powers_of_two_last():
    order = by_frequency(SIZES, ALL_KINDS)
    assert main_sizes(SIZES) == [1, 2, 4, 8, 16, 32, 40], "powers of two and the largest"
    assert len(order) == len(set(order)) == len(SIZES) * len(ALL_KINDS)
    assert [unit.size for unit in order[-len(ALL_KINDS) :]] == [24] * len(ALL_KINDS)
    at_eight = [unit.kind for unit in order if unit.size == 8]
    assert at_eight == [*USUAL_KINDS, *LOGPROBS_KINDS, *GRAMMAR_KINDS]


def test_a_budget_takes_the_most_frequent_units_and_no_more():
    for number in (0, 1, 7, 20, 64):
        selection = selection_of(number)
        assert selection.chosen == set(by_frequency(SIZES, ALL_KINDS)[:number])
        assert selection.cost(selection.chosen).num_bytes(1000) <= number * 10_000
    assert len(selection_of(None).chosen) == 64


@pytest.mark.parametrize("num_running", [256, 512])
def test_many_running_requests_have_graphs_of_every_kind(num_running):
    """For 6 GB, with shapes that are chosen by measurements, of a target as deep as Llama-3.1-8B."""
    target = tiny_target(num_layers=32)
    draft = HeadDraftModel(tiny_head(target), target)
    config = EngineConfig(max_batch_size=num_running).resolve(on_gpu=True)
    shapes = {size: [SpecShape.parse(text) for text in ("4,1,5", "none")] for size in config.batch_sizes}
    selection = select_graphs(target.config, draft, config, shapes, 6 * 10**9)
    for size in main_sizes(config.batch_sizes):
        assert {unit.kind for unit in selection.chosen if unit.size == size} == set(ALL_KINDS)
    left_out = selection.left_out(ALL_KINDS)
    assert left_out and not set(main_sizes(config.batch_sizes)) & {unit.size for unit in left_out}
    assert selection.cost(selection.chosen).num_bytes(selection.bytes_of_launch) <= 6 * 10**9


def test_a_batch_uses_the_next_larger_size_or_a_higher_level():
    main = len(main_sizes(SIZES))
    selection = selection_of(main * len(ALL_KINDS))
    assert selection.serving(GraphUnit(24, SAMPLED), SIZES) == GraphUnit(32, SAMPLED)
    assert selection.serving(GraphUnit(16, SAMPLED), SIZES) == GraphUnit(16, SAMPLED), "its own"
    assert selection.serving(GraphUnit(24, SAMPLED), (24, 40)) == GraphUnit(40, SAMPLED), (
        "32 has other shapes"
    )

    # A kind that is left out for all sizes has a higher level, if that is there.
    selection.note_captured(GraphUnit(8, FILTERED), None)
    few = GraphSelection(
        {GraphUnit(size, kind): UnitCost(1, 1, 0) for size in (4, 8) for kind in ALL_KINDS}, 0, 1
    )
    few.note_captured(GraphUnit(8, FILTERED), None)
    assert few.serving(GraphUnit(4, GREEDY), (4, 8)) == GraphUnit(8, FILTERED)
    assert few.serving(GraphUnit(4, ADJUSTED), (4, 8)) == GraphUnit(4, ADJUSTED), "nothing contains it"
    assert not few.may_capture(GraphUnit(4, ADJUSTED))
    for kind in (LOGPROBS_KINDS[0], GRAMMAR_KINDS[0]):
        assert few.serving(GraphUnit(4, kind), (4, 8)) == GraphUnit(4, kind), "other results"
    assert few.may_capture(GraphUnit(3, GREEDY)), "a size that was not planned for"


def test_what_launches_really_take_decides():
    """Half as much as estimated makes room for twice as many units; four times as much, for a quarter."""
    for really, expected in ((500, 40), (4000, 5), (0, 64)):
        selection = selection_of(20)
        selection.note_captured(GraphUnit(40, GREEDY), 10 * really)
        assert selection.is_measured and selection.bytes_of_launch == really
        assert len(selection.chosen) == expected
        assert GraphUnit(40, GREEDY) in selection.chosen
    assert selection.planned_node_bytes == 10_000


def test_a_unit_without_memory_takes_larger_ones_with_it():
    selection = selection_of(None)
    selection.note_captured(GraphUnit(40, GREEDY), None)
    selection.note_out_of_memory(GraphUnit(16, FILTERED))
    assert GraphUnit(40, GREEDY) in selection.chosen, "it is there"
    for unit in selection.left_out(ALL_KINDS):
        assert unit.size >= 16 and unit.kind.level >= Level.FILTERED
    assert not selection.may_capture(GraphUnit(24, ADJUSTED))
    assert not selection.may_capture(GraphUnit(16, BatchKind(Level.ADJUSTED, True, True)))
    assert selection.may_capture(GraphUnit(8, ADJUSTED)) and selection.may_capture(GraphUnit(32, SAMPLED))


def test_phrases_name_kinds_with_the_same_sizes_together():
    units = [GraphUnit(size, kind) for size in (24, 40) for kind in (GREEDY, SAMPLED)]
    units += [GraphUnit(size, GRAMMAR_KINDS[0]) for size in range(8, 88, 8)]
    first, second = describe(units)
    assert "24, 40" in first and "greedy, sampled" in first
    assert "8, 16 .. 80" in second and "10 sizes" in second and "grammars" in second


KINDS = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"repetition_penalty": 1.3},
    {"logprobs": 2},
)


@pytest.mark.parametrize("sampling", KINDS, ids=lambda each: next(iter(each), "greedy"))
def test_responses_are_the_same_from_graphs_of_larger_batches_and_without_any(sampling):
    """Five requests in sizes of which only one, at the highest level, has a graph; or none has."""
    target = tiny_target()
    options = {"max_batch_size": 8, "batch_sizes": (1, 2, 4, 6, 8), "max_context": 128, "graph_mode": "off"}
    params = [SamplingParams(max_tokens=6 + 2 * i, ignore_eos=True, seed=i, **sampling) for i in range(5)]
    prompts = [[3 + i, 5, 7 + i] for i in range(5)]

    def responses(units):
        llm = LLM(target, tiny_head(target), shape="3,1,4", **options)
        runner = llm.engine().runner
        sizes = set()
        if units is not None:
            runner.graphs = UncapturedGraphs()
            costs = {unit: UnitCost(1, 1, 0) for unit in by_frequency(options["batch_sizes"], ALL_KINDS)}
            runner._graph_selection = GraphSelection(costs, 0, 1)
            for unit in units:
                runner.graph_selection.note_captured(unit, None)
            run = runner.graphs.run

            def noted(call):
                sizes.add((len(call.inputs.slot_ids), call.may_capture))
                return run(call)

            runner.graphs.run = noted
        outputs = llm.generate(prompts, params)
        return [(output.token_ids, output.logprobs) for output in outputs], sizes

    expected, _ = responses(None)
    has_logprobs = "logprobs" in sampling
    from_largest, sizes = responses([GraphUnit(8, BatchKind(Level.ADJUSTED, has_logprobs))])
    assert sizes == {(8, True)}
    eager, sizes = responses([])
    assert {may_capture for _, may_capture in sizes} == {False} and len(sizes) > 2
    for found in (from_largest, eager):
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        assert all(bool(logprobs) == has_logprobs for _, logprobs in found)
