"""Ends of values against Python's own parsers, and types of parameters against pydantic's schemas."""

import ast
import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel, create_model

from eagle_kit.data.chat.response.literals import end_of_value, typed

VALUES = [
    {"a": [1, -2.5e-3, True, None, {}], "b\\\n\"'": {"c": [[], "é, {"]}},
    [],
    {},
    [{"x": ":"}, ",", "'"],
]


@pytest.mark.parametrize("write", [json.dumps, repr, lambda value: json.dumps(value, indent=1)])
@pytest.mark.parametrize("value", VALUES, ids=str)
def test_the_end_is_where_a_written_value_ends_and_no_part_of_it_has_one(value: Any, write: Any) -> None:
    text = write(value)
    for rest in ("", "}", " x"):
        assert end_of_value(text + rest, 0) == len(text)
    for cut in range(len(text)):
        assert end_of_value("x" + text[:cut], 1) is None


@pytest.mark.parametrize("text", ['{"a": 1', '["b", {"c": "d"', "{'a': [1, 2]"])
@pytest.mark.parametrize("junk", list("<>{}[]()\"'abc1,:`\n &") + ["true", "]]"])
def test_what_is_refused_is_the_beginning_of_no_value(text: str, junk: str) -> None:
    """Where the scan says that nothing helps, none of many ends makes it a value for Python."""
    try:
        end_of_value(text + junk, 0)
    except ValueError:
        for end in ("", "}", "]", "}]", "]}", '"}', '": 1}', '"}]', "'}", "']}", ": 1}]", "1}", "1]}"):
            for parse in (json.loads, ast.literal_eval):
                with pytest.raises((ValueError, SyntaxError, TypeError)):
                    parse(text + junk + end)
    else:
        assert junk not in "<>`&"


class City(BaseModel):
    name: str


class Tree(BaseModel):
    below: "Tree | None" = None


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (int | None, "3", 3),
        (int | None, "null", None),
        (int | None, "None", None),
        (str | None, "x", "x"),
        (str | None, "3", "3"),
        (str | None, "null", None),
        (str, "null", "null"),
        (str, "3", "3"),
        (int | str, "3", 3),
        (int | str, "[3]", "[3]"),
        (int | str, "three", "three"),
        (int, "three", "three"),
        (float, "3", 3),
        (float, "1e999", "1e999"),
        (bool | None, "True", True),
        (City, '{"name": "Oslo"}', {"name": "Oslo"}),
        (City | None, '{"name": "Oslo"}', {"name": "Oslo"}),
        (City | str, '{"name": "Oslo"}', {"name": "Oslo"}),
        (Tree, '{"below": null}', {"below": None}),
        (list[City], '[{"name": "Oslo"}]', [{"name": "Oslo"}]),
        (Literal["1", "2"], "1", "1"),
        (Literal[1, 2], "1", 1),
        (Literal[1, "a"], "a", "a"),
        (Any, "[1]", [1]),
    ],
    ids=str,
)
def test_parameters_have_the_types_that_pydantic_gives_their_schemas(
    annotation: Any, text: str, value: Any
) -> None:
    root = create_model("Arguments", x=(annotation, ...)).model_json_schema()
    found = typed(text, root["properties"]["x"], root)
    assert found == value and type(found) is type(value)


def test_parameters_without_a_schema_are_text_and_references_may_go_round() -> None:
    assert typed("3", None, {}) == "3"
    root = {"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"allOf": [{"type": "integer"}]}]}}}
    assert typed("3", {"$ref": "#/$defs/A"}, root) == 3
    assert typed("3", {"$ref": "#/$defs/nowhere"}, root) == 3
