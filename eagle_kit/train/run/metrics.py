"""`metrics.jsonl` and `judge.jsonl`: one JSON object a line, one line a step, no step twice."""

import json
from pathlib import Path
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import parse_json, write_text_atomically, writing_remedy


class JsonLines:
    """A file of rows, each with the key ``step``, to which rows are appended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self) -> list[dict[str, Any]]:
        """All rows up to the first damaged one. A crash may damage the last row."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_bytes().splitlines():
            try:
                row = parse_json(line, self.path)
            except ValueError:
                break
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                break
            rows.append(row)
        return rows

    def truncate(self, step: int) -> None:
        """Remove the rows after ``step``, so that a resumed run writes each step once."""
        lines = [f"{json.dumps(row)}\n" for row in self.rows() if row["step"] <= step]
        write_text_atomically(self.path, "".join(lines))

    def append(self, row: dict[str, Any]) -> None:
        """Append a row without buffering. Raises UserError if it cannot be written."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise UserError(
                f"{self.path} could not be written: {error.strerror or error}.",
                writing_remedy(error, "repair the folder, then go on with --resume"),
            ) from error
