"""Between our layout and the others', by kind of head; a draft from elsewhere goes back as it came."""

from typing import Any

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.drafts.base.kind import HeadKind
from eagle_kit.drafts.files.draft_files import OWN, DraftFiles
from eagle_kit.drafts.files.formats import FORMATS, Format, Served, config_hash, dtype_name
from eagle_kit.drafts.files.recognise import Layout
from eagle_kit.models.config import TargetConfig

IMPORTED = "imported"
"""Key of ``eagle_kit.json`` for what a draft from elsewhere was."""


def read_draft(
    files: DraftFiles, seen: Layout, *, format: Format | None = None, target: TargetConfig | None = None
) -> DraftFiles:
    """Any draft -> our layout.

    Args:
        seen: the layout of ``files``.
        format: what they are in; needed only where two formats look the same.
        target: needed only by drafts that name no layer ids.

    Raises:
        UserError: two formats that number layers differently are possible; a tensor too many or too few.
    """
    written = format or seen.format
    if seen.format is not None and format is not None and not _is_possible(format, seen):
        raise UserError(
            f"The draft in {files.where} is not in the format {format}: it was recognised as {seen.maker}.",
            f"Import it as {seen.format}, or leave the format out.",
        )
    if written is None:
        raise UserError(
            f"The draft in {files.where} does not say whether it means inputs or outputs of the layers it "
            "names.",
            "Convert it by eagle-kit import with --format sglang for heads of SpecForge, SGLang and ModelOpt "
            "(outputs), --format vllm for heads of EAGLE and vLLM (inputs).",
        )
    if written == "eagle-kit":
        return files
    ours = seen.kind.format.read(files, written, target)
    if OWN in files.config:
        return ours
    names = {name: theirs for name, theirs in seen.kind.names(files).items() if name in ours.tensors}
    left_out = {name: files.tensors[name] for name in sorted(files.tensors.keys() - set(names.values()))}
    assert not any(bool(tensor.any()) for tensor in left_out.values())
    kept = {name: [theirs, dtype_name(files.tensors[theirs].dtype)] for name, theirs in names.items()}
    origin = {
        "format": written,
        "layout": seen.maker,
        "config": files.config,
        "tensors": kept,
        "zeros": {name: [list(zeros.shape), dtype_name(zeros.dtype)] for name, zeros in left_out.items()},
        "config_here": config_hash(ours.config),
    }
    return DraftFiles(ours.config, ours.tensors, {**files.metadata, IMPORTED: origin}, ours.where)


def _is_possible(format: Format, seen: Layout) -> bool:
    """True when a draft may be read as ``format`` though it looks like another: flat EAGLE-3 configs of other
    projects differ in the numbering alone, and EAGLE-1 heads and modules in nothing that matters."""
    if format == seen.format:
        return True
    if seen.maker.startswith("ours"):
        return False
    return "eagle-kit" not in (format, seen.format) and "speculators" not in (format, seen.format)


def write_draft_as(
    files: DraftFiles, kind: HeadKind[Any, Any, Any], format: Format, served: Served
) -> DraftFiles:
    """Our layout -> ``format``. A draft that came in this format and was not changed goes back as it came.

    Raises:
        UserError: the format has no place for a part of the draft.
    """
    assert format in FORMATS
    if format == "eagle-kit":
        return files
    origin = files.metadata.get(IMPORTED) or {}
    if origin.get("format") == format and origin["config_here"] == config_hash(files.config):
        return DraftFiles(origin["config"], _as_they_came(dict(files.tensors), origin), files.metadata)
    return kind.format.write(files, format, served)


def _as_they_came(tensors: dict[str, torch.Tensor], origin: dict[str, Any]) -> dict[str, torch.Tensor]:
    """By the names and in the whole-number types of their source; floating ones as they are now."""
    out = {
        name: torch.zeros(shape, dtype=getattr(torch, kind))
        for name, (shape, kind) in origin["zeros"].items()
    }
    for ours, (name, kind) in origin["tensors"].items():
        value = tensors[ours]
        out[name] = value if value.is_floating_point() else value.to(getattr(torch, kind))
    return out
