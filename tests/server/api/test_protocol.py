"""The protocol over HTTP, with an engine that says what the tests want it to say."""

import copy
import json
import math
import time
from collections import Counter
from types import SimpleNamespace

import openai
import pytest
from chat_templates import tokenizer_for

from eagle_kit.core.output import ResponseLogprobs
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.structured_outputs import Grammar
from eagle_kit.data.chat.forms import to_conversation
from eagle_kit.data.chat.renderer import ChatRenderer
from eagle_kit.engine.text_stream import Detokenizer
from eagle_kit.engine.token_names import TokenNames
from eagle_kit.server.api.logprobs import (
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
)
from eagle_kit.server.api.metrics import Metrics
from tests.server.api.scripted import ScriptedEngine, scripted_llm
from tests.server.api.serving import serving

TEXT = "Grüße, 世界! \U0001f600 The end of it."
NUM_TOKENS = len(TEXT.encode()) + 1
"""Tokens of the response: one a byte, and the one that ends it."""
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def one_byte_a_step(tokenizer):
    """Emits TEXT one byte a step, so that every character is cut; slowly, so that pieces come one by one."""
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(TEXT.encode())
    llm = scripted_llm(tokenizer)
    engine = ScriptedEngine(llm, lambda request: ids, per_step=1, step_s=0.005)
    with serving(llm, engine) as server:
        yield server


def post(server, path, body, **options):
    return server.http.post(path, json=body, **options)


def chat(server, **body):
    return post(server, "/v1/chat/completions", {"messages": MESSAGES, **body})


def complete(server, **body):
    return post(server, "/v1/completions", {"prompt": "ab", "max_tokens": 200, **body})


def test_a_stream_shows_whole_characters_only_and_joins_to_the_whole_response(one_byte_a_step):
    client = one_byte_a_step.openai
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == TEXT and "�" not in "".join(pieces)
    assert len([piece for piece in pieces if piece]) > 3  # tokens that arrive together are one piece
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-2:] == [None, "stop"]
    usage = chunks[-1].usage
    assert chunks[-1].choices == [] and usage.completion_tokens == NUM_TOKENS
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert whole.choices[0].message.content == TEXT and whole.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "stop", ["世界", ["The", "世"], ["end of", "zzz"], ["zzz", "end of"], ["\U0001f600 T"]]
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_text_across_tokens_never_shows_and_ends_the_response(one_byte_a_step, stop, stream):
    first = min(TEXT.find(text) for text in ([stop] if isinstance(stop, str) else stop) if text in TEXT)
    answer = one_byte_a_step.openai.completions.create(
        model="tiny", prompt="ab", max_tokens=200, stop=stop, stream=stream
    )
    if stream:
        chunks = list(answer)
        assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT[:first]
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT[:first], "stop")


@pytest.mark.parametrize("stream", [True, False])
def test_a_token_that_ends_the_response_is_counted_and_is_no_text(one_byte_a_step, tokenizer, stream):
    """``T`` is a token like any other, unlike the special ones, which no text shows anyway."""
    (token,) = tokenizer("T", add_special_tokens=False)["input_ids"]
    shown = TEXT[: TEXT.index("T")]
    body = {"stop_token_ids": [token], "prompt": "ab", "max_tokens": 200, "stream_options": None}
    if stream:
        body["stream_options"] = {"include_usage": True}
        *chunks, last = events(one_byte_a_step, "/v1/completions", body)
        choices = [chunk["choices"][0] for chunk in chunks]
    else:
        last = complete(one_byte_a_step, **body).json()
        choices = last["choices"]
    assert "".join(choice["text"] for choice in choices) == shown
    assert choices[-1]["finish_reason"] == "stop"
    assert last["usage"]["completion_tokens"] == len(shown.encode()) + 1


