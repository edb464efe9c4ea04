"""`eagle-kit data preview | prepare | mix | vocab | regenerate | prompts | texts | capture | import-states |
store`: work before training."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_kit.cli.arguments import (
    DECODING,
    TEMPLATE,
    add_decoding,
    add_flags,
    add_sampling,
    add_shard,
    add_target,
    chosen_target,
    json_object,
    options_of,
    sampling_params,
)
from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.loading.command_line import add_config
from eagle_kit.core.errors import UserError, shown

if TYPE_CHECKING:
    from eagle_kit.config.train import TemplateVariant, TrainConfig
    from eagle_kit.data.chat.dataset import PreparedData
    from eagle_kit.train.replies.responder import Responder


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands and their arguments."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")

    def action(run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = actions.add_parser(run.__name__.removeprefix("_").replace("_", "-"), help=text)
        added.set_defaults(action_run=run)
        return added

    preview = action(_preview, "print a conversation with its supervised tokens coloured")
    add_config(preview)
    preview.add_argument("--record", type=int, default=0, metavar="N", help="which conversation, from 0")
    add_config(action(_prepare, "tokenise and pack a config's data into the cache"))
    add_config(action(_mix, "say what each source of a config gives to its training, without training"))
    vocab = action(_vocab, "write a draft vocabulary that head.vocab_map or a token map can name")
    add_config(vocab)
    vocab.add_argument("--out", required=True, type=Path, metavar="FILE", help="made, or replaced")
    vocab.add_argument(
        "--size",
        type=int,
        metavar="N",
        help="tokens of a map for serve's --speculative-token-map, where the kind of head proposes every "
        "token; default head.draft_vocab_size",
    )
    regenerate = action(_regenerate, "let the target answer the human turns itself")
    regenerate.add_argument("--source", required=True, help="file, package:NAME or datasets:NAME[:SPLIT]")
    regenerate.add_argument("--out", required=True, type=Path, metavar="JSONL", help="made, or continued")
    add_target(regenerate)
    add_decoding(regenerate, max_tokens=512, batch_size=16)
    add_flags(regenerate, EngineConfig, TEMPLATE)
    add_sampling(regenerate, seed=0)
    add_shard(regenerate, "conversations")
    for flag, default, text in (
        ("--limit", None, "conversations answered when done"),
        ("--samples", 1, "conversations from each one of the source (default %(default)s)"),
        ("--max-turns", 2, "human turns (default %(default)s)"),
        ("--max-prompt-tokens", 1024, "longer ones are left out (default %(default)s)"),
    ):
        regenerate.add_argument(flag, type=int, default=default, metavar="N", help=text)
    regenerate.add_argument("--ids", action="store_true", help="also keep the token ids")
    regenerate.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help="such as '{\"enable_thinking\": false}'; or variants, as data.chat_template_kwargs has them",
    )
    left_out = regenerate.add_argument_group("left out, and counted in the manifest")
    left_out.add_argument("--skip-refusals", action="store_true", help="replies that begin as refusals do")
    left_out.add_argument(
        "--refusal-patterns",
        type=Path,
        metavar="FILE",
        help="regular expressions, one a line, of how refusals of other languages begin",
    )
    left_out.add_argument(
        "--skip-truncated", action="store_true", help="replies cut at --max-tokens or by the context"
    )
    left_out.add_argument(
        "--near-duplicates",
        type=float,
        metavar="X",
        help="conversations whose human turns have this Jaccard similarity, 0.05 to 1, with earlier ones",
    )
    left_out.add_argument(
        "--decontaminate",
        nargs="+",
        default=(),
        metavar="TASK",
        help="conversations that hold a prompt of these tasks, named as for eval",
    )
    server = regenerate.add_argument_group("another engine", "in place of --target and its engine's options")
    server.add_argument("--base-url", metavar="URL", help="a server that speaks OpenAI's protocol")
    server.add_argument("--model", metavar="NAME", help="its name there; default the server's only one")
    server.add_argument(
        "--concurrency", type=int, default=16, metavar="N", help="requests under way (default %(default)s)"
    )
    server.add_argument(
        "--retries", type=int, default=6, metavar="N", help="of a request that fails (default %(default)s)"
    )
    server.add_argument("--api-key-env", metavar="NAME", help="environment variable with the server's key")
    prompts = action(_prompts, "make prompts of tasks that chats are short of, out of the text of chats")
    prompts.add_argument("--source", required=True, help="file, package:NAME or datasets:NAME[:SPLIT]")
    prompts.add_argument("--out", required=True, type=Path, metavar="JSONL", help="made, or replaced")
    prompts.add_argument("--limit", type=int, required=True, metavar="N", help="prompts to make")
    prompts.add_argument(
        "--skip", type=int, default=0, metavar="N", help="conversations of the source that are passed over"
    )
    prompts.add_argument("--seed", type=int, default=0, metavar="N", help="of wording and numbers")
    prompts.add_argument(
        "--categories",
        nargs="+",
        default=(),
        metavar="NAME",
        help="make these only, of retrieval, translation, summarising, questions, extraction, rewriting, "
        "mathematics, completion (of Python functions) and code; default all",
    )
    capture = action(_capture, "keep the target's states of a config's data in a folder")
    add_config(capture)
    capture.add_argument("--out", required=True, type=Path, metavar="DIR", help="made, or continued")
    add_shard(capture, "rows")
    capture.add_argument(
        "--dry-run", action="store_true", help="print the estimate of disk and time, then stop"
    )
    capture.add_argument("--verify", action="store_true", help="read every byte again when it is whole")
    capture.add_argument(
        "--engine",
        choices=("eagle-kit", "vllm"),
        default="eagle-kit",
        help="that computes (default %(default)s)",
    )
    capture.add_argument(
        "--engine-python", default=sys.executable, metavar="PYTHON", help="of an environment with vLLM"
    )
    capture.add_argument(
        "--engine-args", metavar="JSON", help="of vLLM's LLM, such as '{\"tensor_parallel_size\": 8}'"
    )
    texts = action(_texts, "write the texts of a config's data as tokens, for another engine to compute")
    add_config(texts)
    texts.add_argument("--out", required=True, type=Path, metavar="JSONL", help="made, or replaced")
    importing = action(_import_states, "make a store of states that another engine has computed")
    add_config(importing)
    importing.add_argument("--from", required=True, type=Path, metavar="DIR", dest="folder", help="its files")
    importing.add_argument("--out", required=True, type=Path, metavar="DIR", help="made, or continued")
    importing.add_argument(
        "--layers",
        nargs="+",
        metavar="LAYER",
        help="of the states of a token, in their order; 'final' is normed",
    )
    importing.add_argument(
        "--convention", choices=("inputs", "outputs"), default="inputs", help="what layers' numbers name"
    )
    importing.add_argument(
        "--max-missing",
        type=int,
        default=0,
        metavar="N",
        help="texts whose states may be missing or unusable; they are left out and counted (default 0)",
    )
    importing.add_argument("--verify", action="store_true", help="read every byte again when it is whole")
    for parser in (capture, importing):
        parser.add_argument(
            "--no-check",
            action="store_true",
            help="do not compare a row of another engine's with the target here",
        )
    store = action(_store, "say what is in a folder of captured states, and check it")
    store.add_argument("folder", type=Path, metavar="DIR")
    store.add_argument("--verify", action="store_true", help="read every byte")


def run(args: argparse.Namespace) -> int:
    """Run the chosen action."""
    return args.action_run(args)


def _config(args: argparse.Namespace) -> "TrainConfig":
    """The config, read before anything heavy is imported."""
    from eagle_kit.config import load_config
    from eagle_kit.config.train import TrainConfig

    return load_config(TrainConfig, args.config, args.overrides)


def _preview(args: argparse.Namespace) -> int:
    if not 0 <= args.record <= sys.maxsize:
        raise UserError(f"--record is {args.record}.", "Count conversations from 0.")
    config = _config(args)
    if not config.data.sources:
        raise UserError("A store has tokens, not conversations.", "Set data.source to what it was made of.")
    from eagle_kit.data.chat.dataset import records_of
    from eagle_kit.data.chat.messages import Unusable
    from eagle_kit.data.chat.preview import preview
    from eagle_kit.data.chat.records import SkipLog
    from eagle_kit.data.chat.rows import tokenize
    from eagle_kit.data.chat.template import set_chat_template
    from eagle_kit.data.tasks.excluded import ExcludedSets
    from eagle_kit.models.loading.source import load_tokenizer, resolve_target

    tokenizer = load_tokenizer(resolve_target(config.target))
    set_chat_template(tokenizer, config.data.chat_template)
    excluded = ExcludedSets.load(config.data.decontaminate)
    skipped = SkipLog(max_broken_lines=config.data.max_broken_lines)
    records = records_of(config.data, skipped)
    chosen = next(islice(records, args.record, None), None)
    unread = skipped.unread()
    if chosen is None:
        raise UserError(
            f"{_listed(config)} has no conversation number {args.record}{unread and f'; {unread}'}.",
            "Give a smaller number, from 0."
            if args.record
            else "Correct its records, or name another source.",
        )
    if unread:
        print(f"note: before it, {unread}")
    remarks: Counter[str] = Counter()
    try:
        excluded.check(chosen)
        chats = tokenize(tokenizer, chosen, config.data.max_length, remarks)
    except Unusable as reason:
        raise UserError(
            f"Training skips {chosen.where}: {reason}.", "Give another conversation with --record N."
        ) from None
    for remark in (*chosen.remarks, *remarks):
        print(f"note: {remark}")
    for number, chat in enumerate(chats, 1):
        row = f", row {number} of {len(chats)}" if len(chats) > 1 else ""
        supervised = int((chat.reply >= 0).sum())
        print(f"{chosen.where} ({chosen.id}){row}: {len(chat.ids)} tokens, {supervised} supervised")
        print(preview(chat, tokenizer))
    return 0


def _data(config: "TrainConfig", vocab_size: int | None = None) -> "PreparedData":
    """The config's data, tokenised now or read from the cache.

    Args:
        vocab_size: tokens of its vocabulary; None for those of the config's head.
    """
    from eagle_kit.data.chat.template import set_chat_template
    from eagle_kit.data.packed_data import load_packed_data
    from eagle_kit.models.loading.source import load_tokenizer, resolve_target

    tokenizer = load_tokenizer(resolve_target(config.target))
    set_chat_template(tokenizer, config.data.chat_template)
    if vocab_size is None:
        vocab_size = config.head.num_counted_tokens
    return load_packed_data(config.data, tokenizer, vocab_size, config.head.vocab_map_file)


def _prepare(args: argparse.Namespace) -> int:
    config = _config(args)
    data = _data(config)
    _print_notes(data)
    listed = f", listed in {data.skip_file}" if data.num_skipped else ""
    share = 100 * data.num_supervised_tokens / max(data.num_tokens, 1)
    print(f"conversations  {data.num_conversations}, {data.num_skipped} skipped{listed}")
    print(f"rows           {len(data)} of at most {config.data.max_length} tokens")
    print(f"tokens         {data.num_tokens}, {data.num_supervised_tokens} supervised ({share:.0f} %)")
    covered = 100 * data.vocab_map.coverage
    if config.head.first_draft is None:
        print(f"vocabulary     {len(data.vocab_map.d2t)} draft tokens cover {covered:.1f} %")
    else:
        print(f"vocabulary     that of {config.head.first_draft}")
    print(f"held out       {len(data.heldout_prompts)} prompts")
    return 0


def _print_notes(data: "PreparedData") -> None:
    for note in data.notes:
        print(f"note           {note}")
    if data.num_skipped:
        print(f"skipped        {data.skip_reasons}")


def _mix(args: argparse.Namespace) -> int:
    from eagle_kit.train.run.mixture import describe_mixture

    config = _config(args)
    data = _data(config)
    _print_notes(data)
    print(describe_mixture(config, data))
    return 0


def _listed(config: "TrainConfig") -> str:
    return ", ".join(file for source in config.data.sources for file in source.files)


def _vocab(args: argparse.Namespace) -> int:
    from eagle_kit.core.files import check_writable

    config = _config(args)
    size = args.size

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
    if size < 2:
        raise UserError(f"--size is {size}.", "Give at least two tokens.")
    if args.out.is_dir():
        raise UserError(f"{args.out} is a folder.", "Give a file with --out.")
    check_writable(args.out.parent, "Give another file with --out.")

    # The tokens of the replies are counted, and the most frequent ones are written.
    data = _data(config, size)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    data.vocab_map.save(args.out)
    covered = 100 * data.vocab_map.coverage
    print(f"{args.out}: {size} draft tokens cover {covered:.1f} % of the replies.")
    if args.size is None:
        print(f"Train with head.vocab_map={args.out} head.draft_vocab_size={size}.")
    else:
        print(f"Serve an EAGLE, NEXTN or STANDALONE draft with --speculative-token-map {args.out}.")
    return 0


def _regenerate(args: argparse.Namespace) -> int:
    from eagle_kit.data.chat.records import check_source
    from eagle_kit.data.tasks.excluded import user_messages
    from eagle_kit.data.tasks.sets import load_tasks
    from eagle_kit.train.replies.dialogue import read_refusals
    from eagle_kit.train.replies.regenerate import RegenerateOptions, check_out, regenerate

    options = RegenerateOptions(
        sampling=sampling_params(args),
        limit=args.limit,
        max_turns=args.max_turns,
        max_prompt_tokens=args.max_prompt_tokens,
        with_ids=args.ids,
        shard=args.shard,
        samples=args.samples,
        chat_template_kwargs=_template_variants(args.chat_template_kwargs),
        skip_refusals=args.skip_refusals,
        refusals=read_refusals(args.refusal_patterns) if args.refusal_patterns else (),
        skip_truncated=args.skip_truncated,
        near_duplicates=args.near_duplicates,
        test_prompts=tuple(user_messages(load_tasks(args.decontaminate) if args.decontaminate else [])),
    )
    check_out(args.out)
    check_source(args.source)
    responder, target = _server(args) if args.base_url else _engine(args)
    try:
        report = regenerate(responder, args.source, args.out, options, target=target)
    except KeyboardInterrupt:
        print(f"\nWhat is in {args.out} is kept; the same command goes on with it.", file=sys.stderr)
        raise
    for note in report.skipped.notes:
        print(note, file=sys.stderr)
    skipped = sum(report.skipped.counts.values())
    if skipped:
        listing = args.out.with_suffix(".skipped.txt")
        report.skipped.write(listing)
        print(
            f"{skipped} conversations were skipped, see {listing}: {report.skipped.reasons()}",
            file=sys.stderr,
        )
    for kind, counts in (("left out", report.left_out), ("shortened", report.shortened)):
        for reason, count in counts.items():
            print(f"{count} conversations were {kind}: {reason}", file=sys.stderr)
    accept = f", accept length {report.stats.accept_length:.2f}" if args.draft is not None else ""
    print(f"{args.out}: {report.num_found} conversations found, {report.num_written} written{accept}.")
    return 0


def _prompts(args: argparse.Namespace) -> int:
    import json

    from eagle_kit.core.files import check_writable, write_text_atomically
    from eagle_kit.data.chat.records import SkipLog, read_conversations
    from eagle_kit.train.replies.prompts import CATEGORIES, task_prompts

    if args.limit < 1 or args.skip < 0:
        raise UserError("--limit is below 1, or --skip below 0.", "Ask for at least one prompt.")
    if unknown := sorted(set(args.categories) - set(CATEGORIES)):
        raise UserError(
            f"There are no prompts of {', '.join(unknown)}.", f"Name some of {', '.join(CATEGORIES)}."
        )
    if args.out.is_dir():
        raise UserError(f"{args.out} is a folder.", "Give a file with --out.")
    check_writable(args.out.parent, "Give another file with --out.")
    skipped = SkipLog()
    conversations = islice(read_conversations(args.source, skipped=skipped), args.skip, None)
    made = list(islice(task_prompts(conversations, args.seed, args.categories), args.limit))
    unread = skipped.unread()
    if not made:
        raise UserError(
            f"{args.source} gives no prompts behind --skip{unread and f'; {unread}'}.",
            "Skip fewer, or name more chats.",
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(args.out, "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in made))
    for note in [*skipped.notes, *([unread] if unread else [])]:
        print(note, file=sys.stderr)
    counts = Counter(one["category"] for one in made)
    print(
        f"{args.out}: " + ", ".join(f"{counts[name]} {name}" for name in CATEGORIES if name in counts) + "."
    )
    if len(made) < args.limit:
        few = f"The texts of {args.source} serve {len(made)} of {args.limit} prompts"
        print(f"{few}; other sources, or fewer skipped, may serve more.", file=sys.stderr)
    return 0


def _template_variants(text: str | None) -> "tuple[TemplateVariant, ...]":
    """Arguments of the chat template out of a flag."""
    from pydantic import TypeAdapter, ValidationError

    from eagle_kit.config.train import ChatTemplateKwargs, template_variants

    try:
        return template_variants(TypeAdapter(ChatTemplateKwargs).validate_json(text or "null"))
    except ValidationError:
        raise UserError(
            f"--chat-template-kwargs is {shown(text)}.",
            'Give a JSON object, or variants such as [{"kwargs": {"enable_thinking": true}, "weight": 0.7}].',
        ) from None


def _engine(args: argparse.Namespace) -> "tuple[Responder, str]":
    """Our engine, and its target's fingerprint."""
    from eagle_kit.cli.generate import check_shape
    from eagle_kit.data.chat.template import template_hash

    if args.model or args.api_key_env:
        raise UserError("--model and --api-key-env are for a server.", "Give its address with --base-url.")
    context = args.max_prompt_tokens + args.max_tokens
    config = options_of(args, EngineConfig, {**DECODING, **TEMPLATE}, max_context=context)
    check_shape(config, args.draft)
    from eagle_kit.models.loading.loader import target_fingerprint
    from eagle_kit.models.loading.source import resolve_target
    from eagle_kit.serve.llm import LLM
    from eagle_kit.train.replies.responder import EngineResponder

    folder = resolve_target(chosen_target(args.target, [args.draft] if args.draft else []))
    llm = LLM(folder, args.draft, config)
    target = target_fingerprint(folder)
    if args.chat_template is not None:
        target += f", chat template {template_hash(llm.tokenizer)}"
    return EngineResponder(llm), target


