"""Every kind of draft, and the ways to find one: by files, by algorithm, by architecture, by training config.

Which kind a draft is of is asked here and nowhere else.
"""

import re
from typing import Any

from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.drafts.base.kind import DraftKind, HeadKind
from eagle_kit.drafts.dflash.kind import DFLASH
from eagle_kit.drafts.dspark.kind import DSPARK
from eagle_kit.drafts.eagle1.kind import EAGLE1
from eagle_kit.drafts.eagle3.kind import EAGLE3
from eagle_kit.drafts.files.draft_files import DraftFiles
from eagle_kit.drafts.mtp.kind import MTP
from eagle_kit.drafts.p_eagle.kind import P_EAGLE
from eagle_kit.drafts.standalone.kind import STANDALONE
from eagle_kit.models.config import HeadArchitecture

KINDS: tuple[DraftKind, ...] = (
    DSPARK,
    DFLASH,
    P_EAGLE,
    EAGLE3,
    MTP,
    EAGLE1,
    STANDALONE,
)
"""In the order in which they are asked for a draft's files; the last one takes everything."""
OTHERS = {
    "medusa": "Medusa heads",
    "dflash2": "a DFlash2 draft",
    "domino": "a Domino draft, a DFlash draft whose logits a recurrent layer over its own tokens corrects",
    "jetspec": "a JetSpec draft, which drafts trees of blocks",
    "xpress": "an XPress draft",
    "dflare": "a DFlare draft",
    "vispec": "a ViSpec draft, which compresses images",
    "multimodaleagle": "an MSD draft, which reads images",
    "kimik3eagle3": "a draft with Kimi K3's layer, whose attention is gated and rotates nothing",
    "llamaeagledraftmodel": "an EAGLE-1 draft of NeMo, with a norm in front of its layer and one after it",
    **dict.fromkeys(
        (
            "gemma4dspark",
            "omnidspark",
            "k3dspark",
            "glm5_2dspark",
            "minimaxm3dspark",
            "deepseekv4dspark",
            "dsparkdeepseekv4",
            "dsparkv41",
            "forcausallmdspark",
        ),
        "a DSpark draft with layers that are not Qwen3's",
    ),
    "mlpspeculator": "an MLP speculator",
    "eaglemistrallarge3": "an EAGLE-1 draft with latent attention",
    "eagledeepseekmtp": "an EAGLE-1 draft with latent attention",
    "eaglecohere": "an EAGLE-1 draft with Cohere's layer, whose attention and MLP run side by side",
    "eagleminicpm": "an EAGLE-1 draft with MiniCPM's layer, which scales its residuals",
    "eagle3gemma": "an EAGLE-3 head with Gemma's layer, whose norms multiply by 1 + weight",
    "eaglellama4": "an EAGLE head with a Llama 4 layer",
    "llama4forcausallmeagle": "an EAGLE head with a Llama 4 layer",
}
"""Parts of names of architectures -> drafts of a kind that we do not have."""
OTHER_MODULES = {"prefix_gru": "domino", "candidate_selector": "dflash2", "medusa_heads": "medusa"}
"""Modules that only such drafts have -> their key in :data:`OTHERS`."""
NAMES_OF_DRAFTS = re.compile("eagle|dflash|dspark|draft|speculator|nextn|mtp|assistant", re.IGNORECASE)
"""Words of architectures that no whole model has."""
ANOTHER_ENGINE = "Serve it with the engine it was made for, or train an EAGLE-3 head."


def head_kinds() -> list[HeadKind[Any, Any, Any]]:
    """Those that are trained and published."""
    return [kind for kind in KINDS if isinstance(kind, HeadKind)]


def find_kind(files: DraftFiles) -> DraftKind:
    """The kind of a draft. Raises UserError for one that we do not have."""
    # Drafts that we know and do not run, by their names or by a module.
    words = [*(files.config.get("architectures") or [])]
    words += [files.config.get("model_type"), files.config.get("speculators_model_type")]
    words += [table.get("projector_type") for table in _tables_of_blocks(files.config)]
    text = " ".join(str(word).lower() for word in words if word)
    modules = {name.removeprefix("model.").partition(".")[0] for name in files.names}
    others = [what for part, what in OTHERS.items() if part in text]
    others += [OTHERS[part] for module, part in OTHER_MODULES.items() if module in modules]
    if others:
        raise UserError(
            f"The draft in {files.where} is {others[0]} ({words[0]}), which eagle-kit does not run.",
            ANOTHER_ENGINE,
        )

    # The first kind that recognises it; the last one is for models that are no drafts by their names.
    kind = next(kind for kind in KINDS if kind.recognises(files))
    if kind.is_whole_model and NAMES_OF_DRAFTS.search(files.architecture):
        raise UserError(
            f"The draft in {files.where} has the architecture {files.architecture}, and its tensors are not "
            "those of a kind that eagle-kit runs.",
            ANOTHER_ENGINE,
        )
    return kind


def _tables_of_blocks(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Tables of a config that say which correction a draft of blocks has."""
    tables = [config, config.get("dflash_config"), config.get("dspark_config")]
    return [table for table in tables if isinstance(table, dict)]


def algorithms() -> tuple[str, ...]:
    """Names that ask for a kind when serving."""
    return tuple(kind.algorithm for kind in KINDS)


def kind_in_target(algorithm: str) -> DraftKind | None:
    """The kind of that name that may lie in a target's own folder; None when it must not."""
    return next((kind for kind in KINDS if kind.algorithm == algorithm and kind.is_in_target), None)


def kind_of(config: HeadArchitecture) -> HeadKind[Any, Any, Any]:
    """The kind of a head, by its architecture."""
    return next(kind for kind in head_kinds() if type(config) is kind.config_class)


def training_kind(config: TrainConfig) -> HeadKind[Any, Any, Any]:
    """The kind of head that a config trains."""
    return next(kind for kind in head_kinds() if config.head.kind in kind.trained_as)
