"""`eagle-kit import DRAFT --out DIR`: a draft of another project in our layout, bit for bit."""

import argparse
import shlex
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
    """Folder, .gguf file, hub id or known name; for drafts that do not say which layers they read."""

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
    print(f"{options.out}: check it with {check_command(options.out, options.target)}")
    return 0


def check_command(draft: Path, target: str | None) -> str:
    """A command that checks an imported draft. It has ``--target`` unless the draft names a known target.

    Args:
        draft: folder of the draft.
        target: ``--target`` of the import; None where it was left out.
    """
    from eagle_kit.drafts.files.draft import DraftFolder
    from eagle_kit.drafts.files.named_target import named_by

    words = ["eagle-kit", "validate", str(draft)]
    if target is not None:
        return shlex.join([*words, "--target", target])
    try:
        names_target = named_by(DraftFolder.as_published(draft)) is not None
    except UserError:
        names_target = False
    return shlex.join(words if names_target else [*words, "--target", "TARGET"])
