"""The target of a command: the one that was given, or the one that its drafts were trained for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from eagle_kit.core.errors import TargetError, UserError
from eagle_kit.drafts.files.draft import AnyDraft, DraftFolder
from eagle_kit.drafts.files.draft_files import WEIGHTS_KEY
from eagle_kit.models.loading.source import PACKAGED_TARGETS, is_hub_id, target_revision
from eagle_kit.models.loading.target_folders import find_folder, note_path

DEFAULT_ORIGIN = "the default target, since no draft names another"


class NamedTarget(NamedTuple):
    """A target, and where its name came from.

    Attributes:
        name: as :func:`~eagle_kit.models.loading.source.resolve_target` takes it.
        origin: for people, such as "named by the draft my-draft".
    """

    name: str
    origin: str


@contextmanager
def naming(target: NamedTarget) -> Iterator[None]:
    """Add to the errors inside that may lie in the choice of the target which one it is, and where its name
    came from."""
    try:
        yield
    except TargetError as error:
        cause = f"{error.cause} The target {target.name} is {target.origin}."
        raise UserError(cause, error.remedy) from None


def target_of(drafts: Sequence[AnyDraft], given: str | None, default: str) -> NamedTarget:
    """Find the target that drafts shall be used with.

    Args:
        drafts: open, or folders, hub ids or known names; none for plain decoding.
        given: with ``--target``; None where it was left out.
        default: where neither the command nor a draft names one.

    Raises:
        UserError: a draft names a target that is not known here, or two drafts name different ones.
    """
    if given is not None:
        return NamedTarget(given, "given with --target")
    found: NamedTarget | None = None
    for draft in drafts:
        named = named_by(DraftFolder.as_published(draft))
        if named is None:
            continue
        if found is not None and found.name != named.name:
            raise UserError(
                f"The drafts name different targets: {found.name} is {found.origin}, and {named.name} is "
                f"{named.origin}.",
                "Give --target.",
            )
        found = named
    return found or NamedTarget(default, DEFAULT_ORIGIN)


def named_by(draft: DraftFolder) -> NamedTarget | None:
    """The target that a draft's own files name; None where they name none.

    Raises:
        UserError: the name is neither a hub id nor a folder, and no folder on this machine has the weights.
    """
    if draft.kind.is_whole_model:
        return None
    files = draft.files
    named = files.own.get("target") or files.metadata.get("target")
    if not named:
        return None
    name = str(named)
    origin = f"named by the draft {draft}"
    if name.lower() in PACKAGED_TARGETS:
        return NamedTarget(name, origin)

    # The folder with the weights of the training; one in the hub's cache is better known by its id.
    weights = files.metadata.get(WEIGHTS_KEY)
    if isinstance(weights, str):
        place = find_folder(weights)
        if place is not None and target_revision(place) is None:
            found_by = f"the folder with the weights of the draft {draft}, by {note_path(weights)}"
            return NamedTarget(str(place), found_by)
    if Path(name).is_dir() or is_hub_id(name):
        return NamedTarget(name, origin)
    raise UserError(
        f"The draft {draft} names its target {name!r}, and no folder of that name is known here.",
        "Give the folder of the target with --target.",
    )
