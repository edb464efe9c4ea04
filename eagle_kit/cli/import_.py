"""`eagle-kit import DRAFT --out DIR`: a draft of another project in our layout, bit for bit."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from eagle_kit.config.loading.flags import Flag, add_options, options_of
from eagle_kit.config.options import Options
from eagle_kit.core.errors import UserError

if TYPE_CHECKING:
    from eagle_kit.drafts.files.draft import AnyDraft, DraftFolder


class ImportOptions(Options):
    """Options of ``import``."""

    source: Annotated[str, Flag(metavar="DRAFT", is_positional=True)]
    """Folder or hub id of a draft of any layout."""

    out: Annotated[Path, Flag(metavar="DIR")]
    """Where the draft goes."""

    format: Literal["sglang", "vllm", "speculators", "eagle"] | None = None
    """Layout of DRAFT, where it cannot be recognised by its files."""

    target: str | None = None
    """Folder, hub id or known name; for drafts that do not say which layers they read."""

    license: Annotated[str, Flag(metavar="ID")] = ""
    """Licence of the card, such as apache-2.0."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``import``."""
    add_options(parser, ImportOptions)


def fitting_format(draft: "DraftFolder", target: str) -> "Literal['sglang', 'vllm'] | None":
    """The format whose numbering of layer ids fits a draft and its target; None where the draft's
    files state the numbering, or where the fit does not decide it.

    Raises:
        UserError: a draft of speculators whose ids, which are inputs by its format, fit as outputs.
    """
    from eagle_kit.eval.diagnose.numbering import measure_numbering

    found = measure_numbering(draft, target)
    if found is None:
        return None
    print(f"layer ids: {found.words}")
    if found.best is None:
        return None
    if "speculators_model_type" not in draft.files.config:
        return "vllm" if found.best == "input" else "sglang"
    if found.best == "output":
        ids = list(found.layers["output"])
        raise UserError(
            f"The layer ids of {draft} are inputs of layers by its format, and they fit as outputs.",
            f"Write {ids} as eagle_aux_hidden_state_layer_ids into its config.json.",
        )
    return None


def run(args: argparse.Namespace) -> int:
    """Import and say what was recognised."""
    options = options_of(args, ImportOptions)
    from eagle_kit.drafts.files.draft import DraftFolder
    from eagle_kit.drafts.files.export import Facts, import_draft

    draft: AnyDraft = options.source
    format = options.format
    if format is None and options.target is not None:
        draft = DraftFolder.as_published(draft)
        format = fitting_format(draft, options.target)
    facts = Facts(licence=options.license)
    imported = import_draft(draft, options.out, format=format, target=options.target, facts=facts)
    print(f"{options.source}: {imported.kind.name} head, {imported.maker}")
    print(f"{options.out}: check it with eagle-kit validate {options.out} --target TARGET")
    return 0
