"""Converters by kind of head."""

from typing import Any

from eagle_kit.drafts.base.kind import HeadKind
from eagle_kit.drafts.dflash.format import BlockConverter
from eagle_kit.drafts.dflash.kind import DFLASH
from eagle_kit.drafts.dspark import format as dspark
from eagle_kit.drafts.eagle1 import format as eagle1
from eagle_kit.drafts.eagle3 import format as eagle3
from eagle_kit.drafts.files import own_format as own
from eagle_kit.drafts.mtp import format as mtp
from eagle_kit.drafts.p_eagle import format as p_eagle

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
