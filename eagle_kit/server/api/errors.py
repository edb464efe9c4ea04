"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from eagle_kit.core.errors import UserError, cut
from eagle_kit.server.response_stream import EngineFailed, NotFinite, OutOfMemory, Overloaded

INVALID = "invalid_request_error"
RETRY_AFTER_S = 1
TYPES = {
    400: INVALID,
    401: "authentication_error",
    404: INVALID,
    405: INVALID,
    408: INVALID,
    409: INVALID,
    413: INVALID,
    415: INVALID,
    429: "rate_limit_error",
    500: "internal_error",
    503: "service_unavailable",
}
MAX_MISTAKES = 100
MAX_MESSAGE = 1000
"""Characters of a message. What the client sent is cut before; this bounds what libraries quote of it."""
TAG = re.compile(r"str|int|float|bool|constrained-\w+|[a-z-]+\[.*\]|[A-Z]\w*")
"""Parts of pydantic's error locations that name a branch of a union instead of a field."""
LIMITS = {
    *("too_long", "too_short", "string_too_long", "string_too_short"),
    *("greater_than", "greater_than_equal", "less_than", "less_than_equal"),
}
"""Types of pydantic's errors of a value that has the right type and is out of range."""
GRAMMARS = "Send regex, or response_format with a JSON schema; other grammars are for LLM.generate in Python."
REMEDIES = {
    "best_of": "Send n and logprobs, and choose among the choices.",
    "chat_template": "Start the server with --chat-template FILE.",
    "ebnf": GRAMMARS,
    "function_call": "Send tool_choice.",
    "functions": "Send tools.",
    "guided_grammar": GRAMMARS,
    "include_reasoning": "Leave it out: reasoning is in reasoning_content.",
    "max_new_tokens": "Send max_tokens.",
    "request_id": "Send the header X-Request-Id.",
    "rid": "Send the header X-Request-Id.",
    "structured_outputs.grammar": GRAMMARS,
    "truncate_prompt_tokens": "Shorten the prompt before it is sent.",
    "use_beam_search": "Send n and a temperature.",
}
"""What to do about parameters of vLLM, SGLang and OpenAI that are not supported, or at one value only; others
are left out."""
EXPECTED = "Input should be "
OBJECT = re.compile("a valid dictionary")


class ApiError(Exception):
    """Error response.

    Args:
        status: HTTP status, 400 to 599.
        message: cause and remedy.
        param: the request's parameter it is about.
        code: for programs, such as ``"model_not_found"``.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = cut(message, MAX_MESSAGE)
        self.param = None if param is None else cut(param)
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """JSON body of the response."""
        kind = TYPES.get(self.status, INVALID if self.status < 500 else "internal_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def as_api_error(error: BaseException) -> ApiError:
    """Convert an exception to an error response; an unknown one is a defect, 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    if isinstance(error, ValidationError):
        return from_validation(error)
    if isinstance(error, Overloaded):
        return ApiError(503, str(error), code="overloaded", headers={"Retry-After": str(RETRY_AFTER_S)})
    if isinstance(error, OutOfMemory):
        retry = {"Retry-After": str(RETRY_AFTER_S)}
        return ApiError(503, str(error), code="out_of_memory", headers=retry)
    if isinstance(error, EngineFailed):
        code = "logits_not_finite" if isinstance(error, NotFinite) else "engine_failed"
        return ApiError(500, str(error), code=code)
    return ApiError(500, "The server has made a mistake; its log says more.")


def from_validation(error: ValidationError) -> ApiError:
    """Convert the error of the branch that the sender meant: a limit that was passed, else the deepest one,
    else the one of the last item. A value that no branch takes is told what each of them takes."""
    if (count := error.error_count()) > MAX_MISTAKES:  # to list them would take long, and much memory
        message = f"The body has {count} mistakes. Compare it with /openapi.json."
        return ApiError(400, message, code="many_mistakes")
    details = error.errors(include_url=False, include_input=False, include_context=False)
    detail = max(details, key=_closeness)
    if detail["type"] == "json_invalid":
        return ApiError(400, f"The body is no JSON that can be read: {detail['msg']}.", code="invalid_json")
    param = _path(detail["loc"])
    if detail["type"] == "extra_forbidden":
        remedy = REMEDIES.get(param, "Leave it out.")
        message = f"The parameter {param} is not supported. {remedy}"
        return ApiError(400, message, param=param, code="unsupported_parameter")
    message = detail["msg"].removeprefix("Value error, ")
    if message.startswith(EXPECTED):
        same = [other["msg"] for other in details if _path(other["loc"]) == param]
        expected = [other.removeprefix(EXPECTED) for other in same if other.startswith(EXPECTED)]
        expected = ["an object" if OBJECT.match(other) else other for other in expected]
        if detail["type"] not in LIMITS:
            message = EXPECTED + ", or ".join(dict.fromkeys(expected))
    if detail["type"] == "literal_error":
        message = message.replace("True", "true").replace("False", "false")
    remedy = f" {REMEDIES[param]}" if param in REMEDIES else ""
    return ApiError(400, f"{param}: {message}.{remedy}" if param else f"{message}.", param=param or None)


def _closeness(detail: Any) -> tuple[bool, int, int]:
    """How far a branch of a union got until its error."""
    loc = detail["loc"]
    return detail["type"] in LIMITS, len(loc), sum(part for part in loc if isinstance(part, int))


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not TAG.fullmatch(part):
            path += f".{part}" if path else part
    return cut(path)
