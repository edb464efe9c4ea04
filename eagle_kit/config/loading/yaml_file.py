"""YAML 1.2 of config files, read and written by ruamel.yaml.

In YAML 1.2 ``off`` is text and ``3e-4`` a number. A key that is given twice is refused.
"""

import io
from pathlib import Path
from typing import Any

from eagle_kit.core.errors import UserError, first_line
from eagle_kit.core.files import read_text

MAX_BYTES = 1 << 20
"""Most bytes of a file."""
BOOLEANS_OF_1_1 = ("yes", "no", "on", "off")
"""Words that are quoted when they are written, for readers of YAML 1.1."""


class NotYAML(ValueError):
    """Text that is not YAML.

    Args:
        problem: a clause.
        line: line of the problem, counted from 1; None if it is not known.
    """

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.line = line


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping. Raises UserError, with the line if it is known."""
    text = read_text(path, "Give the path of a YAML file.", MAX_BYTES)
    try:
        found = parse_value(text)
    except NotYAML as error:
        if error.line is None:
            raise UserError(f"{path} is not YAML: {error.problem}.", "Correct the file.") from None
        raise UserError(
            f"{path}, line {error.line}, is not YAML: {error.problem}.", "Correct that line."
        ) from None
    if not isinstance(found, dict):
        kind = "empty" if found is None else f"a {type(found).__name__}"
        raise UserError(f"{path} is {kind}, not a mapping of keys to values.", "Write lines of `key: value`.")
    return found


def parse_value(text: str) -> Any:
    """Read a scalar, list or mapping. Raises NotYAML."""
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    wrong_scalar = (YAMLError, ValueError, KeyError, OverflowError)
    try:
        return _make_yaml().load(text)
    except MarkedYAMLError as error:
        line = None if error.problem_mark is None else error.problem_mark.line + 1
        raise NotYAML(error.problem or "it cannot be read", line) from None
    except RecursionError:
        raise NotYAML("it has too many levels") from None
    except wrong_scalar as error:
        raise NotYAML(f"a value cannot be read ({first_line(error)})") from None


def dump_mapping(value: dict[str, Any]) -> str:
    """Write a mapping as YAML that :func:`read_mapping` reads back."""
    stream = io.StringIO()
    _make_yaml().dump(value, stream)
    return stream.getvalue()


def _make_yaml() -> Any:
    """A ``YAML`` that reads and writes plain values, in which dates are text."""
    from ruamel.yaml import YAML
    from ruamel.yaml.constructor import ConstructorError, SafeConstructor
    from ruamel.yaml.representer import SafeRepresenter

    class Constructor(SafeConstructor):
        """Makes values of JSON."""

    class Representer(SafeRepresenter):
        """Writes values of JSON."""

    def construct_text(constructor: SafeConstructor, node: Any) -> str:
        text: str = constructor.construct_yaml_str(node)
        if "\0" in text:  # a path with it cannot be opened
            problem = "a text holds the character NUL"
            raise ConstructorError(problem=problem, problem_mark=node.start_mark)
        return text

    def represent_text(representer: SafeRepresenter, text: str) -> Any:
        style = "'" if text.lower() in BOOLEANS_OF_1_1 else None
        return representer.represent_scalar("tag:yaml.org,2002:str", text, style)

    Constructor.add_constructor("tag:yaml.org,2002:str", construct_text)
    Constructor.add_constructor("tag:yaml.org,2002:timestamp", construct_text)
    Representer.add_representer(str, represent_text)
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.Constructor = Constructor
    yaml.Representer = Representer
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    return yaml
