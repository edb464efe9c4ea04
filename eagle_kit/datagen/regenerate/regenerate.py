"""Responses by the target itself: the human turns of a conversation source, answered by our engine or a
server.

A draft predicts the target's own responses, so it is trained on those; the responses of ShareGPT are another
model's. Results of tools stay as they were recorded, and the responses around them are generated. The result
is a JSONL file of ``{"id", "messages", "finish_reasons"}`` lines, with category, tools and arguments of the
chat template if there are any, in the order of the source; the data reader reads it as it is. A line is
written as soon as its conversation and those before it are answered, so an interrupted run continues. The
seed of a response is a hash of the run's seed and the prompt: the response is the same in any batch, shard or
session, with a draft and without.
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
from eagle_kit.datagen.regenerate.responder import GeneratedResponse, Responder
from eagle_kit.report.stages import TimeLeft, mute, say

GROUP_FACTOR = 8
"""Conversations of a group for each running request, so that short responses do not leave the batch empty."""
TOO_LONG = "the prompt of a later turn is longer than max_prompt_tokens, or than the target's context"


@dataclass(frozen=True)
class RegenerateOptions:
    """Conversations to answer, and the decoding of responses.

    Attributes:
        sampling: parameters of every response; its seed is hashed into that of the response. A response that
            was cut at ``max_tokens`` ends its conversation.
        limit: maximum number of conversations, with those of earlier runs and those that were left out
            because of a response; None is unbounded.
        max_turns: maximum number of human turns of a conversation.
        max_prompt_tokens: maximum length of a prompt, earlier turns included. A longer one, or one that the
            responder does not take, ends its conversation.
        with_ids: also write ``ids``, the tokens of the last prompt and its response.
        samples: conversations that are generated from each one of the source.
        chat_template_kwargs: variants of the chat template's arguments, one of which is drawn for every
            conversation and sample; the arguments of a record take precedence.
        skip_refusals: leave out refusals and the turns after them.
        skip_truncated: leave out responses that were cut.
        refusals: patterns of refusals besides the English ones
            (:func:`~eagle_kit.datagen.regenerate.dialogue.read_refusals`).
        near_duplicates: Jaccard similarity of human turns from which on a conversation is left out as a
            duplicate of an earlier one; None leaves out equal ones only.
        test_prompts: prompts of evaluation sets; conversations that contain one are left out.
        shard: ``(i, n)``: this process answers every n-th conversation, from the i-th, i in [0, n). The files
            of all shards together equal the file of one process.
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
                f"{self.samples} samples of greedy responses would be the same.",
                "Give a temperature above 0.",
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
        """Everything that decides the responses, as it is written beside them."""
        options = asdict(self) | asdict(self.sampling)
        for name in ("limit", "sampling", "test_prompts"):
            del options[name]
        options["chat_template_kwargs"] = [variant.model_dump() for variant in self.chat_template_kwargs]
        options["test_prompts"] = "none"
        if self.test_prompts:
            prompts = json.dumps(self.test_prompts).encode()
            options["test_prompts"] = hashlib.sha256(prompts).hexdigest()[:16]
        return json.loads(json.dumps({"source": str(source), "target": target, **options}))


