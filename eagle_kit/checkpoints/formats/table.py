"""Converters by kind of head."""

from types import ModuleType
from typing import Any

from eagle_kit.checkpoints.formats import dflash, eagle1, eagle3, mtp, own, p_eagle
from eagle_kit.kinds.kind import HeadKind

CONVERTERS: dict[str, ModuleType] = {
    "eagle3": eagle3,
    "p-eagle": p_eagle,
    "dflash": dflash,
    "eagle1": eagle1,
    "mtp": mtp,
}
"""Name of a kind -> its module here, with ``layout``, ``read`` and ``write``."""


def converter(kind: HeadKind[Any, Any]) -> ModuleType:
    """The module of a kind; one that knows no other format when nobody else serves such heads."""
    return CONVERTERS.get(kind.name, own)
