"""Save, find and load a draft: folder of ``config.json``, ``model.safetensors`` and ``eagle_kit.json``."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from eagle_kit.autotune.files import SHIPPED
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import (
    CHOOSE_ANOTHER,
    cache_folder,
    check_disk_space,
    give_usual_mode,
    replacing,
    writing_remedy,
)
from eagle_kit.drafts.base.kind import DraftKind, HeadKind
from eagle_kit.drafts.files.convert import read_draft
from eagle_kit.drafts.files.draft_files import CONFIG, METADATA, WEIGHTS, DraftFiles, open_draft
from eagle_kit.drafts.files.recognise import Layout, recognise
from eagle_kit.drafts.registry import find_kind, kind_in_target, kind_of
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.models.loading.source import SET_CACHE, resolve_model, target_revision
from eagle_kit.models.targets.target import Target

CARD = "README.md"
CONVERSION_VERSION = 2
"""Version of what :meth:`DraftFolder.open` converts; increase it to invalidate earlier conversions."""


@dataclass(frozen=True, eq=False)
class DraftFolder:
    """A draft on disk, opened once and classified once, for everything that reads it.

    Attributes:
        name: the folder, hub id or known name by which it was found.
        path: its folder.
        files: its config and metadata, which are read, and its tensors, which are read on demand.
    """

    name: str
    path: Path
    files: DraftFiles

    @classmethod
    def open(cls, draft: "AnyDraft", target: TargetConfig | None = None) -> "DraftFolder":
        """Find and open a draft. A draft of the hub in another layout is converted to ours in the cache, once
        for each commit.

        Args:
            draft: a name as :func:`~eagle_kit.models.loading.source.resolve_model` takes it, where
                ``org/target/folder`` is a draft in its target's repository; or a draft that is open already,
                whose files are not read again.
            target: gives the usual layer ids to a draft that names none.

        Raises:
            UserError: it cannot be obtained, or is not a draft or a model that we know.
        """
        return cls.as_published(draft).converted(target)

    @classmethod
    def as_published(cls, draft: "AnyDraft", role: str = "draft") -> "DraftFolder":
        """Find and open a draft in the layout in which it was published. Raises UserError as :meth:`open`
        does; ``role`` is what its messages call the draft."""
        if isinstance(draft, DraftFolder):
            return draft
        path = resolve_model(draft, role)
        return cls(str(draft), path, open_draft(path))

    def converted(self, target: TargetConfig | None) -> "DraftFolder":
        """This draft, or its conversion to our layout where it is one of the hub in another layout; see
        :meth:`open`."""
        commit = target_revision(self.path)
        if commit is None or self.kind.is_whole_model or self.layout.format == "eagle-kit":
            return self

        # The place of the conversion: repository, folder in it, commit, and what the conversion depends on.
        layers = () if target is None else target.default_aux_layer_ids
        version = "-".join(map(str, (commit, f"v{CONVERSION_VERSION}", *layers)))
        place = self.path.resolve()
        inside = [place.name] if place.name != commit else []
        repository = place.parents[1 + len(inside)].name
        folder = cache_folder() / "drafts" / "--".join([repository, *inside]) / version
        if not folder.is_dir():
            self._convert(folder, target)
        return DraftFolder(self.name, folder, open_draft(folder))

    def _convert(self, folder: Path, target: TargetConfig | None) -> None:
        """Write the draft in our layout to ``folder``, unless another process has done it meanwhile."""
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                if folder.is_dir():
                    return
                print(f"Converting the draft {self.name} in {folder} (once)", file=sys.stderr, flush=True)
                ours = read_draft(self.files, self.layout, target=target)
                tensors = {key: tensor.contiguous() for key, tensor in ours.tensors.items()}
                write_draft(folder, tensors, ours.config, metadata=ours.metadata)
        except OSError as error:
            raise UserError(
                f"The draft {self.name} could not be converted ({error}).", writing_remedy(error, SET_CACHE)
            ) from error

    @cached_property
    def kind(self) -> DraftKind:
        """Its kind. Raises UserError for a draft of a kind that we do not have."""
        return find_kind(self.files)

    @property
    def head_kind(self) -> HeadKind[Any, Any, Any]:
        """Its kind, of a head. Raises UserError for a whole model too."""
        kind = self.kind
        if not isinstance(kind, HeadKind):
            raise UserError(
                f"The model in {self.files.where} ({self.files.architecture}) is a whole model, not a draft "
                "head.",
                "A whole model drafts as it is, and modules of MTP are served out of their target's folder.",
            )
        return kind

    @cached_property
    def layout(self) -> Layout:
        """Whose layout a head has. Raises UserError for a whole model, and for an unknown layout."""
        return recognise(self.files, self.head_kind)

    def serving_kind(self, algorithm: str = "auto") -> DraftKind:
        """The kind that drafts from its files. Raises UserError where it is not what ``algorithm`` asks
        for."""
        kind = self.kind
        if algorithm == "auto" or algorithm in kind.algorithms:
            return kind
        if kind.is_whole_model and (asked := kind_in_target(algorithm)) is not None:
            return asked
        raise UserError(
            f"The draft {self.files.where} is for the algorithm {kind.algorithm}, and {algorithm} was asked "
            "for.",
            f"Ask for {kind.algorithm}, or give another draft.",
        )

    def load(
        self,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        target: Target | None = None,
    ) -> DraftHead:
        """Load its head, ready to be trained; see :func:`load_draft`."""
        head: DraftHead = self.head_kind.read(self.files, target, dtype=dtype, device=device)
        return head

    def __str__(self) -> str:
        return self.name


AnyDraft = str | Path | DraftFolder
"""A draft that is open, or its name, by which :meth:`DraftFolder.open` finds it."""


def save_draft(
    head: DraftHead,
    folder: str | Path,
    *,
    metadata: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    card: str | None = None,
) -> None:
    """Write a servable draft: beside the folder first, then renamed to it.

    Args:
        head: on any device; it is not changed.
        folder: new, empty, or holding an older draft, which is replaced whole.
        metadata: goes into ``eagle_kit.json``: data, tokens seen, seconds, command, accept lengths.
        dtype: of the weights on disk; bf16 for export, fp32 to train on.
        card: text of ``README.md``.

    Raises:
        UserError: the folder holds something else, or the disk is full; what was there before stays as it
            was.
    """
    files = kind_of(head.config).write(head, dtype)
    name = str(dtype).removeprefix("torch.")
    config = files.config | {"dtype": name, "torch_dtype": name}
    write_draft(folder, files.tensors, config, metadata=metadata, card=card)


def write_draft(
    folder: str | Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    metadata: Mapping[str, Any],
    card: str | None = None,
) -> None:
    """Write the files of a draft, as :func:`save_draft` does, whatever their layout is.

    Args:
        tensors: by the names they have in the file; none shares memory with another.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # The texts are made before anything is written.
    folder = Path(os.path.realpath(folder))
    _check_replaceable(folder)
    texts = {
        CONFIG: json.dumps(dict(config), indent=2) + "\n",
        METADATA: json.dumps(dict(metadata), indent=2) + "\n",
    }
    if card is not None:
        texts[CARD] = card

    # Everything is written beside the folder, and takes its place at the end.
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        need = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) + (1 << 20)
        check_disk_space(folder.parent, need)
        with replacing(folder) as partial:
            partial.mkdir()
            save_file(dict(tensors), str(partial / WEIGHTS), metadata={"format": "pt"})
            give_usual_mode(partial / WEIGHTS)
            for name, text in texts.items():
                (partial / name).write_text(text, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"The draft could not be written to {folder} ({error}).", writing_remedy(error, CHOOSE_ANOTHER)
        ) from error


