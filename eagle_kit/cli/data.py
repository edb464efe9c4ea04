"""`eagle-kit data preview | prepare | mix | vocab | regenerate | prompts | texts | capture | import-states |
store`: work before training."""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from eagle_kit.cli.arguments import (
    DECODING,
    TEMPLATE,
    DraftFlag,
    SamplingFlags,
    ShardFlag,
    TargetFlag,
    chosen_target,
)
from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.loading.flags import ConfigFlags, Flag, FlagsOf, add_options, options_of
from eagle_kit.config.options import Options
from eagle_kit.core.errors import UserError, shown
from eagle_kit.core.process import expand_segments

if TYPE_CHECKING:
    from eagle_kit.config.train import TemplateVariant, TrainConfig
    from eagle_kit.data.chat.dataset import PreparedData
    from eagle_kit.datagen.regenerate.responder import Responder

LEFT_OUT = "left out, and counted in the manifest"
SERVER = "another engine, in place of --target and its engine's options"


class PreviewFlags(ConfigFlags):
    """Print a conversation with its supervised tokens coloured."""

    record: int = Field(default=0, ge=0, le=sys.maxsize)
    """Number of the conversation, from 0."""


class PrepareFlags(ConfigFlags):
    """Tokenise and pack a config's data into the cache."""


class MixFlags(ConfigFlags):
    """Say what each source of a config gives to its training, without training."""


class VocabFlags(ConfigFlags):
    """Write a draft vocabulary that head.vocab_map or a token map can name."""

    out: Path
    """Made, or replaced."""

    size: int | None = Field(default=None, ge=2)
    """Tokens of a map for serve's --speculative-token-map, where the kind of head proposes every token;
    default head.draft_vocab_size.
    """


class RegenerateFlags(ShardFlag, SamplingFlags, DraftFlag, TargetFlag):
    """Let the target answer the human turns itself."""

    source: str
    """File, package:NAME or datasets:NAME[:SPLIT]."""

    out: Annotated[Path, Flag(metavar="JSONL")]
    """Made, or continued."""

    engine: Annotated[EngineConfig, FlagsOf({**DECODING, **TEMPLATE})] = EngineConfig(max_batch_size=16)

    max_tokens: int = Field(default=512, ge=1)
    """Most tokens per response."""

    seed: int | None = 0
    """Seed of the samples."""

    limit: int | None = None
    """Conversations answered when done."""

    samples: int = 1
    """Conversations from each one of the source."""

    max_turns: int = 2
    """Most human turns."""

    max_prompt_tokens: int = 1024
    """Longer prompts are left out."""

    ids: bool = False
    """Also keep the token ids."""

    chat_template_kwargs: Annotated[str | None, Flag(metavar="JSON")] = None
    """Such as '{"enable_thinking": false}'; or variants, as data.chat_template_kwargs has them."""

    skip_refusals: Annotated[bool, Flag(group=LEFT_OUT)] = False
    """Responses that begin as refusals do."""

    refusal_patterns: Annotated[Path | None, Flag(group=LEFT_OUT)] = None
    """Regular expressions, one a line, of how refusals of other languages begin."""

    skip_truncated: Annotated[bool, Flag(group=LEFT_OUT)] = False
    """Responses cut at --max-tokens or by the context."""

    near_duplicates: Annotated[float | None, Flag(group=LEFT_OUT)] = None
    """Conversations whose human turns have this Jaccard similarity, 0.05 to 1, with earlier ones."""

    decontaminate: Annotated[tuple[str, ...], Flag(metavar="TASK", group=LEFT_OUT)] = ()
    """Conversations that hold a prompt of these tasks, named as for eval."""

    base_url: Annotated[str | None, Flag(group=SERVER)] = None
    """Server that speaks OpenAI's protocol."""

    model: Annotated[str | None, Flag(metavar="NAME", group=SERVER)] = None
    """Its name there; default the server's only one."""

    concurrency: Annotated[int, Flag(group=SERVER)] = Field(default=16, ge=1)
    """Requests under way."""

    retries: Annotated[int, Flag(group=SERVER)] = Field(default=6, ge=0)
    """Further attempts of a request that fails."""

    api_key_env: Annotated[str | None, Flag(metavar="NAME", group=SERVER)] = None
    """Environment variable with the server's key."""

    @model_validator(mode="after")
    def _go_together(self) -> "RegenerateFlags":
        if self.base_url is None:
            if self.model or self.api_key_env:
                raise UserError(
                    "--model and --api-key-env are for a server.", "Give its address with --base-url."
                )
            return self
        if self.draft is not None:
            raise UserError("--draft is for our engine.", "Leave it out, or --base-url.")
        if self.engine.chat_template is not None:
            raise UserError("--chat-template is for our engine.", "Leave it out, or --base-url.")
        return self