def _server(args: argparse.Namespace) -> "tuple[Responder, str]":
    """A server, and what is known of its model: no more than its name."""
    from eagle_kit.train.replies.server import ServerOptions, ServerResponder

    for flag, value in (("--draft", args.draft), ("--chat-template", args.chat_template)):
        if value is not None:
            raise UserError(f"{flag} is for our engine.", "Leave it out, or --base-url.")
    key = os.environ.get(args.api_key_env) if args.api_key_env else None
    if args.api_key_env and not key:
        raise UserError(f"The variable {args.api_key_env} is not set.", "Set it, or leave --api-key-env out.")
    numbers = {"concurrency": args.concurrency, "retries": args.retries}
    responder = ServerResponder(
        ServerOptions(args.base_url, args.model, **numbers, api_key=key, with_ids=args.ids)
    )
    return responder, f"{responder.model} of a server; revision and template unknown"


def _texts(args: argparse.Namespace) -> int:
    from eagle_kit.core.files import check_writable

    config = _config(args)
    if args.out.is_dir():
        raise UserError(f"{args.out} is a folder.", "Give a file with --out.")
    check_writable(args.out.parent, "Give another file with --out.")
    from eagle_kit.train.states.capture import write_texts

    count, longest = write_texts(_data(config), args.out)
    print(f"{args.out}: {count} texts of at most {longest} tokens.")
    return 0


