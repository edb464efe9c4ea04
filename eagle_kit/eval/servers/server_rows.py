"""Records of servers added up to rows of an evaluation's table, and what is said about them."""

import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eagle_kit.eval.counters import ACCEPTED, Snapshot, figures_of
from eagle_kit.eval.servers.server_answers import ServedAnswer, ServedRecord
from eagle_kit.eval.summary import ALL
from eagle_kit.report.tables import number

SEVERAL = "several"
"""Shape of a server that used more than one."""
MAX_DIFFERENCES = 3
"""Differences of a server that are printed."""
AnswerKey = tuple[str, str, int, int]
"""Task, prompt, turn and round of an answer."""


@dataclass(frozen=True)
class _Part:
    """What one server decoded of a category of a task.

    Attributes:
        answers: by task, prompt, turn and round.
        counted: counts of its batches; None where a batch has prompts of another category too.
        is_alone: False where the server counted more tokens than these responses have.
    """

    answers: dict[AnswerKey, ServedAnswer]
    counted: Snapshot | None
    is_alone: bool

    @property
    def speed(self) -> float | None:
        """Tokens per second of decoding; None where nothing was decoded."""
        num_tokens = sum(answer.response.num_decode_tokens for answer in self.answers.values())
        seconds = sum(answer.decode_share_s for answer in self.answers.values())
        return num_tokens / seconds if seconds > 0 else None

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify, bonus token included; None where no verifies are counted.

        These are the tokens of the responses but the first of each, as our engine counts them. Where
        others used the server, or it emitted tokens without a draft, it is the figure of the counters.
        """
        counted = self.counted
        if counted is None or not counted.num_verifies:
            return None
        num_emitted = sum(max(answer.response.num_tokens - 1, 0) for answer in self.answers.values())
        accepted = counted.count(ACCEPTED)
        is_drafted = not accepted or num_emitted <= counted.num_verifies + accepted
        if self.is_alone and is_drafted:
            return num_emitted / counted.num_verifies
        return float(figures_of(counted)["accept length"])


def server_rows(
    records: Sequence[ServedRecord],
    servers: Sequence[str],
    tasks: Sequence[str],
    temperature: float = 0.0,
    rounds: Collection[int] = (0,),
) -> list[dict[str, Any]]:
    """Rows with the fields of :func:`eagle_kit.eval.summary.summarise` for every server and part.

    ``draft`` is the name of the server, and ``engine`` that of its engine. ``speedup`` is over the
    plain server of the same engine, None without one.

    Args:
        records: of all servers.
        servers: names, in the order to show.
        tasks: names, in the order to show.
        temperature: of the rows.
        rounds: numbers of the rounds with this temperature.
    """
    of_round = [record for record in records if record.round in rounds]
    rows = []
    for task, category in _parts(of_round, tasks):
        for server in servers:
            of_server = [record for record in of_round if record.server == server]
            if of_server:
                part = _part(of_server, task, category)
                plain = plain_server(of_round, server)
                plain_part = None
                if plain is not None:
                    plain_part = _part([r for r in of_round if r.server == plain], task, category)
                row = _row(of_server, part, plain_part, task, category)
                rows.append({"temperature": temperature, **row})
    return rows


def plain_server(records: Sequence[ServedRecord], server: str) -> str | None:
    """The first server of the same engine that drafted nothing; None without one, and for itself."""
    engines = {record.server: record.engine for record in records}
    for name, engine in engines.items():
        if engine == engines[server] and is_plain(records, name):
            return name if name != server else None
    return None


def is_plain(records: Sequence[ServedRecord], server: str) -> bool:
    """Whether a server drafted nothing."""
    return all(record.shape == "none" for record in records if record.server == server)


def describe_servers(records: Sequence[ServedRecord], urls: dict[str, str]) -> list[dict[str, Any]]:
    """Facts of each server for the summary: engine, version, model, shape, identity, other traffic.

    Args:
        urls: by the servers' names.
    """
    found = []
    for name, url in urls.items():
        of_server = [record for record in records if record.server == name]
        if not of_server:
            continue
        answers = [answer for record in of_server for answer in record.answers]
        last = of_server[-1]
        found.append(
            {
                "name": name,
                "url": url,
                "engine": last.engine,
                "version": last.version,
                "model": last.model,
                "shape": _shape(of_server),
                "plain_server": plain_server(records, name),
                "num_compared": sum(answer.identical is not None for answer in answers),
                "differences": list(_differences(of_server)),
                "num_tokens": sum(record.num_tokens for record in of_server),
                "num_unexplained_tokens": sum(record.num_unexplained for record in of_server),
                "num_batches_with_others": sum(record.num_unexplained > 0 for record in of_server),
                "num_batches": len(of_server),
                "gauge": last.counted.gauge if not last.counted.num_verifies else None,
            }
        )
    return found


def server_lines(servers: Sequence[dict[str, Any]]) -> list[str]:
    """What the report says about servers below the table."""
    lines = []
    for server in servers:
        name = server["name"]
        plain = server["plain_server"]
        over = f"; its speed-up is over {plain}" if plain is not None else ""
        shape = server["shape"] or "unknown"
        if shape == "none":
            shape = "none, plain decoding"
        lines.append(
            f"{name}: {server['engine']} {server['version']} at {server['url']}, model {server['model']}, "
            f"shape {shape}{over}"
        )
        lines += [f"  {line}" for line in _remarks(server)]
    return lines


def _remarks(server: dict[str, Any]) -> list[str]:
    """Identity of a server's texts, and what weakens its figures."""
    remarks = []
    differences = server["differences"]
    if not server["num_compared"]:
        remarks.append("samples of another engine are not compared with ours")
    elif not differences:
        remarks.append(f"texts: {server['num_compared']} of them equal plain decoding here")
    else:
        remarks.append(
            f"texts: {len(differences)} of {server['num_compared']} differ from plain decoding here"
        )
        remarks += [f"  {_described(record)}" for record in differences[:MAX_DIFFERENCES]]
        if len(differences) > MAX_DIFFERENCES:
            remarks.append(f"  ... and {len(differences) - MAX_DIFFERENCES} more in summary.json")
    if server["num_unexplained_tokens"]:
        remarks.append(
            f"warning: it counted {server['num_unexplained_tokens']} tokens more than these requests have, "
            f"in {server['num_batches_with_others']} of {server['num_batches']} batches; others used it"
        )
    if server["gauge"] is not None:
        remarks.append(
            f"it counts no verifies; the gauge of its last interval is {number(server['gauge'])}, which is "
            "not of these prompts alone"
        )
    return remarks