class PromptsFlags(Options):
    """Make prompts of tasks that chats are short of, out of the text of chats."""

    source: str
    """File, package:NAME or datasets:NAME[:SPLIT]."""

    out: Annotated[Path, Flag(metavar="JSONL")]
    """Made, or replaced."""

    limit: int = Field(ge=1)
    """Prompts to make."""

    skip: int = Field(default=0, ge=0)
    """Conversations of the source that are passed over."""

    seed: int = 0
    """Seed of wording and numbers."""

    categories: Annotated[tuple[str, ...], Flag(metavar="NAME")] = ()
    """Make these only, of retrieval, translation, summarising, questions, extraction, rewriting, mathematics,
    completion (of Python functions) and code; default all.
    """


class CaptureFlags(ShardFlag, ConfigFlags):
    """Keep the target's states of a config's data in a folder."""

    out: Annotated[Path, Flag(metavar="DIR")]
    """Made, or continued."""

    dry_run: bool = False
    """Print the estimate of disk and time, then stop."""

    verify: bool = False
    """Read every byte again when it is whole."""

    engine: Literal["eagle-kit", "vllm"] = "eagle-kit"
    """Engine that computes."""

    engine_python: Annotated[str | None, Flag(metavar="PYTHON")] = None
    """Interpreter of an environment with vLLM; default the one that runs this command."""

    engine_args: Annotated[dict[str, Any], Flag(example='{"tensor_parallel_size": 8}')] = Field(
        default_factory=dict
    )
    """Arguments of vLLM's LLM, such as '{"tensor_parallel_size": 8}'."""

    no_check: bool = False
    """Do not compare a row of another engine's with the target here."""

    @model_validator(mode="after")
    def _go_together(self) -> "CaptureFlags":
        if self.engine == "vllm":
            return self
        for name in ("engine_python", "engine_args", "no_check"):
            if name in self.model_fields_set:
                flag = f"--{name.replace('_', '-')}"
                raise UserError(
                    f"{flag} is for --engine vllm, which was not given.", "Give both, or neither."
                )
        return self


class TextsFlags(ConfigFlags):
    """Write the texts of a config's data as tokens, for another engine to compute."""

    out: Annotated[Path, Flag(metavar="JSONL")]
    """Made, or replaced."""


class ImportStatesFlags(ConfigFlags):
    """Make a store of states that another engine has computed."""

    folder: Annotated[Path, Flag("--from", metavar="DIR")]
    """Files of the engine."""

    out: Annotated[Path, Flag(metavar="DIR")]
    """Made, or continued."""

    layers: tuple[str, ...] = ()
    """Layers of the states of a token, in their order; 'final' is normed."""

    convention: Literal["inputs", "outputs"] = "inputs"
    """What layers' numbers name."""

    max_missing: int = Field(default=0, ge=0)
    """Texts whose states may be missing or unusable; they are left out and counted."""

    verify: bool = False
    """Read every byte again when it is whole."""

    no_check: bool = False
    """Do not compare a row of another engine's with the target here."""


