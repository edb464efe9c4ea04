"""Speed and acceptance of a draft by batch size and shape, beside plain decoding: ``eagle-kit bench``.

``eagle-kit eval`` measures whole responses over tasks and compares texts; this times short rounds in which
all settings decode the same prompts, a cycle of one after a cycle of another.
"""

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import write_json_atomically
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.stats import SpecStats
from eagle_kit.data.tasks.sets import load_tasks
from eagle_kit.engine.llm import LLM
from eagle_kit.eval.side_by_side import Decoded, decode_side_by_side
from eagle_kit.report.environment import command_line, describe_machine, describe_versions, now
from eagle_kit.report.tables import Table, number

PLAIN = "none"
MOST_WARM_UPS = 20
"""Most rounds of a batch size in which some engine only makes graphs or recordings."""
COLUMNS = ("batch", "shape", "tokens/s", "times plain", "least", "most", "accept length")


@dataclass(frozen=True)
class SpeedOptions:
    """Prompts, batch sizes and shapes to measure.

    Attributes:
        tasks: names of task sets, or JSONL files.
        batch_sizes: prompts decoded together.
        shapes: speculation shapes; ``auto`` lets the engine choose.
        rounds: number of rounds of every batch size, each with prompts of its own.
        max_tokens: tokens of a response; a response does not end at its end token.
        seed: seed of the order of prompts.
    """

    tasks: Sequence[str]
    batch_sizes: Sequence[int]
    shapes: Sequence[str]
    rounds: int
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class SpeedRow:
    """Figures of one shape at one batch size.

    Attributes:
        batch_size: prompts decoded together.
        shape: speculation shape.
        tokens_per_s: median over the rounds, without prefill.
        times_plain: median over the rounds of the rate, in times that of plain decoding in the same
            round.
        least: the smallest of these ratios.
        most: the largest of them.
        accept_length: tokens per verify, the bonus token included; None where nothing was verified.
    """

    batch_size: int
    shape: str
    tokens_per_s: float
    times_plain: float
    least: float
    most: float
    accept_length: float | None


def measure(target: str, draft: str, engine: EngineConfig, options: SpeedOptions, out: Path | None) -> int:
    """Measure, print a table, and write the figures to ``out``; returns the exit code 0.

    Raises:
        UserError: a model or task that cannot be loaded, or prompts that leave no room for responses.
    """
    max_batch_size = max(options.batch_sizes)
    plain = LLM(target, config=engine, shape=PLAIN, max_batch_size=max_batch_size)
    llms = _engines(plain, draft, engine, options.shapes, max_batch_size)
    prompts = _prompts(plain, options)
    rows: list[SpeedRow] = []
    for batch_size in options.batch_sizes:
        rounds = list(_rounds(llms, prompts, batch_size, options))
        for shape in llms:
            row = _row(rounds, batch_size, shape)
            rows.append(row)
            print(_line(row), flush=True)

    print(f"\n{_table(rows)}")
    if out is not None:
        _write(out, target, draft, options, rows, plain)
        print(f"figures in {out}")
    return 0


def _engines(
    plain: LLM, draft: str, engine: EngineConfig, shapes: Sequence[str], max_batch_size: int
) -> dict[str, LLM]:
    """Make an engine for every setting; they share the weights of target and draft."""
    llms = {PLAIN: plain}
    loaded: Any = draft
    for shape in shapes:
        llm = LLM(
            plain.target,
            loaded,
            engine,
            tokenizer=plain.tokenizer,
            shape=None if shape == "auto" else shape,
            max_batch_size=max_batch_size,
        )
        loaded = llm.draft
        llms[shape] = llm
    return llms


def _prompts(llm: LLM, options: SpeedOptions) -> list[list[int]]:
    """Tokenise the tasks' first turns, in an order drawn by the seed, without those that leave no room."""
    texts = [prompt.given() for task in load_tasks(options.tasks) for prompt in task.prompts]
    random.Random(options.seed).shuffle(texts)
    longest = llm.max_context - options.max_tokens
    prompts = [ids for ids in map(llm.tokenize_task, texts) if len(ids) <= longest]
    if not prompts:
        raise UserError(
            f"No prompt leaves room for {options.max_tokens} tokens in {llm.max_context}.",
            "Give a smaller --max-tokens, or other --tasks.",
        )
    return prompts


def _rounds(
    llms: Mapping[str, LLM], prompts: Sequence[list[int]], batch_size: int, options: SpeedOptions
) -> Iterator[dict[str, Decoded]]:
    """Decode the rounds of a batch size. The first round warms up, and so does any in which an
    engine only made graphs or recordings; these are not yielded.

    Raises:
        UserError: responses are too short to be timed.
    """
    params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
    num_yielded = 0
    for round_number in range(1 + MOST_WARM_UPS + options.rounds):
        # Each round has prompts of its own, as far as there are so many.
        first = round_number * batch_size
        part = [prompts[(first + i) % len(prompts)] for i in range(batch_size)]
        decoded = decode_side_by_side(llms, part, params, while_whole=True)
        is_warm_up = round_number == 0 or any(each.rate == 0 for each in decoded.values())
        if is_warm_up:
            continue
        yield decoded
        num_yielded += 1
        if num_yielded == options.rounds:
            return
    raise UserError(
        f"Responses of {options.max_tokens} tokens are too short to be timed.", "Give a larger --max-tokens."
    )


def _row(rounds: Sequence[Mapping[str, Decoded]], batch_size: int, shape: str) -> SpeedRow:
    """Figures of a shape, compared with plain decoding within rounds, since texts and machine differ."""
    rates = [each[shape].rate for each in rounds]
    ratios = [each[shape].rate / each[PLAIN].rate for each in rounds]
    stats = SpecStats()
    for each in rounds:
        for request in each[shape].requests:
            stats.add(request.stats.spec)
    has_verified = stats.num_verifies > 0 and shape != PLAIN
    return SpeedRow(
        batch_size=batch_size,
        shape=shape,
        tokens_per_s=statistics.median(rates),
        times_plain=statistics.median(ratios),
        least=min(ratios),
        most=max(ratios),
        accept_length=stats.accept_length if has_verified else None,
    )


def _line(row: SpeedRow) -> str:
    """One row as it is measured."""
    return f"batch {row.batch_size}, {row.shape}: {row.tokens_per_s:.1f} tokens/s"


def _table(rows: Sequence[SpeedRow]) -> str:
    """All rows, for a terminal."""
    lines = []
    for row in rows:
        lines.append(
            [
                str(row.batch_size),
                row.shape,
                number(row.tokens_per_s, 1),
                number(row.times_plain),
                number(row.least),
                number(row.most),
                number(row.accept_length),
            ]
        )
    return Table(COLUMNS, lines, left=("shape",)).text()


def _write(
    out: Path, target: str, draft: str, options: SpeedOptions, rows: Sequence[SpeedRow], llm: LLM
) -> None:
    """Write the figures with machine, versions and command."""
    out.parent.mkdir(parents=True, exist_ok=True)
    device = str(llm.target.embed_tokens.weight.device)
    figures = {
        "kind": "bench",
        "date": now(),
        "command": command_line(),
        "machine": describe_machine(device),
        "versions": describe_versions(),
        "settings": {"target": target, "draft": draft, **asdict(options)},
        "rows": [asdict(row) for row in rows],
    }
    write_json_atomically(out, figures, indent=1)
