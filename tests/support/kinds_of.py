"""The name by which a draft folder is asked for when serving."""

from eagle_kit.drafts.files.draft_files import open_draft
from eagle_kit.drafts.registry import find_kind


def algorithm_of(folder) -> str:
    return find_kind(open_draft(folder)).algorithm
