"""Causes of low acceptance, named from measurements, the likeliest first.

First come faults that were undone and whose undoing restored acceptance, by what it restored: they
are proven. Then come causes that nothing can undo here (another target, too few steps, a vocabulary
that lacks tokens), each by a figure of its own. Last, and only where acceptance is low, come
warnings of the check of the files.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle_kit.drafts.files.findings import TARGET_WEIGHTS, Finding, amount_of_training
from eagle_kit.eval.diagnose.context import ContextResult
from eagle_kit.eval.diagnose.fit import LOW_SHARE, Fit
from eagle_kit.eval.diagnose.formats import WITH_TOOL, FormatResult
from eagle_kit.eval.diagnose.hypotheses import LEAST_RATIO
from eagle_kit.eval.diagnose.trials import LIKELY, SURE, Trial

LEAST_EXCESS = 0.05
LEAST_EXCESS_SHARE = 0.15
"""Confidence above the target's that a fitting head does not have, and its least share of the
confidence. The shipped head has 0.03 and 8 % on our prompts with its own target, 0.05 and 10 % on
HumanEval's, and 0.09 and 24 % with its target rounded to 4 bits; to 8 bits costs it nothing."""
UNTRAINED_CONFIDENCE = 0.02
"""Probability under the target of the first drafts of weights that were never trained."""
AS_MUCH = 0.9
"""Times the gain of a cut context that the target's own rotation must give to be the cause."""
MORE = 1.15
"""The same of any other rotation. A larger base helps any head beyond the length of its training,
at best as much as cutting does; the right one brings the far context back as well."""
LEAST_COVERAGE = 0.8
"""Share of the responses' tokens that a draft vocabulary should hold."""
RETRAIN = "Train it longer: `eagle-kit train` with `head.start_from`, on responses that this target wrote."
OTHER_TARGET = "another target"
OWN_TARGET = (
    "Use the very weights that the draft was trained for, of the same commit and not quantised, or train it "
    "on this target's responses."
)


@dataclass(frozen=True)
class Cause:
    """A cause of low acceptance.

    Attributes:
        subject: its name.
        evidence: what was measured, in one or two sentences.
        remedy: one sentence.
        is_found: False for what is only possible.
        cost: drafts per root that it costs, for the order.
    """

    subject: str
    evidence: str
    remedy: str
    is_found: bool = True
    cost: float = 0.0


@dataclass(frozen=True)
class Measured:
    """Everything that speaks for or against a cause.

    Attributes:
        fit: figures of the head as it is served.
        trials: of hypotheses, the best first.
        findings: of the check of the files.
        context: on long texts.
        formats: after other prompts; empty where the template is known to be the trained one.
        skipped: reason why there is no context although one was requested; else empty.
        is_other_template: the draft names another template than the target's as that of its
            training.
        other_copies: names of matrices of the target that the draft brings and that are not this target's.
        training: ``eagle_kit.json`` of the draft.
    """

    fit: Fit
    trials: Sequence[Trial]
    findings: Sequence[Finding]
    context: ContextResult | None = None
    formats: Sequence[FormatResult] = ()
    skipped: str = ""
    is_other_template: bool = False
    other_copies: Sequence[str] = ()
    training: Mapping[str, Any] = field(default_factory=dict)


def causes_in_files(findings: Sequence[Finding]) -> list[Cause]:
    """Errors that a check of the files found: the draft cannot be decoded with."""
    errors = (finding for finding in findings if finding.level == "error")
    return [Cause(error.subject, _sentence(error.cause), error.remedy) for error in errors]


def name_causes(measured: Measured) -> list[Cause]:
    """Causes, the likeliest first; none for a head that fits."""
    if not measured.fit.is_finite:
        evidence = "The head's logits hold NaN or infinity on ordinary text, though its weights are finite."
        return [Cause("NaN", evidence, "Decode in bfloat16 or float32, and check the target's weights.")]

    # Causes that were found, without those that cost much less than the first.
    found = sorted([*_undone_faults(measured), *_by_figures(measured)], key=lambda cause: -cause.cost)
    found = [cause for cause in found if cause.cost >= found[0].cost / 2]

    # Causes that are only possible.
    causes = list(found)
    template = _template(measured)
    if template is not None and not template.is_found:
        causes.append(template)
    if measured.fit.is_low or causes:
        named = {cause.subject for cause in causes}
        if OTHER_TARGET in named:
            named |= {"target", TARGET_WEIGHTS}
        causes += [cause for cause in _warnings(measured.findings) if cause.subject not in named]
    return causes