class StoreFlags(Options):
    """Say what is in a folder of captured states, and check it."""

    folder: Annotated[Path, Flag(metavar="DIR", is_positional=True)]
    """Folder of the states."""

    verify: bool = False
    """Read every byte."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands and their arguments."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    for name, action in ACTIONS.items():
        text = action.schema.__doc__ or ""
        added = actions.add_parser(name, help=f"{text[:1].lower()}{text[1:]}".rstrip("."), description=text)
        add_options(added, action.schema)


def run(args: argparse.Namespace) -> int:
    """Run the chosen action."""
    action = ACTIONS[args.action]
    return action.run(options_of(args, action.schema))


def _config(options: ConfigFlags) -> "TrainConfig":
    """The config, read before anything heavy is imported."""
    from eagle_kit.config import load_config
    from eagle_kit.config.train import TrainConfig

    return load_config(TrainConfig, options.config, options.overrides)


def _preview(options: PreviewFlags) -> int:
    config = _config(options)
    if not config.data.sources:
        raise UserError("A store has tokens, not conversations.", "Set data.source to what it was made of.")
    from eagle_kit.data.chat.dataset import records_of
    from eagle_kit.data.chat.messages import Unusable
    from eagle_kit.data.chat.preview import preview
    from eagle_kit.data.chat.records import SkipLog
    from eagle_kit.data.chat.renderer import ChatRenderer
    from eagle_kit.data.chat.template import set_chat_template
    from eagle_kit.data.packed_data import check_sources
    from eagle_kit.data.tasks.excluded import ExcludedSets
    from eagle_kit.models.loading.source import load_tokenizer, resolve_target

    # Find the conversation.
    check_sources(config.data)
    tokenizer = load_tokenizer(resolve_target(config.target))
    set_chat_template(tokenizer, config.data.chat_template)
    excluded = ExcludedSets.load(config.data.decontaminate)
    skipped = SkipLog(max_broken_lines=config.data.max_broken_lines)
    records = records_of(config.data, skipped)
    chosen = next(islice(records, options.record, None), None)
    unread = skipped.unread()
    if chosen is None:
        cause = f"{_listed(config)} has no conversation"
        remedy = "Correct its records, or name another source."
        if options.record:
            cause += f" number {options.record}"
            remedy = "Give a smaller number, from 0."
        if unread:
            cause += f"; {unread}"
        raise UserError(f"{cause}.", remedy)
    if unread:
        print(f"note: before it, {unread}")

    # Tokenise it as a training does.
    remarks: Counter[str] = Counter()
    try:
        excluded.check(chosen)
        chats = ChatRenderer(tokenizer).tokenize(chosen, config.data.max_length, remarks)
    except Unusable as reason:
        raise UserError(
            f"Training skips {chosen.where}: {reason}.", "Give another conversation with --record N."
        ) from None

    # Print its rows.
    for remark in (*chosen.remarks, *remarks):
        print(f"note: {remark}")
    for number, chat in enumerate(chats, 1):
        name = f"{chosen.where} ({chosen.id})"
        if len(chats) > 1:
            name += f", row {number} of {len(chats)}"
        num_supervised = int((chat.response >= 0).sum())
        print(f"{name}: {len(chat.ids)} tokens, {num_supervised} supervised")
        print(preview(chat, tokenizer))
    return 0


def _data(config: "TrainConfig", vocab_size: int | None = None) -> "PreparedData":
    """The config's data, tokenised now or read from the cache.

    Args:
        vocab_size: tokens of its vocabulary; None for those of the config's head.
    """
    from eagle_kit.data.chat.template import set_chat_template
    from eagle_kit.data.packed_data import check_sources, load_packed_data
    from eagle_kit.models.loading.source import load_tokenizer, resolve_target

    check_sources(config.data)
    tokenizer = load_tokenizer(resolve_target(config.target))
    set_chat_template(tokenizer, config.data.chat_template)
    if vocab_size is None:
        vocab_size = config.head.num_counted_tokens
    return load_packed_data(config.data, tokenizer, vocab_size, config.head.vocab_map_file)


def _prepare(options: PrepareFlags) -> int:
    config = _config(options)
    data = _data(config)
    _print_notes(data)

    # Conversations, rows and tokens.
    skipped = f"{data.num_skipped} skipped"
    if data.num_skipped:
        skipped += f", listed in {data.skip_file}"
    share = 100 * data.num_supervised_tokens / max(data.num_tokens, 1)
    print(f"conversations  {data.num_conversations}, {skipped}")
    print(f"rows           {len(data)} of at most {config.data.max_length} tokens")
    print(f"tokens         {data.num_tokens}, {data.num_supervised_tokens} supervised ({share:.0f} %)")

    # Vocabulary, and prompts to evaluate with.
    covered = 100 * data.vocab_map.coverage
    if config.head.first_draft is None:
        print(
            f"vocabulary     {len(data.vocab_map.d2t)} draft tokens cover {covered:.1f} %; "
            f"{data.vocab_map.contents}"
        )
    else:
        print(f"vocabulary     that of {config.head.first_draft}")
    print(f"held out       {len(data.heldout_prompts)} prompts")
    return 0


def _print_notes(data: "PreparedData") -> None:
    for note in data.notes:
        print(f"note           {note}")
    if data.num_skipped:
        print(f"skipped        {data.skip_reasons}")


def _mix(options: MixFlags) -> int:
    from eagle_kit.train.run.mixture import describe_mixture

    config = _config(options)
    data = _data(config)
    _print_notes(data)
    print(describe_mixture(config, data))
    return 0


def _listed(config: "TrainConfig") -> str:
    """Names of the files of all sources."""
    return ", ".join(file for source in config.data.sources for file in source.files)


def _vocab(options: VocabFlags) -> int:
    from eagle_kit.core.files import check_writable

    config = _config(options)
    size = options.size

    # Without --size the map is the vocabulary of the config's head.
    if size is None:
        if config.head.first_draft is not None:
            raise UserError(
                f"The head of head.start_from, {config.head.first_draft}, brings its vocabulary.",
                "To make a map for a new head, leave head.start_from out; for a token map, give --size N.",
            )
        size = config.head.num_counted_tokens
    elif config.head.num_counted_tokens is not None:
        raise UserError(
            f"--size is for heads that propose every token, unlike {config.head.kind}.",
            "Set head.draft_vocab_size=N in place of --size N.",
        )
    if size is None:
        raise UserError(
            f"A head of the kind {config.head.kind} proposes every token, and needs no map to be trained.",
            "To make a token map for serving it, say how many tokens with --size N, such as 32768.",
        )
    if options.out.is_dir():
        raise UserError(f"{options.out} is a folder.", "Give a file with --out.")
    check_writable(options.out.parent, "Give another file with --out.")

    # Count the tokens of the responses, and write the most frequent ones.
    data = _data(config, size)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    data.vocab_map.save(options.out)
    covered = 100 * data.vocab_map.coverage
    counted = f"{size} draft tokens cover {covered:.1f} % of the responses; {data.vocab_map.contents}"
    print(f"{options.out}: {counted}.")
    if options.size is None:
        print(f"Train with head.vocab_map={options.out} head.draft_vocab_size={size}.")
    else:
        print(f"Serve an EAGLE, NEXTN or STANDALONE draft with --speculative-token-map {options.out}.")
    return 0


def _regenerate(options: RegenerateFlags) -> int:
    from eagle_kit.data.chat.records import check_source
    from eagle_kit.data.tasks.excluded import user_messages
    from eagle_kit.data.tasks.sets import load_tasks
    from eagle_kit.datagen.regenerate.dialogue import read_refusals
    from eagle_kit.datagen.regenerate.regenerate import RegenerateOptions, check_out, regenerate

    # Check the options before a model is loaded.
    tasks = load_tasks(options.decontaminate) if options.decontaminate else []
    regeneration = RegenerateOptions(
        sampling=options.sampling_params,
        limit=options.limit,
        max_turns=options.max_turns,
        max_prompt_tokens=options.max_prompt_tokens,
        with_ids=options.ids,
        shard=options.shard,
        samples=options.samples,
        chat_template_kwargs=_template_variants(options.chat_template_kwargs),
        skip_refusals=options.skip_refusals,
        refusals=read_refusals(options.refusal_patterns) if options.refusal_patterns else (),
        skip_truncated=options.skip_truncated,
        near_duplicates=options.near_duplicates,
        test_prompts=tuple(user_messages(tasks)),
    )
    check_out(options.out)
    check_source(options.source)

    # Answer, by our engine or a server.
    responder, target = _server(options) if options.base_url else _engine(options)
    try:
        report = regenerate(responder, options.source, options.out, regeneration, target=target)
    except KeyboardInterrupt:
        print(f"\nWhat is in {options.out} is kept; the same command goes on with it.", file=sys.stderr)
        raise

    # Print what was left out, and what was written.
    for note in report.skipped.notes:
        print(note, file=sys.stderr)
    skipped = sum(report.skipped.counts.values())
    if skipped:
        listing = options.out.with_suffix(".skipped.txt")
        report.skipped.write(listing)
        print(
            f"{skipped} conversations were skipped, see {listing}: {report.skipped.reasons()}",
            file=sys.stderr,
        )
    for reason, count in report.left_out.items():
        print(f"{count} conversations were left out: {reason}", file=sys.stderr)
    for reason, count in report.shortened.items():
        print(f"{count} conversations were shortened: {reason}", file=sys.stderr)
    written = f"{report.num_written} conversations written"
    if report.num_found:
        written += f", {report.num_found} were there before"
    if options.draft is not None:
        written += f", accept length {report.stats.accept_length:.2f}"
    print(f"{options.out}: {written}.")
    return 0


def _prompts(options: PromptsFlags) -> int:
    from eagle_kit.core.files import check_writable, write_text_atomically
    from eagle_kit.data.chat.records import SkipLog, read_conversations
    from eagle_kit.datagen.task_prompts import CATEGORIES, task_prompts

    # Check the options.
    unknown = sorted(set(options.categories) - set(CATEGORIES))
    if unknown:
        raise UserError(
            f"There are no prompts of {', '.join(unknown)}.", f"Name some of {', '.join(CATEGORIES)}."
        )
    if options.out.is_dir():
        raise UserError(f"{options.out} is a folder.", "Give a file with --out.")
    check_writable(options.out.parent, "Give another file with --out.")

    # Make prompts out of the conversations.
    skipped = SkipLog()
    conversations = islice(read_conversations(options.source, skipped=skipped), options.skip, None)
    prompts = list(islice(task_prompts(conversations, options.seed, options.categories), options.limit))
    unread = skipped.unread()
    if not prompts:
        cause = f"{options.source} gives no prompts behind --skip"
        if unread:
            cause += f"; {unread}"
        raise UserError(f"{cause}.", "Skip fewer, or name more chats.")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts]
    write_text_atomically(options.out, "".join(lines))

    # Print notes on the source, and how many prompts of each category were made.
    for note in skipped.notes:
        print(note, file=sys.stderr)
    if unread:
        print(unread, file=sys.stderr)
    counts = Counter(prompt["category"] for prompt in prompts)
    by_category = ", ".join(f"{counts[name]} {name}" for name in CATEGORIES if name in counts)
    print(f"{options.out}: {by_category}.")
    if len(prompts) < options.limit:
        print(
            f"The texts of {options.source} serve {len(prompts)} of {options.limit} prompts; other "
            "sources, or fewer skipped, may serve more.",
            file=sys.stderr,
        )
    return 0


def _template_variants(text: str | None) -> "tuple[TemplateVariant, ...]":
    """Parse ``--chat-template-kwargs``. Raises UserError for what is no JSON of such arguments."""
    from pydantic import TypeAdapter, ValidationError

    from eagle_kit.config.train import ChatTemplateKwargs, template_variants

    try:
        return template_variants(TypeAdapter(ChatTemplateKwargs).validate_json(text or "null"))
    except ValidationError:
        raise UserError(
            f"--chat-template-kwargs is {shown(text)}.",
            'Give a JSON object, or variants such as [{"kwargs": {"enable_thinking": true}, "weight": 0.7}].',
        ) from None


def _engine(options: RegenerateFlags) -> "tuple[Responder, str]":
    """Our engine, and its target's fingerprint."""
    from eagle_kit.cli.generate import check_shape
    from eagle_kit.data.chat.renderer import ChatRenderer
    from eagle_kit.data.chat.template import set_chat_template, template_hash

    context = options.max_prompt_tokens + options.max_tokens
    config = options.engine.replace(max_context=context)
    check_shape(config, options.draft)
    from eagle_kit.datagen.regenerate.responder import EngineResponder
    from eagle_kit.drafts.files.named_target import naming
    from eagle_kit.engine.llm import LLM
    from eagle_kit.models.loading.loader import target_fingerprint
    from eagle_kit.models.loading.source import load_tokenizer, resolve_target

    named = chosen_target(options.target, [options.draft] if options.draft else [])
    with naming(named):
        folder = resolve_target(named.name)

        # A missing chat template is refused before the weights are loaded and a file is written.
        tokenizer = load_tokenizer(folder)
        set_chat_template(tokenizer, config.chat_template)
        ChatRenderer(tokenizer).template()

        llm = LLM(folder, options.draft, config, tokenizer=tokenizer)
    target = target_fingerprint(folder)
    if config.chat_template is not None:
        target += f", chat template {template_hash(llm.tokenizer)}"
    return EngineResponder(llm), target


