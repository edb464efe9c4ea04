"""Costs fitted to made-up machines whose true times are known."""

import pytest

from eagle_kit.autotune.costs import CostTable, Timing, join
from eagle_kit.core.shape import NO_SPECULATION, SpecShape


def machine(batch_size, shape, context):
    """A target that is bound by memory up to 20 rows and by arithmetic beyond; reading keys costs as well."""
    steps, topk, tokens = shape

    def forward(rows, weights, keys):
        return max(weights, weights * rows / 20) + 2e-3 * weights * batch_size * context / 100 * keys

    time = 2e-4 + forward(batch_size * tokens, 30e-3, 1.0)
    if steps:
        time += 1e-4 + forward(batch_size * (steps + 1), 3e-3, 0.1)
        time += (steps - 1) * forward(batch_size * topk, 2e-3, 0.1)
    return time


SHAPES = (
    NO_SPECULATION,
    *map(SpecShape.parse, ("1,1,2", "2,1,3", "4,1,5", "7,1,8", "3,4,8", "5,4,16", "6,8,48")),
)
QUICK = (NO_SPECULATION, *map(SpecShape.parse, ("1,1,2", "4,1,5", "4,4,12")))
UNSEEN = tuple(map(SpecShape.parse, ("3,1,4", "5,1,6", "4,4,12", "5,8,32", "2,4,6")))


@pytest.fixture(scope="module")
def table():
    timings = [
        Timing(size, shape, context, machine(size, shape, context))
        for size in (1, 2, 4, 8, 16)
        for shape in SHAPES
        for context in (64, 1024)
    ]
    return CostTable.fit(timings)


def test_cycles_that_were_measured_are_known(table):
    assert table.error < 0.08
    for size, shape, context in ((1, SHAPES[1], 64), (8, SHAPES[6], 1024)):
        assert table.seconds(size, shape, context) == pytest.approx(machine(size, shape, context), rel=0.01)


def test_a_shape_that_no_fit_explains_is_known_where_it_was_measured():
    odd = SpecShape(2, 1, 3)

    def strange(size, shape, context):
        return machine(size, shape, context) * (1.5 if shape == odd else 1.0)

    points = [(size, shape, context) for size in (1, 4, 8) for shape in SHAPES for context in (64, 1024)]
    table = CostTable.fit([Timing(*each, strange(*each)) for each in points])
    assert table.seconds(4, odd, 64) == pytest.approx(strange(4, odd, 64), rel=0.02)
    assert table.seconds(6, odd, 200) == pytest.approx(strange(6, odd, 200), rel=0.1)


@pytest.mark.parametrize("slow", [1, 4])
def test_a_point_that_a_slow_minute_met_makes_no_shape_cheap_that_was_timed_elsewhere(slow):
    points = [(1, QUICK), (4, (*QUICK, *UNSEEN)), (8, (*QUICK, *UNSEEN))]
    table = CostTable.fit(
        [
            Timing(size, shape, 64, machine(size, shape, 64) * (3.0 if size == slow else 1.0))
            for size, shapes in points
            for shape in shapes
        ]
    )
    for shape in (*QUICK, *UNSEEN):
        beside = table.seconds(1, shape, 64) / table.seconds(1, NO_SPECULATION, 64)
        truth = machine(1, shape, 64) / machine(1, NO_SPECULATION, 64)
        assert beside == pytest.approx(truth, rel=0.2), shape


@pytest.mark.parametrize("batch_size", [1, 3, 6, 12])
@pytest.mark.parametrize("shape", UNSEEN, ids=str)
def test_cycles_that_were_never_run_are_predicted(table, shape, batch_size):
    for context in (200, 600):
        expected = machine(batch_size, shape, context)
        assert table.seconds(batch_size, shape, context) == pytest.approx(expected, rel=0.1)


def test_more_work_never_costs_less(table):
    for size in (1, 4, 9):
        chains = [table.seconds(size, SpecShape(s, 1, s + 1), 300) for s in range(1, 9)]
        assert chains == sorted(chains)
    assert table.seconds(8, NO_SPECULATION, 2000) > table.seconds(8, NO_SPECULATION, 100)


