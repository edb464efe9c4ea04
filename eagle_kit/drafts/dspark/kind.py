"""DSpark heads: the layout of DeepSpec, which SGLang and vLLM serve, and those of SpecForge and speculators.

The architecture is DFlash's with a Markov head (``markov_rank``, ``markov_head_type``) and a confidence
head, which reads the token before too (``confidence_head_with_markov``) or not. DeepSpec has these keys, the
mask and the layers at the top of the config, SpecForge in ``dflash_config`` with ``projector_type`` dspark.
ModelOpt has them there too, with keys (``use_confidence_head``, ``shift_label``) and names of its own.
Rows predict the next token. A config that does not say so (``sample_from_anchor``) means it, but for one of
speculators, which vLLM takes for the other kind: that is refused. Keys of the confidence head that are
missing follow from its weights.
"""

from typing import Any

from eagle_kit.config.drafts.blocks import DSparkHeadConfig
from eagle_kit.core.errors import UserError
from eagle_kit.drafts.base.kind import HeadTensors, our_names
from eagle_kit.drafts.dflash.block_kind import ROWS, TABLE, BlockKind
from eagle_kit.drafts.dspark.format import FORM, RANK, DSparkFormat
from eagle_kit.drafts.dspark.head import DSparkConfig, DSparkHead
from eagle_kit.drafts.files.draft_files import DraftFiles
from eagle_kit.models.blocks.markov import MARKOV_FORMS
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.config_values import read_flag, wrong_value
from eagle_kit.models.targets.target import Target

CONFIDENCE, READS_TOKEN = "enable_confidence_head", "confidence_head_with_markov"
CONFIDENCE_WEIGHT = "confidence_head.proj.weight"
TABLE_WEIGHT = "markov_head.markov_w1.weight"
USES_CONFIDENCE = "use_confidence_head"
"""ModelOpt's key for :data:`CONFIDENCE`."""
FLAT_MODULES = {
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "gate_proj": "markov_head.gate_proj",
    "joint_proj": "markov_head.joint_proj",
    "confidence_proj": "confidence_head.proj",
}
"""ModelOpt's modules of both heads, which stand beside the layers -> ours."""
MAX_RANK = 65_536


