"""Check that a draft fits a target: every mismatch by name, before any weight of the target is read."""

from pathlib import Path

from eagle_kit.core.errors import UserError
from eagle_kit.drafts.files.convert import IMPORTED
from eagle_kit.drafts.files.draft import resolve_draft
from eagle_kit.drafts.files.draft_files import open_draft
from eagle_kit.drafts.files.findings import Finding, TargetFolder
from eagle_kit.drafts.files.recognise import recognise
from eagle_kit.drafts.registry import find_kind
from eagle_kit.models.loading.loader import read_target_config
from eagle_kit.models.loading.source import resolve_target


def validate_draft(draft: str | Path, target: str | Path, chat_template: Path | None = None) -> list[Finding]:
    """Check a draft of any kind against a target.

    Heads: sizes, vocabulary, layer ids, context, RoPE, template, name, weights. A whole model: vocabulary,
    tokenizer, context.

    Args:
        draft: see :func:`~eagle_kit.drafts.files.draft.resolve_draft`; when it cannot be read, that is a
            finding too.
        target: anything that ``resolve_target`` knows; only its config and tokenizer are read.
        chat_template: file of the one in use, in place of the target's.

    Raises:
        UserError: the target cannot be found or read.
    """
    folder = resolve_target(target)
    against = TargetFolder(folder, read_target_config(folder), chat_template)
    try:
        files = open_draft(resolve_draft(draft, against.config))
        kind = find_kind(files)
        found = kind.validate(files, against)
        if kind.is_whole_model:
            return found
        origin = files.metadata.get(IMPORTED)
        came = f", converted from {origin['layout']}" if origin else ""
        return [Finding("ok", "layout", f"{recognise(files).maker}{came}."), *found]
    except UserError as error:
        return [Finding("error", "checkpoint", error.cause, error.remedy)]
