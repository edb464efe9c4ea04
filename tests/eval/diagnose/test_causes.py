"""From measurements to causes: order, what is proven and what is only possible, and when nothing is named."""

from dataclasses import replace

from eagle_kit.drafts.files.findings import Finding
from eagle_kit.eval.diagnose.causes import Measured, causes_in_files, name_causes
from eagle_kit.eval.diagnose.context import ContextResult
from eagle_kit.eval.diagnose.estimates import Estimate, estimate
from eagle_kit.eval.diagnose.fit import Fit
from eagle_kit.eval.diagnose.formats import WITH_TOOL, FormatResult
from eagle_kit.eval.diagnose.hypotheses import Hypothesis
from eagle_kit.eval.diagnose.trials import Change, Trial


def sure(mean: float, error: float = 0.01) -> Estimate:
    return Estimate(mean, error)


FIT = Fit(
    reach=(sure(0.45), sure(0.2)),
    coverage=sure(0.97),
    accepted_if_covered=sure(0.46),
    confidence=sure(0.4),
    target_confidence=sure(0.4),
    excess=sure(0.0),
    entropy=2.0,
    max_entropy=9.0,
    is_finite=True,
)
LOW = replace(FIT, reach=(sure(0.05), sure(0.0)))


def trial(subject: str, gain: float, score: float = 9.0, before: float = 0.2) -> Trial:
    """A trial behind which the head fits."""
    error = gain / score
    return Trial(
        Hypothesis(subject, f"{subject} undone", f"Mend {subject}."),
        sure(before),
        sure(before + gain),
        Estimate(gain, error),
        Estimate(gain, error),
        Change(before, before + gain),
        Change(0.4, 0.4),
        Change(1.2, 1.2 + gain),
        FIT,
    )


def subjects(measured: Measured, *, found: bool = True) -> list[str]:
    return [cause.subject for cause in name_causes(measured) if cause.is_found is found]


