"""Speculation shapes: parsing, refusals and defaults."""

import pytest

from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import NO_SPECULATION, ShapeTable, SpecShape, auto_shape


def test_a_shape_is_three_numbers():
    assert SpecShape.parse("5,4,16") == SpecShape(5, 4, 16) and str(SpecShape(4, 1, 5)) == "4,1,5"
    assert SpecShape.parse(None) == SpecShape.parse("none") == NO_SPECULATION


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("5,4", "not of the form"),
        ("a,1,2", "not of the form"),
        ("0,1,2", "out of range"),
        ("3,4,65", "out of range"),
        ("4,1,6", "cannot verify 6"),
        ("2,2,8", "more than the draft grows"),
        ("5,4,5", "too few to reach"),
        ("20,4,30", "a window holds 64"),
    ],
)
def test_what_cannot_be_drafted_is_refused(text, cause):
    with pytest.raises(UserError, match=cause):
        SpecShape.parse(text)


def test_a_table_gives_every_batch_its_shape():
    table = ShapeTable.parse("5,4,16 8:4,1,5 32:none")
    assert str(table) == "5,4,16 8:4,1,5 32:none" and ShapeTable.parse(table) is table
    assert [str(table.at(size)) for size in (1, 7, 8, 31, 32, 99)] == [
        "5,4,16",
        "5,4,16",
        "4,1,5",
        "4,1,5",
        "none",
        "none",
    ]
    assert (table.steps, table.topk, table.tokens) == (5, 4, 16)
    assert ShapeTable.parse(None) == ShapeTable.parse("none") == ShapeTable.parse(NO_SPECULATION)


@pytest.mark.parametrize("text", ["", "5,4,16 4,1,5", "5,4,16 8:", "5,4,16 1:4,1,5", "4,1,5 8:none 4:none"])
def test_a_table_that_cannot_be_read_is_refused(text):
    with pytest.raises(UserError):
        ShapeTable.parse(text)


def test_the_shape_that_nobody_chose():
    assert auto_shape("llama") == auto_shape("qwen3") == SpecShape.parse("5,4,8")
    assert auto_shape("llama", drafts_are_expensive=True) == SpecShape.parse("3,1,4")
    for mixture in ("deepseek_v2", "deepseek_v3", "qwen3_moe", "mixtral"):
        assert auto_shape(mixture) == SpecShape.parse("3,1,4")