def test_max_tokens_ends_a_response_with_length_and_releases_what_was_held(one_byte_a_step):
    answer = complete(one_byte_a_step, max_tokens=3).json()
    assert answer["choices"][0] == {"index": 0, "text": "Gr�", "logprobs": None, "finish_reason": "length"}
    assert answer["usage"]["completion_tokens"] == 3


def test_bodies_as_the_router_of_sglang_sends_them_on_are_answered(one_byte_a_step):
    """What sglang-router 0.3.2 made of bodies with a model, messages or a prompt, and max_tokens."""
    both = {
        "no_stop_trim": False,
        "ignore_eos": False,
        "skip_special_tokens": True,
        "return_hidden_states": False,
    }
    reasoning = {"continue_final_message": False, "separate_reasoning": True, "stream_reasoning": True}
    answer = chat(one_byte_a_step, **both, **reasoning, logprobs=False, max_completion_tokens=5, stream=False)
    assert answer.status_code == 200
    assert complete(one_byte_a_step, **both, echo=False, stream=False).status_code == 200
    for name, value in {**both, **reasoning}.items():
        if name not in ("ignore_eos", "skip_special_tokens", "no_stop_trim", "continue_final_message"):
            answer = chat(one_byte_a_step, **{name: not value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_choices_have_seeds_in_a_row_and_prompts_are_counted_once(one_byte_a_step):
    engine = one_byte_a_step.engine
    engine.seen.clear()
    answer = complete(one_byte_a_step, prompt=["ab", "cde"], n=2, seed=2**63 - 1, max_tokens=2).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [request.params.seed for request in engine.seen] == [2**63 - 1, -(2**63)] * 2
    assert [len(request.prompt_ids) for request in engine.seen] == [2, 2, 3, 3]
    assert answer["usage"]["prompt_tokens"] == 5 and answer["usage"]["completion_tokens"] == 8


def test_several_choices_stream_side_by_side(one_byte_a_step):
    stream = one_byte_a_step.openai.chat.completions.create(model="tiny", messages=MESSAGES, n=3, stream=True)
    texts = ["", "", ""]
    roles = [[], [], []]
    ends = []
    for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index].append(choice.delta.role)
        if choice.finish_reason:
            ends.append(choice.index)
    assert texts == [TEXT] * 3 and sorted(ends) == [0, 1, 2]
    for own in roles:
        assert own[0] == "assistant" and set(own[1:]) == {None}


@pytest.mark.parametrize(
    ("path", "kind", "kind_of_events"),
    [
        ("/v1/chat/completions", "chat.completion", "chat.completion.chunk"),
        ("/v1/completions", "text_completion", "text_completion"),
    ],
)
def test_responses_and_events_say_what_they_are(one_byte_a_step, path, kind, kind_of_events):
    body = {"messages": MESSAGES} if "chat" in path else {"prompt": "ab"}
    body["max_tokens"] = 2
    whole = post(one_byte_a_step, path, body).json()
    streamed = events(one_byte_a_step, path, {**body, "stream_options": {"include_usage": True}})
    heads = []
    for data, expected in ((whole, kind), *((event, kind_of_events) for event in streamed)):
        assert data["object"] == expected and data["model"] == "tiny"
        assert abs(data["created"] - time.time()) < 60
        heads.append(data["system_fingerprint"])
    assert len(set(heads)) == 1 and heads[0].startswith("eagle_kit-")
    assert set(streamed[-1]) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}


def test_the_last_token_of_the_context_can_be_asked_for(one_byte_a_step):
    """The context holds 400 tokens; what is absent is as much as there is room for."""
    for num_prompt_tokens, asked, num_expected in ((399, 1, 1), (395, None, 5), (380, 20, 20)):
        body = {"prompt": [5] * num_prompt_tokens, "max_tokens": asked}
        answer = post(one_byte_a_step, "/v1/completions", body).json()
        assert answer["usage"]["completion_tokens"] == num_expected
        assert answer["choices"][0]["finish_reason"] == "length"
    messages = [{"role": "user", "content": "a" * 370}]
    answer = chat(one_byte_a_step, messages=messages).json()
    assert answer["usage"]["total_tokens"] == 400 and answer["choices"][0]["finish_reason"] == "length"


