"""Results of a benchmark as a JSON file that is whole after every part, so that a run can be taken up."""

import json
import os
from pathlib import Path
from typing import Any

from eagle_kit.core.errors import UserError


class Record:
    """One run's file: ``head`` (date, command, machine), ``settings``, and ``parts`` by name, each with its
    ``status``: ``"ok"``, ``"failed"`` or ``"left out"``.

    Args:
        path: written at once and after every part; its folder is made.
        settings: what must be equal for parts of two sessions to stand in one file.
        resume: keep the parts that the file has; parts left out are done now. A part that was begun and not
            finished ended its process: it is recorded as failed and not tried again.

    Raises:
        UserError: the file cannot be written, is no such file, or has other settings.
    """

    def __init__(
        self, path: Path, head: dict[str, Any], settings: dict[str, Any], *, resume: bool = False
    ) -> None:
        self.path = path
        self.data: dict[str, Any] = {**head, "settings": settings, "parts": {}, "running": None}
        if resume and path.exists():
            self._take_up(settings)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.save()
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}.", "Name another file.") from None

    def _take_up(self, settings: dict[str, Any]) -> None:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            parts, theirs = dict(found["parts"]), found["settings"]
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{self.path} is not a result of this benchmark.", "Name another file, or leave out --resume."
            ) from None
        if theirs != json.loads(json.dumps(settings)):
            raise UserError(
                f"{self.path} was measured with other settings ({_difference(theirs, settings)}).",
                "Give the same ones, or leave out --resume.",
            )
        if running := found.get("running"):
            parts.setdefault(running, {"status": "failed", "error": "It ended the process."})
        kept = {name: part for name, part in parts.items() if part.get("status") != "left out"}
        self.data = {
            **found,
            "parts": kept,
            "running": None,
            "resumed": [*found.get("resumed", []), self._when],
        }

    @property
    def _when(self) -> str:
        return str(self.data.get("date", "?"))

    @property
    def parts(self) -> dict[str, dict[str, Any]]:
        """What is done, by name."""
        return self.data["parts"]

    @property
    def failed(self) -> list[str]:
        """Names of the parts that failed."""
        return [name for name, part in self.parts.items() if part["status"] == "failed"]

    def begin(self, name: str) -> bool:
        """Note that a part is being measured; False when it is done already."""
        if name in self.parts:
            return False
        self.data["running"] = name
        self.save()
        return True

    def finish(self, name: str, part: dict[str, Any]) -> None:
        """Keep what a part came to."""
        self.parts[name] = part
        self.data["running"] = None
        self.save()

    def put(self, **values: Any) -> None:
        """Set top-level values."""
        self.data.update(values)
        self.save()

    def save(self) -> None:
        """Write the file; a reader never sees half of it."""
        beside = self.path.with_name(self.path.name + ".part")
        beside.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, self.path)


def _difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    return ", ".join(f"{name} {theirs.get(name)} then, {ours.get(name)} now" for name in names)
