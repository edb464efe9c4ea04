"""``eagle-kit bench serve --base-url URL``: acceptance that a server counts while another tool drives it."""

import subprocess
import time
from collections.abc import Sequence

from eagle_kit.bench.options import Options
from eagle_kit.bench.record import Record, describe
from eagle_kit.bench.runner import say
from eagle_kit.bench.table import format_row
from eagle_kit.core.errors import UserError
from eagle_kit.serve.counters import difference, take_snapshot


def main(base_url: str, command: Sequence[str], options: Options) -> int:
    """Count while ``command`` runs, or until Ctrl-C without one, and print -> the command's exit code.

    Raises:
        UserError: there are no metrics, or no such command.
    """
    before, started, code = take_snapshot(base_url), time.monotonic(), 0
    try:
        if command:
            code = subprocess.run(command).returncode
        else:
            say(f"Counting at {base_url} until Ctrl-C.")
            while True:
                time.sleep(1)
    except KeyboardInterrupt:
        pass
    except OSError as error:
        raise UserError(f"{command[0]} cannot be run ({error.strerror}).", "Check the command.") from None
    row = {
        "group": "acceptance",
        "case": base_url,
        "status": "ok",
        "figures": difference(before, take_snapshot(base_url)),
        "seconds": round(time.monotonic() - started, 3),
    }
    if options.out is not None:
        head = {"kind": "acceptance", **describe("cpu", options.command)}
        record = Record(options.out, head, {"base_url": base_url, "driven_by": list(command)})
        record.finish(f"acceptance: {base_url}", row)
    say(format_row(row))
    return code