def _described(record: dict[str, Any]) -> str:
    """One line for a response that differs."""
    found = record["difference"]
    gap = "" if found["logit_gap"] is None else f" (logit gap {found['logit_gap']:.3g})"
    return (
        f"{record['task']} {record['id']}, turn {record['turn'] + 1}: token {found['position']}, character "
        f"{found['character']} is {found['text']!r}, plain decoding has {found['plain_text']!r}{gap}"
    )


def _parts(records: Sequence[ServedRecord], tasks: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Tasks and categories of rows, as in :mod:`eagle_kit.eval.summary`."""
    yield ALL, ALL
    for task in tasks:
        yield task, ALL
        of_task = [record for record in records if record.task == task]
        categories = dict.fromkeys(answer.category for record in of_task for answer in record.answers)
        if len(categories) > 1:
            for category in categories:
                yield task, category


def _part(records: Sequence[ServedRecord], task: str, category: str) -> _Part:
    """Answers and counts of one server's records of a part."""
    answers: dict[AnswerKey, ServedAnswer] = {}
    counted: Snapshot | None = Snapshot()
    is_alone = True
    for record in records:
        if task not in (ALL, record.task):
            continue
        inside = [answer for answer in record.answers if category in (ALL, answer.category)]
        if not inside:
            continue
        for answer in inside:
            answers[record.task, answer.id, record.turn, record.round] = answer
        is_alone = is_alone and not record.num_unexplained
        if len(inside) < len(record.answers):
            counted = None
        elif counted is not None:
            counted = counted.plus(record.counted)
    return _Part(answers, counted, is_alone)


def _row(
    records: Sequence[ServedRecord], part: _Part, plain: _Part | None, task: str, category: str
) -> dict[str, Any]:
    """One server on one part."""
    answers = list(part.answers.values())
    counted = part.counted or Snapshot()
    shares = []
    if counted.num_verifies:
        shares = [counted.accepted_at[depth] / counted.num_verifies for depth in sorted(counted.accepted_at)]
    speedup = None
    speedup_of_totals = None
    if plain is not None:
        speedup = _median_speedup(part, plain)
        if part.speed and plain.speed:
            speedup_of_totals = part.speed / plain.speed
    return {
        "task": task,
        "category": category,
        "draft": records[0].server,
        "shape": _shape(records),
        "engine": records[0].engine,
        "num_answers": len(answers),
        "num_tokens": sum(answer.response.num_tokens for answer in answers),
        "num_verifies": counted.num_verifies,
        "accept_length": part.accept_length,
        "acceptance_per_position": shares,
        "histogram": [],
        "decode_tokens_per_s": part.speed,
        "speedup": speedup,
        "speedup_of_totals": speedup_of_totals,
        "decode_s": sum(answer.decode_share_s for answer in answers),
        "prefill_s": statistics.fmean(answer.response.first_s for answer in answers) if answers else None,
        "num_different": sum(answer.identical is False for answer in answers),
        "num_compared": sum(answer.identical is not None for answer in answers),
    }


def _median_speedup(part: _Part, plain: _Part) -> float | None:
    """Median of the ratios of tokens per second over the turns that both servers decoded."""
    ratios = []
    for key, answer in part.answers.items():
        other = plain.answers.get(key)
        if other is None or answer.decode_share_s <= 0 or other.decode_share_s <= 0:
            continue
        speed = answer.response.num_decode_tokens / answer.decode_share_s
        plain_speed = other.response.num_decode_tokens / other.decode_share_s
        if plain_speed > 0:
            ratios.append(speed / plain_speed)
    return statistics.median(ratios) if ratios else None


def _shape(records: Sequence[ServedRecord]) -> str:
    """Shape of one server's records. A batch whose responses ended at once drafted nothing."""
    shapes = {record.shape for record in records}
    if len(shapes) > 1:
        shapes.discard("none")
    return shapes.pop() if len(shapes) == 1 else SEVERAL


def _differences(records: Sequence[ServedRecord]) -> Iterator[dict[str, Any]]:
    for record in records:
        for answer in record.answers:
            if answer.difference is not None:
                yield {
                    "task": record.task,
                    "id": answer.id,
                    "turn": record.turn,
                    "difference": asdict(answer.difference),
                }