def test_cached_tokens_of_a_prompt_count_once_however_many_choices_it_has(one_byte_a_step):
    body = {"prompt": [97] * 40, "max_tokens": 2}
    assert complete(one_byte_a_step, **body).status_code == 200
    alone = complete(one_byte_a_step, **body).json()["usage"]
    several = complete(one_byte_a_step, **body, n=3).json()["usage"]
    assert 0 < alone["prompt_tokens_details"]["cached_tokens"] < 40
    assert several["prompt_tokens_details"] == alone["prompt_tokens_details"]
    assert several["prompt_tokens"] == 40


def test_absent_parameters_have_the_defaults_of_openai(one_byte_a_step):
    engine = one_byte_a_step.engine
    engine.seen.clear()
    assert chat(one_byte_a_step).status_code == 200
    post(one_byte_a_step, "/v1/completions", {"prompt": [5, 6]})
    assert chat(one_byte_a_step, top_k=-1, stop=None, n=None, seed=None).status_code == 200
    chatted, completed, given = engine.seen
    assert given.params == chatted.params, "-1 is vLLM's for all tokens, and null is absent"
    assert chatted.params.temperature == 1.0 and chatted.params.top_p == 1.0 and chatted.params.seed is None
    assert chatted.params.max_tokens == 400 - len(chatted.prompt_ids)
    assert completed.params.max_tokens == 16 and completed.prompt_ids == [5, 6]


def test_every_parameter_reaches_the_engine(one_byte_a_step):
    engine = one_byte_a_step.engine
    engine.seen.clear()
    body = {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 3,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"17": 2, "5": -100.0},
        "stop": ["x", "y", "x"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "max_completion_tokens": 7,
        "priority": 4,
        "logprobs": True,
        "top_logprobs": 3,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "s", "strict": True, "schema": {"type": "object"}},
        },
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
    }
    assert chat(one_byte_a_step, **body).status_code == 200
    params = engine.seen[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.7, 0.8, 5, 0.1)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.5, -0.5, 1.2)
    assert params.logit_bias == {17: 2.0, 5: -100.0} and params.stop == ("x", "y")
    assert params.stop_token_ids == (9,) and params.ignore_eos and params.max_tokens == 7
    assert params.logprobs == 3 and engine.seen[0].priority == 4
    assert params.grammar == Grammar("json_schema", '{"type": "object"}')
    assert chat(one_byte_a_step, regex="a+").status_code == 200
    assert engine.seen[1].params.grammar == Grammar("regex", "a+")
    assert chat(one_byte_a_step, response_format={"type": "json_object"}).status_code == 200
    assert engine.seen[2].params.grammar == Grammar("json_object", "")
    assert chat(one_byte_a_step, allowed_token_ids=[7, 5], temperature=7.5, tools=[]).status_code == 200
    words = ["ab", "c", "ab"]
    assert chat(one_byte_a_step, bad_words=words).status_code == 200
    assert engine.seen[4].params.bad_words == ("ab", "c") and len(engine.seen[4].bad_word_ids) == 4
    assert engine.seen[3].params.allowed_token_ids == (7, 5) and engine.seen[3].params.temperature == 7.5


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({"guided_json": {"type": "object"}}, Grammar("json_schema", '{"type": "object"}')),
        ({"guided_json": ' {"type":"object"}'}, Grammar("json_schema", '{"type": "object"}')),
        ({"guided_regex": "a|b"}, Grammar("regex", "a|b")),
        ({"guided_choice": ["a.b", "c"]}, Grammar("regex", r"a\.b|c")),
        ({"structured_outputs": {"json": {"type": "object"}}}, Grammar("json_schema", '{"type": "object"}')),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["(", "b"]}}, Grammar("regex", r"\(|b")),
        ({"structured_outputs": {"json_object": True, "regex": None}}, Grammar("json_object", "")),
    ],
)
def test_names_of_vllm_for_grammars_are_taken(one_byte_a_step, body, grammar):
    for ask in (chat, complete):
        one_byte_a_step.engine.seen.clear()
        assert ask(one_byte_a_step, **body).status_code == 200
        assert one_byte_a_step.engine.seen[0].params.grammar == grammar