def test_errors_are_those_of_texts_not_of_tokens():
    import torch

    values = torch.tensor([1.0] * 50 + [0.0] * 50)
    same = estimate(values, torch.arange(100) // 50)
    assert same.mean == 0.5 and same.error > 0.49, "two texts, all alike inside: two observations"
    free = estimate(values, torch.arange(100))
    assert abs(free.error - 0.05) < 0.001
    assert estimate(values, torch.zeros(100, dtype=torch.int64)).error == float("inf")
    assert estimate(torch.ones(4), torch.arange(4)).score == float("inf")


def test_a_head_that_fits_has_no_cause():
    warned = [Finding("warning", "target", "another name.", "Look.")]
    assert name_causes(Measured(FIT, [], warned)) == []


def test_what_restores_most_comes_first_and_doubts_last():
    trials = [trial("RoPE", 0.2), trial("dtype", 0.1), trial("layer ids", 0.3), trial("layer ids", 0.2)]
    warned = [Finding("warning", "target", "another name.", "Look.")]
    measured = Measured(LOW, trials, warned)
    assert subjects(measured) == ["layer ids", "RoPE"] and subjects(measured, found=False) == ["target"]
    assert "dtype" not in subjects(measured), "what undoes a third is undone by what undoes all"
    first = name_causes(measured)[0]
    assert "0.20 of first drafts are accepted, and 0.50 with layer ids undone" in first.evidence
    assert first.remedy == "Mend layer ids."


def test_a_gain_that_chance_explains_or_that_is_worth_nothing_is_no_cause():
    assert subjects(Measured(FIT, [trial("RoPE", 0.05, score=2.5)], [])) == []
    assert subjects(Measured(FIT, [trial("RoPE", 0.002, score=9, before=0.4)], [])) == []
    unlikely = replace(trial("RoPE", 0.05, score=2.5), log_prob_gain=Estimate(0.2, 0.02))
    assert subjects(Measured(FIT, [unlikely], [])) == ["RoPE"], "the log-probability is sure of it"


def test_a_reading_that_makes_tokens_likelier_and_costs_none_is_a_cause_unless_doubt_explains_it():
    free = replace(trial("layer ids", -0.01, score=-0.5, before=0.4), log_prob_gain=Estimate(0.1, 0.02))
    assert subjects(Measured(FIT, [free], [])) == ["layer ids"]
    assert subjects(Measured(FIT, [replace(free, confidence=Change(0.4, 0.3))], [])) == []
    assert subjects(Measured(FIT, [replace(free, served=sure(0.1))], [])) == [], "of a head that works only"
    assert subjects(Measured(FIT, [replace(free, log_prob_gain=Estimate(0.1, 0.04))], [])) == []


def test_a_sure_and_wrong_head_has_another_target_and_an_unsure_one_too_little_training():
    assert subjects(Measured(replace(LOW, excess=sure(0.3)), [], [])) == ["another target"]
    assert subjects(Measured(replace(FIT, excess=sure(0.3)), [], [])) == ["another target"], "not only if low"
    warned = [Finding("warning", "target", "another name.", "Look.")]
    (cause,) = name_causes(Measured(replace(LOW, excess=sure(0.3)), [], warned))
    assert "another name" in cause.evidence, "said once"
    same = [Finding("ok", "target weights", "the same.")]
    learned = Measured(replace(LOW, excess=sure(0.3)), [], same, training={"tokens_seen": 4954, "step": 24})
    assert subjects(learned) == ["too few or other texts"]
    assert "4,954 tokens in 24 steps" in name_causes(learned)[0].evidence
    assert subjects(Measured(LOW, [], [])) == ["too little training"]
    assert subjects(Measured(LOW, [], [], other_copies=["embed_tokens.weight"])) == ["another target"]
    assert subjects(Measured(replace(LOW, excess=sure(0.3)), [trial("layer ids", 0.3)], [])) == ["layer ids"]


def test_a_reading_that_leaves_a_head_too_sure_or_low_does_not_explain_it():
    too_sure = replace(FIT, excess=sure(0.3))
    free = replace(trial("layer ids", -0.01, score=-0.5, before=0.4), log_prob_gain=Estimate(0.1, 0.02))
    (cause,) = name_causes(Measured(too_sure, [replace(free, fit=too_sure)], []))
    assert cause.subject == "another target" and cause.evidence.startswith("With layer ids undone, the head")
    assert subjects(Measured(too_sure, [free], [])) == ["layer ids"]
    still = replace(trial("layer ids", 0.1, before=0.05), undone=sure(0.15), fit=LOW)
    assert subjects(Measured(LOW, [still], [])) == ["too little training", "layer ids"]


def test_a_small_draft_vocabulary_is_named_by_what_it_costs():
    small = replace(FIT, coverage=sure(0.6), accepted_if_covered=sure(0.45), reach=(sure(0.27),))
    (cause,) = name_causes(Measured(small, [], []))
    assert cause.subject == "vocabulary coverage" and "60%" in cause.evidence
    assert abs(cause.cost - 0.18) < 1e-9


def test_far_from_the_beginning_it_is_the_rotation_where_another_one_does_as_well():
    """The target's own, that is; a larger base, for which nothing else speaks, must do better."""
    near, rope = trial("context", 0.3), trial("RoPE", 0.28)
    reading = ContextResult(2048, (), near, rope, rope_is_targets=True)
    assert subjects(Measured(FIT, [], [], reading)) == ["RoPE"]
    assert subjects(Measured(FIT, [], [], replace(reading, rope_is_targets=False))) == ["context"]
    better = replace(reading, rope=trial("RoPE", 0.36), rope_is_targets=False)
    assert subjects(Measured(FIT, [], [], better)) == ["RoPE"]
    assert subjects(Measured(FIT, [], [], replace(reading, rope=None))) == ["context"]
    assert subjects(Measured(FIT, [], [], replace(reading, near=trial("context", 0.3, score=2)))) == []


def test_a_template_behind_which_the_target_is_followed_better_is_named():
    own = FormatResult("the target's own", sure(0.3), Estimate(0, 0), Estimate(0, 0))
    other = FormatResult("ChatML", sure(0.4), sure(0.1), sure(0.2))
    weak = FormatResult("Llama 3's", sure(0.31), sure(0.01, 0.01), sure(0.2, 0.1))
    assert subjects(Measured(FIT, [], [], formats=[own, weak, other])) == ["chat template"]
    assert subjects(Measured(FIT, [], [], formats=[own, weak])) == []
    said = Measured(FIT, [], [], formats=[own, weak], is_other_template=True)
    assert subjects(said) == [] and subjects(said, found=False) == ["chat template"]
    tools = other._replace(name=WITH_TOOL)
    assert subjects(Measured(FIT, [], [], formats=[own, tools])) == ["tool format"]


def test_nan_is_said_alone_and_errors_of_files_are_causes():
    assert subjects(Measured(replace(LOW, is_finite=False), [trial("RoPE", 0.3)], [])) == ["NaN"]
    findings = [Finding("ok", "rope", "fine."), Finding("error", "weights", "fc has NaN.", "Save again.")]
    (cause,) = causes_in_files(findings)
    assert (cause.subject, cause.evidence, cause.remedy) == ("weights", "Fc has NaN.", "Save again.")
