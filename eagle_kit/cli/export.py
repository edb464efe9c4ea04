"""`eagle-kit export RUN --out DIR`: a servable draft with a model card, for this engine or another."""

import argparse
import shlex
from pathlib import Path
from typing import Annotated, Literal

from pydantic import model_validator

from eagle_kit.config.loading.flags import Flag, add_options, options_of
from eagle_kit.config.options import Options
from eagle_kit.core.errors import UserError


class ExportOptions(Options):
    """Options of ``export``."""

    source: Annotated[str, Flag(metavar="RUN_OR_DRAFT", is_positional=True)]
    """Run folder (its best), checkpoint, or folder or id of a draft."""

    out: Annotated[Path, Flag(metavar="DIR")]
    """Where the draft goes."""

    format: Literal["eagle-kit", "sglang", "vllm", "speculators", "eagle"] = "eagle-kit"
    """Layout of the files."""

    dtype: Literal["bfloat16", "float16", "float32", "keep"] = "bfloat16"
    """Dtype of the weights."""

    target: str | None = None
    """Folder, .gguf file, hub id or known name; default the one that the draft was trained for."""

    eval: Annotated[Path | None, Flag(metavar="DIR")] = None
    """Results of an eagle-kit eval whose figures go into the card."""

    license: Annotated[str, Flag(metavar="ID")] = ""
    """Licence of the card, such as apache-2.0."""

    push: Annotated[str | None, Flag(metavar="ORG/NAME")] = None
    """Upload the folder to this repository of the hub."""

    private: bool = False
    """Make the repository of --push private."""

    @model_validator(mode="after")
    def _go_together(self) -> "ExportOptions":
        if self.eval is not None and not self.eval.exists():
            raise UserError(
                f"The folder {self.eval} does not exist.", "Give the result folder of an eagle-kit eval."
            )
        if self.private and self.push is None:
            raise UserError("--private was given without --push.", "Give --push ORG/NAME, or leave it out.")
        return self


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``export``."""
    add_options(parser, ExportOptions)


def run(args: argparse.Namespace) -> int:
    """Export and say where."""
    options = options_of(args, ExportOptions)
    import torch

    from eagle_kit.drafts.files.export import Facts, export_draft
    from eagle_kit.drafts.files.publish import Repository

    # Export. A repository that cannot be written to is refused before.
    repository = None
    if options.push is not None:
        repository = Repository(options.push, options.private)
    export_draft(
        options.source,
        options.out,
        target=options.target,
        format=options.format,
        dtype=None if options.dtype == "keep" else getattr(torch, options.dtype),
        facts=Facts(options.eval, options.license, options.push or ""),
    )

    # Say what to do with the folder.
    size = sum(path.stat().st_size for path in options.out.rglob("*") if path.is_file())
    uses = {
        "sglang": "its README.md has SGLang's command",
        "vllm": "its README.md has vLLM's command",
        "speculators": "load it with speculators, or serve it with vLLM",
        "eagle": "load it with EAGLE's EaModel",
    }
    use = uses.get(options.format, f"try it with {generate_command(options.out, options.target)}")
    print(f"{options.out}: {size / 1e6:.1f} MB; {use}")
    if repository is not None:
        print(f"{options.push}: {repository.upload(options.out)}")
    return 0


def generate_command(draft: Path, target: str | None) -> str:
    """A command that decodes with a draft, from any folder.

    Args:
        target: ``--target`` of the export; None where the draft names a target that is known here.
    """
    words = ["eagle-kit", "generate", "--draft", str(draft.resolve())]
    if target is not None:
        if Path(target).exists():
            target = str(Path(target).resolve())
        words += ["--target", target]
    return shlex.join([*words, "--prompt", "Why is the sky blue?"])
