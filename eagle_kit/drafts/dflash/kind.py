"""DFlash heads: the layout of their authors, which SGLang and vLLM serve, and that of speculators.

Rows predict their own token. A config that does not say so (``sample_from_anchor``) means it, unless it is
one of DeepSpec's (``markov_rank``), whose heads have rows of the next token.
"""

from typing import Any

from eagle_kit.config.drafts.blocks import DFlashHeadConfig
from eagle_kit.drafts.dflash.block_kind import NEMO, BlockKind
from eagle_kit.drafts.dflash.format import BlockFormat
from eagle_kit.drafts.dflash.head import DFlashConfig, DFlashHead


class DFlashKind(BlockKind[DFlashConfig, DFlashHead, DFlashHeadConfig]):
    """DFlash (arXiv 2602.06036)."""

    name = "dflash"
    title = "DFlash draft head"
    algorithms = ("DFLASH",)
    vllm_method = "dflash"
    architecture = "DFlashDraftModel"
    speculator = "DFlashSpeculator"
    other_architectures = (NEMO,)
    format_class = BlockFormat
    config_class = DFlashConfig
    head_class = DFlashHead
    trained_as = ("dflash",)

    def read_rows(self, config: dict[str, Any], where: str) -> bool:
        """See :class:`~eagle_kit.drafts.dflash.block_kind.BlockKind`, and the top of this file."""
        is_deepspec_s = config.get("sample_from_anchor") is None and "markov_rank" in config
        return is_deepspec_s or super().read_rows(config, where)


DFLASH = DFlashKind()
