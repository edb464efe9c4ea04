"""From what was measured to causes, the likeliest first.

What was undone and thereby restored acceptance comes first, by what it restored: it is proven. Then come
causes that nothing can undo here (another target, too few steps, a vocabulary that lacks tokens), each by a
figure of its own. Last, and only where acceptance is low, what the files alone raise doubts about.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle_kit.drafts.files.findings import TARGET_WEIGHTS, Finding, amount_of_training
from eagle_kit.eval.diagnose.context import ContextReading
from eagle_kit.eval.diagnose.fit import LOW_SHARE, Fit
from eagle_kit.eval.diagnose.formats import WITH_TOOL, FormatReading
from eagle_kit.eval.diagnose.hypotheses import LEAST_RATIO
from eagle_kit.eval.diagnose.trials import LIKELY, SURE, Trial

LEAST_EXCESS, LEAST_EXCESS_SHARE = 0.05, 0.15
"""Confidence above the target's probability that a fitting head does not have, and the share of its
confidence that this is. The shipped head has 0.03 and 8 % on our prompts with its own target, 0.05 and 10 %
on HumanEval's, and 0.09 and 24 % with its target rounded to 4 bits; to 8 bits costs it nothing."""
UNTAUGHT = 0.02
"""Probability under the target of the first drafts of weights that were never trained."""
AS_MUCH, MORE = 0.9, 1.15
"""Times what cutting the context restores that another rotation must restore to be the cause, the target's
own or one that nothing speaks for: a larger base helps any head beyond the length of its training, at best as
much as cutting does, and the right one brings the far context back as well."""
LEAST_COVERAGE = 0.8
"""Share of the replies' tokens that a draft vocabulary should hold."""
RETRAIN = "Train it longer: `eagle-kit train` with `head.start_from`, on replies that this target wrote."
OTHER_TARGET = "another target"
OWN_TARGET = (
    "Use the very weights that the draft was trained for, of the same commit and not quantised, or train it "
    "on this target's replies."
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
        fit: figures of the head as it is.
        trials: of what could be undone, the best first.
        findings: of the files.
        context: on one long text.
        formats: behind other prompts; empty where the template is known to be the trained one.
        skipped: why there is no context though one was asked for.
        is_other_template: the draft says that it was trained with another template.
        other_copies: names of matrices of the target that the draft brings and that are not this target's.
        training: ``eagle_kit.json`` of the draft.
    """

    fit: Fit
    trials: Sequence[Trial]
    findings: Sequence[Finding]
    context: ContextReading | None = None
    formats: Sequence[FormatReading] = ()
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
    found = sorted([*_undone(measured), *_by_figures(measured)], key=lambda cause: -cause.cost)
    found = [cause for cause in found if cause.cost >= found[0].cost / 2]
    found += [cause for cause in _template(measured) if not cause.is_found]
    if measured.fit.is_low or found:
        named = {cause.subject for cause in found}
        named |= {"target", TARGET_WEIGHTS} if OTHER_TARGET in named else set()
        found += [cause for cause in _doubts(measured.findings) if cause.subject not in named]
    return found


def _undone(measured: Measured) -> Iterator[Cause]:
    """What restored acceptance, one of each subject."""
    seen: set[str] = set()
    trials = [*measured.trials, *_far_trials(measured.context)]
    for trial in sorted(trials, key=lambda each: -each.score):
        subject = trial.hypothesis.subject
        if trial.is_confirmed and subject not in seen:
            seen.add(subject)
            cost = max(trial.gain.mean, 0.0)  # one that only makes tokens likelier may cost none
            yield Cause(subject, describe_trial(trial), trial.hypothesis.remedy, cost=cost)
    yield from (cause for cause in _template(measured) if cause.is_found)


def _far_trials(context: ContextReading | None) -> list[Trial]:
    """Trials far into the long text. Where another rotation does what cutting the context does, it is the
    rotation."""
    if context is None or not context.near.is_confirmed:
        return []
    rope = context.rope
    least = (AS_MUCH if context.rope_is_targets else MORE) * context.near.gain.mean
    if rope is not None and rope.is_confirmed and rope.gain.mean >= least:
        return [rope]
    return [context.near]


def describe_trial(trial: Trial) -> str:
    """A trial as a sentence."""
    words, gain = trial.hypothesis.words, trial.gain
    text = f"{trial.served.mean:.2f} of first drafts are accepted, and {trial.undone.mean:.2f} with {words}"
    if trial.lengths is not None:
        text += f": {trial.lengths[0]:.2f} and {trial.lengths[1]:.2f} tokens per verify"
    nats = f"{trial.likelier.mean:+.2f} ± {trial.likelier.margin:.2f} nats"
    return f"{text} ({gain.mean:+.3f} ± {gain.margin:.3f} drafts and {nats} per root)."


def _template(measured: Measured) -> Iterator[Cause]:
    """Another chat template, or tools: found where the head follows the target better behind them, and
    possible where the draft says so, and nothing that was tried is better."""
    if len(measured.formats) < 2:
        return
    own, best = measured.formats[0], max(measured.formats[1:], key=lambda each: each.gain.mean)
    is_found = best.follow.score >= SURE and best.gain.score >= LIKELY
    is_found &= best.gain.mean >= (LEAST_RATIO - 1) * measured.fit.share
    if not (is_found or measured.is_other_template):
        return
    said = "The draft was trained with another template. " if measured.is_other_template else ""
    evidence = (
        f"{said}{own.accepted.mean:.2f} of first drafts are accepted behind the target's own template, and "
        f"{best.accepted.mean:.2f} behind {best.name} ({best.gain.mean:+.3f} ± {best.gain.margin:.3f})."
    )
    subject = "tool format" if is_found and best.name == WITH_TOOL else "chat template"
    remedy = "Serve with the template and tools of the draft's training, or train a draft on these prompts."
    yield Cause(subject, evidence, remedy, is_found, best.gain.mean if is_found else 0.0)


def _by_figures(measured: Measured) -> Iterator[Cause]:
    """Causes that nothing undoes. Other faults make a head unsure or too sure as well, so those two are told
    from the best reading that was confirmed, where there is one."""
    fit = measured.fit
    if fit.coverage.mean + fit.coverage.margin < LEAST_COVERAGE:
        lost = (1 - fit.coverage.mean) * fit.within.mean
        evidence = (
            f"The draft vocabulary holds {fit.coverage.mean:.0%} of the replies' tokens; of those it holds "
            f"{fit.within.mean:.2f} first drafts are accepted, of all {fit.share:.2f}."
        )
        remedy = "Train with a larger head.draft_vocab_size, or choose it from this target's own replies."
        yield Cause("vocabulary coverage", evidence, remedy, cost=lost)
    if any(cause.is_found for cause in _template(measured)):
        return
    who, confirmed = "The head", [trial for trial in measured.trials if trial.is_confirmed]
    if confirmed:
        best = max(confirmed, key=lambda trial: trial.score)
        who, fit = f"With {best.hypothesis.words}, the head", best.fit or fit
    if _is_too_sure(measured, fit):
        has_its_weights = any(
            each.subject == TARGET_WEIGHTS and each.level == "ok" for each in measured.findings
        )
        yield _learned_by_heart(measured, fit, who) if has_its_weights else _other_target(measured, fit, who)
    elif fit.is_low:
        yield _too_little_training(measured, fit, who)


def _is_too_sure(measured: Measured, fit: Fit) -> bool:
    """True where the head is surer of its drafts than the target by more than a fitting head is, or where
    acceptance is low and the head brings matrices of another target."""
    excess, least = fit.excess, LEAST_EXCESS_SHARE * fit.confidence.mean
    too_sure = excess.mean >= max(LEAST_EXCESS, least) and excess.score >= SURE
    return too_sure or (fit.is_low and bool(measured.other_copies))


def _excess(fit: Fit, who: str) -> str:
    """How much surer the head is than it may be."""
    return (
        f"{who} gives its first drafts {fit.confidence.mean:.2f} on average and the target gives them "
        f"{fit.trust.mean:.2f}: it is surer than it may be, by {fit.excess.mean:.2f} ± "
        f"{fit.excess.margin:.2f}"
    )


def _learned_by_heart(measured: Measured, fit: Fit, who: str) -> Cause:
    evidence = (
        f"{_excess(fit, who)}, though the target has the weights of its training: it has learned few texts, "
        f"or texts of another kind.{amount_of_training(measured.training)}"
    )
    return Cause("too few or other texts", evidence, RETRAIN, cost=fit.excess.mean)


def _other_target(measured: Measured, fit: Fit, who: str) -> Cause:
    evidence = f"{_excess(fit, who)}, as a head is whose target's states are not those it learned from."
    if fit.trust.mean < UNTAUGHT:
        evidence += " The target would say none of it: these may not be weights that were trained at all."
    if measured.other_copies:
        evidence += f" It brings {' and '.join(measured.other_copies)}, not this target's."
    subjects = ("target", TARGET_WEIGHTS)
    checked = next((each for each in measured.findings if each.subject in subjects), None)
    if checked is not None:
        evidence += f" A check of the files says: {checked.cause}"
    return Cause(OTHER_TARGET, evidence, OWN_TARGET, cost=fit.excess.mean)


def _too_little_training(measured: Measured, fit: Fit, who: str) -> Cause:
    curve = ", ".join(f"{each.mean:.2f}" for each in fit.reach)
    evidence = (
        f"Accepted by depth: {curve}. {who} is unsure and knows it: it gives its first drafts "
        f"{fit.confidence.mean:.2f}, the target {fit.trust.mean:.2f}, with an entropy of {fit.entropy:.1f} "
        f"of {fit.most_entropy:.1f} nats."
    )
    evidence += amount_of_training(measured.training)
    return Cause("too little training", evidence, RETRAIN, cost=LOW_SHARE - fit.share)


def _doubts(findings: Sequence[Finding]) -> list[Cause]:
    """Warnings of the check of the files, in the order of what they cost where they are true."""
    order = ("layer ids", "target", "chat template", "rope", "context", "tokenizer")
    warned = [finding for finding in findings if finding.level == "warning"]
    warned.sort(key=lambda each: order.index(each.subject) if each.subject in order else len(order))
    return [Cause(each.subject, _sentence(each.cause), each.remedy, is_found=False) for each in warned]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