def _undone_faults(measured: Measured) -> Iterator[Cause]:
    """Faults whose undoing restored acceptance, one of each subject."""
    trials = [*measured.trials, *_far_trials(measured.context)]
    seen: set[str] = set()
    for trial in sorted(trials, key=lambda each: -each.score):
        subject = trial.hypothesis.subject
        if trial.is_confirmed and subject not in seen:
            seen.add(subject)
            cost = max(trial.gain.mean, 0.0)  # a fault that only makes tokens less likely costs no draft
            yield Cause(subject, describe_trial(trial), trial.hypothesis.remedy, cost=cost)
    template = _template(measured)
    if template is not None and template.is_found:
        yield template


def _far_trials(context: ContextResult | None) -> list[Trial]:
    """The trial that explains low acceptance far into long texts, if it is low there: the context
    that is cut, or another rotation where that restores as much."""
    if context is None or not context.near.is_confirmed:
        return []
    least = (AS_MUCH if context.rope_is_targets else MORE) * context.near.gain.mean
    rope = context.rope
    if rope is not None and rope.is_confirmed and rope.gain.mean >= least:
        return [rope]
    return [context.near]


def describe_trial(trial: Trial) -> str:
    """A trial as a sentence."""
    words = trial.hypothesis.words
    text = f"{trial.served.mean:.2f} of first drafts are accepted, and {trial.undone.mean:.2f} with {words}"
    if trial.lengths is not None:
        text += f": {trial.lengths.served:.2f} and {trial.lengths.undone:.2f} tokens per verify"
    drafts = f"{trial.gain.mean:+.3f} ± {trial.gain.margin:.3f} drafts"
    nats = f"{trial.log_prob_gain.mean:+.2f} ± {trial.log_prob_gain.margin:.2f} nats"
    return f"{text} ({drafts} and {nats} per root)."


def _template(measured: Measured) -> Cause | None:
    """Another chat template, or tools. The cause is found where the head follows the target better
    after them; it is possible where the draft names another template and no format that was tried
    is better."""
    if len(measured.formats) < 2:
        return None
    own = measured.formats[0]
    best = max(measured.formats[1:], key=lambda each: each.gain.mean)
    follows_better = best.follow.score >= SURE and best.gain.score >= LIKELY
    is_worth_naming = best.gain.mean >= (LEAST_RATIO - 1) * measured.fit.share
    is_found = follows_better and is_worth_naming
    if not (is_found or measured.is_other_template):
        return None

    evidence = (
        f"{own.accepted.mean:.2f} of first drafts are accepted behind the target's own template, and "
        f"{best.accepted.mean:.2f} behind {best.name} ({best.gain.mean:+.3f} ± {best.gain.margin:.3f})."
    )
    if measured.is_other_template:
        evidence = f"The draft was trained with another template. {evidence}"
    subject = "chat template"
    if is_found and best.name == WITH_TOOL:
        subject = "tool format"
    remedy = "Serve with the template and tools of the draft's training, or train a draft on these prompts."
    cost = best.gain.mean if is_found else 0.0
    return Cause(subject, evidence, remedy, is_found, cost)