def test_a_table_comes_back_from_json(table):
    again = CostTable.from_json(table.to_json())
    assert (again.knots, again.coefficients, again.error) == (table.knots, table.coefficients, table.error)
    corrected = again.with_residuals([Timing(2, SHAPES[1], 64, 1.0)])
    assert corrected.seconds(2, SHAPES[1], 64) == pytest.approx(1.0)
    data = table.to_json()
    with pytest.raises(ValueError, match="number of coefficients"):
        CostTable.from_json({**data, "coefficients": [1.0]})
    with pytest.raises(ValueError, match="no times"):
        CostTable.from_json({**data, "coefficients": [-1.0 for _ in data["coefficients"]]})


@pytest.mark.parametrize("batch_size", [1, 2, 4, 6, 8])
def test_a_few_cycles_tell_the_order_of_the_others(batch_size):
    timings = [Timing(b, shape, 64, machine(b, shape, 64)) for b in (1, 4, 8) for shape in QUICK]
    table = CostTable.fit(timings)
    for shape in (*SHAPES, *UNSEEN):
        expected = machine(batch_size, shape, 64)
        assert table.seconds(batch_size, shape, 64) == pytest.approx(expected, rel=0.3), shape


def test_beyond_what_was_measured_costs_go_on_growing():
    timings = [Timing(b, shape, 64, machine(b, shape, 64)) for b in (1, 8) for shape in QUICK]
    table = CostTable.fit(timings)
    wide = SpecShape(6, 8, 64)
    assert table.seconds(8, wide, 64) > 2 * table.seconds(8, QUICK[-1], 64)
    assert table.seconds(32, QUICK[-1], 64) > 2.5 * table.seconds(8, QUICK[-1], 64)


@pytest.mark.parametrize("batch_size", [4, 16])
def test_fewer_rows_of_the_target_take_the_time_of_a_smaller_window(table, batch_size):
    """Beside the draft, whose forwards are those of the larger one."""
    small, large = SpecShape(1, 1, 2), SpecShape(4, 1, 5)
    forwards = {n: max(30e-3, 30e-3 * batch_size * n / 20) for n in (2, 5)}
    share = table.row_share(batch_size, large, 64, batch_size * small.tokens)
    truth = machine(batch_size, large, 64)
    assert share == pytest.approx((truth - forwards[5] + forwards[2]) / truth, abs=0.05)
    assert table.row_share(batch_size, large, 64, batch_size * large.tokens) == 1.0


def test_a_draft_reads_what_it_has_missed_in_the_time_of_as_many_rows(table):
    for batch_size, num_tokens in ((1, 8), (4, 3), (4, 8)):
        forward = max(3e-3, 3e-3 * batch_size * num_tokens / 20)
        forward += 2e-3 * 3e-3 * batch_size * 64 / 100 * 0.1
        assert table.backfill_seconds(batch_size, num_tokens, 64) == pytest.approx(forward, rel=0.5)
    assert table.backfill_seconds(8, 16, 64) > 2 * table.backfill_seconds(8, 2, 64)


def test_times_of_a_later_and_slower_machine_are_joined_by_what_plain_decoding_takes():
    chain = SpecShape(2, 1, 3)
    tree = SpecShape(3, 4, 8)
    plain = NO_SPECULATION
    before = [Timing(1, plain, 64, 0.02), Timing(1, chain, 64, 0.03)]
    later = [Timing(1, plain, 70, 0.04), Timing(1, tree, 70, 0.08)]
    elsewhere = [Timing(1, plain, 1024, 0.06), Timing(1, tree, 1024, 0.09), Timing(4, tree, 64, 0.1)]
    assert join(before, later) == [*before, Timing(1, tree, 70, pytest.approx(0.04))]
    assert join(before, [*later, *elsewhere]) == [
        *before,
        Timing(1, tree, 70, pytest.approx(0.04)),
        *elsewhere,
    ], "points that were not timed before stay as they are"


@pytest.mark.parametrize("slow", [1, 2])
def test_a_table_knows_contexts_apart(slow):
    """What was measured at one context says less of another."""
    points = [(size, shape, context) for size in (1, 4) for shape in QUICK for context in (64, 4096)]
    times = []
    for size, shape, context in points:
        factor = slow if context > 1000 else 1
        times.append(factor * machine(size, shape, context))
    table = CostTable.fit([Timing(*point, time) for point, time in zip(points, times, strict=True)])
    for point, time in zip(points, times, strict=True):
        assert table.seconds(*point) == pytest.approx(time, rel=0.05)
