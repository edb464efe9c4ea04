"""Log-probabilities as JSON in OpenAI's two shapes. Names and bytes of tokens are made when they are
written."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from pydantic_core import to_json

from eagle_kit.core.output import PromptLogprobs, ResponseLogprobs, TokenLogprobs
from eagle_kit.engine.text_stream import Detokenizer
from eagle_kit.engine.token_names import TokenNames

LOWEST = -9999.0
"""OpenAI's value for a token of probability zero; JSON has no infinity."""


class TextOffsets:
    """Offsets of the tokens of one response in its text. The second part of a character has the offset of the
    first.

    Args:
        detokenizer: of the response.
        start: offset of the first token.
    """

    def __init__(self, detokenizer: Detokenizer, start: int = 0) -> None:
        self._detokenizer = detokenizer
        self._offset = start

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


class RepeatedPrompt(NamedTuple):
    """Prompt whose log-probabilities come before those of its response.

    Attributes:
        token_ids: tokens of the prompt.
        logprobs: of all tokens but the first.
        num_top: alternatives to report of each.
        offsets: has read no token yet.
    """

    token_ids: Sequence[int]
    logprobs: PromptLogprobs
    num_top: int
    offsets: TextOffsets

    def chosen(self) -> Iterator[float | None]:
        """Iterate over the log-probabilities of the tokens, None for the first one."""
        yield None
        for index in range(len(self.logprobs.entries)):
            yield max(self.logprobs.entries.chosen(index), LOWEST)

    def top(self, names: TokenNames) -> Iterator[dict[str, float] | None]:
        """Iterate over the most likely tokens at each token, by name; None for the first one."""
        yield None
        for token, entry in zip(self.token_ids[1:], self.logprobs.entries, strict=True):
            yield _by_name(names, ((token, entry.logprob), *entry.top[: self.num_top]))


def completion_logprobs(
    names: TokenNames,
    tokens: Sequence[int],
    entries: ResponseLogprobs,
    offsets: TextOffsets,
    prompt: RepeatedPrompt | None = None,
) -> Iterator[str]:
    """Write :class:`~eagle_kit.server.api.responses.CompletionLogprobs` as JSON, a piece for each token and
    list; ``offsets`` has read the response's tokens before these. Those of a repeated prompt come first."""
    response_tokens = list(tokens)
    prompt_tokens = [] if prompt is None else list(prompt.token_ids)

    yield '{"tokens":'
    yield from _written(names.written(token) for token in chain(prompt_tokens, response_tokens))

    chosen = (max(entries.chosen(index), LOWEST) for index in range(len(entries)))
    yield ',"token_logprobs":'
    yield from _written(chain(prompt.chosen() if prompt else (), chosen))

    top = (
        _by_name(names, ((token, entry.logprob), *entry.top))
        for token, entry in zip(response_tokens, entries, strict=True)
    )
    yield ',"top_logprobs":'
    yield from _written(chain(prompt.top(names) if prompt else (), top))

    of_prompt = (prompt.offsets.push(token) for token in prompt_tokens) if prompt else ()
    yield ',"text_offset":'
    yield from _written(chain(of_prompt, (offsets.push(token) for token in response_tokens)))
    yield "}"


def prompt_logprobs(
    names: TokenNames, token_ids: Sequence[int], logprobs: PromptLogprobs, num_top: int
) -> Iterator[str]:
    """Write the log-probabilities of a prompt as vLLM does, a piece for each token: null for the first one,
    then :class:`~eagle_kit.server.api.responses.PromptLogprob` by token id."""

    def written(token: int, logprob: float, rank: int) -> dict[str, Any]:
        text, _ = names.of(token)
        return {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": text}

    def entry_of(index: int, entry: TokenLogprobs) -> dict[str, Any]:
        token = token_ids[index + 1]
        found = {str(token): written(token, entry.logprob, logprobs.ranks[index])}
        for rank, (other, logprob) in enumerate(entry.top[:num_top], 1):
            found.setdefault(str(other), written(other, logprob, rank))
        return found

    entries = (entry_of(index, entry) for index, entry in enumerate(logprobs.entries))
    return _written(chain((None,), entries))


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
