"""Acceptance that a server counts while another tool drives it: ``eagle-kit bench serve --base-url URL``."""

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import write_json_atomically
from eagle_kit.eval.counters import difference, take_snapshot
from eagle_kit.report.environment import command_line, describe_machine, describe_versions, now
from eagle_kit.report.tables import in_few_digits


def count(base_url: str, command: Sequence[str], out: Path | None = None) -> int:
    """Count while ``command`` runs, or until Ctrl-C without one, and print; returns the command's
    exit code.

    Args:
        out: JSON file for the figures.

    Raises:
        UserError: there are no metrics, or no such command.
    """
    # Count until the command or the user ends it.
    before = take_snapshot(base_url)
    started = time.monotonic()
    exit_code = 0
    try:
        if command:
            exit_code = subprocess.run(command).returncode
        else:
            print(f"Counting at {base_url} until Ctrl-C.", flush=True)
            while True:
                time.sleep(1)
    except KeyboardInterrupt:
        pass
    except OSError as error:
        raise UserError(f"{command[0]} cannot be run ({error.strerror}).", "Check the command.") from None

    # Print before a file is written.
    figures = difference(before, take_snapshot(base_url))
    seconds = time.monotonic() - started
    print(f"{base_url}, {seconds:.0f} s")
    for name, value in figures.items():
        print(f"  {name:32}{in_few_digits(value)}")
    if out is not None:
        _write(out, base_url, command, figures, seconds)
    return exit_code


def _write(out: Path, base_url: str, command: Sequence[str], figures: dict[str, Any], seconds: float) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "kind": "acceptance",
        "date": now(),
        "command": command_line(),
        "machine": describe_machine("cpu"),
        "versions": describe_versions(),
        "settings": {"base_url": base_url, "driven_by": list(command)},
        "figures": figures,
        "seconds": round(seconds, 3),
    }
    write_json_atomically(out, record, indent=1)