@dataclass
class RegenerateReport:
    """Counts of a regeneration.

    Attributes:
        num_written: conversations that this call wrote.
        num_found: conversations that earlier calls wrote.
        left_out: conversations that all calls left out because of their first response, by reason.
        shortened: conversations that all calls ended before a later response, by reason.
        num_response_tokens: tokens of the responses of this call.
        stats: acceptance of a draft in this call.
        skipped: records of the source that were not answered.
    """

    num_written: int = 0
    num_found: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    shortened: Counter[str] = field(default_factory=Counter)
    num_response_tokens: int = 0
    stats: SpecStats = field(default_factory=SpecStats)
    skipped: SkipLog = field(default_factory=SkipLog)

    def manifest(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Contents of the manifest. ``not_answered`` counts records of the source as far as it was read."""
        return {
            "settings": settings,
            "conversations": self.num_found + self.num_written,
            "not_answered": dict(self.skipped.counts.most_common()),
            "left_out": dict(self.left_out.most_common()),
            "shortened": dict(self.shortened.most_common()),
            "notes": self.skipped.notes,
        }

    def __str__(self) -> str:
        """Response tokens, and the accept length of a draft."""
        text = f"{self.num_response_tokens} response tokens"
        has_draft = self.stats.num_emitted_tokens > self.stats.num_verifies
        if has_draft:
            text += f", accept length {self.stats.accept_length:.2f}"
        return text


def regenerate(
    responder: Responder,
    source: str,
    out: str | Path,
    options: RegenerateOptions,
    *,
    target: str = "",
    progress: bool = True,
) -> RegenerateReport:
    """Have ``responder`` answer the human turns of ``source``, and append the conversations to ``out``.

    Conversations with the same system messages, tools, arguments of the chat template and first ``max_turns``
    human turns are answered once. Beside ``out`` are the settings that decide the responses, in
    ``NAME.settings.json``; the conversations that were left out or shortened because of a response, in
    ``NAME.left-out.jsonl``; and the counts, in ``NAME.manifest.json``.

    Args:
        responder: the target in our engine, with or without a draft (the responses are the same), or a
            server.
        source: source of :func:`eagle_kit.data.chat.records.read_conversations`.
        out: a JSONL file, which is created or continued; a half-written last line is removed.
        options: conversations and decoding.
        target: fingerprint of the target's weights, or a description of the server's; empty is not compared.
        progress: show a progress bar.

    Raises:
        UserError: the source cannot be read; or ``out`` is another kind of file, has responses of other
            settings, is written by another process, or is missing while its list of left out conversations
            exists.
    """
    path = Path(out)
    check_out(path)
    check_source(source)
    with sole_writer(path, path.with_name(f".{path.name}.lock")):
        return _continue(responder, source, path, options, target, progress)


def _continue(
    responder: Responder, source: str, path: Path, options: RegenerateOptions, target: str, progress: bool
) -> RegenerateReport:
    """:func:`regenerate` as the only writer of ``path``."""
    from tqdm import tqdm

    # Read the files of earlier calls.
    report = RegenerateReport()
    done = read_done(path)
    report.num_found = sum(done.values())
    settings = options.settings(source, target)
    manifest = manifest_path(path)
    left_out_file = left_out_path(path)
    left_out_before = read_left_out(left_out_file)
    if left_out_before and not path.exists():
        raise UserError(
            f"{left_out_file} lists what was left out of {path}, which does not exist.",
            f"Remove it to begin anew, or restore {path.name}.",
        )
    check_settings(path, settings, report.num_found + len(left_out_before))

    # Count what was left out before; it is not asked again. A process can be killed between writing that a
    # conversation is shortened and writing the conversation, which is then answered again.
    num_shortened: Counter[Key] = Counter()
    for each in left_out_before:
        if not each.is_shortened:
            report.left_out[each.reason] += 1
        elif num_shortened[each.key] < done[each.key]:
            report.shortened[each.reason] += 1
            num_shortened[each.key] += 1
    done.update(each.key for each in left_out_before if not each.is_shortened)

    # Nothing is left: at most the manifest is written. The first dialogue is asked for because the records
    # before it are counted as not answered.
    left = None
    if options.limit is not None:
        left = max(options.limit - sum(done.values()), 0)
    dialogues = _new_dialogues(responder, source, options, done, report.skipped)
    if left == 0:
        if not _is_current(manifest, report):
            next(dialogues, None)
            with writing(path):
                write_json_atomically(manifest, report.manifest(settings), indent=1)
        return report

    # The settings are on the disk before the first response is.
    dialogues = islice(dialogues, left)
    with writing(path):
        write_json_atomically(settings_path(path), settings, indent=1)
        path.open("a").close()

    # Answer in groups; responses are written in the order of the source.
    sample = responder.batch_size / options.max_turns
    time_left = TimeLeft(left, "conversations", sample=sample, prints=say if progress else mute)
    with tqdm(total=left, unit="conversation", dynamic_ncols=True, disable=not progress) as bar:

        def write(unwritten: deque[Dialogue], is_last: bool = False) -> None:
            """Write the conversations that have ended: those before the first that has not, or with
            ``is_last`` all of them."""
            bar.set_postfix_str(str(report))
            if is_last:
                ended = [dialogue for dialogue in unwritten if not dialogue.waiting]
            else:
                ended = list(takewhile(lambda dialogue: not dialogue.waiting, unwritten))
            if not ended:
                return
            for dialogue in ended:
                unwritten.remove(dialogue)

            # Write them.
            replied = [dialogue for dialogue in ended if dialogue.finish_reasons]
            with writing(path):
                append(left_out_file, "".join(each.left_out_line() for each in ended if each.left_out))
                append(path, "".join(each.line(options.with_ids) for each in replied))

            # Count them.
            report.num_written += len(replied)
            for dialogue in ended:
                if not dialogue.left_out:
                    continue
                if dialogue.finish_reasons:
                    report.shortened[dialogue.left_out] += 1
                else:
                    report.left_out[dialogue.left_out] += 1
            bar.update(len(ended))

        try:
            while group := deque(islice(dialogues, GROUP_FACTOR * responder.batch_size)):
                try:
                    _answer(responder, list(group), options, report, partial(write, group), time_left)
                except NotWritten:  # the file may end in half a line, and nothing may follow that
                    raise
                except BaseException:
                    write(group, is_last=not responder.repeats)
                    raise
        finally:
            with writing(path):
                write_json_atomically(manifest, report.manifest(settings), indent=1)
    return report


def _is_current(manifest: Path, report: RegenerateReport) -> bool:
    """True if the manifest has the counts of ``report``; False if an earlier process was killed before it
    could write them."""
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
    """Answer the conversations of ``group``, turn by turn.

    Args:
        report: counts response tokens and acceptance.
        write: called when conversations may have ended.
        time_left: counts responses as shares of their conversations.
    """
    longest = _longest_prompt(responder, options)
    refusals = []
    if options.skip_refusals:
        refusals = [REFUSAL, *map(refusal_pattern, options.refusals)]
    while any(dialogue.waiting for dialogue in group):
        # Prompts of the next turn, without those that are too long.
        asking = []
        counted = []
        for dialogue in group:
            if not dialogue.waiting:
                continue
            try:
                size = responder.num_tokens(dialogue.next_prompt())
            except PromptError as error:  # a result of a tool that was not called, say
                dialogue.end(error.cause)
                continue
            if size is not None and size > longest:
                dialogue.end(TOO_LONG)
                continue
            asking.append(dialogue)
            counted.append(size is not None)
        params = [dialogue.params(options.sampling) for dialogue in asking]

        def take(
            i: int,
            response: GeneratedResponse,
            asking: Sequence[Dialogue] = asking,
            counted: Sequence[bool] = counted,
        ) -> None:
            """Take the response to the i-th prompt."""
            dialogue = asking[i]
            num_waiting = len(dialogue.waiting)
            num_turns = len(dialogue.finish_reasons) + num_waiting

            def count() -> None:
                time_left.count((num_waiting - len(dialogue.waiting)) / num_turns)

            # The server refused the prompt.
            if response.refused is not None:
                report.skipped.add(dialogue.id, response.refused)
                dialogue.end()
                count()
                return write()

            # A server counts the prompt's tokens only with its response.
            dialogue.add_response(response, refusals=refusals, skip_truncated=options.skip_truncated)
            is_long = not counted[i] and response.num_prompt_tokens + response.num_tokens > longest
            if is_long and dialogue.waiting:
                dialogue.end(TOO_LONG)

            report.num_response_tokens += response.num_tokens
            report.stats.add(response.stats)
            count()
            write()

        # Answer them; ``take`` is called with each response. Prompts that did not fit may have ended others.
        responder.answer([dialogue.next_prompt() for dialogue in asking], params, take)
        write()


def _longest_prompt(responder: Responder, options: RegenerateOptions) -> int:
    """Maximum number of tokens of a prompt, by ``max_prompt_tokens`` and by the responder."""
    if responder.max_prompt_tokens is None:
        return options.max_prompt_tokens
    return min(options.max_prompt_tokens, responder.max_prompt_tokens)


def _new_dialogues(
    responder: Responder, source: str, options: RegenerateOptions, done: Counter[Key], skipped: SkipLog
) -> Iterator[Dialogue]:
    """The conversations of ``source`` that are not done, each once for every sample.

    Args:
        done: conversations that are done; each of them is removed when its record is read.
        skipped: log of the records that cannot be answered.
    """
    longest = _longest_prompt(responder, options)
    shard, num_shards = options.shard
    seed = options.sampling.seed or 0
    for number, conversation in enumerate(_chosen(source, options, skipped)):
        if number % num_shards != shard:
            continue
        system, blocks = script(conversation, options.max_turns)
        key = ChatPrompt(conversation.messages, conversation.tools).key()
        for sample in range(options.samples):
            # The conversation up to its first response.
            kwargs = draw_kwargs(options.chat_template_kwargs, seed, f"{sample}\n{key}")
            kwargs = {**kwargs, **conversation.chat_template_kwargs}
            prompt = ChatPrompt(system, conversation.tools, kwargs)
            dialogue = Dialogue(conversation.id, prompt, list(blocks), sample, conversation.category)
            identity = (dialogue.id, dialogue.first, sample)
            if done[identity]:
                done[identity] -= 1
                continue

            # Its first prompt must fit.
            try:
                size = responder.num_tokens(dialogue.next_prompt()) or 0
            except PromptError as error:
                skipped.add(conversation.where, error.cause)
                continue
            if size > longest:
                skipped.add(conversation.where, "the first human turn is longer than max_prompt_tokens")
                continue
            yield dialogue


def _chosen(source: str, options: RegenerateOptions, skipped: SkipLog) -> Iterator[Conversation]:
    """Conversations of ``source`` that some shard answers; the others are added to ``skipped``."""
    seen: set[str] = set()
    near = None
    if options.near_duplicates is not None:
        near = NearDuplicates(options.near_duplicates)
    tests = TestPrompts(options.test_prompts)
    for conversation in read_conversations(source, skipped=skipped):
        system, blocks = script(conversation, options.max_turns)
        turns = list(texts(blocks))
        kwargs = dict(conversation.chat_template_kwargs)
        content = json.dumps([system, blocks, conversation.tools, kwargs], sort_keys=True)
        if not blocks:
            reason = "no human turn"
        elif content in seen:
            reason = "the same human turns as an earlier conversation"
        elif any(tests.are_in(turn) for turn in turns):
            reason = CONTAMINATED
        elif near is not None and not near.is_new("\n".join(turns)):
            reason = "nearly the same human turns as an earlier conversation"
        else:
            seen.add(content)
            yield conversation
            continue
        skipped.add(conversation.where, reason)
