"""The draft head at the start of a training run: architecture and initial weights, by the config."""

from dataclasses import replace
from typing import Any

import torch

from eagle_kit.config.drafts.base import HeadConfig
from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import SpecShape
from eagle_kit.data.chat.template import template_hash
from eagle_kit.drafts.base.kind import InitContext
from eagle_kit.drafts.files.draft import DraftFolder
from eagle_kit.drafts.registry import training_kind
from eagle_kit.models.config import HeadArchitecture, TargetConfig
from eagle_kit.models.draft_head import DraftHead


def head_architecture(config: TrainConfig, target: TargetConfig, tokenizer: Any) -> HeadArchitecture:
    """Architecture of a run's draft head.

    Raises:
        UserError: the head does not fit the target, or the run has settings for another number of steps.
    """
    head = _with_first_draft(config.head, target)
    draft = training_kind(config).new_config(head, target)
    check_steps(config, draft)
    named: HeadArchitecture = replace(draft, target=config.target, template_hash=template_hash(tokenizer))
    return named


def check_steps(config: TrainConfig, draft: HeadArchitecture) -> None:
    """Check the settings of a head with a fixed number of draft steps: several modules, or a block.

    Raises:
        UserError: the head is trained for another number of steps, or validated with more of them or a tree.
    """
    most = draft.most_steps
    if most is None:
        return
    reason = f"a block drafts {most} tokens"
    alternative = "another head.block_size"
    if draft.num_modules > 1:
        reason = f"each of the {draft.num_modules} modules is trained for one step"
        alternative = "head.num_modules=1"

    # Training.
    if config.training.ttt_length != most:
        raise UserError(
            f"training.ttt_length is {config.training.ttt_length}, but {reason}.",
            f"Set training.ttt_length={most}, or {alternative}.",
        )

    # Validation.
    if not config.validation.every:
        return
    for name in config.validation.shapes:
        shape = SpecShape.parse(name)
        if shape.topk > 1 or shape.steps > most:
            raise UserError(
                f"validation.shapes has {name}, which is more than a chain of {most} steps, but {reason}.",
                f"Set validation.shapes to {SpecShape(most, 1, most + 1)}.",
            )


def new_head(config: TrainConfig, draft: HeadArchitecture, start: InitContext) -> DraftHead:
    """A draft head with seeded weights, in fp32 and bound to the target."""
    torch.manual_seed(config.seed)
    settings = _with_first_draft(config.head, start.target.config)
    head: DraftHead = training_kind(config).new_head(settings, draft, start)
    return head


def _with_first_draft(head: HeadConfig, target: TargetConfig) -> HeadConfig:
    """Copy of ``head`` whose ``start_from`` is the local folder of the draft it names."""
    if head.first_draft is None:
        return head
    first = DraftFolder.open(head.first_draft, target)
    return head.model_copy(update={"start_from": str(first.path)})
