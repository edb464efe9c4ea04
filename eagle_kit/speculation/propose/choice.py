"""Choice of a drafter for a draft model."""

from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import UserError
from eagle_kit.speculation.propose.draft_model import DraftModel
from eagle_kit.speculation.propose.drafter import Drafter
from eagle_kit.speculation.propose.modules import ModulesDrafter
from eagle_kit.speculation.propose.sampled import SampledDrafter
from eagle_kit.speculation.propose.static import SampledStaticDrafter, StaticDrafter


def drafter_class(model: DraftModel, config: EngineConfig) -> type[Drafter]:
    """Choose the drafter of ``model`` by its number of modules, the topology, and the sampling of drafts.

    Raises:
        UserError: several modules were asked for other drafts than plain chains.
    """
    if model.num_modules > 1:
        if config.tree == "static" or config.sampled_drafts:
            raise UserError(
                f"The draft has {model.num_modules} modules, which draft plain chains only.",
                "Leave static trees and sampled drafts out.",
            )
        return ModulesDrafter
    if config.tree == "static":
        return SampledStaticDrafter if config.sampled_drafts else StaticDrafter
    return SampledDrafter if config.sampled_drafts else Drafter