def test_logprobs_have_both_shapes_with_bytes_of_cut_characters(one_byte_a_step):
    answer = chat(one_byte_a_step, max_tokens=4, logprobs=True, top_logprobs=2).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]) == TEXT.encode()[:4]
    assert content[0]["token"] == "G" and content[0]["logprob"] == -0.5
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-1.5, -2.5]
    answer = complete(one_byte_a_step, max_tokens=4, logprobs=1).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["G", "r", "bytes:\\xc3", "bytes:\\xbc"]
    assert logprobs["token_logprobs"] == [-0.5] * 4 and logprobs["text_offset"] == [0, 1, 2, 2]
    assert logprobs["top_logprobs"][0] == {"G": -0.5, "<|endoftext|>": -1.5}


def test_streamed_logprobs_are_those_of_the_whole_response(one_byte_a_step):
    whole = complete(one_byte_a_step, logprobs=0).json()["choices"][0]["logprobs"]
    parts = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for data in events(
        one_byte_a_step, "/v1/completions", {"prompt": "ab", "max_tokens": 200, "logprobs": 0}
    ):
        for name, values in data["choices"][0]["logprobs"].items():
            parts[name] += values
    assert parts == whole
    names = [chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}" for byte in TEXT.encode()]
    assert whole["tokens"][:-1] == names
    # Each of a character's bytes begins where the character does.
    assert whole["text_offset"][:-1] == [i for i, letter in enumerate(TEXT) for _ in letter.encode()]
    assert whole["text_offset"][-1] == len(TEXT)
    both = complete(one_byte_a_step, logprobs=0, n=2).json()["choices"]
    assert [choice["logprobs"] for choice in both] == [whole, whole]


def test_names_of_tokens_are_found_once(tokenizer, monkeypatch):
    names = TokenNames(tokenizer)
    find = names._bytes
    calls = []
    monkeypatch.setattr(names, "_bytes", lambda token, text: calls.append(token) or find(token, text))
    entries = ResponseLogprobs()
    for _ in range(4):
        entries.append(-0.5, [70, 71], [-0.5, -1.5])
    content = json.loads("".join(chat_logprobs(names, [70] * 4, entries)))["content"]
    assert [item["token"] for item in content] == [tokenizer.decode([70])] * 4
    assert calls == [70, 71]


def test_tokens_of_all_bytes_are_known_by_them(tokenizer):
    """In byte-level BPE, over all bytes that UTF-8 has, and as SentencePiece writes a byte."""
    names = TokenNames(tokenizer)
    places = [*range(1, 0x800), *range(0x800, 0xD800, 0x3F), *range(0x10000, 0x110000, 0xFFF)]
    text = "".join(map(chr, places))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(names.of(token)[1] for token in ids) == text.encode()
    alone = SimpleNamespace(
        decode=lambda ids, skip_special_tokens: "\ufffd" * len(ids),
        id_to_token=lambda id: f"<0x{id:02X}>",
        get_vocab_size=lambda: 256,
    )
    letters = SimpleNamespace(backend_tokenizer=alone)
    names = TokenNames(letters)
    assert [names.of(byte)[1] for byte in range(256)] == [bytes([byte]) for byte in range(256)]


