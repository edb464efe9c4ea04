"""Trials of hypotheses: chosen on one half of the replies and judged on the other, both ways.

Whatever is best of dozens on one half is a little better there by chance; the other half has not seen the
choice. What both halves choose is judged on all replies. Differences are paired, root by root, and their
errors are those of texts.

Legend: R roots, Vd draft vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from eagle_kit.core.stats import SpecStats
from eagle_kit.engine.load_draft import copy_head
from eagle_kit.eval.diagnose.chain import Reading, Source, View, read_chain
from eagle_kit.eval.diagnose.estimates import Estimate, estimate
from eagle_kit.eval.diagnose.fit import LOW_SHARE, Fit, measure_fit
from eagle_kit.eval.diagnose.hypotheses import MAP, Hypothesis
from eagle_kit.eval.diagnose.row import Row
from eagle_kit.models.draft_head import DraftHead

STEPS = 4
"""Depth of the chains that are judged."""
FINALISTS = 2
"""Readings of a subject that are judged on the second half."""
SURE = 4.0
"""Standard errors of a difference that is taken for real: chance gives as much once in 30,000 trials, and
with a dozen texts, whose errors are themselves uncertain, once in 1,000."""
LIKELY = 2.0
LEAST_LIKELIER = 0.05
"""Log-probability that the right reading gives more, in nats per token. A head was trained to give the most
with its own inputs, so this tells readings apart that cost no token yet: neighbouring layers, for one."""
TAUGHT = 0.15
"""Probability of its first drafts that a head gives them once it has learned anything."""
LEARNED_SHARE = 0.15
"""First drafts that a learned map must restore: frequent tokens alone make a twentieth."""


@dataclass(frozen=True)
class Trial:
    """A hypothesis on replies that did not choose it.

    Attributes:
        served, undone: share of first drafts that are accepted, as the head is and with the hypothesis.
        gain: drafts of a chain that are accepted more, per root.
        likelier: log-probability of the target's token that the head gives more, per root.
        accepted: drafts of a chain that are accepted, per root, as it is and undone.
        confidence: probability of first drafts under the head, as it is and undone.
        lengths: tokens per verify of a chain, as it is and undone; None where the replies are not greedy.
        fit: figures of the head with the hypothesis; None for far positions, and where it is not confirmed.
    """

    hypothesis: Hypothesis
    served: Estimate
    undone: Estimate
    gain: Estimate
    likelier: Estimate
    accepted: tuple[float, float]
    confidence: tuple[float, float]
    lengths: tuple[float, float] | None = None
    fit: Fit | None = None

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
        as_sure = self.confidence[1] >= self.confidence[0]  # or a head that is too sure would gain by doubt
        return is_likelier and works and as_sure and not self.hypothesis.leaks

    @property
    def score(self) -> float:
        """What orders trials: log-probability and drafts gained."""
        return self.likelier.mean + self.gain.mean


def try_all(
    head: DraftHead,
    source: Source,
    tried: Sequence[Hypothesis],
    on_probe: Callable[[], None] = lambda: None,
) -> list[Trial]:
    """Try hypotheses -> those of every subject that looked best, the best first.

    Args:
        on_probe: called after every hypothesis.
    """
    texts = source.row.texts
    served = {depth: read_chain(head, source, depth) for depth in {each.depth for each in tried}}
    scores: tuple[list[float], list[float]] = ([], [])
    for hypothesis in tried:
        depth = hypothesis.depth
        better = _better(served[depth], read(head, source, hypothesis, depth))
        for half in (0, 1):
            scores[half].append(float(better[texts % 2 == half].mean()))
        on_probe()
    chosen = [_finalists(tried, mine) for mine in scores]
    as_it_is, trials = read_chain(head, source, STEPS), []
    for number in sorted(chosen[0] | chosen[1]):
        seen = [half for half in (0, 1) if number in chosen[half]]
        judged_on = texts if len(seen) == 2 else texts.where(texts % 2 != seen[0], -1)
        trials.append(judge(head, source, as_it_is, tried[number], judged_on))
    if not any(
        trial.is_confirmed for trial in trials
    ):  # a learned map mends other faults of simple texts too
        judged_on = texts.where(texts % 2 == 1, -1)
        learned = _learned_map(head, source, as_it_is)
        trials += [judge(head, source, as_it_is, each, judged_on) for each in learned]
    return sorted(trials, key=lambda trial: -trial.score)


def read(head: DraftHead, source: Source, hypothesis: Hypothesis, steps: int = 1) -> Reading:
    """Read a head as a hypothesis has it; the head stays as it was."""
    if hypothesis.change is not None:
        head = copy_head(head).bind(source.target.lm_head)
        hypothesis.change(head)
    return read_chain(head, source, steps, hypothesis.view)


def judge(
    head: DraftHead, source: Source, served: Reading, hypothesis: Hypothesis, texts: torch.Tensor
) -> Trial:
    """Compare a hypothesis with the head as it is, on ``texts`` as :func:`compare`."""
    undone, row = read(head, source, hypothesis, STEPS), source.row
    lengths = decoded(served, row).accept_length, decoded(undone, row).accept_length
    trial = replace(compare(hypothesis, served, undone, texts), lengths=lengths)
    fit = measure_fit(head, source, undone, hypothesis.view.token_map) if trial.is_confirmed else None
    return replace(trial, fit=fit)


def compare(hypothesis: Hypothesis, served: Reading, undone: Reading, texts: torch.Tensor) -> Trial:
    """Compare two readings of the same roots, of ``texts`` int64 ``[R]``; roots of text -1 are left out."""
    keep = texts >= 0
    texts = texts[keep]

    def share(reading: Reading) -> Estimate:
        return estimate((reading.accepted[keep] > 0).float(), texts)

    def means(field: str) -> tuple[float, float]:
        one, other = (float(getattr(reading, field)[keep].float().mean()) for reading in (served, undone))
        return one, other

    return Trial(
        hypothesis,
        share(served),
        share(undone),
        gain=estimate((undone.accepted - served.accepted)[keep], texts),
        likelier=estimate((undone.log_truth - served.log_truth)[keep], texts),
        accepted=means("accepted"),
        confidence=means("confidence"),
    )


def _better(served: Reading, found: Reading) -> torch.Tensor:
    """What chooses the finalists, ``[R]``: tokens that are likelier, and drafts accepted."""
    return found.log_truth - served.log_truth + (found.accepted - served.accepted).float()


def _finalists(tried: Sequence[Hypothesis], scores: Sequence[float]) -> set[int]:
    """Numbers of the best few of every subject, of those that are better than the head as it is."""
    best: dict[str, list[int]] = {}
    for number in sorted(range(len(tried)), key=lambda each: -scores[each]):
        mine = best.setdefault(tried[number].subject, [])
        if scores[number] > 0 and len(mine) < FINALISTS:
            mine.append(number)
    return {number for mine in best.values() for number in mine}


def _learned_map(head: DraftHead, source: Source, served: Reading) -> list[Hypothesis]:
    """What every draft id most often stood for in the even texts: restores acceptance under a map of another
    head."""
    token_map = head.token_map
    if token_map is None or float(served.confidence.mean()) < TAUGHT:
        return []
    learned, is_even = token_map.clone(), source.row.texts % 2 == 0
    for draft_id in served.first[is_even].unique().tolist():
        mine = is_even & (served.first == draft_id)
        tokens, counts = source.states.greedy[mine].unique(return_counts=True)
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