def _import_states(args: argparse.Namespace) -> int:
    config = _config(args)
    layers = tuple(_layer(each) for each in args.layers) if args.layers else None
    from eagle_kit.train.states.capture import CaptureOptions, OtherEngine, capture

    more: tuple[str, ...] = ("--from", str(args.folder), "--convention", args.convention)
    more += ("--layers", *args.layers) if args.layers else ()
    more += ("--no-check",) if args.no_check else ()
    if args.max_missing < 0:
        raise UserError(f"--max-missing is {args.max_missing}.", "Give 0 or more.")
    more += ("--max-missing", str(args.max_missing)) if args.max_missing else ()
    about = {"layers": layers, "convention": args.convention, "checks": not args.no_check}
    other = OtherEngine("import-states", more, args.folder, **about, max_missing=args.max_missing)
    options = CaptureOptions(
        out=args.out, verify=args.verify, arguments=(args.config, *args.overrides), other=other
    )
    return capture(config, options)


def _layer(name: str) -> int | str:
    if name == "final" or name.isdigit():
        return name if name == "final" else int(name)
    raise UserError(f"--layers has {name!r}.", "Give numbers of layers, or final.")


def _capture(args: argparse.Namespace) -> int:
    from eagle_kit.train.parallel.launch import check_launcher

    config = _config(args)
    check_launcher(os.environ, config.training)
    from eagle_kit.train.states.capture import CaptureOptions, OtherEngine, capture

    other = None
    if args.engine == "vllm":
        more: tuple[str, ...] = ("--engine", "vllm", "--engine-python", args.engine_python)
        more += ("--engine-args", args.engine_args) if args.engine_args else ()
        more += ("--no-check",) if args.no_check else ()
        engine_args = json_object(args.engine_args, "--engine-args", '{"tensor_parallel_size": 8}')
        python, checks = args.engine_python, not args.no_check
        other = OtherEngine("capture", more, python=python, engine_args=engine_args, checks=checks)
    options = CaptureOptions(
        out=args.out,
        shard=args.shard,
        dry_run=args.dry_run,
        verify=args.verify,
        arguments=(args.config, *args.overrides),
        other=other,
    )
    return capture(config, options)


def _store(args: argparse.Namespace) -> int:
    from eagle_kit.data.states.store import StateStore
    from eagle_kit.train.states.capture import summary, verify

    store = StateStore(args.folder)
    print(summary(store), flush=True)
    if args.verify:
        verify(store)
        print("Every byte is what was captured.")
    return 0
