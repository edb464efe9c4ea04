"""Refusals before anything is measured: a server of another model, or whose context is too short."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import read_object
from eagle_kit.drafts.files.named_target import NamedTarget
from eagle_kit.eval.openai_server import RefusedRequest
from eagle_kit.eval.servers.measured_server import COMPLETIONS, MeasuredServer
from eagle_kit.models.loading.source import PACKAGED_TARGETS, is_hub_id, resolve_target

CHECKED_TEXT = (
    "def f(x):\n    return x ** 2  # 1234567 \u00e4\u00f6\u00fc \u4f60\u597d \U0001f642\n"
    "\tIt's 3.14, isn't it?"
)
"""Text with code, digits, four alphabets and spaces, which tokenizers split differently."""
SIZES = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
"""Fields of config.json that two models must share to be one."""
GIVE_TARGET = "Give --target the model that the server has, or another --base-url."


class LabelledPrompt(NamedTuple):
    """A prompt, and what to call it in a message."""

    label: str
    ids: list[int]


def served_target(servers: Sequence[MeasuredServer]) -> NamedTarget:
    """The target of the first server, where its model is known here by its name or its folder.

    Raises:
        UserError: it is not, or the server does not answer.
    """
    facts = servers[0].facts
    origin = f"the model of {servers[0].url}"
    for name in (facts.model, facts.root):
        known = _known_here(name)
        if known is not None:
            return NamedTarget(known, origin)
    for name in (facts.root, facts.model):
        if is_hub_id(name):
            return NamedTarget(name, origin)
    raise UserError(
        f"{servers[0].url} serves {facts.model!r}, and no model of that name is known here.",
        "Give the same model with --target.",
    )


def check_server(
    server: MeasuredServer,
    target: str | Path,
    tokenizer: Any,
    prompts: Sequence[LabelledPrompt],
    max_tokens: int,
) -> None:
    """Refuse a server that cannot be measured on ``prompts``.

    Raises:
        UserError: it serves another model than ``target``, its tokenizer differs, or a prompt with
            ``max_tokens`` of response is longer than its context.
    """
    _check_model(server, target)
    _check_tokenizer(server, tokenizer)

    # Room for every first turn.
    most = server.facts.max_context
    for prompt in prompts:
        if most is not None and len(prompt.ids) + max_tokens > most:
            raise UserError(
                f"{prompt.label} has {len(prompt.ids)} tokens, with up to {max_tokens} of the response, and "
                f"{server.name} holds {most}.",
                "Give a smaller --max-tokens, or start the server with a longer context (vLLM "
                "--max-model-len, SGLang --context-length, ours --max-context).",
            )


def _known_here(name: str) -> str | None:
    """Name by which a model is known on this machine without a download; None where it is not."""
    lower = name.lower()
    for packaged, about in PACKAGED_TARGETS.items():
        if lower in (packaged, about.hub_id.lower()):
            return packaged
    if name and (Path(name).expanduser() / "config.json").is_file():
        return name
    return None


def _check_model(server: MeasuredServer, target: str | Path) -> None:
    """Compare the sizes of the target with those of the server's model, where that is known here."""
    facts = server.facts
    known = _known_here(facts.root) or _known_here(facts.model)
    if known is None:
        return
    served = read_object(resolve_target(known) / "config.json")
    wanted = read_object(resolve_target(target) / "config.json")
    for name in SIZES:
        if served.get(name) != wanted.get(name):
            raise UserError(
                f"{server.name} serves {known}, whose {name} is {served.get(name)}; the target's is "
                f"{wanted.get(name)}.",
                GIVE_TARGET,
            )


def _check_tokenizer(server: MeasuredServer, tokenizer: Any) -> None:
    """Compare the tokens of a text."""
    ids = tokenizer(CHECKED_TEXT, add_special_tokens=False)["input_ids"]
    try:
        answer = server.request(
            "/tokenize",
            {"model": server.facts.model, "prompt": CHECKED_TEXT, "add_special_tokens": False},
        )
    except RefusedRequest:
        _check_count(server, tokenizer, len(ids))
        return
    if answer.get("tokens") != ids:
        raise _other_tokenizer(server)


def _check_count(server: MeasuredServer, tokenizer: Any, num_ids: int) -> None:
    """Compare the number of tokens of a text, of a server that shows no tokens."""
    body = {"model": server.facts.model, "prompt": CHECKED_TEXT, "max_tokens": 1, "temperature": 0}
    usage = server.request(COMPLETIONS, body).get("usage") or {}
    allowed = (num_ids, len(tokenizer(CHECKED_TEXT)["input_ids"]))
    if usage.get("prompt_tokens") not in allowed:
        raise _other_tokenizer(server)


def _other_tokenizer(server: MeasuredServer) -> UserError:
    return UserError(
        f"{server.name} serves another model ({server.facts.model}): its tokenizer makes other tokens of a "
        "text than the target's.",
        GIVE_TARGET,
    )
