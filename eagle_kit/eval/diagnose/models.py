"""Target and draft of a diagnosis, loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle_kit.config.engine import EngineConfig
from eagle_kit.drafts.files.copies import is_copy
from eagle_kit.drafts.files.draft import DraftFolder
from eagle_kit.drafts.files.draft_files import EMBEDDING
from eagle_kit.engine.llm import LLM
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.targets.target import Target

MOST_WEIGHTS = 4e9
"""Parameters of the largest target that is loaded once more, in fp32."""


@dataclass(frozen=True)
class Models:
    """An engine with target and draft, and the head once more as its files have it.

    Attributes:
        head: on the target's device and in its dtype, without packed weights.
        target_folder: files of the target; None for models that were made in memory.
        draft: files of the draft; None for a head that was made in memory.
        embedding: ``[V, H]`` of the draft's files, where it is not the target's; else None.
        other_copies: names of matrices that the files bring as the target's, and that are not this one's.
    """

    llm: LLM
    head: DraftHead
    target_folder: Path | None = None
    draft: DraftFolder | None = None
    embedding: torch.Tensor | None = None
    other_copies: Sequence[str] = ()

    @property
    def target(self) -> Target:
        """The target in use."""
        return self.llm.target

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.target.embed_tokens.weight.dtype

    @property
    def training(self) -> Mapping[str, Any]:
        """``eagle_kit.json`` of the draft, with figures of its training; empty where there is
        none."""
        return {} if self.draft is None else self.draft.files.metadata

    def in_float32(self) -> "tuple[Target, DraftHead] | None":
        """Load target and head in fp32. None where they are in fp32, are too large for another
        copy, or have no files."""
        count = sum(parameter.numel() for parameter in self.target.parameters())
        if self.dtype == torch.float32 or count > MOST_WEIGHTS:
            return None
        if self.target_folder is None or self.draft is None:
            return None
        device = self.target.embed_tokens.weight.device
        target = load_target(self.target_folder, torch.float32, device)
        return target, self.draft.load(torch.float32, device, target=target)


def load_models(draft: DraftFolder, target_folder: Path, config: EngineConfig) -> Models:
    """Load target and draft. Raises UserError as :class:`~eagle_kit.engine.llm.LLM` does."""
    from eagle_kit.server.api.startup import warnings_as_lines

    with warnings_as_lines(lambda line: None):  # they are among the findings
        llm = LLM(target_folder, draft, config.replace(shape=None))
        target = llm.target
        weight = target.embed_tokens.weight
        head = draft.load(weight.dtype, weight.device, target=target)

    # Matrices that the files bring as the target's, and that are not this one's.
    files = draft.files
    kind = draft.head_kind
    copies = kind.weights(files, kind.read_config(files, target.config), target).copies
    others = []
    for name, copy in copies.items():
        own = weight if name == EMBEDDING else target.head_weight
        if not is_copy(copy, own):
            others.append(name)
    embedding = copies[EMBEDDING].to(weight) if EMBEDDING in others else None
    head = head.eval().requires_grad_(False)
    return Models(llm, head, target_folder, draft, embedding, others)
