"""Values that a JSON file may hold and nobody expects."""

from collections.abc import Iterator
from typing import Any

NUMBERS = (-5, 0, 1, 3, 10**12, 2**24, 2**63, 10**400, 1.5, -1.0, 0.0, 1e300, float("nan"), float("inf"))
OTHERS = (True, False, "text", "", [], [1], [-1], ["a"], [[1]], {}, {"a": 1}, None)


def with_one_other_value(config: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Every field of ``config``, also inside of objects, with every hostile value, and left out: its key, the
    value, and the changed config."""
    for key, value in config.items():
        yield key, "left out", {name: other for name, other in config.items() if name != key}
        yield from ((key, hostile, {**config, key: hostile}) for hostile in (*NUMBERS, *OTHERS))
        if isinstance(value, dict):
            for inner, hostile, changed in with_one_other_value(value):
                yield f"{key}.{inner}", hostile, {**config, key: changed}
