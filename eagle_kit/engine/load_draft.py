"""From what a user calls a draft to a model that drafts."""

import copy
import warnings
from pathlib import Path

from eagle_kit.drafts.base.draft_model import DraftModel
from eagle_kit.drafts.base.kind import head_draft_model
from eagle_kit.drafts.files.draft import AnyDraft, DraftFolder
from eagle_kit.drafts.files.findings import raise_on_errors
from eagle_kit.drafts.files.token_map import load_token_map
from eagle_kit.drafts.files.validate import validate_draft
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.models.targets.target import Target
from eagle_kit.ops.linear import packed_parts


def load_draft_model(
    draft: "AnyDraft | DraftHead | DraftModel",
    target: Target,
    *,
    target_name: str | Path | None = None,
    algorithm: str = "auto",
    token_map: str | Path | None = None,
    chat_template: Path | None = None,
) -> DraftModel:
    """Load a draft for ``target``, in its dtype and on its device.

    Args:
        draft: open or a name (see :meth:`~eagle_kit.drafts.files.draft.DraftFolder.open`), a head (copied),
            or a draft model (used as it is). With ``"NEXTN"`` it may be the target's own folder.
        target_name: where the target came from; a folder is checked against it as ``validate`` does.
        algorithm: ``"auto"``, or what the draft is insisted to be.
        token_map: a file, or a file of the hub, with the target ids that an EAGLE, NEXTN or STANDALONE draft
            may propose; see :func:`~eagle_kit.drafts.files.token_map.load_token_map`.
        chat_template: file of the one in use, in place of the target's.

    Raises:
        UserError: it does not fit the target, or is not what ``algorithm`` says.
    """
    if isinstance(draft, DraftHead):
        return head_draft_model(copy_head(draft), target)
    if not isinstance(draft, AnyDraft):
        return draft

    # The draft, what it may propose, and whether it fits.
    opened = DraftFolder.open(draft, target.config)
    kind = opened.serving_kind(algorithm)
    hot = None
    if token_map is not None:
        hot = load_token_map(token_map, target.config.vocab_size, target_name)
    if target_name is not None and kind is opened.kind:
        findings = validate_draft(opened, target_name, chat_template)
        raise_on_errors(findings)
        for finding in findings:
            if finding.level == "warning":
                warnings.warn(f"{finding.subject}: {finding.cause} {finding.remedy}", stacklevel=4)
    return kind.draft_model(opened.files, target, hot)


def copy_head(head: DraftHead) -> DraftHead:
    """Copy a head, without the packed weights of an earlier use and without a target's layer."""
    left_out = [*packed_parts(head), head.bound]
    return copy.deepcopy(head, {id(part): None for part in left_out if part is not None})
