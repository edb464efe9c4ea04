"""Heads of a kind that no other project has a layout for."""

from typing import NoReturn

from eagle_kit.drafts.files.draft_files import DraftFiles
from eagle_kit.drafts.files.formats import Format, Served, refuse


def layout(files: DraftFiles) -> tuple[Format, str]:
    """Ours."""
    return "eagle-kit", "ours"


def write(files: DraftFiles, peer: Format, served: Served) -> NoReturn:
    """Raise UserError."""
    refuse(peer, "it has no class for heads of this kind", "Serve them with eagle-kit.")
