"""Target and draft of a diagnosis, loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eagle_kit.config.engine import EngineConfig
from eagle_kit.drafts.base.kind import EMBEDDING
from eagle_kit.drafts.files.copies import is_copy
from eagle_kit.drafts.files.draft import load_draft
from eagle_kit.drafts.files.draft_files import DraftFiles
from eagle_kit.drafts.registry import find_head_kind
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
        places: folders of target and draft; None for models that were handed over.
        embedding: ``[V, H]`` that the files bring, where it is not the target's.
        other_copies: names of matrices that the files bring as the target's, and that are not this one's.
        metadata: ``eagle_kit.json`` of the draft.
    """

    llm: LLM
    head: DraftHead
    places: tuple[Path, Path] | None = None
    embedding: torch.Tensor | None = None
    other_copies: Sequence[str] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> Target:
        """The target in use."""
        return self.llm.target

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.target.embed_tokens.weight.dtype

    def in_float32(self) -> "tuple[Target, DraftHead] | None":
        """Target and head in fp32; None where they are, or where that is too much for another copy."""
        count = sum(parameter.numel() for parameter in self.target.parameters())
        if self.dtype == torch.float32 or self.places is None or count > MOST_WEIGHTS:
            return None
        device = self.target.embed_tokens.weight.device
        target = load_target(self.places[0], torch.float32, device)
        return target, load_draft(self.places[1], torch.float32, device, target=target)


def load_models(files: DraftFiles, places: tuple[Path, Path], config: EngineConfig) -> Models:
    """Load target and draft. Raises UserError as :class:`~eagle_kit.engine.llm.LLM` does.

    Args:
        files: of the draft.
        places: folders of target and draft.
    """
    from eagle_kit.server.api.startup import warnings_as_lines

    kind = find_head_kind(files)
    with warnings_as_lines(lambda line: None):  # they are among the findings
        llm = LLM(places[0], places[1], config.replace(shape=None))
        target, weight = llm.target, llm.target.embed_tokens.weight
        head = load_draft(places[1], weight.dtype, weight.device, target=target)
    copies = kind.weights(files, kind.read_config(files, target.config), target).copies
    others = [
        name
        for name, copy in copies.items()
        if not is_copy(copy, weight if name == EMBEDDING else target.head_weight)
    ]
    embedding = copies[EMBEDDING].to(weight) if EMBEDDING in others else None
    head = head.eval().requires_grad_(False)
    return Models(llm, head, places, embedding, others, files.metadata)
