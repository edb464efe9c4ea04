"""Converters by kind of head."""

from typing import Any

from eagle_kit.checkpoints.formats import dspark, eagle1, eagle3, mtp, own, p_eagle
from eagle_kit.checkpoints.formats.blocks import BlockConverter
from eagle_kit.kinds.dflash import DFLASH
from eagle_kit.kinds.kind import HeadKind

CONVERTERS: dict[str, Any] = {
    "eagle3": eagle3,
    "p-eagle": p_eagle,
    "dflash": BlockConverter(DFLASH),
    "dspark": dspark.CONVERTER,
    "eagle1": eagle1,
    "mtp": mtp,
}
"""Name of a kind -> its module or object here, with ``layout``, ``read`` and ``write``."""


def converter(kind: HeadKind[Any, Any, Any]) -> Any:
    """The converter of a kind; one that knows no other format when nobody else serves such heads."""
    return CONVERTERS.get(kind.name, own)