def _check_replaceable(folder: Path) -> None:
    """Refuse to replace a folder that is more than a draft."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file.", "Choose a folder for the draft.")
    found = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if others := sorted(found - {CONFIG, WEIGHTS, METADATA, CARD, SHIPPED}):
        raise UserError(
            f"The folder {folder} holds other things than a draft ({', '.join(others[:4])}).",
            "Choose a new or empty folder.",
        )


def drafts_in_target(folder: str | Path, algorithm: str) -> list[DraftFolder]:
    """Open the draft heads for ``algorithm`` that lie in folders of a target's, as some are published."""
    found = []
    for config in sorted(Path(folder).glob(f"*/{CONFIG}")):
        try:
            draft = DraftFolder.as_published(config.parent)
            kind = draft.kind
        except UserError:  # something else, or a head that is not ours
            continue
        if algorithm in kind.algorithms and not kind.is_whole_model:
            found.append(draft)
    return found


def load_draft(
    draft: AnyDraft,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    target: Target | None = None,
) -> DraftHead:
    """Load a draft head of ours or of another trainer, ready to be trained.

    Args:
        draft: see :meth:`DraftFolder.open`.
        dtype: of the weights in memory; RoPE frequencies stay fp32.
        target: the head is bound to it. Needed only by drafts that name no layer ids, or have no ``lm_head``
            because they share the target's; heads without an output layer must be bound before they run.

    Raises:
        UserError: a corrupt file; missing, unexpected or misshapen tensors by name; an impossible vocabulary
            map; a whole model.
    """
    opened = DraftFolder.open(draft, None if target is None else target.config)
    return opened.load(dtype, device, target=target)
