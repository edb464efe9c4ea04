"""The chat template of a tokenizer: whether there is one, its hash, and its replacement by a file."""

import hashlib
import json
from pathlib import Path
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import expand, read_text
from eagle_kit.data.chat.arguments import names_read
from eagle_kit.data.chat.messages import Unusable


def has_chat_template(tokenizer: Any) -> bool:
    """True if a tokenizer has a chat template. Those of base models have none."""
    return bool(getattr(tokenizer, "chat_template", None))


def template_hash(tokenizer: Any) -> str:
    """A short hash of a tokenizer's chat template; empty without one."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return ""
    return hashlib.sha256(str(template).encode()).hexdigest()[:16]


def read_chat_template(path: str | Path) -> str:
    """Read a chat template from a file of Jinja.

    Raises:
        UserError: the file cannot be read, is no Jinja, or never reads the messages.
    """
    remedy = "Give a file with the Jinja source of a chat template."
    path = expand(path)
    template = read_text(path, remedy)
    if _is_json(template):
        raise UserError(f"{path} is JSON, which would be rendered as it stands.", remedy)
    try:
        names = names_read(template)
    except Unusable as reason:
        raise UserError(f"{path} cannot be used: {reason}.", remedy) from None
    if "messages" not in names:
        raise UserError(f"{path} is no chat template, since it does not read messages.", remedy)
    return template


def set_chat_template(tokenizer: Any, path: str | Path | None) -> None:
    """Replace the chat template of ``tokenizer`` by that of a file. None changes nothing. Raises as
    :func:`read_chat_template`."""
    if path is not None:
        tokenizer.chat_template = read_chat_template(path)


def _is_json(text: str) -> bool:
    """True for a text that is JSON, as ``tokenizer_config.json`` and ``chat_template.json`` are."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
