"""``eagle-kit train CONFIG --init TARGET``: a first config, whose comments come from the schema."""

import json
import textwrap
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import write_text_atomically
from eagle_kit.data.chat.template import has_chat_template
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.loading.loader import read_target_config
from eagle_kit.models.loading.source import load_tokenizer, resolve_target

SMALL_WIDTH = 1024
"""Hidden size up to which a target is small enough for the settings of a laptop."""
RESPONSES = "responses.jsonl"
TEXTS = "texts.jsonl"
WIDTH = 100
"""Columns of comments."""


def write_first_config(path: Path, target: str) -> None:
    """Write a config for a first head of ``target``, whose config and tokenizer are read.

    Raises:
        UserError: the file exists, the target cannot be read, or the file cannot be written.
    """
    if path.exists():
        raise UserError(f"{path} exists.", "Name another file, or delete it.")
    folder = resolve_target(target)
    has_template = has_chat_template(load_tokenizer(folder))
    text = first_config(target, path, read_target_config(folder), has_template)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, text)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}).", "Name another file.") from error


def first_config(target: str, path: Path, architecture: TargetConfig, has_template: bool) -> str:
    """Text of a config: an EAGLE-3 head that learns from the target's own responses, or from texts.

    Args:
        path: path of the config; the run is named after it.
        architecture: architecture of the target, by which sizes are chosen.
        has_template: True if the target has a chat template; a target without one cannot response to chats.
    """
    name = path.stem

    # Sizes that fit the target.
    max_length = 4096
    draft_vocab_size = 32000
    learning_rate = 1e-4
    sequences_per_step = 16
    if architecture.hidden_size <= SMALL_WIDTH:
        max_length = 1024
        draft_vocab_size = 8192
        learning_rate = 8e-4
        sequences_per_step = 4
    settings: dict[str, Any] = {
        "target": target,
        "output_dir": f"runs/{name}",
        "data": {
            "source": RESPONSES if has_template else TEXTS,
            "max_length": min(max_length, architecture.max_position_embeddings),
            "eval_conversations": 48,
        },
        "head": {
            "kind": "eagle3" if architecture.mla is None else "eagle3-mla",
            "draft_vocab_size": min(draft_vocab_size, architecture.vocab_size),
        },
        "training": {
            "ttt_length": 7,
            "learning_rate": learning_rate,
            "epochs": 2,
            "sequences_per_step": sequences_per_step,
            "save_every": 200,
        },
        "validation": {"every": 200, "prompts": 16, "max_tokens": 64, "shapes": ["4,1,5"]},
    }

    # The next steps, above the keys.
    data = [
        "# 1. Let the target answer prompts, which teaches more than responses of others:",
        f"#    eagle-kit data regenerate --target {target} --source PROMPTS --out {RESPONSES}",
    ]
    if not has_template:
        data = [
            "# 1. The target has no chat template, so the head learns from texts: write them to",
            f'#    {TEXTS}, a line {{"text": "..."}} each (docs/how-to/train-on-a-base-model.md).',
        ]
    head = [
        "# A first EAGLE-3 head. The project's docs/reference/options.md has every other key.",
        *data,
        f"# 2. eagle-kit train {path}",
        f"# 3. eagle-kit export runs/{name} --out {name}-draft",
        "",
    ]
    config = TrainConfig.model_validate(settings)
    return "\n".join([*head, *_lines(config, settings, "")]) + "\n"


def _lines(section: BaseModel, settings: dict[str, Any], indent: str) -> list[str]:
    """Lines of a section: each key below a comment, the first sentence of its description."""
    lines = []
    for key, value in settings.items():
        field = type(section).model_fields[key]
        if isinstance(value, dict):
            lines += ["", f"{indent}{key}:", *_lines(getattr(section, key), value, f"{indent}  ")]
            continue
        about = " ".join((field.description or "").split()).replace("``", "")
        sentence = about.partition(". ")[0].partition("; ")[0].rstrip(".")
        mark = f"{indent}# "
        lines += textwrap.wrap(f"{sentence}.", WIDTH, initial_indent=mark, subsequent_indent=mark)
        lines.append(f"{indent}{key}: {json.dumps(value)}")
    return lines
