"""YAML with the booleans and numbers of YAML 1.2, which refuses repeated keys.

PyYAML follows YAML 1.1, where ``off``, ``no`` and ``on`` are booleans and ``3e-4`` is text.
"""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from eagle_kit.core.errors import UserError


class _Loader(yaml.SafeLoader):
    """SafeLoader with the booleans and numbers of YAML 1.2 that refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_BOOLEAN = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOLEAN, list("tTfF"))
_EXPONENT = re.compile(r"^[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping. Raises UserError, with the line where there is one."""
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}.", "Give the path of a YAML file."
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not a text file: byte {error.start} is not UTF-8.", "Give the path of a YAML file."
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}," if mark else ""
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be read"
        raise UserError(f"{path}{where} is not YAML: {what}.", "Correct that line.") from None
    if not isinstance(found, dict):
        kind = "empty" if found is None else f"a {type(found).__name__}"
        raise UserError(f"{path} is {kind}, not a mapping of keys to values.", "Write lines of `key: value`.")
    return found


def parse_value(text: str) -> Any:
    """Read a command-line value: a YAML scalar, list or mapping. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)
