"""Speculation shapes: parsing, refusals and defaults."""

import pytest

from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import (
    NGRAM_SHAPE,
    NO_SPECULATION,
    ShapeTable,
    SpecShape,
    auto_shape,
    complete_shape,
)


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
        ("14,10,60", r"topk x \(steps - 1\) = 130 nodes.* more than 128"),
        ("34,4,60", "= 132 nodes"),
        ("2,64,64", "has room for 63 drafts"),
        ("1,100,50", "has room for 63 drafts"),
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


@pytest.mark.parametrize(
    "text",
    ["63,1,64", "2,2,7", "5,4,6", "17,4,30", "9,8,64", "1,1,2", "1,63,64", "8,10,60", "13,10,64", "3,63,64"],
)
def test_the_largest_and_smallest_shapes_can_be_drafted(text):
    assert str(SpecShape.parse(text)) == text


def test_the_remedy_of_a_draft_of_too_many_nodes_can_be_drafted():
    with pytest.raises(UserError) as refused:
        SpecShape.parse("14,10,60")
    assert refused.value.remedy == "Use at most 13 steps, or a topk of at most 9."
    assert SpecShape.parse("13,10,60").num_draft_nodes == 120
    assert SpecShape.parse("14,9,60").num_draft_nodes == 117
    assert ShapeTable.parse("5,4,16 8:8,10,60 32:none").num_draft_nodes == 70


def test_a_shape_that_is_no_text_is_checked_too():
    assert SpecShape.parse(SpecShape(4, 1, 5)) == SpecShape(4, 1, 5)
    with pytest.raises(UserError, match="cannot verify 6"):
        SpecShape.parse(SpecShape(4, 1, 6))
    with pytest.raises(UserError, match="cannot verify 6"):
        ShapeTable.parse(SpecShape(4, 1, 6))


def test_a_shape_says_whether_it_is_a_tree():
    assert SpecShape(4, 1, 5).label == "4,1,5 (chain)" and SpecShape(4, 2, 5).label == "4,2,5 (tree)"


def test_a_table_is_as_large_as_its_largest_shapes():
    """Which may be those of different batch sizes, the first or a later one."""
    table = ShapeTable.parse("3,2,5 2:4,1,5 4:2,3,12 8:none")
    assert (table.steps, table.topk, table.tokens) == (4, 3, 12)
    assert table.shapes_at(3) == [SpecShape(4, 1, 5)] and len(table.shapes) == 4


@pytest.mark.parametrize("text", ["", "5,4,16 4,1,5", "5,4,16 8:", "5,4,16 1:4,1,5", "4,1,5 8:none 4:none"])
def test_a_table_that_cannot_be_read_is_refused(text):
    with pytest.raises(UserError):
        ShapeTable.parse(text)


def test_the_shape_that_nobody_chose():
    assert auto_shape("llama") == auto_shape("qwen3") == SpecShape.parse("5,4,8")
    assert auto_shape("llama", drafts_are_expensive=True) == SpecShape.parse("3,1,4")
    mixtures = ("deepseek_v2", "deepseek_v3", "qwen3_moe", "mixtral", "llama4_text", "minimax_m2", "glm4_moe")
    for mixture in (*mixtures, "gpt_oss", "qwen3_next", "kimi_linear"):
        assert auto_shape(mixture) == SpecShape.parse("3,1,4")


LLAMA = auto_shape("llama")
DEEPSEEK = auto_shape("deepseek_v3")


@pytest.mark.parametrize(
    ("usual", "given", "wanted"),
    [
        (LLAMA, {"steps": 5, "topk": 4}, (5, 4, 8)),
        (LLAMA, {"steps": 8}, (8, 4, 16)),
        (LLAMA, {"steps": 8, "topk": 8}, (8, 8, 16)),
        (LLAMA, {"steps": 1}, (1, 4, 5)),
        (LLAMA, {"topk": 1}, (5, 1, 6)),
        (LLAMA, {"topk": 1, "tokens": 4}, (3, 1, 4)),
        (LLAMA, {"topk": 1, "steps": 7}, (7, 1, 8)),
        (LLAMA, {"topk": 2, "tokens": 32}, (9, 2, 32)),
        (LLAMA, {"topk": 8}, (5, 8, 8)),
        (LLAMA, {"tokens": 64}, (5, 4, 64)),
        (LLAMA, {"tokens": 3}, (2, 4, 3)),
        (LLAMA, {"steps": 2, "tokens": 40}, (2, 6, 40)),
        (DEEPSEEK, {"steps": 5}, (5, 1, 6)),
        (DEEPSEEK, {"tokens": 6}, (5, 1, 6)),
        (DEEPSEEK, {"topk": 4}, (3, 4, 8)),
        (DEEPSEEK, {"steps": 3, "tokens": 8}, (3, 4, 8)),
        (DEEPSEEK, {"steps": 3, "tokens": 4}, (3, 1, 4)),
        (NGRAM_SHAPE, {"tokens": 6}, (5, 4, 6)),
        (NGRAM_SHAPE, {"steps": 16}, (16, 4, 24)),
    ],
)
def test_a_shape_given_in_part_is_completed_to_a_legal_one(usual, given, wanted):
    shape = complete_shape(usual, **given)
    assert shape == wanted == SpecShape.parse(str(shape))


@pytest.mark.parametrize(
    "given", [{"steps": 0}, {"topk": 0, "tokens": 8}, {"tokens": 65}, {"tokens": 1}, {"steps": 64}]
)
def test_numbers_that_no_shape_has_are_refused(given):
    with pytest.raises(UserError):
        complete_shape(LLAMA, **given)


def test_every_number_alone_completes():
    for usual in (LLAMA, DEEPSEEK, NGRAM_SHAPE):
        for steps in range(1, 64):
            assert complete_shape(usual, steps=steps).steps == steps
        for tokens in range(2, 65):
            assert complete_shape(usual, tokens=tokens).tokens == tokens
        for topk in range(1, 64):
            assert complete_shape(usual, topk=topk).topk == topk
