"""Flags made from the fields of models: names, help, values, and errors that name the flag."""

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, model_validator

from eagle_kit.config.loading.flags import Flag, FlagsOf, Parser, add_flags, add_options, options_of
from eagle_kit.config.options import Options
from eagle_kit.core.errors import UserError


class Part(Options):
    """A section."""

    size: int = Field(default=2, ge=1)
    """Size of the part."""

    kind: Literal["a", "b"] = "a"
    """Kind of the part."""

    cache: bool = True
    """Keep the pages; a long story."""

    other: int = 9
    """Has no flag."""


class Whole(Options):
    """Options of a command."""

    source: Annotated[str, Flag(is_positional=True, metavar="SOURCE")]
    """What is read."""

    out: Path
    """Where it goes; 100 % of it."""

    count: Annotated[int | None, Flag(alone=7)] = Field(default=None, ge=2)
    """Number of rounds."""

    share: float = 0.5
    """Part that is taken."""

    names: tuple[str, ...] = ("x", "y")
    """Names of the parts."""

    stop: Annotated[tuple[str, ...], Flag(is_repeated=True)] = ()
    """Text that ends it."""

    more: dict[str, Any] = Field(default_factory=dict)
    """Further arguments."""

    is_dry: Annotated[bool, Flag("--dry-run")] = False
    """Print the plan."""

    no_check: bool = False
    """Do not check it."""

    part: Annotated[
        Part, FlagsOf({"size": "--part-size", "kind": "--kind", "cache": "--no-cache"}, "part")
    ] = Part(size=4)

    @model_validator(mode="after")
    def _go_together(self) -> "Whole":
        if self.is_dry and self.no_check:
            raise UserError("--dry-run was given beside --no-check.", "Leave one of them out.")
        return self


NEEDED = ("from", "--out", "to")


def parser() -> Parser:
    made = Parser(prog="command")
    add_options(made, Whole)
    return made


def read(*words: str) -> Whole:
    return options_of(parser().parse_args([*NEEDED, *words]), Whole)


def test_values_are_those_of_the_fields() -> None:
    numbers = "--count 3 --share 0.25"
    texts = "--names p q --stop 'a, b' --stop c"
    others = """--more '{"k": [1]}' --dry-run --part-size 5 --kind b --no-cache"""
    found = read(*shlex.split(f"{numbers} {texts} {others}"))
    assert (found.source, found.out, found.count, found.share) == ("from", Path("to"), 3, 0.25)
    assert (found.names, found.stop, found.more) == (("p", "q"), ("a, b", "c"), {"k": [1]})
    assert found.is_dry and not found.no_check
    assert found.part == Part(size=5, kind="b", cache=False)


def test_what_is_not_given_has_the_defaults_of_the_command() -> None:
    found = read()
    assert found == Whole(source="from", out=Path("to"))
    assert found.part.size == 4, "the command's own"
    assert read("--kind", "b").part == Part(size=4, kind="b")
    assert read("--count").count == 7, "the value of a flag that stands alone"
    assert read("--names", "p", "--names", "q").names == ("p", "q")


def test_the_help_is_the_text_of_the_field_with_its_default() -> None:
    words = " ".join(parser().format_help().split())
    for text in (
        "SOURCE what is read",
        "--out FILE where it goes; 100 % of it",
        "--names NAME [NAME ...] names of the parts (default x y)",
        "--share X part that is taken (default 0.5)",
        "--stop TEXT text that ends it",
        "--more JSON further arguments",
        "part: --part-size N size of the part (default 4)",
        "--kind {a,b} kind of the part (default a)",
        "--no-cache do not keep the pages",
        "--no-check do not check it",
    ):
        assert text in words, text
    assert "has no flag" not in words and "--other" not in words


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("--count", "1"), "--count is 1."),
        (("--part-size", "0"), "--part-size is 0."),
        (("--count", "x"), "Argument --count: invalid int value: 'x'."),
        (("--kind", "c"), "Argument --kind: invalid choice: 'c'"),
        (("--share", "nan"), "--share is nan."),
        (("--more", "[1]"), "--more is no JSON object."),
        (("--more", "{"), "--more is not JSON"),
        (("--dry-run", "--no-check"), "--dry-run was given beside --no-check."),
        (("--unknown",), "command has no flag --unknown."),
    ],
)
def test_an_error_names_the_flag(words: tuple[str, ...], cause: str) -> None:
    with pytest.raises(UserError) as caught:
        read(*words)
    assert caught.value.cause.startswith(cause) and caught.value.remedy


def test_a_value_that_is_missing_is_named_and_the_help_is_the_remedy() -> None:
    with pytest.raises(UserError) as caught:
        parser().parse_args(["from"])
    assert "--out" in caught.value.cause and caught.value.remedy == "See command --help."


def test_some_fields_under_flags_of_other_names() -> None:
    made = Parser()
    add_flags(made, Part, {"size": "--how-many", "cache": "--cache"}, size=6)
    args = made.parse_args(["--cache"])
    assert options_of(args, Part, {"size": "--how-many", "cache": "--cache"}, kind="b") == Part(
        size=6, kind="b"
    )
    assert "(default 6)" in made.format_help()


def test_a_wrong_object_is_answered_with_the_example_of_its_flag():
    class Engine(Options):
        engine_args: Annotated[dict[str, Any], Flag(example='{"size": 8}')] = Field(default_factory=dict)
        """Arguments of the engine."""

    parser = Parser()
    add_options(parser, Engine)
    for given in ("[1]", "{"):
        with pytest.raises(UserError) as refused:
            options_of(parser.parse_args(["--engine-args", given]), Engine)
        assert '{"size": 8}' in refused.value.remedy
