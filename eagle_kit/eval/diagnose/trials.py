"""Trials of hypotheses: chosen on one half of the responses and measured on the other, both ways.

The best of dozens of hypotheses on one half is a little better there by chance; the other half had
no part in the choice. A hypothesis that both halves choose is measured on all responses. Differences
are taken root by root, and their errors are those of texts.

Legend: R roots, Vd draft vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from eagle_kit.core.stats import SpecStats
from eagle_kit.engine.load_draft import copy_head
from eagle_kit.eval.diagnose.chain import ChainResult, InputVariant, Source, draft_chains
from eagle_kit.eval.diagnose.estimates import Estimate, estimate
from eagle_kit.eval.diagnose.fit import LOW_SHARE, Fit, measure_fit
from eagle_kit.eval.diagnose.hypotheses import MAP, Hypothesis
from eagle_kit.eval.diagnose.row import Row
from eagle_kit.models.draft_head import DraftHead

STEPS = 4
"""Steps of the chains that are compared."""
FINALISTS = 2
"""Hypotheses of a subject that one half chooses and the other half measures."""
SURE = 4.0
"""Standard errors of a difference that is taken for real: chance gives as much once in 30,000 trials, and
with a dozen texts, whose errors are themselves uncertain, once in 1,000."""
LIKELY = 2.0
"""Standard errors of a difference that supports another one."""
LEAST_LOG_PROB_GAIN = 0.05
"""Log-probability that the right inputs add to the target's tokens, in nats per token. A head was
trained to give the most with its own inputs, so this finds faults that cost no token yet:
neighbouring layers, for one."""
LEARNED_CONFIDENCE = 0.15
"""Mean probability that a head gives its first drafts once it has learned anything."""
LEARNED_SHARE = 0.15
"""Share of first drafts that a map made from responses must restore: frequent tokens alone make a
twentieth."""


class Change(NamedTuple):
    """A figure of the head as it is served, and with the fault undone."""

    served: float
    undone: float


@dataclass(frozen=True)
class Trial:
    """A hypothesis on responses that did not choose it.

    Attributes:
        served: share of first drafts accepted, of the head as it is served.
        undone: the same with the fault undone.
        gain: drafts of a chain that are accepted more, per root.
        log_prob_gain: log-probability that the head adds to the target's token, per root, in nats.
        num_accepted: drafts of a chain that are accepted, per root.
        confidence: mean probability of the first drafts under the head.
        lengths: tokens per verify of a chain; None where the responses are not the greedy ones.
        fit: figures of the head with the fault undone; None for far positions, and where it is not
            confirmed.
    """

    hypothesis: Hypothesis
    served: Estimate
    undone: Estimate
    gain: Estimate
    log_prob_gain: Estimate
    num_accepted: Change
    confidence: Change
    lengths: Change | None = None
    fit: Fit | None = None

    @property
    def is_confirmed(self) -> bool:
        """True where more drafts are accepted; also where the target's tokens become likelier, the
        head works as it is served, and no draft is lost. Neither may be chance."""
        return self._raises_acceptance or self._fits_better

    @property
    def _raises_acceptance(self) -> bool:
        fault = self.hypothesis
        if self.num_accepted.undone < fault.least_ratio * self.num_accepted.served:
            return False
        if self.undone.mean < fault.least_share:
            return False
        if fault.leaks:
            return self.gain.score >= SURE and self.log_prob_gain.score >= SURE
        return max(self.gain.score, self.log_prob_gain.score) >= SURE and self.gain.score >= LIKELY

    @property
    def _fits_better(self) -> bool:
        if self.hypothesis.leaks:
            return False
        is_likelier = self.log_prob_gain.mean >= LEAST_LOG_PROB_GAIN and self.log_prob_gain.score >= SURE
        works = self.served.mean >= LOW_SHARE and self.gain.score > -LIKELY
        # A head that is too sure would gain log-probability by being less sure alone.
        is_as_sure = self.confidence.undone >= self.confidence.served
        return is_likelier and works and is_as_sure

    @property
    def score(self) -> float:
        """Order of trials: log-probability and drafts gained."""
        return self.log_prob_gain.mean + self.gain.mean


def run_trials(
    head: DraftHead,
    source: Source,
    hypotheses: Sequence[Hypothesis],
    on_trial: Callable[[], None] = lambda: None,
) -> list[Trial]:
    """Try hypotheses; returns the trials of the best few of every subject, the best first.

    Args:
        on_trial: called after every hypothesis.
    """
    text_index = source.row.text_index

    # Mean score of every hypothesis over the even texts, and over the odd ones.
    depths = {each.depth for each in hypotheses}
    served = {depth: draft_chains(head, source, depth) for depth in depths}
    scores: tuple[list[float], list[float]] = ([], [])
    for hypothesis in hypotheses:
        undone = run_hypothesis(head, source, hypothesis, hypothesis.depth)
        score = _scores(served[hypothesis.depth], undone)
        for half in (0, 1):
            scores[half].append(float(score[text_index % 2 == half].mean()))
        on_trial()

    # What one half chose is measured on the other, and what both chose on all texts.
    chosen = [_finalists(hypotheses, half_scores) for half_scores in scores]
    served_chain = draft_chains(head, source, STEPS)
    trials = []
    for index in sorted(chosen[0] | chosen[1]):
        measured_on = text_index
        if index not in chosen[1]:
            measured_on = text_index.where(text_index % 2 == 1, -1)
        elif index not in chosen[0]:
            measured_on = text_index.where(text_index % 2 == 0, -1)
        trials.append(run_trial(head, source, served_chain, hypotheses[index], measured_on))

    # A learned map also mends other faults of simple texts, so it is tried where nothing else helps.
    if not any(trial.is_confirmed for trial in trials):
        measured_on = text_index.where(text_index % 2 == 1, -1)
        for hypothesis in _learned_map(head, source, served_chain):
            trials.append(run_trial(head, source, served_chain, hypothesis, measured_on))
    return sorted(trials, key=lambda trial: -trial.score)


def run_hypothesis(head: DraftHead, source: Source, hypothesis: Hypothesis, steps: int = 1) -> ChainResult:
    """Draft chains with the fault undone; ``head`` itself is not changed."""
    if hypothesis.change is not None:
        head = copy_head(head).bind(source.target.lm_head)
        hypothesis.change(head)
    return draft_chains(head, source, steps, hypothesis.inputs)


def run_trial(
    head: DraftHead,
    source: Source,
    served: ChainResult,
    hypothesis: Hypothesis,
    text_index: torch.Tensor,
) -> Trial:
    """Compare a hypothesis with the head as it is served.

    Args:
        served: chains of ``STEPS`` steps of the head as it is served.
        text_index: texts to compare on, as for :func:`compare`.
    """
    undone = run_hypothesis(head, source, hypothesis, STEPS)
    lengths = Change(
        simulate_decoding(served, source.row).accept_length,
        simulate_decoding(undone, source.row).accept_length,
    )
    trial = replace(compare(hypothesis, served, undone, text_index), lengths=lengths)
    if not trial.is_confirmed:
        return trial
    return replace(trial, fit=measure_fit(head, source, undone, hypothesis.inputs.token_map))


def compare(
    hypothesis: Hypothesis, served: ChainResult, undone: ChainResult, text_index: torch.Tensor
) -> Trial:
    """Compare two results for the same roots.

    Args:
        text_index: int64 ``[R]``, text of each root; roots of text -1 are left out.
    """
    is_used = text_index >= 0
    text_index = text_index[is_used]

    def share_accepted(result: ChainResult) -> Estimate:
        return estimate((result.num_accepted[is_used] > 0).float(), text_index)

    def mean(values: torch.Tensor) -> float:
        return float(values[is_used].float().mean())

    accepted_more = undone.num_accepted - served.num_accepted
    log_prob_more = undone.first.label_log_prob - served.first.label_log_prob
    return Trial(
        hypothesis,
        served=share_accepted(served),
        undone=share_accepted(undone),
        gain=estimate(accepted_more[is_used], text_index),
        log_prob_gain=estimate(log_prob_more[is_used], text_index),
        num_accepted=Change(mean(served.num_accepted), mean(undone.num_accepted)),
        confidence=Change(mean(served.first.confidence), mean(undone.first.confidence)),
    )


def _scores(served: ChainResult, undone: ChainResult) -> torch.Tensor:
    """Score of a hypothesis at every root, ``[R]``: log-probability and drafts gained."""
    accepted_more = undone.num_accepted - served.num_accepted
    return undone.first.label_log_prob - served.first.label_log_prob + accepted_more.float()


def _finalists(hypotheses: Sequence[Hypothesis], scores: Sequence[float]) -> set[int]:
    """Indices of the best few hypotheses of every subject, of those that are better than the served
    head."""
    best: dict[str, list[int]] = {}
    for index in sorted(range(len(hypotheses)), key=lambda each: -scores[each]):
        of_subject = best.setdefault(hypotheses[index].subject, [])
        if scores[index] > 0 and len(of_subject) < FINALISTS:
            of_subject.append(index)
    return {index for of_subject in best.values() for index in of_subject}


def _learned_map(head: DraftHead, source: Source, served: ChainResult) -> list[Hypothesis]:
    """A map from every draft id to the token that it most often stood for in the even texts. It
    restores acceptance where the stored map is that of another head."""
    token_map = head.token_map
    if token_map is None or float(served.first.confidence.mean()) < LEARNED_CONFIDENCE:
        return []
    learned = token_map.clone()
    is_even = source.row.text_index % 2 == 0
    for draft_id in served.first.draft_id[is_even].unique().tolist():
        is_drafted = is_even & (served.first.draft_id == draft_id)
        tokens, counts = source.states.greedy[is_drafted].unique(return_counts=True)
        if int(counts.max()) > 1:
            learned[draft_id] = tokens[counts.argmax()]
    return [
        Hypothesis(
            MAP,
            "a d2t that is learned from these responses: draft ids mean other tokens throughout",
            "Use the d2t of this very head: draft ids are the rows of its lm_head, and another map was "
            "stored.",
            InputVariant(token_map=learned),
            least_share=LEARNED_SHARE,
        )
    ]


def simulate_decoding(result: ChainResult, row: Row) -> SpecStats:
    """Statistics that decoding the responses with these chains would have, cycle by cycle."""
    stats = SpecStats()
    num_accepted = result.num_accepted.tolist()
    root = 0
    while root < len(num_accepted):
        # Roots of one response follow each other; a cycle begins at the token that the last one emitted.
        end = root + int(row.ends[root] - row.roots[root]) - 1
        while root < end:
            num_emitted = min(num_accepted[root] + 1, end - root)
            stats.observe(num_emitted, min(num_accepted[root], end - root))
            root += num_emitted
    return stats
