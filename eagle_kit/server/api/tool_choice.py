"""Calls that a request insists on: a grammar lets the model write nothing else.

As in vLLM the response is JSON, whatever form the target's own calls have: the arguments of the function that
is named, or with ``required`` a list of objects of ``name`` and ``arguments``, and one of them where
``parallel_tool_calls`` is false. The grammar begins behind the reasoning.
"""

import json
from typing import Any

from eagle_kit.core.errors import UserError, cut, shown
from eagle_kit.core.structured_outputs import Grammar
from eagle_kit.data.chat.messages import Unusable
from eagle_kit.data.chat.response.calls import calls_of, make_call
from eagle_kit.data.chat.response.parts import ResponseParts, ResponseReader
from eagle_kit.server.api.protocol import ChatRequest, FunctionDefinition

DEFINITIONS = ("$defs", "definitions")
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def call_grammar(body: ChatRequest) -> Grammar:
    """Make the grammar of what ``tool_choice`` insists on: a list of calls, or one call where
    the request allows no more.

    Raises:
        UserError: definitions of one name in the schemas of several tools differ, or are no object.
    """
    functions = [tool.function for tool in body.tools or ()]
    if (name := body.chosen_function) is not None:
        chosen = next(function for function in functions if function.name == name)
        return Grammar("json_schema", json.dumps(_parameters(chosen)))
    root: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for function in functions:
        parameters = _parameters(function)
        for kind in DEFINITIONS:
            definitions = parameters.pop(kind, None)
            if definitions is None:
                continue
            if not isinstance(definitions, dict):
                raise UserError(
                    f"The parameters of the function {shown(function.name)} have {kind}, which is no object.",
                    "Give an object of schemas by name, or leave it out.",
                )
            for key, about in definitions.items():
                if root.setdefault(kind, {}).setdefault(key, about) != about:
                    raise UserError(
                        f"Two tools define {cut(key)!r} differently in their schemas.", "Rename one of them."
                    )
        properties = {"name": {"const": function.name}, "arguments": parameters}
        required = {"required": list(properties), "additionalProperties": False}
        calls.append({"type": "object", "properties": properties, **required})
    call = {"anyOf": calls} if len(calls) > 1 else calls[0]
    if body.parallel_tool_calls is not False:
        call = {"type": "array", "items": call, "minItems": 1}
    return Grammar("json_schema", json.dumps(root | call))


def _parameters(function: FunctionDefinition) -> dict[str, Any]:
    """Schema of the arguments, which are an object."""
    parameters = dict(function.parameters or NO_ARGUMENTS)
    return (
        parameters
        if {"$ref", "anyOf", "oneOf", "allOf"} & set(parameters)
        else {"type": "object"} | parameters
    )


class ChosenCallReader:
    """:class:`~eagle_kit.data.chat.response.parts.ResponseReader` of responses that follow
    :func:`call_grammar`.

    Args:
        name: function that the request names; None where the response names it.
        thoughts: reader of reasoning and content; None where all of the response is the call.
    """

    def __init__(self, name: str | None, thoughts: ResponseReader | None = None) -> None:
        self._name = name
        self._thoughts = thoughts
        self._pieces: list[str] = []

    def feed(self, text: str) -> ResponseParts:
        """Read the reasoning of a further piece of text, and keep the rest."""
        return self._keep(
            ResponseParts(content=text) if self._thoughts is None else self._thoughts.feed(text)
        )

    def finish(self, end: str = "") -> ResponseParts:
        """Read the call; what was cut off is content."""
        parts = ResponseParts() if self._thoughts is None else self._keep(self._thoughts.finish(end))
        text = "".join(self._pieces)
        try:
            value = json.loads(text)
            parts.calls = calls_of(value) if self._name is None else [make_call(self._name, value)]
        except (Unusable, ValueError, RecursionError):
            parts.content = text
        return parts

    def _keep(self, parts: ResponseParts) -> ResponseParts:
        self._pieces.append(parts.content)
        return ResponseParts(reasoning=parts.reasoning)
