"""The head that a run starts from: its architecture by the config, its first weights."""

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
    """The architecture of a run's head. Raises UserError when the target has no use for it, or the run asks
    the head for other steps than it has."""
    draft = training_kind(config).new_config(_here(config.head, target), target)
    check_steps(config, draft)
    named: HeadArchitecture = replace(draft, target=config.target, template_hash=template_hash(tokenizer))
    return named


def check_steps(config: TrainConfig, draft: HeadArchitecture) -> None:
    """Raise UserError when a head is to be trained or judged for other steps than it has: several modules, or
    a block."""
    most = draft.most_steps
    if most is None:
        return
    modules = draft.num_modules
    has, other = (
        (f"each of the {modules} modules is trained for one step", "head.num_modules=1")
        if modules > 1
        else (f"a block drafts {most} tokens", "another head.block_size")
    )
    if config.training.ttt_length != most:
        raise UserError(
            f"training.ttt_length is {config.training.ttt_length}, but {has}.",
            f"Set training.ttt_length={most}, or {other}.",
        )
    shapes = [SpecShape.parse(shape) for shape in config.judge.shapes]
    if config.judge.every and any(shape.topk > 1 or shape.steps > most for shape in shapes):
        raise UserError(
            f"judge.shapes asks for more than a chain of {most} steps, and {has}.",
            f"Set judge.shapes to {SpecShape(most, 1, most + 1)}.",
        )


def new_head(config: TrainConfig, draft: HeadArchitecture, start: InitContext) -> DraftHead:
    """A head with seeded weights, in fp32 and bound to the target."""
    torch.manual_seed(config.seed)
    head: DraftHead = training_kind(config).new_head(_here(config.head, start.target.config), draft, start)
    return head


def _here(head: HeadConfig, target: TargetConfig) -> HeadConfig:
    """``head`` with the folder of the draft that ``start_from`` names."""
    if head.first_draft is None:
        return head
    first = DraftFolder.open(head.first_draft, target)
    return head.model_copy(update={"start_from": str(first.path)})
