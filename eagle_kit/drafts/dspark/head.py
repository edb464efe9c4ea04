"""DSpark draft head (arXiv 2607.05147): a DFlash head whose logits are corrected by the token before, and
that tells how likely each of its tokens is accepted.

The body drafts all rows of a block at once, so that none of them knows the tokens before it; the Markov head
(:mod:`eagle_kit.models.blocks.markov`) corrects their logits one after the other. The *confidence head* is
``sigmoid(C [h, W1 x] + b)``, of the row h, normed for the output layer, and the Markov head's embedding of
the token before: the probability that the row's token is accepted where all before it are. It knows the
tokens before that one and not the token itself. Rank 0 has no Markov head: that is DFlash.

Legend: T rows, H hidden, r rank.
"""

from dataclasses import dataclass

import torch
from torch import nn

from eagle_kit.drafts.dflash.head import DFlashConfig, DFlashHead
from eagle_kit.models.blocks.markov import MarkovForm, MarkovHead
from eagle_kit.ops.linear import Linear


@dataclass(frozen=True)
class DSparkConfig(DFlashConfig):
    """Architecture of a DSpark head.

    Attributes:
        markov_rank: r; 0 for no correction.
        markov_form: of the Markov head.
        has_confidence: it has a confidence head.
        confidence_reads_token: that one reads the token before too.
    """

    block_size: int = 7
    predicts_next: bool = True
    markov_rank: int = 256
    markov_form: MarkovForm = "vanilla"
    has_confidence: bool = True
    confidence_reads_token: bool = True


class ConfidenceHead(nn.Module):
    """Logit of a row's acceptance."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = Linear(size, 1)


class DSparkHead(DFlashHead):
    """DSpark head.

    What its output layer reads is a row of H values and, after them, the r values of its correction.
    """

    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.markov_head: MarkovHead | None = None
        if config.markov_rank:
            self.markov_head = MarkovHead(
                config.hidden_size,
                config.markov_rank,
                config.markov_form,
                config.vocab_size,
                config.draft_vocab_size,
            )
        self.confidence_head: ConfidenceHead | None = None
        if config.has_confidence:
            confidence_size = config.hidden_size
            if config.confidence_reads_token:
                confidence_size += config.markov_rank
            self.confidence_head = ConfidenceHead(confidence_size)

    @property
    def markov(self) -> MarkovHead | None:
        """See :class:`~eagle_kit.models.draft_head.DraftHead`."""
        return self.markov_head

    @property
    def predicts_confidence(self) -> bool:
        """See :class:`~eagle_kit.models.draft_head.DraftHead`."""
        return self.confidence_head is not None

    def corrected(self, blocks: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """See :class:`DFlashHead`."""
        if self.markov_head is None:
            return blocks
        return torch.cat((blocks, self.markov_head.of_blocks(blocks, before)), -1)

    def logits(self, fed_back: torch.Tensor) -> torch.Tensor:
        """See :class:`~eagle_kit.models.draft_head.DraftHead`."""
        if self.markov_head is None:
            return super().logits(fed_back)
        rows, values = fed_back.split((self.config.hidden_size, self.config.markov_rank), -1)
        return super().logits(rows) + self.markov_head.markov_w2(values)

    def confidence_logits(self, lm_head_input: torch.Tensor, before: torch.Tensor) -> torch.Tensor | None:
        """See :class:`~eagle_kit.models.draft_head.DraftHead`."""
        if self.confidence_head is None:
            return None
        rows = lm_head_input[..., : self.config.hidden_size]
        if self.config.confidence_reads_token and self.markov_head is not None:
            rows = torch.cat((rows, self.markov_head.markov_w1(before).to(rows.dtype)), -1)
        return self.confidence_head.proj(rows)[..., 0]
