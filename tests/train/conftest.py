"""Runs of a tiny target for the tests of the loop."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_run import make_config

from eagle_kit.train.__main__ import main


class Run:
    """A config in a folder of its own, and what a run of it left behind."""

    def __init__(self, folder: Path, config: Path) -> None:
        self.folder, self.config, self.output = folder, config, folder / "run"

    def __call__(self, *arguments: str) -> int:
        from accelerate.state import AcceleratorState

        try:
            return main([str(self.config), *arguments])
        finally:  # accelerate keeps the first run's precision for the whole process
            AcceleratorState._reset_state(reset_partial_state=True)

    def metrics(self, output: str = "run") -> list[dict[str, Any]]:
        """Rows of metrics.jsonl without what depends on the clock."""
        lines = (self.folder / output / "metrics.jsonl").read_text().splitlines()
        clocked = ("tokens_per_s", "seconds")
        return [{k: v for k, v in json.loads(line).items() if k not in clocked} for line in lines]


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """``make_run(training={...}, judge={...})`` -> a :class:`Run` that has not started."""
    monkeypatch.setenv("EAGLE_KIT_CACHE", str(tmp_path / "cache"))

    def make(**sections: Any) -> Run:
        return Run(tmp_path, make_config(tmp_path, **sections))

    return make
