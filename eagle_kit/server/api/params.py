"""Conversion of request parameters to :class:`SamplingParams`."""

import json
import re
from collections.abc import Sequence
from typing import Any

from eagle_kit.core.errors import UserError, shown
from eagle_kit.core.sampling_params import SamplingParams, successor
from eagle_kit.core.structured_outputs import Grammar, ThinkingBudget, Thought, choice_pattern
from eagle_kit.server.api.protocol import ChatRequest, CompletionRequest, Sampling
from eagle_kit.server.api.tool_choice import call_grammar

NUMBERS = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,10}")
MAX_REQUEST_LOGPROBS = 2**23
"""Log-probabilities of the responses to a request. One takes 19 bytes, measured, so all take 160 MB."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `/v1/completions`; a chat goes on until the context is full."""


def sampling_params(
    body: Sampling,
    num_prompt_tokens: int,
    max_context: int,
    vocab_size: int,
    grammar: Grammar | None = None,
    cache_salt: str | None = None,
    thinking_budget: ThinkingBudget | None = None,
) -> list[SamplingParams]:
    """Make the parameters of the `n` responses to one prompt; with a seed, response i draws from seed + i.

    Absent parameters have OpenAI's defaults: temperature 1, everything else neutral. ``cache_salt`` is the
    body's, or what the server has made of it.

    Raises:
        UserError: more tokens than the context holds, or token ids outside the vocabulary.
    """
    given = {name: float(value) for name in NUMBERS if (value := getattr(body, name)) is not None}
    common: dict[str, Any] = {
        "max_tokens": _max_tokens(body, num_prompt_tokens, max_context),
        "temperature": 1.0,
        **given,
        "top_k": body.top_k or 0,
        "logit_bias": _logit_bias(body.logit_bias, vocab_size),
        "allowed_token_ids": _allowed(body, vocab_size),
        "bad_words": tuple(dict.fromkeys(body.bad_words or ())),
        "logprobs": num_logprobs(body),
        "stop": (body.stop,) if isinstance(body.stop, str) else tuple(dict.fromkeys(body.stop or ())),
        "stop_token_ids": _in_vocabulary(body.stop_token_ids or [], vocab_size, "stop_token_ids"),
        "ignore_eos": bool(body.ignore_eos),
        "min_tokens": body.min_tokens or 0,
        "include_stop_str_in_output": body.includes_stop,
        "thinking_budget": thinking_budget,
        "speculative_depth": 0 if body.speculative is False else body.speculative_depth,
        "grammar": grammar,
        "cache_salt": cache_salt,
    }
    params = []
    for i in range(body.num_choices):
        seed = None if body.seed is None else successor(body.seed, i)
        # In a stream any response to the prompt may begin first.
        prompt_logprobs = num_prompt_logprobs(body) if i == 0 or body.stream else None
        params.append(SamplingParams(**common, seed=seed, prompt_logprobs=prompt_logprobs))
    return params


def _max_tokens(body: Sampling, num_prompt_tokens: int, max_context: int) -> int:
    room = max_context - num_prompt_tokens
    if room < 1:
        raise UserError(
            f"The prompt has {num_prompt_tokens} tokens, but the context holds {max_context} with the "
            "response.",
            "Shorten the prompt.",
        )
    asked = body.max_tokens
    if isinstance(body, ChatRequest):
        asked = asked if body.max_completion_tokens is None else body.max_completion_tokens
        default = room
    else:
        default = min(room, DEFAULT_COMPLETION_TOKENS)
    if asked is not None and asked > room:
        raise UserError(
            f"max_tokens is {asked}, but the context of {max_context} tokens has room for {room} behind the "
            f"prompt's {num_prompt_tokens}.",
            "Lower max_tokens, or shorten the prompt.",
        )
    return default if asked is None else asked


def num_logprobs(body: Sampling) -> int | None:
    """Alternatives that are reported of each token; None where no log-probabilities are."""
    if isinstance(body, ChatRequest):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs if isinstance(body, CompletionRequest) else None


def num_prompt_logprobs(body: Sampling) -> int | None:
    """Alternatives that are reported of each token of the prompt; None where no log-probabilities are."""
    repeated = body.logprobs if isinstance(body, CompletionRequest) and body.echo else None
    asked = [number for number in (body.prompt_logprobs, repeated) if number is not None]
    return max(asked, default=None)


def check_num_logprobs(
    body: Sampling, prompts: Sequence[Sequence[int]], params_of: Sequence[Sequence[SamplingParams]]
) -> None:
    """Raise UserError where a request may have more than :data:`MAX_REQUEST_LOGPROBS` log-probabilities.

    They are kept until the last of them is sent.

    Args:
        prompts: token ids of each prompt.
        params_of: of each prompt the parameters of its responses.
    """
    name = "top_logprobs" if isinstance(body, ChatRequest) else "logprobs"
    of_responses = 0
    of_prompts = 0
    for prompt, responses in zip(prompts, params_of, strict=True):
        for params in responses:
            if params.logprobs is not None:
                of_responses += params.max_tokens * (params.logprobs + 1)
            if params.prompt_logprobs is not None:
                of_prompts += len(prompt) * (params.prompt_logprobs + 1)
    if of_responses + of_prompts <= MAX_REQUEST_LOGPROBS:
        return
    if of_responses > of_prompts:
        raise UserError(
            f"The request asks for up to {of_responses} log-probabilities (max_tokens of all responses times "
            f"{name} + 1), and {MAX_REQUEST_LOGPROBS} are allowed.",
            f"Lower n, max_tokens or {name}.",
        )
    raise UserError(
        f"The request asks for {of_prompts} log-probabilities of its prompts (their tokens times the "
        f"alternatives + 1), and {MAX_REQUEST_LOGPROBS} are allowed.",
        "Send fewer prompts at once, or lower logprobs and prompt_logprobs.",
    )


def _logit_bias(given: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    bias = {}
    for token, value in (given or {}).items():
        if not TOKEN_ID.fullmatch(token):
            raise UserError(
                f"logit_bias has the key {shown(token)}, which is no token id.",
                'Write token ids as texts without leading zeros, such as "50".',
            )
        bias[int(token)] = float(value)
    _in_vocabulary(list(bias), vocab_size, "logit_bias")
    return bias


def _allowed(body: Sampling, vocab_size: int) -> tuple[int, ...] | None:
    if body.allowed_token_ids is None:
        return None
    return _in_vocabulary(body.allowed_token_ids, vocab_size, "allowed_token_ids")


def _in_vocabulary(ids: list[int], vocab_size: int, name: str) -> tuple[int, ...]:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise UserError(
                f"{name} has the token id {token}, outside 0..{vocab_size - 1}.", "Use the model's tokens."
            )
    return tuple(ids)


def make_grammar(body: Sampling, thought: Thought | None = None) -> Grammar | None:
    """Make the grammar of a request, which begins behind its reasoning; None where it has none.

    Raises:
        UserError: see :func:`~eagle_kit.server.api.tool_choice.call_grammar`.
    """
    if isinstance(body, ChatRequest) and body.must_call:
        return call_grammar(body)._replace(thought=thought)
    if not body.constraints:
        return None
    (constraint,) = body.constraints
    kind, value = constraint
    if kind == "json_object":
        return Grammar("json_object", thought=thought)
    if kind == "json_schema":
        return Grammar("json_schema", json.dumps(value), thought)
    if isinstance(value, list):
        value = choice_pattern(value)
    assert isinstance(value, str)
    return Grammar("regex", value, thought)
