"""Progress of long commands: how long they take is said once, after the first measured work."""

import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from eagle_kit.report import stages as module
from eagle_kit.report.stages import Stages, TimeLeft, about


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines that are printed."""
    said: list[str] = []
    monkeypatch.setattr(module, "say", said.append)
    return said


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let seconds pass by the clock."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now)

    def pass_seconds(seconds: float) -> None:
        clock.now += seconds

    return pass_seconds


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (5, "less than a minute"),
        (65, "about 1 minute"),
        (600, "about 10 minutes"),
        (2 * 3600, "about 2.0 hours"),
    ],
)
def test_times_are_in_words(seconds: float, words: str) -> None:
    assert about(seconds) == words


def test_the_time_is_estimated_from_a_whole_sample(wait: Callable[[float], None]) -> None:
    said: list[str] = []
    left = TimeLeft(20, sample=4, prints=said.append)
    for _ in range(3):
        wait(60)
        left.count(1)
    assert not said
    wait(60)
    left.count(1)
    left.count(1)
    (line,) = said
    assert re.findall(r"\d+", line) == ["16"], "minutes of the work that is left"


def test_work_of_unknown_length_has_a_rate(wait: Callable[[float], None]) -> None:
    said: list[str] = []
    left = TimeLeft(None, "responses", prints=said.append)
    wait(30)
    left.count(1)
    (line,) = said
    assert "120 responses" in line


def test_later_stages_are_counted_by_their_costs(lines: list[str], wait: Callable[[float], None]) -> None:
    work = Stages({"first": 10, "second": 30}, shows_bar=False)
    wait(1000)
    work.start("first", 10, "prompt")
    wait(60)
    work.step()
    stage, time_left = lines
    assert "1/2 first" in stage and "10 prompts" in stage
    assert re.findall(r"\d+", time_left) == ["39"]
    work.start("second", 3, "response")
    work.step()
    (stage,) = lines[2:]
    assert "2/2 second" in stage and "3 responses" in stage, "the time is printed once"


@pytest.mark.parametrize(("unit", "words"), [("response", "8 responses"), ("trial", "8 trials")])
def test_pieces_of_a_stage_are_in_the_plural(lines: list[str], unit: str, words: str) -> None:
    Stages({"first": 1}, shows_bar=False).start("first", 8, unit)
    assert lines[0].endswith(words)


def test_what_was_done_before_is_not_measured(lines: list[str], wait: Callable[[float], None]) -> None:
    work = Stages({"first": 10, "second": 10}, shows_bar=False)
    work.start("first", 10)
    work.skip(8)
    wait(60)
    work.step()
    assert re.findall(r"\d+", lines[-1]) == ["11"]


def test_quiet_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    work = Stages({"first": 1}, is_quiet=True)
    work.start("first", 1)
    work.step(3, "what a callback is told")
    work.close()
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
