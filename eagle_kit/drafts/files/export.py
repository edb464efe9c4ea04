"""Export a run or a checkpoint as the folder that is published, in our layout or another's; import another's
into ours."""

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import read_object
from eagle_kit.drafts.base.kind import HeadKind
from eagle_kit.drafts.files.card import Card, model_card
from eagle_kit.drafts.files.convert import IMPORTED, read_draft, write_draft_as
from eagle_kit.drafts.files.draft import AnyDraft, DraftFolder, write_draft
from eagle_kit.drafts.files.draft_files import OLD_WEIGHTS, OWN, WEIGHTS, DraftFiles, without_keys
from eagle_kit.drafts.files.findings import raise_on_errors
from eagle_kit.drafts.files.formats import Format, Served, dtype_name
from eagle_kit.drafts.files.named_target import target_of
from eagle_kit.drafts.files.recognise import Layout
from eagle_kit.drafts.files.validate import validate_draft
from eagle_kit.models.loading.loader import EXACT_SUFFIXES, read_target_config
from eagle_kit.models.loading.source import (
    PACKAGED_TARGETS,
    resolve_model,
    resolve_target,
    run_checkpoints,
    split_revision,
)

QUANTISED = "quantization_config"
CHECKPOINT = re.compile(r"best|step-\d+")
PEER_ENGINES: tuple[Format, ...] = ("sglang", "vllm")
ABSOLUTE_FOLDER = re.compile(r"(?<![\w.:/~-])/(?:[\w.@+-]+/)+")


@dataclass(frozen=True)
class Facts:
    """What the card says beyond the draft's own files.

    Attributes:
        eval_summary: ``summary.json`` of an evaluation of this draft, or its folder.
        licence: an identifier of the Hugging Face hub.
        name: of the draft in the card's commands, such as its hub id; empty for its folder.
    """

    eval_summary: str | Path | None = None
    licence: str = ""
    name: str = ""


def find_checkpoint(run_or_checkpoint: str | Path) -> Path:
    """The draft to export: the folder itself, else its ``best/``, else its last ``step-N/``; or a hub id.

    Raises:
        UserError: there is none.
    """
    folder = Path(run_or_checkpoint)
    folder = folder if folder.is_dir() else resolve_model(run_or_checkpoint, "run or draft")
    for candidate in (folder, *run_checkpoints(folder)):
        names = (WEIGHTS, OLD_WEIGHTS, f"{WEIGHTS}.index.json", f"{OLD_WEIGHTS}.index.json")
        if any((candidate / name).is_file() for name in names):
            return candidate
    raise UserError(f"The folder {folder} holds no draft.", "Give a run folder or a checkpoint.")


def export_draft(
    run_or_checkpoint: str | Path,
    out: str | Path,
    *,
    target: str | Path | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
    format: Format = "eagle-kit",
    facts: Facts = Facts(),
) -> Path:
    """Write a servable draft with its model card; it is checked against its target first.

    Args:
        run_or_checkpoint: see :func:`find_checkpoint`; in any layout.
        out: see :func:`~eagle_kit.drafts.files.draft.save_draft`; everything is written at once or not at
            all.
        target: default the one it was trained for.
        dtype: of the weights on disk; None leaves every tensor as it is.
        format: the layout that is written.
        facts: for the card.

    Returns:
        The checkpoint that was exported.

    Raises:
        UserError: no draft there, one that does not fit its target, a part that the format has no place for,
            an evaluation of other drafts, an ``out`` that is a checkpoint of a run, no disk space.
    """
    check_out(out)
    source = find_checkpoint(run_or_checkpoint)
    draft = DraftFolder.as_published(source)

    # Check it against its target.
    name = target_of([draft], None if target is None else str(target), default="").name
    if name:
        raise_on_errors(validate_draft(draft, name))

    # Bring it into our layout, and write it in the one that was asked for.
    served = served_by(name)
    files = read_draft(draft.files, draft.layout, target=served.config)
    files = cast(files, draft.head_kind, dtype)
    given = facts.eval_summary
    summary = None if given is None else measured(read_summary(given), (Path(out), source))
    write_with_card(files, draft.head_kind, format, served, out, summary=summary, facts=facts)
    return source