def test_a_probability_of_zero_is_a_number_of_json(tokenizer):
    entries = ResponseLogprobs()
    entries.append(-math.inf, [70, 71], [-math.inf, -0.5])
    names = TokenNames(tokenizer)
    (chosen,) = json.loads("".join(chat_logprobs(names, [70], entries)))["content"]
    assert chosen["logprob"] == -9999.0
    assert [top["logprob"] for top in chosen["top_logprobs"]] == [-9999.0, -0.5]
    offsets = TextOffsets(Detokenizer(tokenizer))
    found = json.loads("".join(completion_logprobs(names, [70], entries, offsets)))
    assert found["token_logprobs"] == [-9999.0]
    assert sorted(found["top_logprobs"][0].values()) == [-9999.0, -0.5]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_in_every_chunk_counts_the_tokens_of_the_chunks(scripted, path):
    llm, engine = scripted(TEXT, per_step=3, step_s=0.005)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": MESSAGES} if "chat" in path else {"prompt": "ab", "max_tokens": 200}
    logprobs = {"logprobs": True} if "chat" in path else {"logprobs": 0}
    with serving(llm, engine) as server:
        streamed = events(server, path, {**body, "n": 2, "stream_options": options})
        plain = events(server, path, {**body, "stream_options": {"include_usage": True}})
        exact = events(server, path, {**body, "n": 2, "stream_options": options, **logprobs})
    num_sent = 0
    for data in exact:
        for choice in data["choices"]:
            entries = choice["logprobs"] or {}
            num_sent += len(entries.get("content") or entries.get("tokens") or ())
        if any(choice["logprobs"] for choice in data["choices"]):
            assert data["usage"]["completion_tokens"] == num_sent
    assert num_sent == 2 * NUM_TOKENS
    counts = [data["usage"]["completion_tokens"] for data in streamed]
    assert counts == sorted(counts) and counts[-1] == 2 * NUM_TOKENS
    assert streamed[-1]["choices"] == [] and len(set(counts)) > 5
    assert all(data["usage"] is None for data in plain[:-1])


def events(server, path, body):
    """The data of every event but the end mark, which must come last."""
    with server.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache", "no proxy may keep it"
        assert response.headers["x-accel-buffering"] == "no", "nor collect it"
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_speculation_details_come_on_request_only(one_byte_a_step):
    assert "speculation" not in chat(one_byte_a_step).json()
    details = chat(one_byte_a_step, return_speculation=True, max_tokens=5).json()["speculation"]
    assert (details["accept_length"], details["num_verifies"], details["histogram"]) == (1.0, 4, [0, 4])
    body = {"messages": MESSAGES, "return_speculation": True, "max_tokens": 5}
    streamed = events(one_byte_a_step, "/v1/chat/completions", body)
    assert streamed[-1]["speculation"] == details and streamed[-1]["choices"] == []
    assert all("usage" not in data for data in streamed)


def test_speculation_details_are_those_of_all_choices(scripted):
    with serving(*scripted("abcdefg")) as server:
        alone = complete(server, return_speculation=True).json()["speculation"]
        assert (alone["num_verifies"], alone["num_accepted_tokens"]) == (3, 5)
        assert alone["num_accepted_at"] == [3, 2]
        assert (alone["histogram"], alone["shapes"], alone["reasons"]) == ([0, 1, 0, 2], {"3,1,4": 3}, [])
        assert alone["accept_length"] == round(7 / 3, 4)
        three = complete(server, return_speculation=True, n=3).json()["speculation"]
    assert three["accept_length"] == alone["accept_length"] and three["shapes"] == {"3,1,4": 9}
    for name in ("num_verifies", "num_accepted_tokens"):
        assert three[name] == 3 * alone[name]
    for name in ("histogram", "num_accepted_at"):
        assert three[name] == [3 * count for count in alone[name]]


@pytest.mark.parametrize("prompt", ["ab", [3, 4], [[3, 4]]])
@pytest.mark.parametrize("stream", [True, False])
def test_echo_puts_the_prompt_before_the_text(one_byte_a_step, prompt, stream):
    text = "ab" if prompt == "ab" else '!"'
    body = {"prompt": prompt, "echo": True, "max_tokens": 2}
    if stream:
        texts = [data["choices"][0]["text"] for data in events(one_byte_a_step, "/v1/completions", body)]
        assert "".join(texts) == text + "Gr"
    else:
        assert post(one_byte_a_step, "/v1/completions", body).json()["choices"][0]["text"] == text + "Gr"


