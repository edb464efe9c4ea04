"""`eagle-kit generate`: decode prompts and print accept lengths."""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

from pydantic import model_validator

from eagle_kit.cli.arguments import (
    DECODING,
    LOADING,
    RANKS,
    DraftFlag,
    SamplingFlags,
    TargetFlag,
    chosen_target,
)
from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.loading.flags import Flag, FlagsOf, add_options, options_of
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import parse_json, read_text
from eagle_kit.core.output import RequestOutput

FLAGS = {**DECODING, **LOADING, **RANKS, "algorithm": "--algorithm", "token_map": "--token-map"}


class GenerateOptions(SamplingFlags, DraftFlag, TargetFlag):
    """Options of ``generate``."""

    prompt: Annotated[tuple[str, ...] | None, Flag(is_repeated=True)] = None
    """Text of a user turn; may be given several times."""

    file: Path | None = None
    """File .jsonl of {prompt} or {messages} lines, or a text that is one prompt."""

    json_lines: Annotated[bool, Flag("--json")] = False
    """Print one JSON object per response."""

    engine: Annotated[EngineConfig, FlagsOf(FLAGS, "engine")] = EngineConfig()

    @model_validator(mode="after")
    def _one_source(self) -> "GenerateOptions":
        if self.prompt is not None and self.file is not None:
            raise UserError("--file was given beside --prompt.", "Give one or the other.")
        return self


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``generate``."""
    add_options(parser, GenerateOptions)


def run(args: argparse.Namespace) -> int:
    """Decode ``--prompt``, ``--file`` or standard input and print each response."""
    options = options_of(args, GenerateOptions)
    prompts = read_prompts(options.prompt, options.file)
    params = options.sampling_params
    config = options.engine.replace(seed=random.getrandbits(62))
    if config.algorithm.upper() in ("AUTO", "NONE"):  # others may find a draft in the target's folder
        check_shape(config, options.draft)
    from eagle_kit.data.chat.template import has_chat_template
    from eagle_kit.drafts.files.named_target import naming
    from eagle_kit.engine.llm import LLM

    # Load.
    target = chosen_target(options.target, [options.draft] if options.draft else [])
    with naming(target):
        batch_size = min(config.batch_size, len(prompts))
        llm = LLM(target.name, options.draft, config, max_batch_size=batch_size)

    # Decode and print.
    with closing(llm):
        if not has_chat_template(llm.tokenizer):
            print("note: the target has no chat template, so it continues the texts.", file=sys.stderr)
        outputs = llm.chat([llm.tokenize_task(prompt) for prompt in prompts], params)
        for prompt, output in zip(prompts, outputs, strict=True):
            if options.json_lines:
                print(json.dumps(as_record(prompt, output)), flush=True)
            else:
                print(as_text(output), flush=True)
    return 0


def check_shape(config: EngineConfig, draft: str | None) -> None:
    """Refuse a shape without a draft, before anything is loaded. Raises UserError."""
    if config.shape is not None and config.shape.steps and draft is None:
        raise UserError(
            f"The shape {config.shape} was given without a draft.", "Give --draft, or leave --shape out."
        )


def read_prompts(texts: Sequence[str] | None, file: Path | None) -> list[Any]:
    """Read prompts as :class:`eagle_kit.LLM` takes them. Raises UserError for an empty or unreadable one."""
    if texts is not None:
        prompts: list[Any] = list(texts)
    elif file is None:
        prompts = [sys.stdin.read()]
    elif not file.is_file():
        raise UserError(f"The file {file} does not exist.", "Give the path of a .jsonl or text file.")
    elif file.suffix == ".jsonl":
        prompts = _read_jsonl(file)
    else:
        prompts = [read_text(file, "Save it as UTF-8.")]
    if not prompts or any(isinstance(prompt, str) and not prompt.strip() for prompt in prompts):
        raise UserError("The prompt is empty.", "Give some text with --prompt, --file or standard input.")
    return prompts


def _read_jsonl(file: Path) -> list[Any]:
    """Read the prompt of every line that is not blank. Raises UserError for a line without one."""
    prompts = []
    for number, line in enumerate(read_text(file, "Save it as UTF-8.").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = parse_json(line, file)
            prompt = record["prompt"] if "prompt" in record else record["messages"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if not _is_prompt(prompt):
            raise UserError(
                f"{file}, line {number}, is not an object with a text `prompt`, or with `messages` of "
                "`role` and `content`.",
                "Correct that line.",
            )
        prompts.append(prompt)
    return prompts


def _is_prompt(value: Any) -> bool:
    """True for a text, and for messages, at least one, of ``role`` and ``content``."""
    if isinstance(value, str):
        return True
    if not isinstance(value, list) or not value:
        return False
    for message in value:
        if not isinstance(message, dict):
            return False
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            return False
    return True


def as_record(prompt: Any, output: RequestOutput) -> dict[str, Any]:
    """Convert a response and its figures to plain data."""
    stats = output.stats
    return {
        "prompt": prompt,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "num_prompt_tokens": len(output.prompt_ids),
        "num_tokens": len(output.token_ids),
        "num_verifies": stats.num_verifies,
        "accept_length": round(stats.accept_length, 4),
        "acceptance_per_position": [round(share, 4) for share in stats.acceptance_per_position],
        "prefill_s": round(output.prefill_s, 4),
        "decode_s": round(output.decode_s, 4),
    }


def as_text(output: RequestOutput) -> str:
    """Format a response and one line of its figures."""
    return f"{output.text}\n\n{figures(output)}\n"


def figures(output: RequestOutput) -> str:
    """Format accept length, tokens, verifies and tokens per second of one response, on one line."""
    stats = output.stats
    num_tokens = len(output.token_ids)
    facts = [f"{num_tokens} tokens"]
    if stats.num_verifies:
        facts.append(f"{stats.num_verifies} verifies")
    if output.decode_s > 0 and num_tokens > 1:
        facts.append(f"{(num_tokens - 1) / output.decode_s:.1f} tokens/s")
    facts.append(output.finish_reason)
    title = f"accept length {stats.accept_length:.2f}" if stats.num_verifies else "plain decoding"
    return f"{title} ({', '.join(facts)})"
