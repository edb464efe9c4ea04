"""How well a head fits its target where nothing can be undone: figures that tell the remaining causes apart.

A head learns the target's distribution over the draft vocabulary. On inputs like those of its
training, its first drafts have the probability under the target that they have under the head.

* A head with too little training gives its drafts low probabilities, and the target gives the same.
* A head whose target has other weights than in training (another model, rounded or tuned weights)
  gives its drafts the probabilities that it learned, and the target gives lower ones.

The head is compared with probabilities, not with what was accepted: a target that is unsure itself
does not count against the head.

Legend: R roots.
"""

import math
from dataclasses import dataclass

import torch

from eagle_kit.eval.diagnose.chain import ChainResult, Source
from eagle_kit.eval.diagnose.estimates import Estimate, estimate
from eagle_kit.eval.diagnose.row import log_probs
from eagle_kit.models.draft_head import DraftHead

LOW_SHARE = 0.2
"""Share of first drafts accepted, below which a head is read wrong or has learned little: a chain
then emits fewer than about 1.25 tokens per verify."""


@dataclass(frozen=True)
class Fit:
    """Figures of a head on its target's responses.

    Attributes:
        reach: share of roots whose chain is accepted to each depth.
        coverage: share of the responses' tokens that are in the draft vocabulary.
        accepted_if_covered: share of first drafts accepted where the response's token is in the draft
            vocabulary.
        confidence: mean probability of the first drafts under the head.
        target_confidence: the same under the target, among the tokens of the draft vocabulary.
        excess: confidence minus target confidence, root by root.
        entropy: mean entropy of the head's distribution, in nats.
        max_entropy: entropy of a uniform distribution over the draft vocabulary, in nats.
        is_finite: whether all logits are.
    """

    reach: tuple[Estimate, ...]
    coverage: Estimate
    accepted_if_covered: Estimate
    confidence: Estimate
    target_confidence: Estimate
    excess: Estimate
    entropy: float
    max_entropy: float
    is_finite: bool

    @property
    def share(self) -> float:
        """Share of first drafts accepted."""
        return self.reach[0].mean

    @property
    def is_low(self) -> bool:
        """True where fewer first drafts are accepted than by any head that is read right and has
        learned."""
        return self.share + self.reach[0].margin < LOW_SHARE


def measure_fit(
    head: DraftHead, source: Source, result: ChainResult, token_map: torch.Tensor | None = None
) -> Fit:
    """Take the figures of the chains that ``head`` drafted.

    Args:
        token_map: int64 ``[Vd]``, map with which they were drafted; None for the head's own.
    """
    text_index = source.row.text_index
    first = result.first

    # Share of roots accepted to each depth, of those whose responses are long enough.
    reach = []
    for depth in range(1, int(result.max_accepted.max()) + 1):
        is_long = result.max_accepted >= depth
        is_reached = result.num_accepted >= depth
        reach.append(estimate(is_reached[is_long].float(), text_index[is_long]))

    # First drafts by the draft vocabulary.
    accepted_if_covered = Estimate(0.0, 0.0)
    if first.is_covered.any():
        is_accepted = result.num_accepted[first.is_covered] > 0
        accepted_if_covered = estimate(is_accepted.float(), text_index[first.is_covered])

    # Probabilities of first drafts under head and target.
    vocabulary = head.token_map if token_map is None else token_map.unique()
    target_log_probs = log_probs(source.target, source.row, source.states, first.token, vocabulary)
    target_confidence = target_log_probs.exp()
    return Fit(
        reach=tuple(reach),
        coverage=estimate(first.is_covered.float(), text_index),
        accepted_if_covered=accepted_if_covered,
        confidence=estimate(first.confidence, text_index),
        target_confidence=estimate(target_confidence, text_index),
        excess=estimate(first.confidence - target_confidence, text_index),
        entropy=float(first.entropy.mean()),
        max_entropy=math.log(head.config.draft_vocab_size),
        is_finite=result.is_finite,
    )
