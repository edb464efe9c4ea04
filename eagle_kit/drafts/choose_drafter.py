"""Choice of a drafter for a draft model."""

from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import UserError
from eagle_kit.drafts.base.autoregressive import AutoregressiveDrafter
from eagle_kit.drafts.base.draft_model import DraftModel
from eagle_kit.drafts.base.drafter import Drafter
from eagle_kit.drafts.base.sampled import SampledDrafter
from eagle_kit.drafts.dflash.drafter import BlockDrafter, SampledBlockDrafter
from eagle_kit.drafts.eagle1.static_tree import SampledStaticDrafter, StaticDrafter
from eagle_kit.drafts.mtp.drafter import ModulesDrafter
from eagle_kit.drafts.p_eagle.drafter import MaskedDrafter, SampledMaskedDrafter
from eagle_kit.models.draft_head import StepForm


def drafter_class(model: DraftModel, config: EngineConfig) -> type[Drafter]:
    """Choose the drafter of ``model`` by the form of its steps, the topology, and the sampling of drafts.

    Raises:
        UserError: the draft makes the candidates of all depths during draft-extend, and such drafts have no
            static trees, or no sampled ones.
    """
    is_sampled = config.sampled_drafts

    # EAGLE heads and whole models: a forward of the draft for each depth.
    if model.step_form is StepForm.FED_BACK:
        if config.tree == "static":
            return SampledStaticDrafter if is_sampled else StaticDrafter
        return SampledDrafter if is_sampled else AutoregressiveDrafter

    # Drafts that make the candidates of all depths during draft-extend.
    if model.step_form is StepForm.MODULES:
        _check_options(config, f"{model.num_modules} modules", has_sampled=False)
        return ModulesDrafter
    if model.step_form is StepForm.MASKED:
        _check_options(config, "masks for its later steps", has_sampled=True)
        return SampledMaskedDrafter if is_sampled else MaskedDrafter
    _check_options(config, "blocks", has_sampled=True)
    return SampledBlockDrafter if is_sampled else BlockDrafter


def _check_options(config: EngineConfig, parts: str, *, has_sampled: bool) -> None:
    """Raise UserError for options that a draft with these ``parts`` does not have.

    Args:
        has_sampled: whether there is a drafter that samples its drafts.
    """
    if has_sampled:
        kinds = "chains and dynamic trees only"
        remedy = "Leave static trees out."
    else:
        kinds = "chains and dynamic trees only, and no sampled ones"
        remedy = "Leave static trees and sampled drafts out."
    if config.tree == "static" or (config.sampled_drafts and not has_sampled):
        raise UserError(f"The draft has {parts}, which draft {kinds}.", remedy)
