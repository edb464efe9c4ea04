"""``eagle-kit bench serve --base-url URL``: acceptance that a server counts while another tool drives it.

Accept length is tokens emitted per verify, the bonus token included (``eagle_kit/core/stats.py``). Counters
belong to the whole server: whoever else uses it meanwhile is in them. They allow ``1 + accepted / drafts``
only, which counts a bonus token even where a reply ended before it, and so lies a little above the figure of
the replies (``return_speculation``) when they are short. vLLM counts under the same names.
"""

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from eagle_kit.bench.options import Options
from eagle_kit.bench.record import Record, describe
from eagle_kit.bench.runner import say
from eagle_kit.bench.table import format_row
from eagle_kit.core.errors import UserError

PREFIXES = ("eagle_kit:", "vllm:")
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)", re.MULTILINE)
"""Name, labels and value of a sample in Prometheus' text format."""
POSITION = re.compile(r'position="(\d+)"')
DRAFTS, DRAFTED, ACCEPTED = (
    f"spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens")
)
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
TOKENS = ("prompt_tokens", "prompt_tokens_cached", "generation_tokens")


@dataclass(frozen=True)
class Snapshot:
    """Counters of one moment, summed over all other labels, without prefix and ``_total``.

    Attributes:
        counters: by name.
        accepted_at: accepted tokens by the depth of their draft, from 0.
    """

    counters: Mapping[str, float] = field(default_factory=dict)
    accepted_at: Mapping[int, float] = field(default_factory=dict)


def parse_metrics(text: str) -> Snapshot:
    """Read Prometheus' text format; samples that are not counted here are passed over."""
    counters: dict[str, float] = {}
    accepted_at: dict[int, float] = {}
    for full, labels, value in SAMPLE.findall(text):
        prefix = next((each for each in PREFIXES if full.startswith(each)), None)
        if prefix is None:
            continue
        name = full.removeprefix(prefix).removesuffix("_total")
        if name == PER_POSITION and (found := POSITION.search(labels)):
            depth = int(found[1])
            accepted_at[depth] = accepted_at.get(depth, 0.0) + float(value)
        elif name in (DRAFTS, DRAFTED, ACCEPTED, *TOKENS):
            counters[name] = counters.get(name, 0.0) + float(value)
    return Snapshot(counters, accepted_at)


def take_snapshot(base_url: str) -> Snapshot:
    """The counters of a server now.

    Args:
        base_url: of the server, ``/v1`` at its end or not.

    Raises:
        UserError: nobody answers, or there are no metrics.
    """
    if urlsplit(base_url).scheme not in ("http", "https"):
        raise UserError(f"{base_url!r} is not a URL.", "Write it like http://127.0.0.1:8000.")
    root = base_url.rstrip("/").removesuffix("/v1")
    try:
        with build_opener(ProxyHandler({})).open(f"{root}/metrics", timeout=10) as response:
            return parse_metrics(response.read().decode("utf-8", "replace"))
    except (URLError, OSError) as error:
        raise UserError(
            f"There are no metrics at {root}/metrics ({error}).", "Start the server, or check --base-url."
        ) from None


def difference(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """Figures of the time between two snapshots.

    Raises:
        UserError: a counter fell, so that the server was restarted.
    """

    def between(name: str) -> float:
        value = after.counters.get(name, 0.0) - before.counters.get(name, 0.0)
        if value < 0:
            raise UserError(f"The server's counter {name} fell.", "Do not restart the server meanwhile.")
        return value

    figures: dict[str, Any] = {name: round(between(name)) for name in TOKENS if name in after.counters}
    drafts, drafted, accepted = (round(between(name)) for name in (DRAFTS, DRAFTED, ACCEPTED))
    if drafts:
        figures |= {"verifies": drafts, "draft tokens": drafted, "accepted tokens": accepted}
        figures["accept length"] = 1 + accepted / drafts
        for depth in sorted(after.accepted_at):
            count = after.accepted_at[depth] - before.accepted_at.get(depth, 0.0)
            figures[f"accepted at depth {depth + 1}"] = count / drafts
    return figures


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
