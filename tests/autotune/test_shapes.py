"""Candidates: few shapes that serve easy and hard text, on machines where windows are cheap or dear."""

from eagle_kit.autotune.acceptance import AcceptanceTable
from eagle_kit.autotune.files import average_acceptance
from eagle_kit.autotune.shapes import MAX_CANDIDATES, all_shapes, choose_candidates
from eagle_kit.core.shape import SpecShape


def free_windows(batch_size, shape, context):
    return 30e-3 + 2e-3 * shape.steps


def dear_windows(batch_size, shape, context):
    return 10e-3 * shape.tokens + 2e-3 * shape.steps


def test_shapes_are_of_every_width_and_depth():
    shapes = all_shapes()
    assert len(set(shapes)) == len(shapes) > 60
    for shape in shapes:
        SpecShape.parse(str(shape))
        assert shape.topk == 1 or shape.tokens > shape.topk
    assert {shape.topk for shape in shapes} == {1, 2, 3, 4, 8}
    assert max(shape.steps for shape in shapes) == 7 and max(shape.tokens for shape in shapes) == 64
    assert SpecShape(1, 2, 3) in shapes and SpecShape(1, 8, 10) not in shapes
    assert all_shapes(3, 1) == [SpecShape(1, 1, 2), SpecShape(2, 1, 3), SpecShape(3, 1, 4)]


def test_where_windows_are_free_candidates_are_trees_and_where_they_are_dear_short_chains():
    table = average_acceptance().table
    free = choose_candidates(free_windows, table, 1, table.shapes)
    dear = choose_candidates(dear_windows, table, 1, table.shapes)
    assert 1 < len(free) <= MAX_CANDIDATES
    assert max(shape.tokens for shape in free) > 16
    assert max(shape.tokens for shape in dear) < 8


def test_candidates_are_only_shapes_that_can_be_run():
    table = average_acceptance().table
    allowed = [SpecShape(2, 1, 3), SpecShape(9, 1, 10)]
    assert choose_candidates(free_windows, table, 1, allowed) == [SpecShape(2, 1, 3)]
    assert choose_candidates(free_windows, AcceptanceTable.even([]), 1, allowed) == []


def test_candidates_are_for_short_and_long_contexts():
    """Here trees are cheap behind short prompts and chains behind long ones: both are candidates."""

    def seconds(batch_size, shape, context):
        is_tree = shape.topk > 1
        is_long = context > 500
        if is_tree == is_long:
            return 30e-3 + 5e-3 * shape.steps
        return 30e-3

    table = average_acceptance().table
    assert {shape.topk > 1 for shape in choose_candidates(seconds, table, 1, table.shapes)} == {True, False}
