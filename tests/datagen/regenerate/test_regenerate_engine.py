"""Regeneration through the real engine: the same responses with a draft and without, greedy and drawn."""

import json
from collections.abc import Callable

import pytest

from eagle_kit.cli.app import main


@pytest.fixture
def regenerate(make_run: Callable) -> Callable[..., list[dict]]:
    """``regenerate(name, *arguments)`` answers the tiny chats, ``draft=True`` with a head of three steps."""
    run = make_run()
    assert run("--max-steps", "3") == 0

    def call(name: str, *arguments: str, draft: bool = False, code: int = 0) -> list[dict]:
        out = run.folder / f"{name}.jsonl"
        command = ["data", "regenerate", "--source", str(run.folder / "chats.jsonl"), "--out", str(out)]
        command += ["--target", str(run.folder / "target"), "--max-tokens", "12", "--limit", "10"]
        command += ["--draft", str(run.output / "step-3"), "--shape", "3,1,4"] if draft else []
        assert main([*command, *arguments]) == code
        return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]

    return call


SAMPLED = ("--temperature", "0.9", "--top-p", "0.95", "--seed", "5")


@pytest.mark.parametrize(
    "sampling",
    [pytest.param((), id="greedy", marks=pytest.mark.nightly), pytest.param(SAMPLED, id="sampled")],
)
def test_a_draft_a_batch_and_a_stop_change_no_response(
    regenerate: Callable, capsys: pytest.CaptureFixture[str], sampling: tuple[str, ...]
) -> None:
    plain = regenerate("plain", *sampling)
    assert len(plain) == 10
    capsys.readouterr()
    assert regenerate("drafted", *sampling, draft=True) == plain
    assert "accept length 1." in capsys.readouterr().out
    assert regenerate("alone", *sampling, "--batch-size", "1") == plain
    regenerate("stopped", *sampling, "--limit", "4")
    assert regenerate("stopped", *sampling, draft=True) == plain
    parts = [regenerate(f"part-{i}", *sampling, "--limit", "5", "--shard", f"{i}/2") for i in range(2)]
    assert [record for pair in zip(*parts, strict=True) for record in pair] == plain


def test_another_seed_draws_other_responses_and_greedy_ones_are_others(regenerate: Callable) -> None:
    first, second = regenerate("first", *SAMPLED), regenerate("second", *SAMPLED[:-1], "6")
    greedy = regenerate("greedy")
    assert first != second and greedy not in (first, second)
    assert len({record["messages"][-1]["content"] for record in first}) > 5


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (("--temperature", "0.5"), "temperature 0.9, but now it is 0.5"),
        pytest.param(("--seed", "6"), "seed 5, but now it is 6", marks=pytest.mark.nightly),
        pytest.param(("--max-tokens", "9"), "max_tokens 12, but now it is 9", marks=pytest.mark.nightly),
        (("--shard", "1/2"), "shard [0, 1], but now it is [1, 2]"),
    ],
)
def test_a_file_is_not_continued_with_other_sampling_params(
    regenerate: Callable, capsys: pytest.CaptureFixture[str], change: tuple[str, ...], shown: str
) -> None:
    before = regenerate("responses", *SAMPLED, "--limit", "2")
    assert regenerate("responses", *SAMPLED, *change, code=2) == before
    assert shown in capsys.readouterr().err


def test_responses_of_other_weights_are_not_appended(
    regenerate: Callable, make_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    before = regenerate("responses", "--limit", "2")
    target = make_run().folder / "target"
    other = target.with_name("tuned")
    shutil.copytree(target, other)
    weights = load_file(other / "model.safetensors")
    tuned = {name: weight * 1.5 for name, weight in weights.items()}
    save_file(tuned, other / "model.safetensors", {"format": "pt"})
    assert regenerate("responses", "--target", str(other), code=2) == before
    assert "were made with target " in capsys.readouterr().err
