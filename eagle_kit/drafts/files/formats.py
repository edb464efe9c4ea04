"""Formats of drafts: what converts a kind of head between ours and others, and what it reads of a target."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.drafts.files.draft_files import EMBEDDING, DraftFiles, FolderTensors
from eagle_kit.models.config import TargetConfig

Format = Literal["eagle-kit", "sglang", "vllm", "speculators", "eagle"]
FORMATS: tuple[Format, ...] = ("eagle-kit", "sglang", "vllm", "speculators", "eagle")
PEERS = {"sglang": "SGLang", "vllm": "vLLM", "speculators": "speculators", "eagle": "EAGLE's repository"}
CHECKED_VERSIONS = {"sglang": "0.5.23", "vllm": "0.32.0", "speculators": "0.9.0"}
"""Of the sources that the rules in this folder were read from."""


@dataclass(frozen=True)
class Served:
    """Facts about a target that a layout depends on.

    Attributes:
        config: its sizes; None when it is not at hand.
        name: a hub id or a name.
        architectures: as in its config.json; empty when unknown.
        folder: of its files; None when they are not at hand.
    """

    config: TargetConfig | None = None
    name: str = ""
    architectures: tuple[str, ...] = ()
    folder: Path | None = None

    @property
    def family(self) -> str:
        """``model_type``; empty when unknown."""
        return "" if self.config is None else self.config.model_type

    def embedding(self) -> torch.Tensor | None:
        """Its embedding ``[V, H]`` on the CPU; None when it is not at hand. Raises UserError for a file that
        cannot be read."""
        tensors = {} if self.folder is None else FolderTensors(self.folder)
        names = [name for name in tensors if name.endswith(EMBEDDING)]
        return tensors[names[0]] if len(names) == 1 else None


class DraftFormat:
    """Conversion of heads of one kind between our layout and the others'.

    A kind names its class as ``format_class``. This one is of kinds for which no other project has a layout.

    Args:
        kind: a :class:`~eagle_kit.drafts.base.kind.HeadKind`, which reads and writes our layout.
    """

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def layout(self, files: DraftFiles) -> tuple[Format | None, str]:
        """The format of a head from elsewhere, and whose layout it is, for people.

        Returns:
            None for the format where two of them, which number layers differently, are possible.

        Raises:
            UserError: a part that our head does not have.
        """
        return "eagle-kit", "ours"

    def write(self, files: DraftFiles, peer: Format, served: Served) -> DraftFiles:
        """Our layout -> that of ``peer``. Raises UserError where it has no place for the head, or would read
        it otherwise."""
        refuse(peer, "it has no class for heads of this kind", "Serve them with eagle-kit.")

    def read(self, files: DraftFiles, peer: Format, target: TargetConfig | None) -> DraftFiles:
        """The layout of ``peer`` -> ours, every tensor accounted for.

        Args:
            target: completes what old configs leave out.

        Raises:
            UserError: a part that our head does not have; missing, unexpected or misshapen tensors.
        """
        raise UserError(
            f"The draft in {files.where} is a {self.kind.title}, and {PEERS[peer]} has no layout for those.",
            "Leave the format out.",
        )


def refuse(peer: Format, reason: str, remedy: str = "Export it in another format.") -> NoReturn:
    """Raise UserError: this draft cannot be written for ``peer`` because ``reason``."""
    raise UserError(f"This draft cannot be written for {PEERS[peer]}: {reason}.", remedy)


def zeros_for(tensors: dict[str, torch.Tensor], name: str, rows: int) -> dict[str, torch.Tensor]:
    """A zero vector ``[rows]`` in the dtype of the draft's matrices, as a table of one tensor."""
    dtype = next(tensor.dtype for key, tensor in tensors.items() if key.endswith("o_proj.weight"))
    return {name: torch.zeros(rows, dtype=dtype)}


def with_dtype(config: dict[str, Any], tensor: torch.Tensor) -> dict[str, Any]:
    """``config`` with the dtype of ``tensor``, in both spellings, where it names none."""
    return dict.fromkeys(("dtype", "torch_dtype"), dtype_name(tensor.dtype)) | config


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype as in configs, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def config_hash(config: dict[str, Any]) -> str:
    """A short hash of a ``config.json`` that the order of its keys does not change."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]
