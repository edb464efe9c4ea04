"""YAML 1.2's core schema over PyYAML, within a budget, refusing repeated keys.

PyYAML follows YAML 1.1, where ``off`` is a boolean, ``3e-4`` text, ``1:30`` a number and ``0x_`` an error.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import read_text

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 10_000
"""Keys and values of a file, what aliases stand for counted each time."""
MAX_DIGITS = 3000
"""Digits of a whole number, hexadecimal ones too."""
_TAG = "tag:yaml.org,2002:"
_CORE = {
    "null": (r"~|null|Null|NULL|", "~nN"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "merge": (r"<<", "<"),
}
"""Tag -> pattern of its plain scalars and their first characters."""


class _Loader(yaml.SafeLoader):
    """SafeLoader of YAML 1.2's core schema that refuses a key given twice, and what exceeds the budget."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = self.num_nodes = 0
        self.sizes: dict[str, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose within the budget: an alias counts as the nodes it stands for."""
        event, before = self.peek_event(), self.num_nodes
        is_alias, anchor = isinstance(event, yaml.AliasEvent), event.anchor
        if is_alias and anchor in self.anchors and anchor not in self.sizes:
            raise yaml.composer.ComposerError(None, None, f"*{anchor} stands inside itself", event.start_mark)
        self.depth += 1
        self.num_nodes += self.sizes.get(anchor, 1) if is_alias else 1
        if self.depth > MAX_DEPTH or self.num_nodes > MAX_NODES:
            most = f"{MAX_DEPTH} levels" if self.depth > MAX_DEPTH else f"{MAX_NODES} keys and values"
            raise yaml.composer.ComposerError(None, None, f"it has more than {most}", event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        if anchor is not None:
            self.sizes.setdefault(anchor, self.num_nodes - before)
        if isinstance(node, yaml.MappingNode) and not is_alias:
            _check_keys(node)
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        if len(text) > MAX_DIGITS:  # Python writes no longer one
            raise ValueError(f"a number of {len(text)} digits; the limit is {MAX_DIGITS}")
        return int(text, 0 if text[1:2] in ("o", "x") else 10)

    def construct_yaml_str(self, node: yaml.ScalarNode) -> str:
        text: str = self.construct_scalar(node)
        if "\0" in text:  # no path and no name has it
            raise yaml.constructor.ConstructorError(
                None, None, "a text has the character NUL", node.start_mark
            )
        return text

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        text = self.construct_scalar(node)
        return float(re.sub(r"\.(?=[iInN])", "", text))  # Python's inf and nan have no point


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes text which a reader of YAML 1.1 or 1.2 would take for something else."""


_Loader.yaml_implicit_resolvers = {}
_Loader.yaml_constructors = {
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if tag in {None, *(_TAG + name for name in ("null", "bool", "int", "float", "str", "seq", "map"))}
}
for _name, (_pattern, _first) in _CORE.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})$"), [*_first, ""])
for _name in ("int", "float", "str"):
    _Loader.add_constructor(_TAG + _name, getattr(_Loader, f"construct_yaml_{_name}"))


def _check_keys(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if str(key.value) in seen and key.tag != f"{_TAG}merge":
            raise yaml.composer.ComposerError(
                None, None, f"the key {key.value!r} is given twice", key.start_mark
            )
        seen.add(str(key.value))


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping. Raises UserError, with the line where there is one."""
    text = read_text(path, "Give the path of a YAML file.", MAX_BYTES)
    try:
        found = parse_value(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}," if mark else ""
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be read"
        remedy = "Correct that line." if mark else "Correct the file."
        raise UserError(f"{path}{where} is not YAML: {what}.", remedy) from None
    if not isinstance(found, dict):
        kind = "empty" if found is None else f"a {type(found).__name__}"
        raise UserError(f"{path} is {kind}, not a mapping of keys to values.", "Write lines of `key: value`.")
    return found


def parse_value(text: str) -> Any:
    """Read a command-line value: a YAML scalar, list or mapping. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (ValueError, KeyError, OverflowError) as error:  # a scalar that is not what its tag says
        reason = str(error).partition(";")[0]
        raise yaml.MarkedYAMLError(problem=f"a value cannot be read ({reason})") from None


def dump_mapping(value: dict[str, Any]) -> str:
    """Write a mapping as YAML that :func:`read_mapping` reads back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)
