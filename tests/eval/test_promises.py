"""What settings promise, by their options, and how an evaluation judges them with real engines."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_rule import learned_head, learned_target, texts
from tiny_rule_llm import word_tokenizer

from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.eval import EvalConfig
from eagle_kit.engine.llm import LLM
from eagle_kit.eval.distribution import LEVEL
from eagle_kit.eval.engines import NamedSetting
from eagle_kit.eval.promises import EXACT, Promise, Promised, promised
from eagle_kit.eval.report import distribution_lines, loss_lines
from eagle_kit.eval.runner import run_eval
from eagle_kit.eval.summary import find_row

PLAIN = EngineConfig(max_batch_size=1, device="cpu", graph_mode="off")
TEXT, DISTRIBUTION, NOTHING = Promise.TEXT, Promise.DISTRIBUTION, Promise.NOTHING


@pytest.mark.parametrize(
    ("options", "greedy", "sampled"),
    [
        ({}, TEXT, TEXT),
        ({"tree": "static", "shape": "5,4,26"}, TEXT, TEXT),
        ({"verifier": "target-only"}, TEXT, TEXT),
        ({"max_batch_size": 7, "page_size": 8}, TEXT, TEXT),
        ({"sampled_drafts": True}, TEXT, DISTRIBUTION),
        ({"sampled_drafts": True, "verifier": "rejection"}, TEXT, DISTRIBUTION),
        ({"verifier": "relaxed"}, TEXT, DISTRIBUTION),
        ({"accept_threshold_single": 0.9}, TEXT, NOTHING),
        ({"accept_threshold_acc": 0.9}, TEXT, NOTHING),
        ({"kv_dtype": "fp8_e4m3"}, NOTHING, NOTHING),
        ({"dtype": "bfloat16"}, NOTHING, NOTHING),
        ({"quantization": "fp8"}, NOTHING, NOTHING),
    ],
    ids=str,
)
def test_promises_follow_from_the_options(options: dict[str, Any], greedy: Promise, sampled: Promise) -> None:
    setting = NamedSetting("x", None, PLAIN.replace(**options), ("none",))
    found = promised(setting, PLAIN)
    assert (found.at(0.0), found.at(0.7)) == (greedy, sampled)
    assert found.has_same_target is (greedy is TEXT)


def test_what_all_settings_have_is_no_difference_unless_it_rounds_what_was_computed() -> None:
    common = PLAIN.replace(dtype="bfloat16", quantization="fp8")
    assert promised(NamedSetting("x", None, common, ("none",)), common) == EXACT
    common = PLAIN.replace(kv_dtype="fp8_e4m3")
    assert promised(NamedSetting("x", None, common, ("none",)), common).greedy is NOTHING


def evaluate(out: Path, temperatures: tuple[float, ...], **options: Any) -> dict[str, Any]:
    """Evaluate a head that has learned with a setting of ``options``."""
    (out / "task.jsonl").write_text(
        "\n".join(json.dumps({"prompt": " ".join(f"w{i}" for i in text.prompt)}) for text in texts(8))
    )
    setting = NamedSetting("head", None, PLAIN.replace(**options), ("3,1,4",))

    def engines(target: str, settings: Any) -> list[LLM]:
        plain = LLM(copy.deepcopy(learned_target()), None, PLAIN, tokenizer=word_tokenizer())
        head = copy.deepcopy(learned_head())
        return [plain, LLM(plain.target, head, settings[0].engine, tokenizer=plain.tokenizer)]

    config = EvalConfig(
        tasks=(str(out / "task.jsonl"),),
        temperatures=temperatures,
        seeds=(1, 2),
        max_tokens=60,
        plots=False,
        engine=PLAIN,
    )
    return run_eval("a-target", {}, config, out=out / "out", quiet=True, engines=engines, settings=[setting])


@pytest.mark.parametrize("verifier", ["block", "rejection"])
def test_sampled_drafts_keep_the_distribution(tmp_path: Path, verifier: str) -> None:
    summary = evaluate(tmp_path, (0.0, 1.0), sampled_drafts=True, verifier=verifier)
    assert (summary["greedy_identical"], summary["seeded_identical"]) == (True, None)
    assert summary["distribution_kept"] is True and summary["passed"] is True
    test = find_row(summary, "head", "3,1,4", temperature=1.0)["distribution"]
    assert test["num_tokens"] == 8 * 2 * 60 and test["p_value"] > LEVEL
    assert find_row(summary, "head", "3,1,4")["distribution"] is None, "greedy text is compared"
    assert distribution_lines(summary)[0].startswith("distribution kept: yes")


def test_thresholds_are_lossy_where_requests_sample_and_a_wrong_promise_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thresholds = {"accept_threshold_single": 0.05, "accept_threshold_acc": 0.2}
    (tmp_path / "known").mkdir()
    summary = evaluate(tmp_path / "known", (0.0, 1.0), **thresholds)
    assert summary["greedy_identical"] is True and summary["passed"] is True
    row = find_row(summary, "head", "3,1,4", temperature=1.0)
    assert row["promise"] == "nothing" and row["distribution"]["p_value"] < 1e-4
    assert row["total_variation"] is None, "it is the same target"
    assert len(loss_lines(summary)) == 1 and "head 3,1,4 at T 1" in loss_lines(summary)[0]

    # The same samples, had they promised the distribution.
    wrong = Promised(Promise.TEXT, Promise.DISTRIBUTION)
    monkeypatch.setattr("eagle_kit.eval.runner.promised", lambda setting, plain: wrong)
    (tmp_path / "wrong").mkdir()
    summary = evaluate(tmp_path / "wrong", (1.0,), **thresholds)
    assert summary["distribution_kept"] is False and summary["passed"] is False
    assert distribution_lines(summary)[0].startswith("distribution kept: no")


def test_keys_and_values_in_fp8_lose_some_text_and_move_distributions(tmp_path: Path) -> None:
    summary = evaluate(tmp_path, (0.0, 1.0), kv_dtype="fp8_e4m3")
    assert summary["greedy_identical"] is None and summary["passed"] is True
    row = find_row(summary, "head", "3,1,4")
    assert 0 < row["agreement"] <= 1
    assert (row["agreement"] == 1) == (row["num_different"] == 0)
    assert 1e-4 < row["total_variation"] < 0.2
    lines = loss_lines(summary)
    assert len(lines) == 2 and all("total variation" in line for line in lines)
