"""Replies by the target itself: the human turns of a conversation source, answered by our engine or a server.

A draft is judged by the target's own replies, so it should learn from those; the replies of ShareGPT are
another model's. The result is a JSONL file of ``{"id", "messages", "finish_reasons"}`` lines in the order of
the source, which the data reader takes as it is. A line is written as soon as its conversation and those
before it are answered, so a run that was broken off goes on where it stopped. Every reply has a seed of its
own, a hash of the run's seed and of all that was said before: a reply is the same in any batch, shard or
session, with a draft and without.
"""

import hashlib
import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import check_writable, parse_json, read_object, sole_writer, write_json_atomically
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.stats import SpecStats
from eagle_kit.data.chat.records import Conversation, SkipLog, read_conversations
from eagle_kit.train.replies.responder import Messages, Reply, Responder

GROUP_FACTOR = 8
"""Conversations answered together per running request, so that short replies do not leave the batch empty."""
REASONING = "reasoning_content"
"""Key of what a server's model thought before a reply."""
ANOTHER_FILE = "Give --out another file."
_Key = tuple[str, str]
"""A conversation's id and its first human turn: ids alone need not be different."""


@dataclass(frozen=True)
class RegenerateOptions:
    """Conversations to answer, and the decoding of replies.

    Attributes:
        sampling: of every reply; its seed is hashed into the reply's own. A conversation ends with a reply
            that was cut at ``max_tokens``.
        limit: most conversations of the file, those of earlier runs included; None answers all.
        max_turns: human turns answered per conversation.
        max_prompt_tokens: a turn whose prompt, earlier turns included, is longer ends its conversation.
        with_ids: also write ``ids``, the tokens of the last prompt and its reply.
        shard: ``(i, n)``: this process answers every n-th conversation, from the i-th, i in [0, n). Files of
            all shards together are what one process would have written.
    """

    sampling: SamplingParams
    limit: int | None = None
    max_turns: int = 2
    max_prompt_tokens: int = 1024
    with_ids: bool = False
    shard: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        for name in ("limit", "max_turns", "max_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}.", "Give a number of at least one.")

    def settings(self, source: str, target: str) -> dict[str, Any]:
        """Everything that decides the replies, as it is kept beside them."""
        about = asdict(self) | asdict(self.sampling)
        free = ("limit", "sampling")
        about = {name: value for name, value in about.items() if name not in free}
        return json.loads(json.dumps({"source": str(source), "target": target, **about}))


@dataclass
class RegenerateReport:
    """Conversations and tokens that a call wrote, and conversations found in the file already."""

    num_written: int = 0
    num_found: int = 0
    num_reply_tokens: int = 0
    stats: SpecStats = field(default_factory=SpecStats)
    skipped: SkipLog = field(default_factory=SkipLog)

    def __str__(self) -> str:
        """Reply tokens, and the accept length of a draft: without one every verify emits one token."""
        is_drafted = self.stats.num_emitted_tokens > self.stats.num_verifies
        accept = f", accept length {self.stats.accept_length:.2f}" if is_drafted else ""
        return f"{self.num_reply_tokens} reply tokens{accept}"


@dataclass
class _Dialogue:
    """One conversation being answered: ``waiting`` human turns, oldest first."""

    id: str
    messages: Messages
    waiting: list[str]
    finish_reasons: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def params(self, sampling: SamplingParams) -> SamplingParams:
        """Parameters of the next reply, whose seed is a hash of the run's seed and all that was said."""
        text = json.dumps([sampling.seed, self.ask()], ensure_ascii=False)
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
        return replace(sampling, seed=seed)

    def ask(self) -> Messages:
        """The prompt of the next turn as messages, without what was thought before earlier ones."""
        said = [{k: v for k, v in turn.items() if k != REASONING} for turn in self.messages]
        return [*said, {"role": "user", "content": self.waiting[0]}]

    def take(self, reply: Reply) -> None:
        """Put the next turn and its reply into the conversation; a cut or empty reply ends it."""
        said = {"role": "assistant", "content": reply.text}
        if reply.reasoning is not None:
            said[REASONING] = reply.reasoning
        self.messages = [*self.messages, self.ask()[-1], said]
        self.waiting = self.waiting[1:] if reply.finish_reason == "stop" and reply.text.strip() else []
        self.finish_reasons.append(reply.finish_reason)
        self.ids = reply.ids or []

    def line(self, with_ids: bool) -> str:
        """Line of the file."""
        record = {"id": self.id, "messages": self.messages, "finish_reasons": self.finish_reasons}
        return json.dumps(record | ({"ids": self.ids} if with_ids else {}), ensure_ascii=False) + "\n"


