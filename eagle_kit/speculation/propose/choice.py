"""Choice of a drafter for a draft model."""

from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import UserError
from eagle_kit.models.heads.draft_head import StepForm
from eagle_kit.speculation.propose.block import BlockDrafter
from eagle_kit.speculation.propose.draft_model import DraftModel
from eagle_kit.speculation.propose.drafter import Drafter
from eagle_kit.speculation.propose.masked import MaskedDrafter
from eagle_kit.speculation.propose.modules import ModulesDrafter
from eagle_kit.speculation.propose.sampled import SampledDrafter
from eagle_kit.speculation.propose.static import SampledStaticDrafter, StaticDrafter

_READY: dict[StepForm, tuple[type[Drafter], str]] = {
    StepForm.MODULES: (ModulesDrafter, "{0.num_modules} modules"),
    StepForm.MASKED: (MaskedDrafter, "masks for its later steps"),
    StepForm.BLOCK: (BlockDrafter, "blocks"),
}
"""Drafters whose candidates are made during draft-extend, and what a model of theirs has."""


def drafter_class(model: DraftModel, config: EngineConfig) -> type[Drafter]:
    """Choose the drafter of ``model`` by how its steps come about, the topology, and the sampling of drafts.

    Raises:
        UserError: a draft that has its candidates after draft-extend was asked for something else.
    """
    if (made_at_once := _READY.get(model.step_form)) is not None:
        if config.tree == "static" or config.sampled_drafts:
            raise UserError(
                f"The draft has {made_at_once[1].format(model)}, which draft chains and dynamic trees only.",
                "Leave static trees and sampled drafts out.",
            )
        return made_at_once[0]
    if config.tree == "static":
        return SampledStaticDrafter if config.sampled_drafts else StaticDrafter
    return SampledDrafter if config.sampled_drafts else Drafter
