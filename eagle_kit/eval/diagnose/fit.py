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
from eagle_kit.models.blocks.layers import RMSNorm
from eagle_kit.models.heads.draft_head import DraftHead


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
        norm_drift: least relative spread of a norm's weights: new norms have equal ones.
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
    norm_drift: float
    is_finite: bool


def measure_fit(head: DraftHead, source: Source, reading: Reading) -> Fit:
    """Take the figures of ``reading``, the head's chain as it is served."""
    texts = source.row.texts
    trust = log_probs(*source, reading.first_token, head.token_map).exp()
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
        min(_spread(module.weight) for module in head.modules() if isinstance(module, RMSNorm)),
        reading.is_finite,
    )


def _spread(weight: torch.Tensor) -> float:
    weight = weight.detach().float()
    return float(weight.std() / weight.abs().mean().clamp(min=1e-12)) if len(weight) > 1 else 0.0
