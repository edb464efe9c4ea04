"""The name by which a draft folder is asked for when serving."""

from eagle_kit.kinds.registry import find_kind
from eagle_kit.kinds.support.files import open_draft


def algorithm_of(folder) -> str:
    return find_kind(open_draft(folder)).algorithm
