"""Replies by the target itself: the human turns of a conversation source, answered by our engine or a server.

A draft is judged by the target's own replies, so it should learn from those; the replies of ShareGPT are
another model's. Results of tools stay where they were recorded, and the turns around them are said anew. The
result is a JSONL file of ``{"id", "messages", "finish_reasons"}`` lines, with category, tools and arguments
of the chat template where there are any, in the order of the source, which the data reader takes as it is. A
line is written as soon as its conversation and those before it are answered, so a run that was broken off
goes on where it stopped. Every reply has a seed of its own, a hash of the run's seed and of all that was
said before: a reply is the same in any batch, shard or session, with a draft and without.
"""

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from eagle_kit.config.train import TemplateVariant
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import read_object, sole_writer, write_json_atomically
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.stats import SpecStats
from eagle_kit.data.chat.forms import Conversation
from eagle_kit.data.chat.messages import ChatPrompt
from eagle_kit.data.chat.overlap import CONTAMINATED, LEAST_SIMILARITY, NearDuplicates, TestPrompts
from eagle_kit.data.chat.records import SkipLog, check_source, read_conversations
from eagle_kit.data.chat.renderer import PromptError
from eagle_kit.data.chat.variants import draw_kwargs
from eagle_kit.datagen.regenerate.dialogue import REFUSAL, Dialogue, refusal_pattern, script, texts
from eagle_kit.datagen.regenerate.files import (
    Key,
    NotWritten,
    append,
    check_out,
    check_settings,
    left_out_path,
    manifest_path,
    read_done,
    read_left_out,
    settings_path,
    writing,
)
from eagle_kit.datagen.regenerate.responder import Reply, Responder
from eagle_kit.report.stages import TimeLeft, mute, say

GROUP_FACTOR = 8
"""Conversations answered together per running request, so that short replies do not leave the batch empty."""
TOO_LONG = "the prompt of a later turn is longer than max_prompt_tokens, or than the target's context"


@dataclass(frozen=True)
class RegenerateOptions:
    """Conversations to answer, and the decoding of replies.

    Attributes:
        sampling: of every reply; its seed is hashed into the reply's own. A conversation ends with a reply
            that was cut at ``max_tokens``.
        limit: most conversations that are answered, those of earlier runs and those left out for their
            replies included; None answers all.
        max_turns: human turns answered per conversation.
        max_prompt_tokens: a turn whose prompt, earlier turns included, is longer than this, or than the
            responder takes, ends its conversation.
        with_ids: also write ``ids``, the tokens of the last prompt and its reply.
        samples: conversations from each one of the source.
        chat_template_kwargs: variants of the chat template's arguments, one of which is drawn for every
            conversation and sample; a record's own come first.
        skip_refusals, skip_truncated: leave out replies that refuse, or were cut, and what follows them.
        refusals: patterns of beginnings of refusals beside the English ones
            (:func:`~eagle_kit.datagen.regenerate.dialogue.read_refusals`).
        near_duplicates: leave out conversations whose human turns are as similar to those of an earlier one,
            by Jaccard similarity; None leaves out the same ones only.
        test_prompts: prompts of evaluation sets; conversations that hold one are left out.
        shard: ``(i, n)``: this process answers every n-th conversation, from the i-th, i in [0, n). Files of
            all shards together are what one process would have written.
    """

    sampling: SamplingParams
    limit: int | None = None
    max_turns: int = 2
    max_prompt_tokens: int = 1024
    with_ids: bool = False
    shard: tuple[int, int] = (0, 1)
    samples: int = 1
    chat_template_kwargs: tuple[TemplateVariant, ...] = ()
    skip_refusals: bool = False
    refusals: tuple[str, ...] = ()
    skip_truncated: bool = False
    near_duplicates: float | None = None
    test_prompts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.samples > 1 and self.sampling.temperature == 0:
            raise UserError(
                f"{self.samples} samples of greedy replies would be the same.", "Give a temperature above 0."
            )
        if self.refusals and not self.skip_refusals:
            raise UserError(
                "Patterns of refusals are given, and refusals are kept.", "Set skip_refusals too."
            )
        if self.near_duplicates is not None and not LEAST_SIMILARITY <= self.near_duplicates <= 1:
            raise UserError(
                f"near_duplicates is {self.near_duplicates}.",
                f"Give one from {LEAST_SIMILARITY}, below which too few are found, to 1.",
            )
        for name in ("limit", "max_turns", "max_prompt_tokens", "samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}.", "Give a number of at least one.")

    def settings(self, source: str, target: str) -> dict[str, Any]:
        """Everything that decides the replies, as it is kept beside them."""
        about = asdict(self) | asdict(self.sampling)
        free = ("limit", "sampling", "test_prompts")
        about = {name: value for name, value in about.items() if name not in free}
        about["chat_template_kwargs"] = [variant.model_dump() for variant in self.chat_template_kwargs]
        told = json.dumps(self.test_prompts).encode()
        about["test_prompts"] = hashlib.sha256(told).hexdigest()[:16] if self.test_prompts else "none"
        return json.loads(json.dumps({"source": str(source), "target": target, **about}))


