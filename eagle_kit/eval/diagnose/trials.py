"""Trials of hypotheses: screened on one half of the replies, and judged on the other.

Whatever is best of dozens on the first half is a little better there by chance; the second half has not seen
the choice. Differences are paired, root by root, and their errors are those of texts.

Legend: R roots, Vd draft vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from eagle_kit.core.stats import SpecStats
from eagle_kit.eval.diagnose.chain import Reading, Source, View, read_chain
from eagle_kit.eval.diagnose.estimates import Estimate, estimate
from eagle_kit.eval.diagnose.hypotheses import MAP, Hypothesis
from eagle_kit.eval.diagnose.row import Row
from eagle_kit.models.heads.draft_head import DraftHead
from eagle_kit.serve.drafts import copy_head

STEPS = 4
"""Depth of the chains that are judged."""
FINALISTS = 2
"""Readings of a subject that are judged on the second half."""
SURE = 4.0
"""Standard errors of a difference that is taken for real: chance gives as much once in 30,000 trials, and
with a dozen texts, whose errors are themselves uncertain, once in 500."""
LIKELY = 2.0
LEAST_LIKELIER = 0.05
"""Log-probability that the right reading gives more, in nats per token. A head was trained to give the most
with its own inputs, so this tells readings apart that cost no token yet: neighbouring layers, for one."""
TAUGHT = 0.15
"""Probability of its first drafts that a head gives them once it has learned anything."""
LEARNED_SHARE = 0.15
"""First drafts that a learned map must restore: frequent tokens alone make a twentieth."""
LOW_SHARE = 0.2
"""First drafts accepted, below which a head is taken for wrong or unlearned rather than modest: a chain then
emits fewer than about 1.25 tokens per verify."""


@dataclass(frozen=True)
class Trial:
    """A hypothesis on replies that did not choose it.

    Attributes:
        served, undone: share of first drafts that are accepted, as the head is and with the hypothesis.
        gain: drafts of a chain that are accepted more, per root.
        likelier: log-probability of the target's token that the head gives more, per root.
        ahead: the same of that token's rank, by its logarithm: blind to how sure the head is.
        accepted: drafts of a chain that are accepted, per root, as it is and undone.
        lengths: tokens per verify of a chain, as it is and undone; None where the replies are not greedy.
    """

    hypothesis: Hypothesis
    served: Estimate
    undone: Estimate
    gain: Estimate
    likelier: Estimate
    ahead: Estimate
    accepted: tuple[float, float]
    lengths: tuple[float, float] | None = None

    @property
    def is_confirmed(self) -> bool:
        """True where acceptance rises, or, of a head that works, the target's tokens become likelier and none
        is lost; and where it is not chance."""
        return self._rises or self._fits_better

    @property
    def _rises(self) -> bool:
        fault = self.hypothesis
        is_worth = self.accepted[1] >= fault.least_ratio * self.accepted[0]
        scores = sorted((self.gain.score, self.likelier.score))
        is_sure = scores[0] >= SURE if fault.leaks else scores[1] >= SURE and self.gain.score >= LIKELY
        return is_worth and is_sure and self.undone.mean >= fault.least_share

    @property
    def _fits_better(self) -> bool:
        is_likelier = self.likelier.mean >= LEAST_LIKELIER and self.likelier.score >= SURE
        works = self.served.mean >= LOW_SHARE and self.gain.score > -LIKELY
        return is_likelier and works and self.ahead.score >= LIKELY and not self.hypothesis.leaks

    @property
    def score(self) -> float:
        """What orders trials: log-probability and drafts gained."""
        return self.likelier.mean + self.gain.mean


def try_all(
    head: DraftHead,
    halves: tuple[Source, Source],
    tried: Sequence[Hypothesis],
    on_probe: Callable[[], None] = lambda: None,
) -> list[Trial]:
    """Try hypotheses -> those of every subject that looked best, the best first.

    Args:
        halves: to choose on, and to judge on.
        on_probe: called after every hypothesis.
    """
    first, second = halves
    served = {depth: read_chain(head, first, depth) for depth in {each.depth for each in tried}}
    scored: list[tuple[float, Hypothesis]] = []
    for hypothesis in tried:
        depth = hypothesis.depth
        scored.append((_score(served[depth], read(head, first, hypothesis, depth)), hypothesis))
        on_probe()
    as_it_is = read_chain(head, second, STEPS)
    trials = [judge(head, second, as_it_is, each) for each in _finalists(scored)]
    if not any(trial.is_confirmed for trial in trials):  # it mends other faults of simple texts too
        trials += [judge(head, second, as_it_is, each) for each in _learned_map(head, first, served[1])]
    return sorted(trials, key=lambda trial: -trial.score)


def read(head: DraftHead, source: Source, hypothesis: Hypothesis, steps: int = 1) -> Reading:
    """Read a head as a hypothesis has it; the head stays as it was."""
    if hypothesis.change is not None:
        head = copy_head(head).bind(source.target.lm_head)
        hypothesis.change(head)
    return read_chain(head, source, steps, hypothesis.view)


def judge(head: DraftHead, source: Source, served: Reading, hypothesis: Hypothesis) -> Trial:
    """Compare a hypothesis with the head as it is, both on ``source``."""
    undone, row = read(head, source, hypothesis, STEPS), source.row
    lengths = decoded(served, row).accept_length, decoded(undone, row).accept_length
    return replace(compare(hypothesis, served, undone, row.texts), lengths=lengths)


def compare(hypothesis: Hypothesis, served: Reading, undone: Reading, texts: torch.Tensor) -> Trial:
    """Compare two readings of the same roots, of ``texts`` int64 ``[R]``; roots of text -1 are left out."""
    keep = texts >= 0
    texts, pair = texts[keep], (served, undone)
    return Trial(
        hypothesis,
        *(estimate((each.accepted[keep] > 0).float(), texts) for each in pair),
        estimate((undone.accepted - served.accepted)[keep], texts),
        estimate((undone.log_truth - served.log_truth)[keep], texts),
        estimate((served.log_rank - undone.log_rank)[keep], texts),
        (float(served.accepted[keep].float().mean()), float(undone.accepted[keep].float().mean())),
    )


def _score(served: Reading, found: Reading) -> float:
    """What chooses the finalists: tokens that are no longer unlikely, and drafts accepted."""
    likelier = (found.log_truth - served.log_truth).mean()
    return float(likelier + (found.accepted - served.accepted).float().mean())


def _finalists(scored: Iterable[tuple[float, Hypothesis]]) -> list[Hypothesis]:
    """The best few of every subject, of those that are better than the head as it is."""
    best: dict[str, list[Hypothesis]] = {}
    for score, hypothesis in sorted(scored, key=lambda pair: -pair[0]):
        mine = best.setdefault(hypothesis.subject, [])
        if score > 0 and len(mine) < FINALISTS:
            mine.append(hypothesis)
    return [hypothesis for mine in best.values() for hypothesis in mine]


def _learned_map(head: DraftHead, source: Source, served: Reading) -> list[Hypothesis]:
    """What every draft id most often stood for: restores acceptance under a map of another head."""
    token_map = head.token_map
    if token_map is None or float(served.confidence.mean()) < TAUGHT:
        return []
    learned = token_map.clone()
    for draft_id in served.first.unique().tolist():
        tokens, counts = source.states.greedy[served.first == draft_id].unique(return_counts=True)
        if int(counts.max()) > 1:
            learned[draft_id] = tokens[counts.argmax()]
    words = "a d2t that is learned from these replies: draft ids mean other tokens throughout"
    remedy = (
        "Use the d2t of this very head: draft ids are the rows of its lm_head, and another map was stored."
    )
    return [Hypothesis(MAP, words, remedy, View(token_map=learned), least_share=LEARNED_SHARE)]


def decoded(reading: Reading, row: Row) -> SpecStats:
    """What decoding the replies with this chain would count, cycle by cycle."""
    stats = SpecStats()
    accepted, texts = reading.accepted.tolist(), row.texts.tolist()
    at = 0
    while at < len(texts):
        end = at + int(row.ends[at] - row.roots[at]) - 1
        while at < end:
            stats.observe(min(accepted[at] + 1, end - at), min(accepted[at], end - at))
            at += min(accepted[at] + 1, end - at)
    return stats
