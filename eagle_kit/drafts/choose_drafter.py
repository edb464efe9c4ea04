"""Choice of a drafter for a draft model."""

from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import UserError
from eagle_kit.drafts.base.autoregressive import AutoregressiveDrafter
from eagle_kit.drafts.base.draft_model import DraftModel
from eagle_kit.drafts.base.drafter import Drafter
from eagle_kit.drafts.base.sampled import SampledDrafter
from eagle_kit.drafts.base.sampled_one_pass import SampledBlockDrafter, SampledMaskedDrafter
from eagle_kit.drafts.dflash.drafter import BlockDrafter
from eagle_kit.drafts.eagle1.static_tree import SampledStaticDrafter, StaticDrafter
from eagle_kit.drafts.mtp.drafter import ModulesDrafter
from eagle_kit.drafts.p_eagle.drafter import MaskedDrafter
from eagle_kit.models.draft_head import StepForm

_ONE_PASS: dict[StepForm, tuple[type[Drafter], type[Drafter] | None, str]] = {
    StepForm.MODULES: (ModulesDrafter, None, "{0.num_modules} modules"),
    StepForm.MASKED: (MaskedDrafter, SampledMaskedDrafter, "masks for its later steps"),
    StepForm.BLOCK: (BlockDrafter, SampledBlockDrafter, "blocks"),
}
"""Drafters whose candidates are made during draft-extend, of chains and trees and of sampled chains, and what
a model of theirs has."""


def drafter_class(model: DraftModel, config: EngineConfig) -> type[Drafter]:
    """Choose the drafter of ``model`` by the form of its steps, the topology, and the sampling of drafts.

    Raises:
        UserError: a draft that has its candidates after draft-extend was asked for something else.
    """
    # EAGLE heads and whole models: a forward of the draft for each step (StepForm.FED_BACK).
    one_pass = _ONE_PASS.get(model.step_form)
    if one_pass is None:
        if config.tree == "static":
            return SampledStaticDrafter if config.sampled_drafts else StaticDrafter
        return SampledDrafter if config.sampled_drafts else AutoregressiveDrafter

    # The other forms: all steps in one pass.
    drafter, sampled_drafter, words = one_pass
    chosen = sampled_drafter if config.sampled_drafts else drafter
    if config.tree != "static" and chosen is not None:
        return chosen
    kinds = "chains and dynamic trees only"
    remedy = "Leave static trees out."
    if sampled_drafter is None:
        kinds += ", and no sampled ones"
        remedy = "Leave static trees and sampled drafts out."
    raise UserError(f"The draft has {words.format(model)}, which draft {kinds}.", remedy)
