"""Log-probabilities of prompts over HTTP, in OpenAI's and in vLLM's shape."""

import json

import pytest

from eagle_kit.engine.llm import LLM
from eagle_kit.server.api import params
from tests.server.api.serving import serving

COMPLETIONS = "/v1/completions"
IDS = [70, 71, 72, 84, 90]


@pytest.fixture(scope="module")
def server(target_folder):
    llm = LLM(str(target_folder), max_batch_size=4, max_context=128, page_size=4)
    with serving(llm, llm.engine()) as running:
        yield running


def choices_of(server, path=COMPLETIONS, **body):
    answer = server.http.post(path, json={"prompt": IDS, "max_tokens": 3, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def known(server, ids=IDS):
    """Log-probabilities of all tokens behind each token of a prompt."""
    return server.service.llm.logits(list(ids)).log_softmax(-1)


def check_lists(server, logprobs, ids, text, num_top):
    """Compare OpenAI's lists with the logits of a prompt and its response."""
    names = server.service.token_names
    rows = known(server, ids)
    assert logprobs["tokens"] == [names.written(token) for token in ids]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    for at, token in enumerate(ids[1:]):
        row = rows[at]
        assert logprobs["token_logprobs"][at + 1] == pytest.approx(float(row[token]), abs=1e-4)
        top = logprobs["top_logprobs"][at + 1]
        is_top = token in row.topk(num_top).indices if num_top else False
        assert len(top) == num_top + (0 if is_top else 1)
        assert max(top.values()) == pytest.approx(
            float(row[token if num_top == 0 else row.argmax()]), abs=1e-4
        )
    for name, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert text[offset:].startswith(name) or name.startswith("bytes:")


@pytest.mark.parametrize("num_top", [0, 1, 4])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_repeated_prompt_has_its_log_probabilities(server, num_top, max_tokens):
    more = {"echo": True, "logprobs": num_top, "max_tokens": max_tokens, "ignore_eos": True}
    (choice,) = choices_of(server, **more)
    (plain,) = choices_of(server, max_tokens=max_tokens or 1, logprobs=0, ignore_eos=True)
    tokens = choice["logprobs"]["tokens"]
    assert len(tokens) == len(IDS) + max_tokens
    assert tokens[len(IDS) :] == plain["logprobs"]["tokens"][:max_tokens]
    assert choice["text"] == "defrx" + (plain["text"] if max_tokens else "")
    cut = {name: each[: len(IDS)] for name, each in choice["logprobs"].items()}
    check_lists(server, cut, IDS, choice["text"], num_top)
    if max_tokens:
        offsets = [each - len("defrx") for each in choice["logprobs"]["text_offset"][len(IDS) :]]
        assert offsets == plain["logprobs"]["text_offset"]
        assert choice["logprobs"]["token_logprobs"][len(IDS) :] == plain["logprobs"]["token_logprobs"]


def test_a_prompt_alone_is_no_token_of_the_response(server):
    body = {"prompt": IDS, "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = server.http.post(COMPLETIONS, json=body).json()
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["prompt_tokens"] == len(IDS)
    assert answer["choices"][0]["finish_reason"] == "length"
    messages = [{"role": "user", "content": "Hi"}]
    chat = server.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 0}).json()
    assert chat["choices"][0]["message"]["content"] == ""
    assert "prompt_logprobs" not in chat and "prompt_logprobs" not in answer["choices"][0]


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_has_the_same(server, n):
    body = {"prompt": [IDS, IDS[:2]], "n": n, "echo": True, "logprobs": 2, "max_tokens": 3}
    body |= {"temperature": 1.0, "seed": 5, "ignore_eos": True}
    whole = choices_of(server, **body)
    texts = [""] * len(whole)
    lists = [{name: [] for name in whole[0]["logprobs"]} for _ in whole]
    with server.http.stream("POST", COMPLETIONS, json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                texts[choice["index"]] += choice["text"]
                for name, values in (choice["logprobs"] or {}).items():
                    lists[choice["index"]][name] += values
    assert texts == [choice["text"] for choice in whole]
    assert lists == [choice["logprobs"] for choice in whole]


def test_they_come_in_the_shape_of_vllm(server):
    (choice,) = choices_of(server, prompt_logprobs=2, ignore_eos=True)
    check_entries(server, choice["prompt_logprobs"], IDS)
    two = choices_of(server, prompt_logprobs=2, n=2, temperature=1.0, seed=1)
    assert [each["prompt_logprobs"] for each in two] == [choice["prompt_logprobs"]] * 2
    assert choice["logprobs"] is None


def test_a_chat_has_those_of_its_rendered_messages(server):
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "max_tokens": 2, "prompt_logprobs": 2, "logprobs": True}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    ids = server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    check_entries(server, answer["prompt_logprobs"], ids)
    assert answer["choices"][0]["logprobs"]["content"] and "prompt_logprobs" not in answer["choices"][0]


def check_entries(server, entries, ids):
    rows = known(server, ids)
    assert entries[0] is None and len(entries) == len(ids)
    for row, token, entry in zip(rows, ids[1:], entries[1:], strict=False):
        top = row.topk(2).indices.tolist()
        assert list(entry) == [str(each) for each in dict.fromkeys((token, *top))]
        for each, value in entry.items():
            assert value["logprob"] == pytest.approx(float(row[int(each)]), abs=1e-4)
            assert value["rank"] == int((row >= row[int(each)]).sum())
            assert value["decoded_token"] == server.service.token_names.of(int(each))[0]


def test_the_repeated_prompt_has_fewer_alternatives_than_the_other_shape(server):
    (choice,) = choices_of(server, echo=True, logprobs=0, prompt_logprobs=3)
    assert all(len(entry) >= 3 for entry in choice["prompt_logprobs"][1:])
    assert all(len(entry) == 1 for entry in choice["logprobs"]["top_logprobs"][1:])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "not in a stream"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
def test_what_cannot_be_is_refused(server, body, message):
    answer = server.http.post(COMPLETIONS, json={"prompt": IDS, **body})
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_log_probabilities_of_prompts_count_against_the_limit(server, monkeypatch):
    monkeypatch.setattr(params, "MAX_REQUEST_LOGPROBS", 20)
    body = {"prompt": [IDS] * 4, "max_tokens": 1, "echo": True, "logprobs": 0}
    answer = server.http.post(COMPLETIONS, json=body)
    assert (
        answer.status_code == 400 and "log-probabilities of its prompts" in answer.json()["error"]["message"]
    )
    assert server.http.post(COMPLETIONS, json={**body, "prompt": [IDS] * 3}).status_code == 200
