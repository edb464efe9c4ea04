"""From a run or a checkpoint to the folder that is published."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eagle_kit.checkpoints.draft import OLD_WEIGHTS, WEIGHTS, load_draft, read_metadata, save_draft
from eagle_kit.checkpoints.model_card import model_card
from eagle_kit.checkpoints.validate import raise_on_errors, validate_draft
from eagle_kit.core.errors import UserError
from eagle_kit.models.loader import read_json

ABSOLUTE_FOLDER = re.compile(r"(?<![\w.:/~-])/(?:[\w.@+-]+/)+")


def find_checkpoint(run_or_checkpoint: str | Path) -> Path:
    """The draft to export: the folder itself, else its ``best/``, else its last ``step-N/``.

    Raises:
        UserError: there is none.
    """
    folder = Path(run_or_checkpoint)
    steps = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    steps.sort(key=lambda path: int(path.name.removeprefix("step-")), reverse=True)
    for candidate in (folder, folder / "best", *steps):
        if (candidate / WEIGHTS).is_file() or (candidate / OLD_WEIGHTS).is_file():
            return candidate
    raise UserError(f"The folder {folder} holds no draft.", "Give a run folder or a checkpoint.")


def export_draft(
    run_or_checkpoint: str | Path,
    out: str | Path,
    *,
    target: str | Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    eval_summary: str | Path | None = None,
) -> Path:
    """Write a servable draft with its model card; it is checked against its target first.

    Args:
        run_or_checkpoint: see :func:`find_checkpoint`.
        out: see :func:`~eagle_kit.checkpoints.draft.save_draft`; everything is written at once or not at all.
        target: default the one it was trained for.
        dtype: of the weights on disk.
        eval_summary: ``summary.json`` of an evaluation of this draft, for the card.

    Returns:
        The checkpoint that was exported.

    Raises:
        UserError: no draft there, one that does not fit its target, an evaluation of other drafts, no disk
            space.
    """
    source = find_checkpoint(run_or_checkpoint)
    head = load_draft(source)
    name = str(target or head.config.target)
    if name:
        raise_on_errors(validate_draft(source, name))
    head.config = replace(head.config, target=without_folders(head.config.target))
    metadata = {key: without_folders(value) for key, value in read_metadata(source).items()}
    summary = None if eval_summary is None else measured(read_json(Path(eval_summary)), (Path(out), source))
    card = model_card(head.config, metadata, summary, str(out), dtype)
    save_draft(head, out, metadata=metadata, dtype=dtype, card=card)
    return source


def without_folders(value: Any) -> Any:
    """Strings anywhere in ``value`` without absolute folders, which mean nothing on another machine."""
    if isinstance(value, str):
        return ABSOLUTE_FOLDER.sub("", value)
    if isinstance(value, Mapping):
        return {key: without_folders(item) for key, item in value.items()}
    return [without_folders(item) for item in value] if isinstance(value, list | tuple) else value


def measured(summary: dict[str, Any], folders: tuple[Path, ...]) -> dict[str, Any]:
    """The part of an evaluation that is about the draft in one of ``folders``, absolute folders left out.

    Raises:
        UserError: it measured several drafts and none of them is this one, or it is no evaluation.
    """
    try:
        places = {draft["name"]: Path(draft["path"]).resolve() for draft in summary["drafts"]}
        wanted = {folder.resolve() for folder in folders}
        names = [name for name, place in places.items() if place in wanted] or list(places)
        rows = [row for row in summary["rows"] if row["draft"] == names[0]]
    except (KeyError, TypeError, IndexError):
        raise UserError(
            "The evaluation given is not the summary.json of a draft's evaluation.",
            "Give the one that eagle-kit eval --draft wrote.",
        ) from None
    if len(names) > 1:
        raise UserError(
            f"The evaluation measured {', '.join(names)}, and none of them is this draft.",
            f"Evaluate {folders[0]} and give that summary.json.",
        )
    return without_folders({**summary, "rows": rows})