def _server(options: RegenerateFlags) -> "tuple[Responder, str]":
    """A server, and its model's name in place of a fingerprint, since no more is known of it."""
    from eagle_kit.datagen.regenerate.server import ServerOptions, ServerResponder

    key = os.environ.get(options.api_key_env) if options.api_key_env else None
    if options.api_key_env and not key:
        raise UserError(
            f"The variable {options.api_key_env} is not set.", "Set it, or leave --api-key-env out."
        )
    server = ServerOptions(
        base_url=options.base_url or "",
        model=options.model,
        concurrency=options.concurrency,
        retries=options.retries,
        api_key=key,
        with_ids=options.ids,
    )
    responder = ServerResponder(server)
    return responder, f"{responder.model} of a server; revision and template unknown"


def _texts(options: TextsFlags) -> int:
    from eagle_kit.core.files import check_writable

    config = _config(options)
    if options.out.is_dir():
        raise UserError(f"{options.out} is a folder.", "Give a file with --out.")
    check_writable(options.out.parent, "Give another file with --out.")
    from eagle_kit.datagen.hidden_states.capture import write_texts

    count, longest = write_texts(_data(config), options.out)
    print(f"{options.out}: {count} texts of at most {longest} tokens.")
    return 0


def _import_states(options: ImportStatesFlags) -> int:
    config = _config(options)
    layers = tuple(_layer(each) for each in options.layers) if options.layers else None
    from eagle_kit.datagen.hidden_states.capture import CaptureOptions, OtherEngine, capture

    # Flags of the command that continues the capture.
    words = ["--from", str(options.folder), "--convention", options.convention]
    if options.layers:
        words += ["--layers", *options.layers]
    if options.no_check:
        words.append("--no-check")
    if options.max_missing:
        words += ["--max-missing", str(options.max_missing)]

    other = OtherEngine(
        "import-states",
        tuple(words),
        options.folder,
        layers=layers,
        convention=options.convention,
        checks=not options.no_check,
        max_missing=options.max_missing,
    )
    capture_options = CaptureOptions(
        out=options.out, verify=options.verify, arguments=(options.config, *options.overrides), other=other
    )
    return capture(config, capture_options)


