"""Recognition of a draft's layout: whose trainer wrote it, for whom, which numbering of layers it means."""

from typing import Any, NamedTuple

from eagle_kit.core.errors import UserError, shown
from eagle_kit.drafts.base.kind import HeadKind
from eagle_kit.drafts.files.draft_files import OWN, DraftFiles
from eagle_kit.drafts.files.formats import FORMATS, PEERS, Format


class Layout(NamedTuple):
    """Result of recognition.

    Attributes:
        kind: of head.
        format: None when nothing tells SGLang's numbering of layers from that of EAGLE and vLLM.
        maker: whose layout it is, and by what that was seen, for people.
    """

    kind: HeadKind[Any, Any, Any]
    format: Format | None
    maker: str


def recognise(files: DraftFiles, kind: HeadKind[Any, Any, Any]) -> Layout:
    """Recognise the layout of a head of ``kind`` by its ``config.json`` and the names of its tensors.

    Raises:
        UserError: a part that our head does not have, or a format that is not known.
    """
    if OWN not in files.config:
        found = kind.format.layout(files)
        return Layout(kind, *found)
    written = files.own.get("format", "eagle-kit")
    if written not in FORMATS:
        raise UserError(
            f"The draft in {files.where} says that eagle-kit wrote it in the format {shown(written)}.",
            f"Known formats are {', '.join(FORMATS)}; use the version of eagle-kit that wrote it.",
        )
    return Layout(kind, written, f"ours, for {PEERS[written]}" if written in PEERS else "ours")
