"""Fields of requests that vLLM, SGLang and OpenAI have: lengths, stops, token ids, how a response begins."""

import json

import pytest

from eagle_kit.data.chat.response.choice import choose_forms
from eagle_kit.engine.llm import LLM
from tests.server.api.serving import serving

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "hi"}
THINKING = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% else %}<think>{% endif %}{% endif %}"
)
EFFORT = (
    THINKING + "{# {{ reasoning_effort }} #}{% if reasoning_effort %}effort {{ reasoning_effort }}{% endif %}"
)


@pytest.fixture(scope="module")
def served(target_folder):
    llm = LLM(str(target_folder), algorithm="NGRAM", shape="3,2,6", max_batch_size=4, max_context=400)
    llm.tokenizer.add_tokens(["<think>", "</think>"])
    first = llm.tokenizer.chat_template
    with serving(llm, llm.engine()) as running:

        def server(template=None):
            llm.tokenizer.chat_template = template or first
            running.service.response_forms = choose_forms(llm.renderer)
            return running

        yield server


def post(server, path, status=200, **body):
    common = {"prompt": [70, 71, 72]} if path == COMPLETIONS else {"messages": [USER]}
    answer = server.http.post(path, json={**common, "max_tokens": 12, "temperature": 0, **body})
    assert answer.status_code == status, answer.text
    return answer.json()


def events(server, path, **body):
    common = {"prompt": [70, 71, 72]} if path == COMPLETIONS else {"messages": [USER]}
    content = {**common, "max_tokens": 12, "temperature": 0, **body, "stream": True}
    with server.http.stream("POST", path, json=content) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def tokenized(server, text):
    return server.service.llm.tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_least_length_is_kept(served, path):
    ids = list(range(250))
    body = {"stop_token_ids": ids, "return_token_ids": True}
    short = post(served(), path, **body)["choices"][0]
    assert len(short["token_ids"]) < 6 and short["finish_reason"] == "stop"
    for least in (6, 12):
        found = post(served(), path, **body, min_tokens=least)["choices"][0]["token_ids"]
        assert len(found) >= least and not set(found[:least]) & set(ids)
    assert "min_tokens is 13" in post(served(), path, 400, min_tokens=13)["error"]["message"]


@pytest.mark.parametrize("n", [1, 2])
def test_completions_have_their_token_ids(served, n):
    server = served()
    body = {"prompt": [[70, 71, 72], [80, 81]], "n": n, "return_token_ids": True, "ignore_eos": True}
    choices = post(server, COMPLETIONS, **body)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[70, 71, 72]] * n + [[80, 81]] * n
    for choice in choices:
        assert len(choice["token_ids"]) == 12
        assert server.service.llm.tokenizer.decode(choice["token_ids"]) == choice["text"]
    streamed = [[] for _ in choices]
    prompts = [[] for _ in choices]
    for event in events(server, COMPLETIONS, **body):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["token_ids"]
            if "prompt_token_ids" in choice:
                prompts[choice["index"]].append(choice["prompt_token_ids"])
    assert streamed == [choice["token_ids"] for choice in choices]
    assert prompts == [[choice["prompt_token_ids"]] for choice in choices]


@pytest.mark.parametrize("n", [1, 2])
def test_chats_have_their_token_ids(served, n):
    server = served()
    body = {"n": n, "return_token_ids": True, "ignore_eos": True}
    answer = post(server, CHAT, **body)
    ids = server.http.post("/tokenize", json={"messages": [USER]}).json()["tokens"]
    assert answer["prompt_token_ids"] == ids
    assert all(len(choice["token_ids"]) == 12 for choice in answer["choices"])
    found = events(server, CHAT, **body)
    assert [event.get("prompt_token_ids") for event in found] == [ids] + [None] * (len(found) - 1)
    streamed = [[] for _ in range(n)]
    for event in found:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice.get("token_ids", [])
    assert streamed == [choice["token_ids"] for choice in answer["choices"]]


def test_token_ids_are_left_out_unless_they_are_asked_for(served):
    for path in (COMPLETIONS, CHAT):
        answer = post(served(), path)
        assert "prompt_token_ids" not in answer
        assert not {"token_ids", "prompt_token_ids"} & set(answer["choices"][0])


@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
def test_the_text_may_have_what_ended_it(served, name):
    server = served()
    text = post(server, COMPLETIONS, ignore_eos=True, max_tokens=20)["choices"][0]["text"]
    stop = next(letter for letter in text[4:] if letter.isascii() and letter.isprintable())
    before = text[: text.index(stop)]
    for path_text in (
        post(server, COMPLETIONS, ignore_eos=True, max_tokens=20, stop=stop, **{name: True}),
        post(server, COMPLETIONS, ignore_eos=True, max_tokens=20, stop=[stop], **{name: True}),
    ):
        assert path_text["choices"][0]["text"] == before + stop
    assert (
        post(server, COMPLETIONS, ignore_eos=True, stop=stop, max_tokens=20)["choices"][0]["text"] == before
    )

    # A token that ends the response.
    ids = post(server, COMPLETIONS, ignore_eos=True, max_tokens=20, return_token_ids=True)["choices"][0][
        "token_ids"
    ]
    last = next(token for token in ids[2:] if token < 128)
    kept = ids[: ids.index(last) + 1]
    decode = server.service.llm.tokenizer.decode
    hidden = post(server, COMPLETIONS, ignore_eos=True, max_tokens=20, stop_token_ids=[last])
    shown = post(server, COMPLETIONS, ignore_eos=True, max_tokens=20, stop_token_ids=[last], **{name: True})
    assert hidden["choices"][0]["text"] == decode(kept[:-1])
    assert shown["choices"][0]["text"] == decode(kept)


