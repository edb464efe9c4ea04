"""Log-probabilities as JSON in OpenAI's two shapes. Names and bytes of tokens are made when they are
written."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic_core import to_json

from eagle_kit.core.output import ResponseLogprobs
from eagle_kit.engine.text_stream import Detokenizer
from eagle_kit.engine.token_names import TokenNames

LOWEST = -9999.0
"""OpenAI's value for a token of probability zero; JSON has no infinity."""


class TextOffsets:
    """Offsets of the tokens of one response in its text. The second part of a character has the offset of the
    first.

    Args:
        detokenizer: of the response.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._offset = 0

    def push(self, token: int) -> int:
        """Compute the offset of a further token, in characters."""
        offset = self._offset
        self._offset += len(self._detokenizer.push((token,)))
        return offset


def chat_logprobs(names: TokenNames, tokens: Sequence[int], entries: ResponseLogprobs) -> Iterator[str]:
    """Write :class:`~eagle_kit.server.api.responses.ChatLogprobs` as JSON, a piece for each token."""

    def written(token: int, logprob: float) -> dict[str, Any]:
        text, content = names.of(token)
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(content)}

    def items() -> Iterator[dict[str, Any]]:
        for token, entry in zip(tokens, entries, strict=True):
            top = [written(*pair) for pair in entry.top]
            yield {**written(token, entry.logprob), "top_logprobs": top}

    yield '{"content":'
    yield from _written(items())
    yield ',"refusal":null}'


def completion_logprobs(
    names: TokenNames, tokens: Sequence[int], entries: ResponseLogprobs, offsets: TextOffsets
) -> Iterator[str]:
    """Write :class:`~eagle_kit.server.api.responses.CompletionLogprobs` as JSON, a piece for each token and
    list; ``offsets`` has read the response's tokens before these."""
    yield '{"tokens":'
    yield from _written(names.written(token) for token in tokens)
    yield ',"token_logprobs":'
    yield from _written(max(entries.chosen(index), LOWEST) for index in range(len(entries)))
    yield ',"top_logprobs":'
    yield from _written(
        _by_name(names, ((token, entry.logprob), *entry.top))
        for token, entry in zip(tokens, entries, strict=True)
    )
    yield ',"text_offset":'
    yield from _written(offsets.push(token) for token in tokens)
    yield "}"


def _written(items: Iterable[Any]) -> Iterator[str]:
    """Write a list as JSON, a piece for each item, in the bytes of pydantic's ``model_dump_json``."""
    before = "["
    for item in items:
        yield before + to_json(item).decode()
        before = ","
    yield "[]" if before == "[" else "]"


def _by_name(names: TokenNames, pairs: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Map the names of tokens, the chosen one first, to their log-probabilities. A token whose name another
    one has taken is named by its id."""
    token_of: dict[str, int] = {}
    found: dict[str, float] = {}
    for token, value in pairs:
        name = names.written(token)
        if token_of.setdefault(name, token) != token:
            name = f"token_id:{token}"
        found[name] = max(value, LOWEST)
    return found