def _layer(name: str) -> int | str:
    """A layer's number, or ``final``. Raises UserError for anything else."""
    if name == "final":
        return name
    if name.isdigit():
        return int(name)
    raise UserError(f"--layers has {name!r}.", "Give numbers of layers, or final.")


def _capture(options: CaptureFlags) -> int:
    from eagle_kit.train.parallel.launch import check_launcher

    config = _config(options)
    check_launcher(os.environ, config.training)
    expand_segments()
    from eagle_kit.datagen.hidden_states.capture import CaptureOptions, OtherEngine, capture

    other = None
    if options.engine == "vllm":
        # Flags of the command that continues the capture.
        python = options.engine_python or sys.executable
        words = ["--engine", "vllm", "--engine-python", python]
        if options.engine_args:
            words += ["--engine-args", json.dumps(options.engine_args)]
        if options.no_check:
            words.append("--no-check")
        other = OtherEngine(
            "capture",
            tuple(words),
            python=python,
            engine_args=options.engine_args,
            checks=not options.no_check,
        )
    capture_options = CaptureOptions(
        out=options.out,
        shard=options.shard,
        dry_run=options.dry_run,
        verify=options.verify,
        arguments=(options.config, *options.overrides),
        other=other,
    )
    return capture(config, capture_options)


def _store(options: StoreFlags) -> int:
    from eagle_kit.data.hidden_states.store import StateStore
    from eagle_kit.datagen.hidden_states.capture import summary, verify

    store = StateStore(options.folder)
    print(summary(store), flush=True)
    if options.verify:
        verify(store)
        print("Every byte is what was captured.")
    return 0


class Action(NamedTuple):
    """A sub-command: its flags, whose docstring is its help, and what runs it."""

    schema: type[Options]
    run: Callable[[Any], int]


ACTIONS = {
    "preview": Action(PreviewFlags, _preview),
    "prepare": Action(PrepareFlags, _prepare),
    "mix": Action(MixFlags, _mix),
    "vocab": Action(VocabFlags, _vocab),
    "regenerate": Action(RegenerateFlags, _regenerate),
    "prompts": Action(PromptsFlags, _prompts),
    "capture": Action(CaptureFlags, _capture),
    "texts": Action(TextsFlags, _texts),
    "import-states": Action(ImportStatesFlags, _import_states),
    "store": Action(StoreFlags, _store),
}