def test_every_prompt_is_repeated_before_each_of_its_texts(one_byte_a_step):
    body = {"prompt": ["ab", "cd"], "n": 2, "echo": True, "max_tokens": 2}
    answer = post(one_byte_a_step, "/v1/completions", body).json()
    expected = ["abGr", "abGr", "cdGr", "cdGr"]
    assert [choice["text"] for choice in answer["choices"]] == expected
    texts = [""] * 4
    for data in events(one_byte_a_step, "/v1/completions", body):
        texts[data["choices"][0]["index"]] += data["choices"][0]["text"]
    assert texts == expected


def test_content_parts_and_roles_reach_the_template(one_byte_a_step):
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "d"},
    ]
    ids = post(one_byte_a_step, "/tokenize", {"messages": messages}).json()["tokens"]
    text = post(one_byte_a_step, "/detokenize", {"tokens": ids}).json()["prompt"]
    assert text == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\nc<|im_end|>\n<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n"
    )


def test_text_and_tokens_go_both_ways(one_byte_a_step):
    answer = post(one_byte_a_step, "/tokenize", {"prompt": TEXT, "model": "tiny"}).json()
    assert answer["count"] == len(answer["tokens"]) == len(TEXT.encode()) and answer["max_model_len"] == 400
    assert post(one_byte_a_step, "/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": TEXT}
    skipped = post(one_byte_a_step, "/detokenize", {"tokens": [2, 3, 2], "skip_special_tokens": True})
    assert skipped.json() == {"prompt": "!"}


def test_special_tokens_begin_a_text_and_are_not_added_to_a_chat(tokenizer):
    """As of a tokenizer that writes a token before every text, which templates write themselves."""
    from tokenizers.processors import TemplateProcessing

    # Such a tokenizer.
    own = copy.deepcopy(tokenizer)
    first = own.convert_tokens_to_ids("<|im_start|>")
    own.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", first)]
    )
    plain = tokenizer("ab", add_special_tokens=False)["input_ids"]

    # Texts and chats, by both endpoints.
    llm = scripted_llm(own)
    engine = ScriptedEngine(llm, lambda request: plain)
    with serving(llm, engine) as server:
        for more, expected in (({}, [first, *plain]), ({"add_special_tokens": False}, plain)):
            assert post(server, "/tokenize", {"prompt": "ab", **more}).json()["tokens"] == expected
        rendered = post(server, "/tokenize", {"messages": MESSAGES}).json()["tokens"]
        assert complete(server).status_code == chat(server).status_code == 200
    completed, chatted = engine.seen
    assert completed.prompt_ids == [first, *plain] and chatted.prompt_ids == rendered
    assert rendered[:2] == [first, *tokenizer("u")["input_ids"]]


def test_tools_are_refused_by_a_template_without_a_place_for_them(one_byte_a_step):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    answer = chat(one_byte_a_step, tools=[tool])
    assert answer.status_code == 400 and "no place for tools" in answer.json()["error"]["message"]
    assert "Leave it out" in answer.json()["error"]["message"]
    assert chat(one_byte_a_step, tools=[tool], tool_choice="none").status_code == 200


def test_tools_and_tool_calls_reach_a_template_that_knows_them(one_byte_a_step, tokenizer, monkeypatch):
    template = (
        "{% if tools %}TOOLS {% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.x }})"
        "{% endfor %};{% endfor %}"
    )
    monkeypatch.setattr(one_byte_a_step.service.llm.tokenizer, "chat_template", template)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "6", "tool_call_id": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    ids = post(one_byte_a_step, "/tokenize", {"messages": messages, "tools": tools}).json()["tokens"]
    assert tokenizer.decode(ids) == "TOOLS f user: go;assistant: f(5);tool: 6;"