def _by_figures(measured: Measured) -> Iterator[Cause]:
    """Causes that nothing undoes.

    Other faults make a head unsure or too sure as well. So where a trial was confirmed, the figures
    are those of the head with that fault undone.
    """
    # The draft vocabulary.
    fit = measured.fit
    if fit.coverage.mean + fit.coverage.margin < LEAST_COVERAGE:
        within = fit.accepted_if_covered.mean
        evidence = (
            f"The draft vocabulary holds {fit.coverage.mean:.0%} of the responses' tokens; of those it holds "
            f"{within:.2f} first drafts are accepted, of all {fit.share:.2f}."
        )
        remedy = "Train with a larger head.draft_vocab_size, or choose it from this target's own responses."
        yield Cause("vocabulary coverage", evidence, remedy, cost=(1 - fit.coverage.mean) * within)

    # Prompts in another format explain what the figures below would show.
    template = _template(measured)
    if template is not None and template.is_found:
        return

    # The head's confidence beside the target's.
    who = "The head"
    confirmed = [trial for trial in measured.trials if trial.is_confirmed]
    if confirmed:
        best = max(confirmed, key=lambda trial: trial.score)
        who = f"With {best.hypothesis.words}, the head"
        fit = best.fit or fit
    if _is_too_sure(measured, fit):
        has_its_weights = any(
            finding.subject == TARGET_WEIGHTS and finding.level == "ok" for finding in measured.findings
        )
        if has_its_weights:
            yield _too_few_texts(measured, fit, who)
        else:
            yield _other_target(measured, fit, who)
    elif fit.is_low:
        yield _too_little_training(measured, fit, who)


def _is_too_sure(measured: Measured, fit: Fit) -> bool:
    """True where the head is surer of its drafts than the target by more than a fitting head is, or where
    acceptance is low and the head brings matrices of another target."""
    least = max(LEAST_EXCESS, LEAST_EXCESS_SHARE * fit.confidence.mean)
    is_too_sure = fit.excess.mean >= least and fit.excess.score >= SURE
    return is_too_sure or (fit.is_low and bool(measured.other_copies))


def _excess(fit: Fit, who: str) -> str:
    """How much surer the head is than the target, as a clause."""
    return (
        f"{who} gives its first drafts {fit.confidence.mean:.2f} on average and the target gives them "
        f"{fit.target_confidence.mean:.2f}: it is surer than it may be, by {fit.excess.mean:.2f} ± "
        f"{fit.excess.margin:.2f}"
    )


def _too_few_texts(measured: Measured, fit: Fit, who: str) -> Cause:
    evidence = (
        f"{_excess(fit, who)}, though the target has the weights of its training: it has learned few texts, "
        f"or texts of another kind.{amount_of_training(measured.training)}"
    )
    return Cause("too few or other texts", evidence, RETRAIN, cost=fit.excess.mean)


def _other_target(measured: Measured, fit: Fit, who: str) -> Cause:
    evidence = f"{_excess(fit, who)}, as a head is whose target's states are not those it learned from."
    if fit.target_confidence.mean < UNTRAINED_CONFIDENCE:
        evidence += " The target would say none of it: these may not be weights that were trained at all."
    if measured.other_copies:
        evidence += f" It brings {' and '.join(measured.other_copies)}, not this target's."
    for finding in measured.findings:
        if finding.subject in ("target", TARGET_WEIGHTS):
            evidence += f" A check of the files says: {finding.cause}"
            break
    return Cause(OTHER_TARGET, evidence, OWN_TARGET, cost=fit.excess.mean)


def _too_little_training(measured: Measured, fit: Fit, who: str) -> Cause:
    by_depth = ", ".join(f"{each.mean:.2f}" for each in fit.reach)
    evidence = (
        f"Accepted by depth: {by_depth}. {who} is unsure and knows it: it gives its first drafts "
        f"{fit.confidence.mean:.2f}, the target {fit.target_confidence.mean:.2f}, with an entropy of "
        f"{fit.entropy:.1f} of {fit.max_entropy:.1f} nats."
    )
    evidence += amount_of_training(measured.training)
    return Cause("too little training", evidence, RETRAIN, cost=LOW_SHARE - fit.share)


def _warnings(findings: Sequence[Finding]) -> list[Cause]:
    """Warnings of the check of the files, in the order of what they cost where they are true."""
    order = ("layer ids", "target", "chat template", "rope", "context", "tokenizer")

    def rank(finding: Finding) -> int:
        return order.index(finding.subject) if finding.subject in order else len(order)

    warnings = sorted((each for each in findings if each.level == "warning"), key=rank)
    return [Cause(each.subject, _sentence(each.cause), each.remedy, is_found=False) for each in warnings]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