@pytest.mark.parametrize("template", [None, THINKING])
def test_a_response_continues_the_last_message(served, template):
    server = served(template)
    messages = [USER, {"role": "assistant", "content": "I think that"}]
    body = {
        "messages": messages,
        "continue_final_message": True,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    answer = post(server, CHAT, **body)
    rendered = server.service.llm.tokenizer.apply_chat_template(
        messages, tokenize=False, continue_final_message=True
    )
    assert rendered.endswith("I think that")
    assert answer["prompt_token_ids"] == tokenized(server, rendered)
    raw = post(server, COMPLETIONS, prompt=tokenized(server, rendered), ignore_eos=True)["choices"][0]
    if template is None:
        assert answer["choices"][0]["message"]["content"] == raw["text"]
    assert post(server, CHAT, **body, add_generation_prompt=False)["choices"] == answer["choices"]


def test_messages_may_end_without_the_beginning_of_a_response(served):
    server = served()
    answer = post(server, CHAT, add_generation_prompt=False, return_token_ids=True)
    rendered = server.service.llm.tokenizer.apply_chat_template(
        [USER], tokenize=False, add_generation_prompt=False
    )
    assert answer["prompt_token_ids"] == tokenized(server, rendered)


def test_the_effort_of_reasoning_reaches_the_template(served):
    server = served(EFFORT)
    for effort in ("low", "high", "none"):
        ids = post(server, CHAT, reasoning_effort=effort, return_token_ids=True)["prompt_token_ids"]
        begin = "<think></think>" if effort == "none" else "<think>"
        assert server.service.llm.tokenizer.decode(ids).endswith(f"{begin}effort {effort}")
    message = post(served(), CHAT, 400, reasoning_effort="high")["error"]["message"]
    assert "reads neither it nor a switch" in message


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
def test_the_effort_of_reasoning_switches_thinking(served, switch):
    """A template like DeepSeek's, which does not think unless it is asked to."""
    template = (
        f"{{% if {switch} is not defined %}}{{% set {switch} = false %}}{{% endif %}}"
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        f"[assistant] {{% if {switch} %}}<think>{{% else %}}<think></think>{{% endif %}}"
    )
    server = served(template)
    for effort, end in ((None, "<think></think>"), ("none", "<think></think>"), ("low", "] <think>")):
        ids = post(server, CHAT, reasoning_effort=effort, return_token_ids=True)["prompt_token_ids"]
        assert server.service.llm.tokenizer.decode(ids).endswith(end)


def test_the_effort_of_reasoning_and_arguments_of_the_template_agree(served):
    server = served(THINKING)
    both = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert "which reasoning_effort sets too" in post(server, CHAT, 400, **both)["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_has_a_budget(served, stream):
    server = served(THINKING)
    end = tokenized(server, "</think>")
    body = {"ignore_eos": True, "max_tokens": 20, "return_token_ids": True}
    body["logit_bias"] = {str(end[0]): -100.0}
    if not stream:
        free = post(server, CHAT, **body, thinking_token_budget=-1)["choices"][0]
        assert end[0] not in free["token_ids"] and free["message"]["content"] == ""
    for budget in (0, 5):
        if stream:
            found = events(server, CHAT, **body, thinking_token_budget=budget)
            choices = [choice for event in found for choice in event["choices"]]
            ids = [token for choice in choices for token in choice.get("token_ids", [])]
            content = "".join(choice["delta"].get("content") or "" for choice in choices)
        else:
            answer = post(server, CHAT, **body, thinking_token_budget=budget)
            ids = answer["choices"][0]["token_ids"]
            content = answer["choices"][0]["message"]["content"]
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget
        assert ids.index(end[0]) == budget and len(ids) == 20
        assert content == server.service.llm.tokenizer.decode(ids[budget + 1 :]).lstrip("\n")


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {"thinking_token_budget": 5}, "no token is known that ends the reasoning"),
        (CHAT, {"thinking_token_budget": -2}, "thinking_token_budget"),
        (CHAT, {"continue_final_message": True}, "last message of the assistant"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        (CHAT, {"reasoning_effort": "huge"}, "reasoning_effort"),
        (COMPLETIONS, {"continue_final_message": True}, "continue_final_message"),
        (COMPLETIONS, {"min_tokens": -1}, "min_tokens"),
    ],
)
def test_what_cannot_be_is_refused(served, path, body, message):
    assert message in post(served(), path, 400, **body)["error"]["message"]