def test_reasoning_and_template_arguments_reach_the_template_as_in_data_preparation(
    one_byte_a_step, tokenizer, monkeypatch
):
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer_for("qwen3").chat_template)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "6", "tool_call_id": "1"},
        {"role": "assistant", "content": "six", "reasoning": "so"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "five"},
    ]
    body = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}
    for kwargs in ({}, {"enable_thinking": False}):
        record = body | {"messages": messages, "chat_template_kwargs": kwargs}
        rows = ChatRenderer(tokenizer).tokenize_chat(to_conversation(record, "x"), 10_000, Counter())
        prompts = [
            row.ids[: (row.response == n).argmax()].tolist()
            for row in rows
            for n in range(row.response.max() + 1)
        ]
        for turn, prompt in zip((1, 3, 5), prompts, strict=True):
            asked = body | {"messages": messages[:turn], "chat_template_kwargs": kwargs}
            assert post(one_byte_a_step, "/tokenize", asked).json()["tokens"] == prompt
            assert chat(one_byte_a_step, **asked).status_code == 200
    answer = chat(one_byte_a_step, chat_template_kwargs={"enable_thought": False})
    assert answer.status_code == 400 and "does not read enable_thought" in answer.json()["error"]["message"]
    refused = [{"role": "user", "content": "a", "reasoning": "b"}]
    assert chat(one_byte_a_step, messages=refused).status_code == 400
    prompt_alone = {"prompt": "a", "chat_template_kwargs": {"enable_thinking": False}}
    assert post(one_byte_a_step, "/tokenize", prompt_alone).status_code == 400


def test_the_request_id_is_echoed_or_made(one_byte_a_step):
    headers = {"X-Request-Id": "my.id-1"}
    answer = post(one_byte_a_step, "/v1/chat/completions", {"messages": MESSAGES}, headers=headers)
    assert answer.headers["x-request-id"] == "my.id-1" and answer.json()["id"] == "chatcmpl-my.id-1"
    made = one_byte_a_step.http.get("/health", headers={"X-Request-Id": "no spaces allowed"})
    assert len(made.headers["x-request-id"]) == 32
    assert len(one_byte_a_step.http.get("/nowhere").headers["x-request-id"]) == 32


def test_models_and_health(one_byte_a_step):
    client = one_byte_a_step.openai
    assert [model.id for model in client.models.list()] == ["tiny"]
    card = client.models.retrieve("tiny")
    assert card.max_model_len == 400 and abs(card.created - time.time()) < 3600
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.models.retrieve("other")
    for path in ("/health", "/health_generate"):
        answer = one_byte_a_step.http.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_a_name_with_slashes_is_a_models_name(scripted):
    with serving(*scripted("abc"), model_name="org/tiny") as server:
        assert server.http.get("/v1/models/org/tiny").json()["id"] == "org/tiny"
        assert chat(server, model="org/tiny").json()["model"] == "org/tiny"
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [70]})):
            assert post(server, path, {**body, "model": "org/tiny"}).status_code == 200
            answer = post(server, path, {**body, "model": "tiny"})
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


