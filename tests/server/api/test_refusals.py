"""What is not supported or not well formed is a 4xx in OpenAI's shape, and the next request is served."""

import json

import pytest
from pydantic import ValidationError

from eagle_kit.server.api.body import parse
from eagle_kit.server.api.errors import ApiError, from_validation
from eagle_kit.server.api.protocol import ChatRequest, CompletionRequest
from tests.server.api.scripted import ScriptedEngine, scripted_llm
from tests.server.api.serving import serving, wait_until

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}
CHAT_BODY, COMPLETE_BODY = {"messages": [USER]}, {"prompt": "ab"}
TOOL = {"type": "function", "function": {"name": "f"}}
LIMIT = 20_000


@pytest.fixture(scope="module")
def server(tokenizer):
    llm = scripted_llm(tokenizer)
    engine = ScriptedEngine(llm, lambda request: [70, 71, 72])
    with serving(llm, engine, max_body_bytes=LIMIT) as running:
        yield running


def refused(server, path, response, status, param=None):
    """Check the shape, and that the server goes on -> the message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(response.json()) == {"error"} and set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
    body = CHAT_BODY if path == CHAT else COMPLETE_BODY
    assert server.http.post(path if path in (CHAT, COMPLETE) else COMPLETE, json=body).status_code == 200
    return error["message"]


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        (CHAT, {"best_of": 2}, "best_of"),
        (COMPLETE, {"best_of": 2}, "best_of"),
        (COMPLETE, {"suffix": "x"}, "suffix"),
        (COMPLETE, {"messages": [USER]}, "messages"),
        (CHAT, {"functions": []}, "functions"),
        (CHAT, {"temprature": 1}, "temprature"),
        (CHAT, {"reasoning_effort": "huge"}, "reasoning_effort"),
        (CHAT, {"store": True}, "store"),
        (CHAT, {"service_tier": "flex"}, "service_tier"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
        (CHAT, {"modalities": ["audio"]}, "modalities[0]"),
        (CHAT, {"temperature": True}, "temperature"),
        (CHAT, {"temperature": "1"}, "temperature"),
        (CHAT, {"temperature": -0.1}, "temperature"),
        (CHAT, {"top_p": 0}, "top_p"),
        (CHAT, {"top_k": -2}, "top_k"),
        (CHAT, {"min_p": 1.5}, "min_p"),
        (CHAT, {"n": 0}, "n"),
        (CHAT, {"n": 129}, "n"),
        (CHAT, {"n": True}, "n"),
        (CHAT, {"max_tokens": -1}, "max_tokens"),
        (CHAT, {"max_tokens": 1.0}, "max_tokens"),
        (CHAT, {"max_tokens": 10**30}, "max_tokens"),
        (CHAT, {"seed": 2**63}, "seed"),
        (CHAT, {"seed": 1.5}, "seed"),
        (CHAT, {"stop": ""}, "stop"),
        (CHAT, {"stop": ["a", ""]}, "stop[1]"),
        (CHAT, {"stop": ["a"] * 17}, "stop"),
        (CHAT, {"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        (CHAT, {"stop_token_ids": ["1"]}, "stop_token_ids[0]"),
        (CHAT, {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        (CHAT, {"logprobs": 1}, "logprobs"),
        (COMPLETE, {"logprobs": True}, "logprobs"),
        (COMPLETE, {"logprobs": 21}, "logprobs"),
        (CHAT, {"logit_bias": {"1": 101}}, "logit_bias.1"),
        (CHAT, {"logit_bias": [1]}, "logit_bias"),
        (CHAT, {"tool_choice": "any", "tools": [TOOL]}, "tool_choice"),
        (CHAT, {"tool_choice": {**TOOL, "more": 1}, "tools": [TOOL]}, "tool_choice.more"),
        (CHAT, {"tools": [{"type": "web_search"}]}, None),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"response_format": {"type": "grammar", "grammar": "x"}}, None),
        (CHAT, {"metadata": {"a": 1}}, "metadata.a"),
        (CHAT, {"stream": "yes"}, "stream"),
        (CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}}, None),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        (CHAT, {"messages": [{**USER, "colour": "red"}]}, "messages[0].colour"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (COMPLETE, {"prompt": []}, "prompt"),
        (COMPLETE, {"prompt": None}, "prompt"),
        (COMPLETE, {"prompt": [1, "a"]}, "prompt[1]"),
        (COMPLETE, {"prompt": ["a", 1]}, "prompt[1]"),
        (COMPLETE, {"prompt": [[1], []]}, "prompt[1]"),
        (COMPLETE, {"prompt": [1, True]}, "prompt[1]"),
        (COMPLETE, {"prompt": [-1]}, "prompt[0]"),
        (CHAT, {"allowed_token_ids": []}, "allowed_token_ids"),
        (CHAT, {"allowed_token_ids": [1, -1]}, "allowed_token_ids[1]"),
        (CHAT, {"bad_words": "a"}, "bad_words"),
        (COMPLETE, {"bad_words": ["a", ""]}, "bad_words[1]"),
        (CHAT, {"bad_words": ["a" * 257]}, "bad_words[0]"),
        (CHAT, {"bad_words": [" "]}, None),
        (CHAT, {"guided_json": "[1]"}, "guided_json"),
        (CHAT, {"guided_json": '{"maximum": NaN}'}, "guided_json"),
        (CHAT, {"guided_json": 5}, "guided_json"),
        (CHAT, {"guided_choice": []}, "guided_choice"),
        (CHAT, {"structured_outputs": {}}, "structured_outputs"),
        (CHAT, {"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        (CHAT, {"structured_outputs": {"json_object": False}}, "structured_outputs"),
        (CHAT, {"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
    ],
)
def test_a_wrong_or_unsupported_parameter_is_named(server, path, change, param):
    body = {**(CHAT_BODY if path == CHAT else COMPLETE_BODY), **change}
    refused(server, path, server.http.post(path, json=body), 400, param)


@pytest.mark.parametrize(("path", "name", "value"), [(CHAT, "echo", False), (COMPLETE, "best_of", 1)])
def test_values_that_say_what_is_done_anyway_are_taken_and_no_others(server, path, name, value):
    body = CHAT_BODY if path == CHAT else COMPLETE_BODY
    assert server.http.post(path, json={**body, name: value}).status_code == 200
    other = 5 if type(value) is int else not value
    refused(server, path, server.http.post(path, json={**body, name: other}), 400, name)


def test_parameters_of_other_engines_are_refused_with_what_to_send(server):
    for name, ours in [
        ("max_new_tokens", "max_tokens"),
        ("truncate_prompt_tokens", "Shorten the prompt"),
        ("rid", "X-Request-Id"),
        ("suffix", "Leave it out"),
    ]:
        answer = server.http.post(COMPLETE, json={**COMPLETE_BODY, name: True})
        assert ours in refused(server, COMPLETE, answer, 400, name)


BOUNDS = {
    "top_p": (0, 0.01, 1, 1.01),
    "top_k": (-2, -1, 2**31 - 1, 2**31),
    "min_p": (-0.01, 0, 1, 1.01),
    "n": (0, 1, 128, 129),
    "max_tokens": (-1, 0, 2**31 - 1, 2**31),
    "max_completion_tokens": (-1, 0, 2**31 - 1, 2**31),
    "seed": (-(2**63) - 1, -(2**63), 2**63 - 1, 2**63),
    "frequency_penalty": (-2.01, -2, 2, 2.01),
    "presence_penalty": (-2.01, -2, 2, 2.01),
    "repetition_penalty": (0, 0.01, 10, 10.1),
    "priority": (-(2**31) - 1, -(2**31), 2**31 - 1, 2**31),
    "top_logprobs": (-1, 0, 20, 21),
    "prompt_logprobs": (-1, 0, 20, 21),
}
"""Of every number of a chat: too small, smallest, largest, too large."""
LENGTHS = {
    "stop": ("a", 0, 16),
    "stop_token_ids": (5, 0, 256),
    "messages": (USER, 1, 4096),
    "tools": (TOOL, 0, 512),
    "allowed_token_ids": (5, 1, 2**15),
    "bad_words": ("a", 0, 128),
    "guided_choice": ("a", 1, 256),
}
"""Of every list: an item, the fewest and the most of it."""


def is_allowed(**change):
    try:
        parse(ChatRequest, json.dumps({**CHAT_BODY, **change}).encode())
    except ApiError as refusal:
        assert refusal.status == 400 and (refusal.param or next(iter(change))).startswith(next(iter(change)))
        return False
    return True


@pytest.mark.parametrize("name", BOUNDS)
def test_numbers_are_allowed_up_to_their_bounds(name):
    more = {"logprobs": True} if name == "top_logprobs" else {}
    assert [is_allowed(**{name: value}, **more) for value in BOUNDS[name]] == [False, True, True, False]


def test_a_temperature_may_be_any_number_from_zero_on():
    assert is_allowed(temperature=0) and is_allowed(temperature=2.5) and is_allowed(temperature=1e300)
    assert not is_allowed(temperature=-0.01)


def test_texts_and_lists_are_allowed_up_to_their_bounds():
    # Lists, texts and tables.
    for name, (item, fewest, most) in LENGTHS.items():
        assert is_allowed(**{name: [item] * most}) and not is_allowed(**{name: [item] * (most + 1)})
        assert is_allowed(**{name: [item] * fewest})
        assert fewest == 0 or not is_allowed(**{name: [item] * (fewest - 1)})
    for name, most in (("stop", 1024), ("regex", 65536)):
        assert is_allowed(**{name: "a" * most}) and not is_allowed(**{name: "a" * (most + 1)})
        assert not is_allowed(**{name: ""})
    for name, most in (("logit_bias", 2**15), ("metadata", 64), ("chat_template_kwargs", 64)):
        value = {"metadata": "x"}.get(name, 1)
        assert is_allowed(**{name: {str(i): value for i in range(most)}})
        assert not is_allowed(**{name: {str(i): value for i in range(most + 1)}})

    # Values within them.
    for bias in (-100, 100):
        assert is_allowed(logit_bias={"1": bias}) and not is_allowed(logit_bias={"1": 1.01 * bias})
    for choice in ([], [TOOL] * 2):
        assert not is_allowed(modalities=choice)

    # Prompts of a completion.
    prompt = json.dumps({"prompt": [[5]] * 4096, "logprobs": 20, "n": 1}).encode()
    assert len(parse(CompletionRequest, prompt).prompts) == 4096
    for wrong in ({"prompt": [[5]] * 4097}, {"prompt": ["a"] * 4097}, {"prompt": "a", "logprobs": -1}):
        with pytest.raises(ApiError):
            parse(CompletionRequest, json.dumps(wrong).encode())


def test_signs_of_a_body_are_allowed_up_to_their_number():
    for sign, most in (("[", 2**17), ("{", 2**17), (":", 2**17), (",", 2**20)):
        # What the body has of it outside of the prompt counts too.
        own = json.dumps({"prompt": ""}).count(sign)
        for more, is_right in ((0, True), (1, False)):
            body = json.dumps({"prompt": sign * (most - own + more)}).encode()
            if is_right:
                parse(CompletionRequest, body)
                continue
            with pytest.raises(ApiError) as refusal:
                parse(CompletionRequest, body)
            assert refusal.value.code == "body_too_complex"


NAMED = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SAID = {"role": "assistant", "content": "a"}
SCHEMA = {"name": "s", "schema": {}}


@pytest.mark.parametrize(
    ("change", "is_right"),
    [
        ({"tool_choice": "none"}, True),
        ({"tools": []}, True),
        ({"tools": [], "tool_choice": "auto"}, True),
        ({"tools": [], "tool_choice": "required"}, False),
        ({"tools": [], "tool_choice": NAMED}, False),
        ({"allowed_token_ids": [5], "regex": "a"}, False),
        ({"allowed_token_ids": [5], "tools": [TOOL], "tool_choice": "required"}, False),
        ({"guided_json": {}, "regex": "a"}, False),
        ({"guided_json": {}, "response_format": {"type": "text"}}, True),
        ({"guided_json": {}, "structured_outputs": {"json": {}}}, False),
        ({"guided_regex": "a", "tools": [TOOL], "tool_choice": "required"}, False),
        ({"tool_choice": NAMED, "tools": [TOOL]}, True),
        ({"tool_choice": "required", "tools": [TOOL], "response_format": {"type": "text"}}, True),
        ({"tool_choice": "auto", "tools": [TOOL], "regex": "a"}, True),
        ({"regex": "a", "response_format": {"type": "text"}}, True),
        ({"response_format": {"type": "json_object", "json_schema": SCHEMA}}, False),
        ({"response_format": {"type": "text", "json_schema": SCHEMA}}, False),
        ({"max_tokens": 3, "max_completion_tokens": 3}, True),
        ({"logprobs": True, "top_logprobs": 0}, True),
        ({"logprobs": False, "top_logprobs": 0}, False),
        ({"stream": False, "stream_options": {}}, False),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, True),
        ({"modalities": ["text"], "store": False, "service_tier": "default", "user": "me"}, True),
        ({"messages": [USER, {**SAID, "reasoning": "b", "reasoning_content": "b"}]}, True),
        ({"messages": [USER, {**SAID, "reasoning": "b", "reasoning_content": "c"}]}, False),
        ({"messages": [{**USER, "reasoning_content": "b"}]}, False),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}, True),
        ({"messages": [USER, {"role": "assistant", "tool_calls": []}]}, False),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, False),
        ({"messages": [{**USER, "tool_call_id": "1"}]}, False),
        ({"messages": [USER, {**SAID, "annotations": [], "audio": None, "refusal": None}]}, True),
        ({"messages": [USER, {**SAID, "annotations": [1]}]}, False),
        ({"messages": [{**USER, "name": "Bo"}]}, True),
    ],
    ids=str,
)
def test_what_goes_together_in_a_chat(change, is_right):
    assert is_allowed(**change) is is_right


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        (CHAT, {"stream_options": {"include_usage": True}}, "set stream to true"),
        (CHAT, {"top_logprobs": 2}, "needs logprobs"),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "differ"),
        (CHAT, {"max_tokens": 401}, "has room for"),
        (CHAT, {"regex": "a", "response_format": {"type": "json_object"}}, "exclude"),
        (CHAT, {"tool_choice": "auto"}, "needs tools"),
        (CHAT, {"tool_choice": "required"}, "needs tools"),
        (
            CHAT,
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]},
            "none of the tools",
        ),
        (
            CHAT,
            {"tool_choice": TOOL, "tools": [TOOL, TOOL]},
            "the name of several tools",
        ),
        (CHAT, {"tool_choice": TOOL, "tools": [TOOL], "regex": "a"}, "excludes"),
        (CHAT, {"logit_bias": {"x": 1}}, "no token id"),
        (CHAT, {"logit_bias": {"5": 1, "05": 2}}, "the key '05', which is no token id"),
        (CHAT, {"logit_bias": {"300": 1}}, "outside 0..299"),
        (CHAT, {"stop_token_ids": [300]}, "outside 0..299"),
        (CHAT, {"allowed_token_ids": [5, 300]}, "outside 0..299"),
        (CHAT, {"stop": ["a"] * 17}, "stop: List should have at most 16 items"),
        (CHAT, {"stop": 5}, "a valid string, or a valid array"),
        (COMPLETE, {"prompt": [[]]}, "prompt[0]: List should have at least 1 item"),
        (COMPLETE, {"prompt": []}, "prompt: List should have at least 1 item"),
        (COMPLETE, {"prompt": {}}, "a valid string, or a valid array"),
        (COMPLETE, {"prompt": "a" * 400}, "400 tokens"),
        (COMPLETE, {"prompt": ""}, "empty"),
        (COMPLETE, {"prompt": ["ab"] * 33, "n": 128}, "holds at most"),
    ],
)
def test_what_cannot_be_done_together_is_explained(server, path, change, words):
    body = {**(CHAT_BODY if path == CHAT else COMPLETE_BODY), **change}
    assert words in refused(server, path, server.http.post(path, json=body), 400)


@pytest.mark.parametrize(
    ("prompt", "most"), [(["a"] * 10_000, 4096), ([[5]] * 10_000, 4096), ([5] * (2**20 + 1), 2**20)]
)
def test_a_list_of_prompts_that_is_too_long_is_told_its_limit(prompt, most):
    with pytest.raises(ValidationError) as mistakes:
        CompletionRequest.model_validate({"prompt": prompt})
    assert f"prompt: List should have at most {most} items" in from_validation(mistakes.value).message


def test_pictures_are_refused(server):
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}, part]}]}
    refused(server, CHAT, server.http.post(CHAT, json=body), 400)


def test_arguments_that_are_no_object_are_refused(server):
    for arguments in ("[1]", "{", "nul", "[" * 5000):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        body = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}
        refused(server, CHAT, server.http.post(CHAT, json=body), 400)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"3",
        b'"x"',
        b"{'prompt': 'x'}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00\\ud800"}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "a\x00b"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x", "max_tokens": -1e308}',
        b'{"prompt": ' + b"[" * 5000 + b"}",
        b'{"prompt": "x"} {"prompt": "y"}',
        b"\xef\xbb\xbf\xff",
        b'{"prompt": "x", "n": 1, "\\u0000": 1}',
    ],
)
def test_malformed_bodies_are_refused(server, content):
    headers = {"Content-Type": "application/json"}
    refused(server, COMPLETE, server.http.post(COMPLETE, content=content, headers=headers), 400)


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_other_content_types_are_refused(server, kind):
    headers = {"Content-Type": kind} if kind else {}
    content = json.dumps(COMPLETE_BODY).encode()
    refused(server, COMPLETE, server.http.post(COMPLETE, content=content, headers=headers), 415)


def test_a_body_of_exactly_the_limit_is_read(server):
    for size, status in ((LIMIT, 200), (LIMIT + 1, 413)):
        spare = size - len(json.dumps({**COMPLETE_BODY, "user": ""}))
        content = json.dumps({**COMPLETE_BODY, "user": "x" * spare}).encode()
        assert len(content) == size
        answer = server.http.post(COMPLETE, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == status, answer.text


def test_codes_tell_programs_what_is_wrong(server):
    headers = {"Content-Type": "application/json"}
    many = json.dumps({**COMPLETE_BODY, **{f"k{i}": 1 for i in range(101)}})
    few = json.dumps({**COMPLETE_BODY, **{f"k{i}": 1 for i in range(100)}})
    for content, code in (
        ("{", "invalid_json"),
        (json.dumps({**COMPLETE_BODY, "suffix": "x"}), "unsupported_parameter"),
        (many, "many_mistakes"),
        (few, "unsupported_parameter"),
        (json.dumps({**COMPLETE_BODY, "user": "x" * LIMIT}), "body_too_large"),
        (json.dumps({**COMPLETE_BODY, "model": "other"}), "model_not_found"),
        (json.dumps({**COMPLETE_BODY, "n": 0}), None),
    ):
        error = server.http.post(COMPLETE, content=content, headers=headers).json()["error"]
        assert error["code"] == code, error


def test_many_mistakes_name_a_page_that_is_there(server):
    many = {**COMPLETE_BODY, **{f"k{i}": 1 for i in range(101)}}
    message = server.http.post(COMPLETE, json=many).json()["error"]["message"]
    page = message.split()[-1].removesuffix(".")
    assert server.http.get(page).status_code == 200


def test_of_a_key_that_comes_twice_the_last_counts(server):
    headers = {"Content-Type": "application/json"}
    content = '{"prompt": "ab", "max_tokens": 1, "max_tokens": 2}'
    answer = server.http.post(COMPLETE, content=content, headers=headers)
    assert answer.json()["usage"]["completion_tokens"] == 2


def test_a_charset_beside_the_content_type_is_fine(server):
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    content = json.dumps(COMPLETE_BODY).encode()
    assert server.http.post(COMPLETE, content=content, headers=headers).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_read_to_its_end_and_refused(server, chunked):
    body = json.dumps({"prompt": "a" * (5 * LIMIT)}).encode()
    content = (body[i : i + 999] for i in range(0, len(body), 999)) if chunked else body
    answer = server.http.post(COMPLETE, content=content, headers={"Content-Type": "application/json"})
    refused(server, COMPLETE, answer, 413)


def test_other_models_paths_and_methods_have_the_same_shape(server):
    answer = server.http.post(CHAT, json={**CHAT_BODY, "model": "gpt-9"})
    refused(server, CHAT, answer, 404, "model")
    assert answer.json()["error"]["code"] == "model_not_found"
    message = refused(server, CHAT, server.http.post("/v1/embeddings", json={"input": "a"}), 404)
    assert "/v1/completions" in message and "/tokenize" in message
    answer = server.http.get(CHAT)
    refused(server, CHAT, answer, 405)
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": [USER]}),
        ("/tokenize", {"messages": [USER], "add_special_tokens": False}),
        ("/tokenize", {"prompt": "x", "tools": [TOOL]}),
        ("/detokenize", {"tokens": [300]}),
        ("/detokenize", {"tokens": "x"}),
        ("/detokenize", {"tokens": [2**31]}),
        ("/abort", {}),
        ("/abort", {"request_id": "x", "abort_all": True}),
        ("/abort", {"abort_all": False}),
    ],
)
def test_the_other_endpoints_are_as_strict(server, path, body):
    refused(server, path, server.http.post(path, json=body), 400)


def test_a_defect_in_one_request_is_a_500_of_that_request_alone(server, monkeypatch):
    def broken(request):
        raise ZeroDivisionError("a defect while a request is taken")

    monkeypatch.setattr(server.engine, "add_request", broken)
    answer = server.http.post(COMPLETE, json=COMPLETE_BODY)
    monkeypatch.undo()
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "internal_error"
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.post(COMPLETE, json=COMPLETE_BODY).json()["choices"][0]["text"] == "def"


def test_nothing_stays_behind_after_all_that(server):
    service = server.service
    wait_until(lambda: not (service.engine.num_live or service._live or service.limits._parallel))
    assert not server.engine.has_work
