"""Results of a benchmark as a JSON file that is whole after every case, so that a run can be taken up."""

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import read_object, write_json_atomically
from eagle_kit.report.environment import describe_machine, describe_versions, now


def describe(device: str, command: str) -> dict[str, Any]:
    """Head of a record: date, command, machine and versions."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "not installed"
    versions = {**describe_versions(), "triton": triton}
    return {"date": now(), "command": command, "machine": describe_machine(device), "versions": versions}


class Record:
    """One run's file: the head (date, command, machine, versions), ``settings``, and ``cases``: rows by key,
    each with its ``status``: ``"ok"``, ``"failed"`` or ``"left out"``.

    Args:
        path: written at once and after every case; its folder is made.
        head: of :func:`describe`.
        settings: what must be equal for cases of two sessions to stand in one file.
        resume: keep the rows that the file has; cases left out are done now. A case that was begun and not
            finished ended its process: it is recorded as failed and not tried again.

    Raises:
        UserError: the file cannot be written, is no such file, or has other settings.
    """

    def __init__(
        self, path: Path, head: dict[str, Any], settings: dict[str, Any], *, resume: bool = False
    ) -> None:
        self.path = path
        self.data: dict[str, Any] = {**head, "settings": settings, "cases": {}, "running": None}
        if resume and path.exists():
            self._take_up(settings)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.save()
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}.", "Name another file.") from None

    def _take_up(self, settings: dict[str, Any]) -> None:
        try:
            found = read_object(self.path)
            cases, theirs = {key: dict(row) for key, row in found["cases"].items()}, dict(found["settings"])
            resumed = [*found.get("resumed", []), self.data.get("date")]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"{self.path} is not a result of this benchmark.", "Name another file, or leave out --resume."
            ) from None
        if theirs != json.loads(json.dumps(settings)):
            raise UserError(
                f"{self.path} was measured with other settings ({_difference(theirs, settings)}).",
                "Give the same ones, or leave out --resume.",
            )
        if running := found.get("running"):
            cases.setdefault(running, {"status": "failed", "error": "It ended the process."})
        kept = {key: row for key, row in cases.items() if row.get("status") != "left out"}
        self.data = {**found, "cases": kept, "running": None, "resumed": resumed}

    @property
    def cases(self) -> dict[str, dict[str, Any]]:
        """Rows of the cases that are done, by key."""
        return self.data["cases"]

    @property
    def failed(self) -> list[str]:
        """Keys of the cases that failed."""
        return [key for key, row in self.cases.items() if row["status"] == "failed"]

    def begin(self, key: str) -> bool:
        """Note that a case is being measured; False when it is done already."""
        if key in self.cases:
            return False
        self.data["running"] = key
        self.save()
        return True

    def finish(self, key: str, row: dict[str, Any]) -> None:
        """Keep the row of a case."""
        self.cases[key] = row
        self.data["running"] = None
        self.save()

    def put(self, **values: Any) -> None:
        """Set top-level values."""
        self.data.update(values)
        self.save()

    def save(self) -> None:
        """Write the file; a reader never sees half of it."""
        write_json_atomically(self.path, self.data, indent=1)


def _difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    return ", ".join(f"{name} {theirs.get(name)} then, {ours.get(name)} now" for name in names)