def import_draft(
    draft: AnyDraft,
    out: str | Path,
    *,
    format: Format | None = None,
    target: str | Path | None = None,
    facts: Facts = Facts(),
) -> Layout:
    """Write a draft of any layout in ours, every tensor bit for bit.

    Args:
        draft: open as it was published, or its name; see
            :meth:`~eagle_kit.drafts.files.draft.DraftFolder.as_published`.
        format: what it is in; needed only where it cannot be recognised.
        target: gives the usual layer ids to a draft that names none.

    Returns:
        What the draft was recognised as.

    Raises:
        UserError: as :func:`~eagle_kit.drafts.files.convert.read_draft`; an ``out`` that is a
            checkpoint of a run; no disk space.
    """
    check_out(out)
    served = served_by(str(target or ""))
    opened = DraftFolder.as_published(draft)
    files = read_draft(opened.files, opened.layout, format=format, target=served.config)
    write_with_card(files, opened.head_kind, "eagle-kit", served, out, facts=facts)
    return opened.layout


def check_out(out: str | Path) -> None:
    """Raise UserError for a checkpoint of a training run, which an export would replace by a rounded copy."""
    folder = Path(out).resolve()
    is_checkpoint = CHECKPOINT.fullmatch(folder.name) is not None and folder.is_dir()
    if is_checkpoint and (folder.parent / "run.yaml").is_file():
        raise UserError(f"The folder {out} is a checkpoint of a training run.", "Choose a new folder.")


def served_by(name: str) -> Served:
    """Look a target up; nothing when ``name`` is empty. Raises UserError when it cannot be read."""
    if not name:
        return Served()
    folder = resolve_target(name)
    packaged = PACKAGED_TARGETS.get(name.lower())
    hub_id = packaged.hub_id if packaged else split_revision(without_folders(name))[0]
    config, architectures = read_target_config(folder), read_object(folder / "config.json")["architectures"]
    return Served(config, hub_id, tuple(architectures), folder)


def cast(files: DraftFiles, kind: HeadKind[Any, Any, Any], dtype: torch.dtype | None) -> DraftFiles:
    """Floating tensors in ``dtype``, but for those that must stay exact; fp8 modules are dequantised."""
    if dtype is None:
        return files
    names = dict.fromkeys(("dtype", "torch_dtype"), dtype_name(dtype))
    if QUANTISED in files.config:
        made = kind.write(kind.read(files), dtype)
        config = without_keys(files.config, (QUANTISED,)) | made.config | names
        return replace(files, config=config, tensors=made.tensors)
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() and not name.endswith(EXACT_SUFFIXES) else tensor
        for name, tensor in files.tensors.items()
    }
    return replace(files, config=files.config | names, tensors=tensors)


def write_with_card(
    files: DraftFiles,
    kind: HeadKind[Any, Any, Any],
    format: Format,
    served: Served,
    out: str | Path,
    *,
    summary: dict[str, Any] | None = None,
    facts: Facts,
) -> None:
    """Write a draft in ``format``, absolute folders left out of everything that we wrote ourselves."""
    own = {OWN: without_folders(files.own)} if OWN in files.config else {}
    metadata = {
        key: value if key == IMPORTED else without_folders(value) for key, value in files.metadata.items()
    }
    files = replace(files, config=files.config | own, metadata=metadata)
    written = write_draft_as(files, kind, format, served)
    reasons: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of formats that nobody asked for
        for peer in PEER_ENGINES:
            try:
                write_draft_as(files, kind, peer, served)
            except UserError as error:
                reasons[peer] = error.cause
    rounded = {name for name in files.tensors if not name.endswith(EXACT_SUFFIXES)}
    dtypes = {files.tensors[name].dtype for name in rounded if files.tensors[name].is_floating_point()}
    config = kind.read_config(files)
    words = dtype_name(dtypes.pop()) if len(dtypes) == 1 else "several types"
    name = facts.name or str(Path(out).resolve())
    card = model_card(Card(kind, config, metadata, name, summary, words, format, reasons, facts.licence))
    tensors = {name: tensor.contiguous() for name, tensor in written.tensors.items()}
    write_draft(out, tensors, written.config, metadata=metadata, card=card)


def read_summary(path: str | Path) -> dict[str, Any]:
    """``summary.json`` of an evaluation, given itself or its folder. Raises UserError when it is missing."""
    path = Path(path)
    path = path / "summary.json" if path.is_dir() else path
    if not path.is_file():
        raise UserError(
            f"The file {path} does not exist.", "Give the summary.json of an eagle-kit eval, or its folder."
        )
    return read_object(path)


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
        rows = [row for row in rows if row.get("temperature", 0.0) == rows[0].get("temperature", 0.0)]
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
