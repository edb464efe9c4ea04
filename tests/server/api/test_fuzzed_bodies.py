"""Random bodies for a server whose chat template has tools: none is answered with 500, whatever schemas,
tools, arguments of the template and messages it combines."""

import asyncio
import json
import random
from typing import Any, NamedTuple

import httpx
import pytest
from chat_templates import tokenizer_for
from tiny import tiny_head, tiny_target

from eagle_kit.config.server import ServerConfig
from eagle_kit.data.chat.renderer import ChatRenderer
from eagle_kit.engine.llm import LLM
from eagle_kit.server.api.app import create_app

TEMPLATES = ("hermes", "qwen3")
SCALARS = (
    None,
    True,
    False,
    0,
    1,
    -1,
    1.5,
    2**31,
    2**64,
    10**30,
    "",
    "a",
    "é",
    "<tool_call>",
    "{}",
    "\x00",
    "🦊",
)
NAMES = (*("f", "g", "h", "k") * 6, "", "a b", '"', "\n", "$defs", "x" * 300)
PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/abort")
STREAMED_ERROR = 'data: {"error"'
MOST_S = 60.0
"""Seconds after which a request hangs."""


class Answer(NamedTuple):
    """What a body was answered with."""

    seed: int
    status: int
    text: str


class Bodies:
    """Random bodies of each path, by a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def body(self, path: str) -> dict[str, Any]:
        """A body that is right or nearly so."""
        made = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.completion,
            "/tokenize": self.tokenize,
            "/detokenize": lambda: {"tokens": self.tokens()},
            "/abort": lambda: {self.pick("request_id", "abort_all"): self.pick(*SCALARS)},
        }[path]()
        for _ in range(self.pick(0, 0, 0, 0, 0, 0, 1, 2)):
            self.damage(made)
        return made

    def pick(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def some(self, make: Any, most: int = 3) -> list[Any]:
        return [make() for _ in range(self.rng.randrange(most + 1))]

    def anything(self, depth: int = 2) -> Any:
        """Any JSON value."""
        kind = self.pick("scalar", "scalar", "list", "object") if depth else "scalar"
        if kind == "scalar":
            return self.pick(*SCALARS)
        values = self.some(lambda: self.anything(depth - 1))
        if kind == "list":
            return values
        return {self.pick(*NAMES): value for value in values}

    def damage(self, value: Any) -> None:
        """Put something else into one place of a body."""
        while isinstance(value, dict | list) and value:
            keys = (
                [key for key in value if key != "max_tokens"]
                if isinstance(value, dict)
                else range(len(value))
            )
            if not keys:
                return
            key = self.rng.choice(keys)
            if self.rng.random() < 0.4 or not isinstance(value[key], dict | list):
                value[key] = self.anything()
                return
            value = value[key]

    def schema(self, depth: int = 2) -> Any:
        """A JSON schema, or a value in its place."""
        if self.rng.random() < 0.08:
            return self.anything()
        schema: dict[str, Any] = {}
        for keyword in self.rng.sample(sorted(KEYWORDS), self.rng.randrange(4)):
            kind = KEYWORDS[keyword]
            if self.rng.random() < 0.08:
                schema[keyword] = self.anything()
            elif kind == "schema":
                schema[keyword] = self.schema(depth - 1) if depth else True
            elif kind == "schemas":
                schema[keyword] = [self.schema(depth - 1) for _ in range(2)] if depth else [{}]
            elif kind == "named":
                schema[keyword] = (
                    {self.pick(*NAMES): self.schema(depth - 1) for _ in range(2)} if depth else {}
                )
            else:
                schema[keyword] = self.pick(*kind)
        return schema

    def tool(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.pick("f", "f", "g", *NAMES)}
        if self.rng.random() < 0.8:
            function["parameters"] = self.schema()
        if self.rng.random() < 0.3:
            function["description"] = self.pick("", "a", "é", "\x00", None)
        if self.rng.random() < 0.05:
            function["strict"] = self.pick(True, False, None)
        return {"type": "function", "function": function}

    def message(self) -> dict[str, Any]:
        role = self.pick("user", "user", "assistant", "assistant", "tool", "system", "developer")
        part = {"type": "text", "text": self.pick("a", "", "é")}
        message: dict[str, Any] = {"role": role, "content": self.pick("a", "", "é", [part], [part, part])}
        if self.rng.random() < 0.1:
            message["content"] = self.pick(None, [])
        if role == "tool":
            message["tool_call_id"] = self.pick("c", "", "d")
        if role == "assistant" and self.rng.random() < 0.6:
            message["tool_calls"] = self.some(self.call, 2)
        if self.rng.random() < 0.15:
            message["name"] = self.pick("f", "", None)
        if role == "assistant" and self.rng.random() < 0.3:
            message[self.pick("reasoning_content", "reasoning")] = self.pick("a", "", "</think>")
        return message

    def call(self) -> dict[str, Any]:
        value = json.dumps(self.anything())
        arguments = self.pick(
            *["{}", '{"a": 1}', '{"a": [null]}'] * 6,
            "",
            "{",
            "null",
            "[]",
            '"a"',
            value,
            '{"a": NaN}',
            "[" * 2000,
        )
        return {
            "id": self.pick("c", "d", ""),
            "type": "function",
            "function": {"name": self.pick(*NAMES), "arguments": arguments},
        }

    def kwargs(self) -> Any:
        name = self.pick(
            "enable_thinking", "tools", "messages", "a", "", "self", "chat_template", "strftime_now"
        )
        return self.pick(None, {}, {name: self.anything()}, {"enable_thinking": self.anything(4)})

    def sampling(self) -> dict[str, Any]:
        body: dict[str, Any] = {"max_tokens": self.pick(1, 2, 3)}
        limit = self.pick(*range(8), *[None] * 8)
        regex = self.pick(
            "a", "(a|b)+", "", "(", "[", "a{1,5000}", "\\p{L}", "(?=a)", "\\d{3}", "^a$", "é", "\x00"
        )
        choices = self.pick(["a"], [], ["", ""], ["a", "b"], ["("], ["\n", "é"])
        if limit == 0:
            body["regex"] = regex
        elif limit == 1:
            body["guided_json"] = self.pick(self.schema(), json.dumps(self.schema()), "", "{", "5")
        elif limit == 2:
            body["guided_regex"] = regex
        elif limit == 3:
            body["guided_choice"] = choices
        elif limit == 4:
            inner = {
                "json": self.schema(),
                "regex": regex,
                "choice": choices,
                "json_object": self.pick(True, False),
            }
            names = self.rng.sample(sorted(inner), self.pick(0, 1, 1, 1, 2))
            body["structured_outputs"] = {name: inner[name] for name in names}
        elif limit in (5, 6):
            form = {"name": self.pick(*NAMES), "schema": self.schema()}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        elif limit == 7:
            body["response_format"] = {"type": self.pick("text", "json_object")}
        if self.rng.random() < 0.2:
            body["logit_bias"] = {
                self.pick(*["5", "9"] * 6, "05", "+5", "５", " 5", "-1", "", "1e1"): self.pick(1, -100)
            }
        if self.rng.random() < 0.2:
            body["stop"] = self.pick("a", ["a", "a"], ["é", "🦊"], [], None)
        if self.rng.random() < 0.2:
            body["stream"] = True
        if self.rng.random() < 0.2:
            body["n"] = self.pick(1, 2, 3, None)
        if self.rng.random() < 0.2:
            body[self.pick("top_k", "top_p", "min_p", "temperature", "seed", "priority")] = self.pick(
                0, 1, 0.5, -1, 1e300
            )
        if self.rng.random() < 0.1:
            body["allowed_token_ids"] = self.pick([5], [5, 5], [9, 5], [], [-1], [10**9], None)
        return body

    def chat(self) -> dict[str, Any]:
        body = {**self.sampling(), **self.messages()}
        named = {"type": "function", "function": {"name": self.pick("f", "g", *NAMES)}}
        if "tools" in body and self.rng.random() < 0.6:
            body["tool_choice"] = self.pick("required", "required", "auto", "none", None, named, named)
        if self.rng.random() < 0.2:
            body["parallel_tool_calls"] = self.pick(True, False, None)
        if self.rng.random() < 0.2:
            body["logprobs"] = True
        return body

    def messages(self) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}, *self.some(self.message)]}
        if self.rng.random() < 0.7:
            body["tools"] = self.some(self.tool)
        if self.rng.random() < 0.4:
            body["chat_template_kwargs"] = self.kwargs()
        return body

    def completion(self) -> dict[str, Any]:
        prompt = self.pick("a", "", [], ["a", "b"], self.tokens(), [self.tokens(), [1]], "é")
        body = {**self.sampling(), "prompt": prompt}
        if self.rng.random() < 0.3:
            body["echo"] = True
        if self.rng.random() < 0.3:
            body["logprobs"] = self.pick(0, 1, 20, 21)
        return body

    def tokenize(self) -> dict[str, Any]:
        if self.rng.random() < 0.7:
            return self.messages()
        return {"prompt": self.pick(*SCALARS), "add_special_tokens": self.pick(True, False, None)}

    def tokens(self) -> list[int]:
        return self.some(lambda: self.pick(0, 1, 5, 255, 299, 300, 10**9, -1, 2**63), 4)


KEYWORDS: dict[str, Any] = {
    "type": (
        "object",
        "array",
        "string",
        "integer",
        "number",
        "boolean",
        "null",
        ["string", "null"],
        "x",
        [],
    ),
    "properties": "named",
    "patternProperties": "named",
    "$defs": "named",
    "definitions": "named",
    "dependentSchemas": "named",
    "additionalProperties": "schema",
    "propertyNames": "schema",
    "items": "schema",
    "contains": "schema",
    "not": "schema",
    "if": "schema",
    "then": "schema",
    "prefixItems": "schemas",
    "anyOf": "schemas",
    "oneOf": "schemas",
    "allOf": "schemas",
    "required": (["f"], [], ["f", "f"], ["z"]),
    "enum": ([1], [], ["a", None], [{"a": [1]}], [1, 1]),
    "const": (1, None, {"a": 1}, "é", 1e300),
    "pattern": ("a", "(", "(?=a)", "^[a-z]+$", "\\bx"),
    "format": ("date", "uuid", "x", "email", "ipv4"),
    "minLength": (0, 3, -1, 10**9, 1.0),
    "maxLength": (0, 3, -1, 10**9),
    "minItems": (0, 2, -1, 10**6),
    "maxItems": (0, 2, -1, 10**6),
    "minProperties": (0, 1, 5),
    "uniqueItems": (True, False),
    "minimum": (0, -5, 1e300, 0.1, 10**30),
    "maximum": (0, -5, 1e300, 0.1, 10**30),
    "exclusiveMinimum": (0, True, 5),
    "multipleOf": (1, 0, 0.1, -2, 1e-300, 10**30),
    "$ref": ("#", "#/$defs/f", "#/definitions/f", "#/$defs/nowhere", "http://x.example/", "", "#/%", "#a"),
    "$schema": ("http://json-schema.org/draft-07/schema#", "x"),
    "$id": ("x", "http://x.example/", "#"),
    "default": (None, 1),
}


def make_app(template: str) -> Any:
    """A server of a random target with a published chat template."""
    tokenizer = tokenizer_for(template)
    ends = tuple(sorted({tokenizer.eos_token_id, *ChatRenderer(tokenizer).end_token_ids}))
    target = tiny_target(len(tokenizer), 1, eos_token_ids=ends, max_position_embeddings=2048)
    sizes = {"max_batch_size": 4, "max_context": 2000, "kv_tokens": 8000, "graph_mode": "off"}
    llm = LLM(target, tiny_head(target), tokenizer=tokenizer, shape="3,1,4", **sizes)
    return create_app(llm, llm.engine(), ServerConfig(model_name="tiny", allowed_host="x"))


async def send_bodies(app: Any, path: str, num_bodies: int) -> list[Answer]:
    """Send the bodies of the first seeds one after the other -> their answers."""
    answers = []
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://x")
    async with app.router.lifespan_context(app), client:
        for seed in range(num_bodies):
            body = Bodies(seed).body(path)
            response = await asyncio.wait_for(client.post(path, json=body), MOST_S)
            answers.append(Answer(seed, response.status_code, response.text))
    return answers


@pytest.mark.parametrize("num_bodies", [20, pytest.param(2000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_no_body_is_answered_with_500(template, path, num_bodies):
    answers = asyncio.run(send_bodies(make_app(template), path, num_bodies))
    wrong = [each for each in answers if each.status not in (200, 400) or STREAMED_ERROR in each.text]
    assert not wrong, wrong[0]
    assert {each.status for each in answers} == {200, 400}, "some bodies pass and some do not"
