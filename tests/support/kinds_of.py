"""The name by which a draft folder is asked for when serving."""

from eagle_kit.drafts.files.draft import DraftFolder


def algorithm_of(folder) -> str:
    return DraftFolder.open(folder).kind.algorithm