def regenerate(
    responder: Responder,
    source: str,
    out: str | Path,
    options: RegenerateOptions,
    *,
    target: str = "",
    progress: bool = True,
) -> RegenerateReport:
    """Have ``responder`` answer the human turns of ``source``, and append the conversations to ``out``, as
    the only process that does.

    Conversations with the same system messages and first ``max_turns`` human turns are answered once. The
    settings that decide the replies are kept beside ``out``, in ``NAME.settings.json``.

    Args:
        responder: the target in our engine, with or without a draft: the replies are the same; or a server.
        source: as :func:`eagle_kit.data.chat.records.read_conversations` takes it.
        out: a JSONL file, made or continued; a half-written last line is dropped.
        options: conversations and decoding.
        target: fingerprint of its weights, or what is known of a server's; empty is not compared.
        progress: show a bar.

    Raises:
        UserError: an unreadable source, or an ``out`` that holds something else, replies that were made
            otherwise, with the setting, or is being written.
    """
    path = Path(out)
    check_out(path)
    with sole_writer(path, path.with_name(f".{path.name}.lock")):
        return _continue(responder, source, path, options, target, progress)


def _continue(
    responder: Responder, source: str, path: Path, options: RegenerateOptions, target: str, progress: bool
) -> RegenerateReport:
    """Answer the conversations that ``path`` lacks; the caller is its only writer."""
    from tqdm import tqdm

    report = RegenerateReport()
    done = _read_done(path)
    report.num_found = sum(done.values())
    settings = options.settings(source, target)
    _check_settings(path, settings, report.num_found)
    left = None if options.limit is None else max(options.limit - report.num_found, 0)
    if left == 0:
        return report
    dialogues = islice(_new_dialogues(responder, source, options, done, report.skipped), left)
    try:
        write_json_atomically(settings_path(path), settings, indent=1)
        opened = path.open("a", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.", ANOTHER_FILE) from error
    shown = tqdm(total=left, unit="conversation", dynamic_ncols=True, disable=not progress)
    with opened as file, shown as bar:
        while group := deque(islice(dialogues, GROUP_FACTOR * responder.batch_size)):

            def write(is_last: bool = False, unwritten: deque[_Dialogue] = group) -> None:
                if is_last:  # the others will not be answered now
                    ready = [dialogue for dialogue in unwritten if not dialogue.waiting]
                else:
                    ready = list(takewhile(lambda dialogue: not dialogue.waiting, unwritten))
                if not ready:
                    return
                for dialogue in ready:
                    unwritten.remove(dialogue)
                    if dialogue.finish_reasons:
                        file.write(dialogue.line(options.with_ids))
                ready = [dialogue for dialogue in ready if dialogue.finish_reasons]
                file.flush()
                os.fsync(file.fileno())
                report.num_written += len(ready)
                bar.set_postfix_str(str(report), refresh=False)
                bar.update(len(ready))

            try:
                _answer(responder, list(group), options, report, write)
            except BaseException:
                write(is_last=not responder.repeats)
                raise
    return report


def check_out(path: Path) -> None:
    """Raise UserError when ``path`` could not be made or appended to; nothing is made."""
    if path.is_dir():
        raise UserError(f"{path} is a folder.", ANOTHER_FILE)
    check_writable(path.parent, ANOTHER_FILE)


def _answer(
    responder: Responder,
    group: Sequence[_Dialogue],
    options: RegenerateOptions,
    report: RegenerateReport,
    write: Callable[[], None],
) -> None:
    """Answer every turn of ``group``, turn by turn; counts reply tokens and acceptance in ``report``.

    Args:
        write: called when conversations may have been answered to their end.
    """

    while asking := [dialogue for dialogue in group if dialogue.waiting]:
        sizes = [responder.num_tokens(dialogue.ask()) for dialogue in asking]
        fits = [size is None or size <= options.max_prompt_tokens for size in sizes]
        for dialogue, fit in zip(asking, fits, strict=True):
            if not fit:
                dialogue.waiting = []
        asking = [dialogue for dialogue, fit in zip(asking, fits, strict=True) if fit]
        params = [dialogue.params(options.sampling) for dialogue in asking]

        def take(i: int, reply: Reply, asking: Sequence[_Dialogue] = asking) -> None:
            dialogue = asking[i]
            if reply.refused is not None:
                dialogue.waiting = []
                report.skipped.add(dialogue.id, reply.refused)
                return write()
            dialogue.take(reply)
            if reply.num_prompt_tokens + reply.num_tokens > options.max_prompt_tokens:
                dialogue.waiting = []  # what a server does not tell before
            report.num_reply_tokens += reply.num_tokens
            report.stats.add(reply.stats)
            write()

        responder.answer([dialogue.ask() for dialogue in asking], params, take)
        write()  # those that did not fit


def _new_dialogues(
    responder: Responder, source: str, options: RegenerateOptions, done: Counter[_Key], skipped: SkipLog
) -> Iterator[_Dialogue]:
    """The conversations of ``source`` that are still to be answered, each once."""
    seen: set[str] = set()
    limits = options.max_prompt_tokens, responder.max_prompt_tokens
    longest = min(limit for limit in limits if limit is not None)
    for conversation in read_conversations(source, skipped=skipped):
        system, turns = _human_turns(conversation, options.max_turns)
        if not turns:
            skipped.add(conversation.where, "no human turn")
            continue
        if (asked := json.dumps([system, turns])) in seen:
            skipped.add(conversation.where, "the same human turns as an earlier conversation")
            continue
        seen.add(asked)
        if (len(seen) - 1) % options.shard[1] != options.shard[0]:
            continue
        if done[conversation.id, turns[0]]:
            done[conversation.id, turns[0]] -= 1
            continue
        dialogue = _Dialogue(conversation.id, system, turns)
        if (responder.num_tokens(dialogue.ask()) or 0) > longest:
            skipped.add(conversation.where, "the first human turn is longer than max_prompt_tokens")
            continue
        yield dialogue


def _human_turns(conversation: Conversation, max_turns: int) -> tuple[list[dict[str, str]], list[str]]:
    """System messages at the start, and the first human turns up to an empty one."""
    system: list[dict[str, str]] = []
    turns: list[str] = []
    for message in conversation.messages:
        if message["role"] == "system" and not turns:
            system.append({"role": "system", "content": message["content"]})
        elif message["role"] == "user":
            if not message["content"].strip() or len(turns) == max_turns:
                break
            turns.append(message["content"])
    return system, turns


def settings_path(path: Path) -> Path:
    """File with the settings of the replies in ``path``."""
    return path.with_suffix(".settings.json")


def _check_settings(path: Path, settings: dict[str, Any], num_found: int) -> None:
    """Raise UserError when the replies that are there were made with other settings."""
    before = read_object(settings_path(path), ANOTHER_FILE) if num_found else {}
    for name, value in settings.items():
        if before.get(name, value) != value and "" not in (before[name], value):
            raise UserError(
                f"The replies in {path} were made with {name} {before[name]}, but now it is {value}.",
                f"Restore it. {ANOTHER_FILE}",
            )


def _read_done(path: Path) -> Counter[_Key]:
    """Conversations in an earlier run's file, its half-written last line cut off. Raises UserError for
    another file."""
    if not path.exists():
        return Counter()
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.", ANOTHER_FILE) from error
    whole = text.rfind(b"\n") + 1
    done: Counter[_Key] = Counter()
    for number, line in enumerate(text[:whole].splitlines(), start=1):
        try:
            record = parse_json(line, path)
            record["finish_reasons"]
            first = next(turn["content"] for turn in record["messages"] if turn["role"] == "user")
            done[str(record["id"]), str(first)] += 1
        except (ValueError, KeyError, TypeError, StopIteration):
            raise UserError(
                f"{path}, line {number}, was not written by regeneration.", ANOTHER_FILE
            ) from None
    if whole < len(text):
        with path.open("r+b") as file:
            file.truncate(whole)
    return done
