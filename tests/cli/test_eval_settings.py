"""Flags of ``eagle-kit eval`` as settings: those of ``serve``, for all of them and for one."""

from pathlib import Path

import pytest
from tiny import tiny_head
from tiny_run import make_target

from eagle_kit.cli import app
from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import ShapeTable
from eagle_kit.drafts.files.draft import save_draft
from eagle_kit.models.loading.loader import load_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("targets") / "target")


@pytest.fixture(scope="module")
def head(target: Path) -> Path:
    save_draft(tiny_head(load_target(target), draft_vocab_size=90), target.parent / "head", metadata={})
    return target.parent / "head"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, target: Path):
    """Runs ``eval`` with words, without measuring -> drafts, config and settings by name."""

    def ask(*words: object):
        found = []

        def run_eval(target, drafts, config, *, out, servers, settings):
            found.append((drafts, config, {setting.name: setting for setting in settings}))
            return {"passed": True}

        monkeypatch.setattr("eagle_kit.eval.runner.run_eval", run_eval)
        args = app.parse(["eval", "--target", str(target), *map(str, words)])
        assert args.run(args) == 0
        return found[0]

    return ask


def test_a_settings_flags_are_serves_and_those_outside_hold_for_all(asked, head: Path) -> None:
    drafts, config, settings = asked(
        *("--draft", head, "--name", "head", "--max-context", 99, "--speculative-ngram-branch-length", 5),
        *("--setting", f"relaxed: --draft {head} --shape 3,1,4 --speculative-accept-threshold-single 0.4"),
        *("--setting", "n: --speculative-algorithm ngram --shape 8,4,12 --speculative-ngram-branch-length 6"),
        *("--setting", "fp8: --kv-dtype fp8_e4m3"),
    )
    assert list(drafts) == ["head"] and list(settings) == ["relaxed", "n", "fp8"]
    assert (config.engine.max_context, config.engine.ngram.branch_length) == (99, 5)
    relaxed, ngram, fp8 = settings.values()
    assert relaxed.engine.accept_threshold_single == 0.4 and str(relaxed.draft) == str(head)
    assert (ngram.draft, ngram.engine.algorithm, ngram.shapes) == (None, "NGRAM", ("8,4,12",))
    assert (ngram.engine.ngram.branch_length, relaxed.engine.ngram.branch_length) == (6, 5)
    assert (fp8.draft, fp8.engine.kv_dtype, fp8.shapes) == (None, "fp8_e4m3", ("none",))
    assert {setting.engine.max_context for setting in settings.values()} == {99}


def test_flags_of_other_engines_are_those_of_a_setting(asked, head: Path) -> None:
    line = f"--speculative-draft-model-path {head} --speculative-algorithm EAGLE3 --speculative-num-steps 3"
    line += " --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    _, _, settings = asked("--setting", f"sglang: {line}")
    assert settings["sglang"].shapes == ("3,1,4",) and str(settings["sglang"].draft) == str(head)


def test_an_algorithm_without_a_draft_is_a_setting_of_its_name(asked) -> None:
    _, _, settings = asked("--speculative-algorithm", "NGRAM", "--shapes", "8,4,12", "4,1,5")
    assert settings["NGRAM"].shapes == ("8,4,12", "4,1,5")
    _, config, settings = asked("--speculative-algorithm", "NGRAM", "--shape", "8,4,12")
    assert settings["NGRAM"].shapes == ("8,4,12",)
    assert config.engine.shape == ShapeTable.parse("8,4,12")


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--setting", "4,1,5"], "no name"),
        (["--setting", "x: --no-such-flag"], "x.*no-such-flag"),
        (["--setting", "x: --port 1"], "--port"),
        (["--setting", "x: --seed 1"], "--seed"),
        (["--setting", "x: --api-key k"], "--api-key"),
        (["--setting", "x: --no-self-test"], "--no-self-test"),
        (["--setting", "x: --target t"], "--target"),
        (["--setting", "x: --shape 4,1,5"], "no draft"),
        (["--setting", 'x: --draft "a'], "cannot be read"),
        (["--setting", "x: --chat-template f"], "chat template"),
        (["--shapes", "4,1,5", "--shape", "4,1,5"], "--shapes"),
        (["--batch-size", "2", "--max-running-requests", "3"], "--batch-size"),
        (["--top-p", "0.5"], "top_p|top-p"),
        (["--temperature", "1", "1"], "twice"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_what_settings_cannot_have_is_refused(asked, words: list[str], cause: str) -> None:
    with pytest.raises(UserError, match=cause):
        asked(*words)


@pytest.mark.parametrize(
    "words", [["--draft", "{target}"], ["--setting", "x: --draft {target}"]], ids=["--draft", "--setting"]
)
def test_the_target_is_its_own_draft_only_where_that_is_asked_for(
    target: Path, tmp_path: Path, words: list[str]
) -> None:
    task = tmp_path / "task.jsonl"
    task.write_text('{"prompt": "The cat sees the dog."}\n')
    line = ["eval", "--target", str(target), "--tasks", str(task), "--no-plots", "--max-tokens", "8"]
    line += [word.format(target=target) for word in words]
    args = app.parse([*line, "--shapes", "3,1,4", "--out", str(tmp_path / "out")])
    with pytest.raises(UserError, match="its own draft"):
        args.run(args)
    assert not (tmp_path / "out").exists()
    args = app.parse([*line, "--out", str(tmp_path / "two"), "--speculative-algorithm", "STANDALONE"])
    assert args.run(args) == 0