@dataclass
class RegenerateReport:
    """Conversations and tokens that a call wrote, conversations found in the file already, and what replies
    of all calls were left out, by reason: of them whole conversations, and the ends of others."""

    num_written: int = 0
    num_found: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    shortened: Counter[str] = field(default_factory=Counter)
    num_reply_tokens: int = 0
    stats: SpecStats = field(default_factory=SpecStats)
    skipped: SkipLog = field(default_factory=SkipLog)

    def manifest(self, settings: dict[str, Any]) -> dict[str, Any]:
        """What was done: ``not_answered`` counts records of the source as far as it was read, ``left_out``
        and ``shortened`` conversations for their replies."""
        return {
            "settings": settings,
            "conversations": self.num_found + self.num_written,
            "not_answered": dict(self.skipped.counts.most_common()),
            "left_out": dict(self.left_out.most_common()),
            "shortened": dict(self.shortened.most_common()),
            "notes": self.skipped.notes,
        }

    def __str__(self) -> str:
        """Reply tokens, and the accept length of a draft: without one every verify emits one token."""
        is_drafted = self.stats.num_emitted_tokens > self.stats.num_verifies
        accept = f", accept length {self.stats.accept_length:.2f}" if is_drafted else ""
        return f"{self.num_reply_tokens} reply tokens{accept}"


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

    Conversations with the same system messages, tools, arguments of the chat template and first ``max_turns``
    human turns are answered once.
    Beside ``out`` are kept the settings that decide the replies, in ``NAME.settings.json``; what was left out
    for its replies, in ``NAME.left-out.jsonl``; and what was done, in ``NAME.manifest.json``.

    Args:
        responder: the target in our engine, with or without a draft: the replies are the same; or a server.
        source: as :func:`eagle_kit.data.chat.records.read_conversations` takes it.
        out: a JSONL file, made or continued; a half-written last line is dropped.
        options: conversations and decoding.
        target: fingerprint of its weights, or what is known of a server's; empty is not compared.
        progress: show a bar.

    Raises:
        UserError: an unreadable source, or an ``out`` that holds something else, replies that were made
            otherwise, with the setting, or is being written, or is gone while its list of what was left out
            is there.
    """
    path = Path(out)
    check_out(path)
    check_source(source)
    with sole_writer(path, path.with_name(f".{path.name}.lock")):
        return _continue(responder, source, path, options, target, progress)


def _continue(
    responder: Responder, source: str, path: Path, options: RegenerateOptions, target: str, progress: bool
) -> RegenerateReport:
    """Answer the conversations that ``path`` lacks; the caller is its only writer."""
    from tqdm import tqdm

    # Read what was done before.
    report = RegenerateReport()
    done = read_done(path)
    report.num_found = sum(done.values())
    settings = options.settings(source, target)
    left_out = left_out_path(path)
    not_again = read_left_out(left_out)
    if not_again and not path.exists():
        raise UserError(
            f"{left_out} lists what was left out of {path}, which does not exist.",
            f"Remove it to begin anew, or restore {path.name}.",
        )
    check_settings(path, settings, report.num_found + len(not_again))

    # Count what was left out before; it is not asked again.
    shortened: Counter[Key] = Counter()
    for key, reason, is_shortened in not_again:
        if not is_shortened:
            report.left_out[reason] += 1
        elif shortened[key] < done[key]:  # a process can be killed between this line and its replies
            report.shortened[reason] += 1
            shortened[key] += 1
    done.update(key for key, _, is_shortened in not_again if not is_shortened)

    # Nothing is left: at most the manifest is written.
    left = None if options.limit is None else max(options.limit - sum(done.values()), 0)
    dialogues = _new_dialogues(responder, source, options, done, report.skipped)
    if left == 0:
        if not _is_told(manifest_path(path), report):
            next(dialogues, None)  # counts what is not answered
            with writing(path):
                write_json_atomically(manifest_path(path), report.manifest(settings), indent=1)
        return report

    # The settings are on the disk before the first reply is.
    dialogues = islice(dialogues, left)
    with writing(path):
        write_json_atomically(settings_path(path), settings, indent=1)
        path.open("a").close()

    # Answer in groups; replies are written in the order of the source.
    sample = responder.batch_size / options.max_turns
    time_left = TimeLeft(left, "conversations", sample=sample, prints=say if progress else mute)
    with tqdm(total=left, unit="conversation", dynamic_ncols=True, disable=not progress) as bar:

        def write(unwritten: deque[Dialogue], is_last: bool = False) -> None:
            bar.set_postfix_str(str(report))
            if is_last:  # the others will not be answered now
                ready = [dialogue for dialogue in unwritten if not dialogue.waiting]
            else:
                ready = list(takewhile(lambda dialogue: not dialogue.waiting, unwritten))
            if not ready:
                return
            for dialogue in ready:
                unwritten.remove(dialogue)
            replied = [dialogue for dialogue in ready if dialogue.finish_reasons]
            with writing(path):
                append(left_out, "".join(each.left_out_line() for each in ready if each.left_out))
                append(path, "".join(each.line(options.with_ids) for each in replied))
            report.num_written += len(replied)
            for dialogue in ready:
                if dialogue.left_out:
                    kind = report.shortened if dialogue.finish_reasons else report.left_out
                    kind[dialogue.left_out] += 1
            bar.update(len(ready))

        try:
            while group := deque(islice(dialogues, GROUP_FACTOR * responder.batch_size)):
                try:
                    _answer(responder, list(group), options, report, partial(write, group), time_left)
                except NotWritten:  # nothing may come behind half a line
                    raise
                except BaseException:
                    write(group, is_last=not responder.repeats)
                    raise
        finally:
            with writing(path):
                write_json_atomically(manifest_path(path), report.manifest(settings), indent=1)
    return report


def _is_told(manifest: Path, report: RegenerateReport) -> bool:
    """Return False if the process before was killed behind its last line, and has not written what it did."""
    if not manifest.exists():
        return False
    found = read_object(manifest)
    expected = report.manifest({})
    return all(found.get(name) == expected[name] for name in ("conversations", "left_out", "shortened"))


def _answer(
    responder: Responder,
    group: Sequence[Dialogue],
    options: RegenerateOptions,
    report: RegenerateReport,
    write: Callable[[], None],
    time_left: TimeLeft,
) -> None:
    """Answer every turn of ``group``, turn by turn; counts reply tokens and acceptance in ``report``.

    Args:
        write: called when conversations may have been answered to their end.
        time_left: counts replies as shares of their conversations.
    """
    longest = _longest_prompt(responder, options)
    refusals = [REFUSAL, *map(refusal_pattern, options.refusals)] if options.skip_refusals else []
    while any(dialogue.waiting for dialogue in group):
        # Prompts of the next turn, without those that are too long.
        asking = []
        counted = []
        for dialogue in group:
            if not dialogue.waiting:
                continue
            try:
                size = responder.num_tokens(dialogue.ask())
            except PromptError as error:  # a result of a tool that was not called, say
                dialogue.end(error.cause)
                continue
            if (size or 0) > longest:
                dialogue.end(TOO_LONG)
                continue
            asking.append(dialogue)
            counted.append(size is not None)
        params = [dialogue.params(options.sampling) for dialogue in asking]

        def take(
            i: int, reply: Reply, asking: Sequence[Dialogue] = asking, counted: Sequence[bool] = counted
        ) -> None:
            dialogue = asking[i]
            num_waiting = len(dialogue.waiting)
            num_turns = len(dialogue.finish_reasons) + num_waiting

            def count() -> None:
                time_left.count((num_waiting - len(dialogue.waiting)) / num_turns)

            # The server took no such prompt.
            if reply.refused is not None:
                report.skipped.add(dialogue.id, reply.refused)
                dialogue.end()
                count()
                return write()

            # A server counts the prompt's tokens only with its reply.
            dialogue.take(reply, refusals=refusals, skip_truncated=options.skip_truncated)
            is_long = not counted[i] and reply.num_prompt_tokens + reply.num_tokens > longest
            if is_long and dialogue.waiting:
                dialogue.end(TOO_LONG)

            report.num_reply_tokens += reply.num_tokens
            report.stats.add(reply.stats)
            count()
            write()

        # Answer them; ``take`` is called reply by reply.
        responder.answer([dialogue.ask() for dialogue in asking], params, take)
        write()  # those that did not fit


def _longest_prompt(responder: Responder, options: RegenerateOptions) -> int:
    """Most tokens of a prompt that is asked: ``max_prompt_tokens``, and what the responder takes."""
    limits = options.max_prompt_tokens, responder.max_prompt_tokens
    return min(limit for limit in limits if limit is not None)


def _new_dialogues(
    responder: Responder, source: str, options: RegenerateOptions, done: Counter[Key], skipped: SkipLog
) -> Iterator[Dialogue]:
    """The conversations of ``source`` that are still to be answered, each once a sample."""
    longest = _longest_prompt(responder, options)
    for number, conversation in enumerate(_chosen(source, options, skipped)):
        if number % options.shard[1] != options.shard[0]:
            continue
        system, blocks = script(conversation, options.max_turns)
        key = ChatPrompt(conversation.messages, conversation.tools).key()
        for sample in range(options.samples):
            drawn = draw_kwargs(options.chat_template_kwargs, options.sampling.seed or 0, f"{sample}\n{key}")
            prompt = ChatPrompt(system, conversation.tools, {**drawn, **conversation.chat_template_kwargs})
            dialogue = Dialogue(conversation.id, prompt, list(blocks), sample, conversation.category)
            if done[about := (dialogue.id, dialogue.first, sample)]:
                done[about] -= 1
                continue
            try:
                size = responder.num_tokens(dialogue.ask()) or 0
            except PromptError as error:
                skipped.add(conversation.where, error.cause)
                continue
            if size > longest:
                skipped.add(conversation.where, "the first human turn is longer than max_prompt_tokens")
                continue
            yield dialogue


def _chosen(source: str, options: RegenerateOptions, skipped: SkipLog) -> Iterator[Conversation]:
    """Conversations of ``source`` that are answered by some shard."""
    seen: set[str] = set()
    near = None if options.near_duplicates is None else NearDuplicates(options.near_duplicates)
    tests = TestPrompts(options.test_prompts)
    for conversation in read_conversations(source, skipped=skipped):
        system, blocks = script(conversation, options.max_turns)
        turns = list(texts(blocks))
        kwargs = dict(conversation.chat_template_kwargs)
        asked = json.dumps([system, blocks, conversation.tools, kwargs], sort_keys=True)
        if not blocks:
            reason = "no human turn"
        elif asked in seen:
            reason = "the same human turns as an earlier conversation"
        elif any(tests.are_in(turn) for turn in turns):
            reason = CONTAMINATED
        elif near is not None and not near.is_new("\n".join(turns)):
            reason = "nearly the same human turns as an earlier conversation"
        else:
            seen.add(asked)
            yield conversation
            continue
        skipped.add(conversation.where, reason)