def samples_of(text):
    """Samples of the exposition format: value by name and labels."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(number) for name, number in (line.rsplit(" ", 1) for line in lines)}


def test_every_metric_is_a_number_of_its_own(scripted):
    """Each of the engine's numbers is another one here, so that none can stand for another."""
    # One request runs and two wait.
    llm, engine = scripted("abcdefg", slots=1, hold_at=2)
    metrics = Metrics(engine, "tiny")
    for prompt, grammar in (([97] * 40, None), ([98], Grammar("regex", "a")), ([99], None)):
        engine.add_request(llm.make_request(prompt, SamplingParams(grammar=grammar)))
    for _ in range(3):
        engine.step()

    # Totals of their own.
    totals = engine.totals
    totals.num_steps = 100
    totals.num_prompt_tokens = 101
    totals.num_cached_prompt_tokens = 102
    totals.num_generated_tokens = 103
    totals.num_preemptions = 104
    totals.num_drafts = 110
    totals.num_draft_tokens = 111
    totals.num_finished.update({"stop": 120, "length": 121, "error": 122})
    totals.spec.num_accepted_at[:] = [60, 30, 5]
    engine.grammars.num_compiled = 130

    # What is served.
    found = samples_of(metrics.text().decode())
    label = 'model_name="tiny"'
    expected = {
        "num_requests_running": 1,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": engine.kv_usage,
        "num_grammars": 130,
        "engine_steps_total": 100,
        "prompt_tokens_total": 101,
        "prompt_tokens_cached_total": 102,
        "generation_tokens_total": 103,
        "num_preemptions_total": 104,
        "spec_decode_num_drafts_total": 110,
        "spec_decode_num_draft_tokens_total": 111,
        "spec_decode_num_accepted_tokens_total": 95,
        "requests_failed_total": 122,
    }
    assert {name: found[f"eagle_kit:{name}{{{label}}}"] for name in expected} == expected
    assert 0 < engine.kv_usage < 1
    for reason, number in (("stop", 120), ("length", 121), ("error", 122)):
        assert found[f'eagle_kit:request_success_total{{finished_reason="{reason}",{label}}}'] == number


def test_latencies_are_seconds_of_each_token_and_of_the_whole_response(scripted):
    llm, engine = scripted("abc")
    metrics = Metrics(engine, "tiny")
    request = llm.make_request([5], SamplingParams())
    request.arrived_at = 10.0
    metrics.finished(request)  # without a token
    metrics.emitted(request, 1, 0.75, True)
    metrics.emitted(request, 4, 2.0, False)
    request.stats.last_token_at = 13.0
    metrics.finished(request)
    found = samples_of(metrics.text().decode())
    for name, count, seconds in (
        ("time_to_first_token", 1, 0.75),
        ("inter_token_latency", 4, 2.0),
        ("e2e_request_latency", 1, 3.0),
    ):
        assert found[f'eagle_kit:{name}_seconds_count{{model_name="tiny"}}'] == count
        assert found[f'eagle_kit:{name}_seconds_sum{{model_name="tiny"}}'] == seconds
    buckets = 'eagle_kit:inter_token_latency_seconds_bucket{le="%s",model_name="tiny"}'
    assert (found[buckets % "0.2"], found[buckets % "0.5"]) == (0, 4), "each of four took half a second"


def test_metrics_count_what_the_engine_did(scripted):
    llm, engine = scripted("abcdefg")
    with serving(llm, engine) as server:
        assert complete(server, prompt="abcd").status_code == 200
        text = server.http.get("/metrics").text
    samples = samples_of(text)

    def value(name, labels='model_name="tiny"'):
        return samples[f"eagle_kit:{name}{{{labels}}}"]

    assert value("spec_decode_num_drafts_total") == 3
    assert value("spec_decode_num_draft_tokens_total") == 9
    assert value("spec_decode_num_accepted_tokens_total") == 5
    positions = [
        value("spec_decode_num_accepted_tokens_per_pos_total", f'model_name="tiny",position="{i}"')
        for i in (0, 1)
    ]
    assert positions == [3, 2], "the last cycle emits the token that ends the response, which was drafted"
    assert value("prompt_tokens_total") == 4 and value("generation_tokens_total") == 8
    assert value("request_success_total", 'finished_reason="stop",model_name="tiny"') == 1
    assert samples["process_resident_memory_bytes"] > 1e8
    assert value("num_requests_running") == value("num_requests_waiting") == value("kv_cache_usage_perc") == 0
    for name, count in (("time_to_first_token", 1), ("inter_token_latency", 7), ("e2e_request_latency", 1)):
        assert value(f"{name}_seconds_count") == count


def test_strict_tools_are_refused_with_the_reason(one_byte_a_step):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}
    answer = chat(one_byte_a_step, tools=[tool])
    assert answer.status_code == 400 and "calls are not held to their schema; leave strict out" in answer.text
