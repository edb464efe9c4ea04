"""DSpark heads for SGLang, vLLM and speculators.

SGLang and vLLM serve DeepSpec's layout, which is ours; vLLM with the vanilla Markov head. A head without a
confidence head loads in SGLang while its ragged verification is static, as it is by default.
"""

from typing import Any

from eagle_kit.drafts.dflash.block_kind import ROWS
from eagle_kit.drafts.dflash.format import BlockFormat
from eagle_kit.drafts.files.formats import Format, refuse

RANK = "markov_rank"
FORM = "markov_head_type"
"""Keys of a ``config.json`` for the Markov head."""


class DSparkFormat(BlockFormat):
    """Between our layout of DSpark heads and the others'."""

    authors = "DeepSpec"

    def check_served(self, config: Any, peer: Format) -> None:
        """See :class:`~eagle_kit.drafts.dflash.format.BlockFormat`."""
        elsewhere = "Export it for speculators."
        if not config.markov_rank:
            refuse(peer, f"its DSpark classes have a Markov head ({RANK})", elsewhere)
        if peer == "vllm":
            if config.markov_form != "vanilla":
                refuse(peer, f"its DSpark classes know no {FORM} {config.markov_form}", elsewhere)
            return
        if not config.predicts_next:
            refuse(peer, f"it drafts a token for each of block_size rows ({ROWS} false: one less)", elsewhere)
        if config.owns_output:
            refuse(peer, "it serves DSpark heads with the target's output layer only", elsewhere)
