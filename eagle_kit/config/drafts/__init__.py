"""The section ``head`` of a training config: a model for each kind of draft, chosen by ``head.kind``."""

from typing import Annotated, Any, get_args

from pydantic import Discriminator, Tag

from eagle_kit.config.drafts.base import HeadConfig
from eagle_kit.config.drafts.blocks import DFlashHeadConfig, DSparkHeadConfig
from eagle_kit.config.drafts.eagle1 import Eagle1HeadConfig
from eagle_kit.config.drafts.fused_states import (
    Eagle3HeadConfig,
    LatentEagle3HeadConfig,
    PEagleHeadConfig,
)
from eagle_kit.config.drafts.mtp import MTPHeadConfig
from eagle_kit.core.errors import UserError

DEFAULT_KIND = "eagle3"


def kind_of_head(head: Any) -> str:
    """The kind of a section ``head``; EAGLE-3 if it names none. Raises UserError for an unknown kind."""
    if isinstance(head, HeadConfig):
        return head.kind
    kind = DEFAULT_KIND
    if isinstance(head, dict):
        kind = head.get("kind", DEFAULT_KIND)
    if kind not in list(HEADS):
        raise UserError(f"head.kind is {kind!r}.", f"Use one of {', '.join(HEADS)}.")
    return str(kind)


# A new kind is one line here. Its tag is the value of `head.kind`.
AnyHeadConfig = Annotated[
    Annotated[Eagle3HeadConfig, Tag("eagle3")]
    | Annotated[LatentEagle3HeadConfig, Tag("eagle3-mla")]
    | Annotated[PEagleHeadConfig, Tag("p-eagle")]
    | Annotated[Eagle1HeadConfig, Tag("eagle1")]
    | Annotated[DFlashHeadConfig, Tag("dflash")]
    | Annotated[DSparkHeadConfig, Tag("dspark")]
    | Annotated[MTPHeadConfig, Tag("mtp")],
    Discriminator(kind_of_head),
]
"""One of :data:`HEADS`, chosen by its ``kind``."""


def _read_union() -> dict[str, type[HeadConfig]]:
    """Tag and model of each member of :data:`AnyHeadConfig`, in the order of the union."""
    heads: dict[str, type[HeadConfig]] = {}
    union = get_args(AnyHeadConfig)[0]
    for member in get_args(union):
        schema, tag = get_args(member)
        heads[tag.tag] = schema
    return heads


HEADS = _read_union()
"""Value of ``head.kind`` -> model of the section. A whole model that drafts is not trained as a head."""