class DSparkKind(BlockKind[DSparkConfig, DSparkHead, DSparkHeadConfig]):
    """DSpark (arXiv 2607.05147)."""

    name = "dspark"
    title = "DSpark draft head"
    algorithms = ("DSPARK",)
    vllm_method = "dspark"
    architecture = "Qwen3DSparkModel"
    speculator = "DSparkSpeculator"
    other_architectures = ("DSparkDraftModel",)
    keys_of_both_places = (*BlockKind.keys_of_both_places, RANK, FORM, CONFIDENCE, READS_TOKEN)
    known_parts = frozenset({RANK, FORM})
    config_class = DSparkConfig
    head_class = DSparkHead
    trained_as = ("dspark",)
    format_class = DSparkFormat

    def recognises(self, files: DraftFiles) -> bool:
        """See :class:`~eagle_kit.drafts.base.kind.DraftKind`; SpecForge's have the architecture of DFlash."""
        table = files.config.get(TABLE)
        return super().recognises(files) or (
            isinstance(table, dict) and table.get("projector_type") == self.name
        )

    def read_fields(self, files: DraftFiles, target: TargetConfig | None) -> dict[str, Any]:
        """See :class:`~eagle_kit.drafts.dflash.block_kind.BlockKind`."""
        fields = super().read_fields(files, target)
        where = files.where
        config = self.read_keys(files)
        rank = config.get(RANK)
        if rank is None and (shape := _shape_of(files, TABLE_WEIGHT)) is not None:
            rank = shape[-1]
        form = config.get(FORM) or MARKOV_FORMS[0]
        if type(rank) is not int or not 0 <= rank <= MAX_RANK:
            raise wrong_value(RANK, rank, where, f"a whole number from 0 to {MAX_RANK}")
        if form not in MARKOV_FORMS:
            raise wrong_value(FORM, form, where, f"one of {', '.join(MARKOV_FORMS)}")
        if form == "rnn" and not fields["predicts_next"]:
            raise UserError(
                f"The draft in {where} has {FORM} rnn and rows that predict their own token ({ROWS}): its "
                "state begins in a row that drafts nothing, which ours does not.",
                "Serve it with the engine it was made for.",
            )
        has_confidence, reads_token = _read_confidence(config, files, fields["hidden_size"])
        if reads_token and not rank:
            raise UserError(
                f"The draft in {where} has {READS_TOKEN}, and no Markov head whose embedding it could read.",
                f"Set {READS_TOKEN} to false, or {RANK} to the rank of its weights.",
            )
        return fields | {
            "markov_rank": rank,
            "markov_form": form,
            "has_confidence": has_confidence,
            "confidence_reads_token": reads_token,
        }

    def has_tensors(self, files: DraftFiles) -> bool:
        """See :class:`~eagle_kit.drafts.dflash.block_kind.BlockKind`; with the table of the Markov head."""
        return super().has_tensors(files) and _shape_of(files, TABLE_WEIGHT) is not None

    def names(self, files: DraftFiles) -> dict[str, str]:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`; ModelOpt's names too."""
        return our_names(((_our_name(name), name) for name in files.tensors), files.where)

    def read_keys(self, files: DraftFiles) -> dict[str, Any]:
        """See :class:`~eagle_kit.drafts.dflash.block_kind.BlockKind`; with ModelOpt's key of the confidence
        head."""
        whole = super().read_keys(files)
        if whole.get(CONFIDENCE) is None and whole.get(USES_CONFIDENCE) is not None:
            return {**whole, CONFIDENCE: whole[USES_CONFIDENCE]}
        return whole

    def own_keys(self, config: DSparkConfig) -> dict[str, Any]:
        """See :class:`~eagle_kit.drafts.dflash.block_kind.BlockKind`; with the Markov and the confidence
        head."""
        return {**super().own_keys(config)[TABLE], **self.part_keys(config)}

    def part_keys(self, config: DSparkConfig) -> dict[str, Any]:
        """See :class:`~eagle_kit.drafts.dflash.block_kind.BlockKind`."""
        return {
            RANK: config.markov_rank,
            FORM: config.markov_form,
            CONFIDENCE: config.has_confidence,
            READS_TOKEN: config.confidence_reads_token,
        }

    def read_rows(self, config: dict[str, Any], where: str) -> bool:
        """See :class:`~eagle_kit.drafts.dflash.block_kind.BlockKind`, and the top of this file."""
        if config.get(ROWS) is not None:
            return super().read_rows(config, where)
        if config.get("speculators_model_type") is not None:
            raise UserError(
                f"The draft in {where} does not say whether a row predicts its own token or the next one.",
                f"Write {ROWS} into its config.json: false for its own token, as vLLM takes such a config.",
            )
        return True

    def sort_tensors(self, files: DraftFiles, config: DSparkConfig, target: Target | None) -> HeadTensors:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`; an unused placeholder is left out."""
        found = super().sort_tensors(files, config, target)
        found.tensors.pop("mask_embedding", None)
        return found

    def describe(self, config: DSparkConfig, dtype: str) -> str:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        parts = []
        if config.markov_rank:
            parts.append(f"a Markov head of rank {config.markov_rank} ({config.markov_form})")
        if config.has_confidence:
            parts.append("a confidence head")
        return " ".join(
            (super().describe(config, dtype), *([f"It has {' and '.join(parts)}."] if parts else []))
        )

    def chosen_parts(self, settings: DSparkHeadConfig) -> dict[str, Any]:
        """See :class:`~eagle_kit.drafts.dflash.block_kind.BlockKind`."""
        return {
            "markov_rank": settings.markov_rank,
            "markov_form": settings.markov_head_type,
            "has_confidence": settings.confidence_head,
            "confidence_reads_token": settings.confidence_head and settings.markov_rank > 0,
        }


def _read_confidence(config: dict[str, Any], files: DraftFiles, size: int) -> tuple[bool, bool]:
    """Whether there is a confidence head, and whether it reads the token before. Weights are only read where
    a key is missing; one ``[1, H]`` reads rows of H values, ``size``, alone."""
    shape = None
    if None in (config.get(CONFIDENCE), config.get(READS_TOKEN)):
        shape = _shape_of(files, CONFIDENCE_WEIGHT)
    has_confidence = read_flag(config, CONFIDENCE, files.where, shape is not None)
    is_wide = shape is not None and shape[-1] > size
    return has_confidence, has_confidence and read_flag(config, READS_TOKEN, files.where, is_wide)


def _our_name(name: str) -> str:
    """Our name of a tensor, whoever named it."""
    name = name.removeprefix("model.")
    module, _, leaf = name.partition(".")
    return f"{FLAT_MODULES[module]}.{leaf}" if module in FLAT_MODULES else name


def _shape_of(files: DraftFiles, ours: str) -> tuple[int, ...] | None:
    """Shape of the tensor of our name ``ours``; None where it is not there or has no values."""
    name = next((name for name in files.names if _our_name(name) == ours), None)
    shape = None if name is None else files.shape_of(name)
    return shape or None


DSPARK = DSparkKind()
