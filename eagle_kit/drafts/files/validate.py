"""Check that a draft fits a target: every mismatch by name, before any weight of the target is read."""

from pathlib import Path

from eagle_kit.core.errors import UserError
from eagle_kit.drafts.files.convert import IMPORTED
from eagle_kit.drafts.files.draft import AnyDraft, DraftFolder
from eagle_kit.drafts.files.findings import Finding, TargetFolder
from eagle_kit.models.loading.loader import read_target_config
from eagle_kit.models.loading.source import resolve_target


def validate_draft(draft: AnyDraft, target: str | Path, chat_template: Path | None = None) -> list[Finding]:
    """Check a draft of any kind against a target.

    Heads: sizes, vocabulary, layer ids, context, RoPE, template, name, weights. A whole model: vocabulary,
    tokenizer, context.

    Args:
        draft: see :meth:`~eagle_kit.drafts.files.draft.DraftFolder.open`; where it cannot be read, that is a
            finding too.
        target: anything that ``resolve_target`` knows; only its config and tokenizer are read.
        chat_template: file of the one in use, in place of the target's.

    Raises:
        UserError: the target cannot be found or read.
    """
    folder = resolve_target(target)
    against = TargetFolder(folder, read_target_config(folder), chat_template)
    try:
        opened = DraftFolder.open(draft, against.config)
        found = opened.kind.validate(opened.files, against)
        if opened.kind.is_whole_model:
            return found
        origin = opened.files.metadata.get(IMPORTED)
        came = f", converted from {origin['layout']}" if origin else ""
        return [Finding("ok", "layout", f"{opened.layout.maker}{came}."), *found]
    except UserError as error:
        return [unreadable(error)]


def unreadable(error: UserError) -> Finding:
    """The finding about a draft that cannot be read."""
    return Finding("error", "checkpoint", error.cause, error.remedy)
