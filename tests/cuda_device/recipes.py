"""Training recipes of ``configs/`` at their real sizes, over targets without bytes and full packed
sequences."""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

from tiny_run import make_target

from eagle_kit.config.loading.loader import load_config
from eagle_kit.config.train import TrainConfig
from eagle_kit.train.run.loop import Trainer
from tests.cuda_device.published import publish, unread_weights

ROOT = Path(__file__).parents[2]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
LEFT = 60
"""Tokens of a row that the template of a conversation of one turn, and the name of its prompt, may take."""
SHORT = 8
"""Characters of a prompt of a row that is full of its response."""


def write_conversations(path: Path, max_length: int, prompt: int, count: int) -> None:
    """Write conversations that fill a packed sequence each; a character is a token.

    Args:
        prompt: characters of the prompts, which all differ.
    """
    response = max_length - prompt - LEFT
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            asked = f"{number:04d}".ljust(prompt, "a")
            messages = [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": "b" * response},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def recipe(
    name: str, folder: Path, *overrides: str, prompt: int = SHORT, count: int = 4, held_out: int = 0
) -> TrainConfig:
    """A config of ``configs/``, of the published sizes, two packed sequences a step, with files below
    ``folder``.

    Args:
        overrides: settings as on the command line.
        prompt: characters of a prompt; by default few, so that rows are full of responses.
        count: conversations, one for each row.
        held_out: conversations of these whose prompts are validated.
    """
    path = str(ROOT / "configs" / f"{name}.yaml")
    given = load_config(TrainConfig, path, [])
    target = folder / "target"
    if not target.exists():
        publish(given.target, target)
        tiny = make_target(folder / "tiny")
        for file in TOKENIZER:
            if (tiny / file).exists():
                shutil.copyfile(tiny / file, target / file)
    source = folder / "chats.jsonl"
    write_conversations(source, given.data.max_length, prompt, count)
    settings = [
        f"target={target}",
        f"output_dir={folder / 'run'}",
        f"data.source={source}",
        f"data.cache_dir={folder / 'cache'}",
        "data.preview=false",
        f"data.eval_conversations={held_out}",
        "training.sequences_per_step=2",
        "tracking.report=false",
    ]
    return load_config(TrainConfig, path, [*settings, *overrides])


@contextmanager
def unsaved() -> Iterator[None]:
    """Within, no weights are read, and no checkpoints and no best head are written, which nobody would read.

    States of the device, whose values nobody computes, are finite.
    """
    with ExitStack() as stack:
        stack.enter_context(unread_weights())
        stack.enter_context(mock.patch.object(Trainer, "_save", lambda self: None))
        stack.enter_context(mock.patch("eagle_kit.train.run.loop.save_draft", lambda *args, **options: None))
        for module in ("store", "writer"):
            check = f"eagle_kit.data.hidden_states.{module}.check_finite"
            stack.enter_context(mock.patch(check, lambda flags, dtypes: None))
        stack.enter_context(mock.patch("eagle_kit.data.hidden_states.store.is_finite", lambda parts: True))
        yield
