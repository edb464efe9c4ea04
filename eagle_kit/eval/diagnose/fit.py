"""How well a head fits its target where nothing can be undone: figures that tell the remaining causes apart.

A head learns the target's distribution over the draft vocabulary, so on inputs like those of its training its
first proposal is as probable under the target as it says itself. Trained too little it is unsure, and knows
it. Fed by another target, or by one whose weights were rounded or tuned since, it is as sure as it was taught
to be, and wrong: then its confidence exceeds the target's probability. (The comparison is with probabilities,
not with what was accepted, so a target that is unsure itself does not count against the head.)

Legend: R roots.
"""

from dataclasses import dataclass

import torch

from eagle_kit.eval.diagnose.chain import Reading, Source
from eagle_kit.eval.diagnose.estimates import Estimate, estimate
from eagle_kit.eval.diagnose.row import log_probs
from eagle_kit.models.draft_head import DraftHead

LOW_SHARE = 0.2
"""First drafts accepted, below which a head is taken for wrong or unlearned rather than modest: a chain then
emits fewer than about 1.25 tokens per verify."""


@dataclass(frozen=True)
class Fit:
    """Figures of a head on its target's replies.

    Attributes:
        reach: share of roots whose chain is accepted to each depth.
        coverage: share of the replies' tokens that are in the draft vocabulary.
        within: first drafts accepted where the token is in it.
        confidence: mean probability of the first proposal under the head.
        trust: the same under the target, of the tokens in the draft vocabulary.
        excess: their difference, root by root.
        entropy: of the first proposal's distribution, in nats; ``most_entropy`` is that of guessing evenly.
        is_finite: whether all logits are.
    """

    reach: tuple[Estimate, ...]
    coverage: Estimate
    within: Estimate
    confidence: Estimate
    trust: Estimate
    excess: Estimate
    entropy: float
    most_entropy: float
    is_finite: bool

    @property
    def share(self) -> float:
        """First drafts accepted."""
        return self.reach[0].mean

    @property
    def is_low(self) -> bool:
        """True where so few drafts are accepted that a modest head does not explain it."""
        return self.share + self.reach[0].margin < LOW_SHARE


def measure_fit(
    head: DraftHead, source: Source, reading: Reading, token_map: torch.Tensor | None = None
) -> Fit:
    """Take the figures of ``reading``, a chain of the head.

    Args:
        token_map: int64 ``[Vd]``, of the reading, in place of the head's.
    """
    texts = source.row.texts
    among = head.token_map if token_map is None else token_map.unique()
    trust = log_probs(*source, reading.first_token, among).exp()
    covered, hit = reading.covered, reading.accepted > 0
    steps = int(reading.possible.max())
    reach = []
    for depth in range(1, steps + 1):
        mine = reading.possible >= depth
        reach.append(estimate((reading.accepted >= depth)[mine].float(), texts[mine]))
    return Fit(
        tuple(reach),
        estimate(covered.float(), texts),
        estimate(hit[covered].float(), texts[covered]) if covered.any() else Estimate(0.0, 0.0),
        estimate(reading.confidence, texts),
        estimate(trust, texts),
        estimate(reading.confidence - trust, texts),
        float(reading.entropy.mean()),
        float(torch.tensor(float(head.config.draft_vocab_size)).log()),
        reading.is_finite,
    )
