"""Completions of tokenizers whose decoder takes the first blank away (Llama 2, Mistral 0.1 to 0.3, Phi-3)."""

import pytest
from tiny_tokenizers import byte_level, llama2_like

from tests.server.api.scripted import ScriptedEngine, scripted_llm
from tests.server.api.serving import serving

PROMPT = "the cat"
RESPONSE = " sat on the mat é\nñ cats"


@pytest.fixture(scope="module", params=[llama2_like, byte_level])
def server(request):
    """Writes what follows the prompt in ``PROMPT + RESPONSE``, or ``RESPONSE`` behind any other."""
    tokenizer = request.param()
    whole = tokenizer(PROMPT + RESPONSE)["input_ids"]
    response = whole[len(tokenizer(PROMPT)["input_ids"]) :]

    def script(request):
        known = request.prompt_ids
        return whole[len(known) :] if whole[: len(known)] == known else response

    llm = scripted_llm(tokenizer)
    with serving(llm, ScriptedEngine(llm, script, per_step=2)) as running:
        running.whole = whole
        yield running


def complete(server, **body):
    answer = server.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 60, **body})
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def streamed(server, **body):
    texts = []
    for event in server.openai.completions.create(
        model="tiny", stream=True, **{"prompt": PROMPT, "max_tokens": 60, **body}
    ):
        for choice in event.choices:
            texts.extend([""] * (choice.index + 1 - len(texts)))
            texts[choice.index] += choice.text
    return texts


@pytest.mark.parametrize("ask", [complete, streamed])
@pytest.mark.parametrize("n", [1, 3])
def test_the_blank_between_prompt_and_response_is_kept(server, ask, n):
    assert ask(server, n=n) == [RESPONSE] * n
    assert ask(server, n=n, echo=True) == [PROMPT + RESPONSE] * n
    assert ask(server, n=n, stop=[" the"]) == [" sat on"] * n
    assert ask(server, n=n, stop=" sat", echo=True) == [PROMPT] * n


@pytest.mark.parametrize("ask", [complete, streamed])
def test_prompts_of_token_ids_may_end_anywhere(server, ask):
    """Between the bytes of a character too: it is a part of the response then."""
    whole = server.whole
    for at in range(1, len(whole)):
        assert ask(server, prompt=whole[:at], echo=True) == [PROMPT + RESPONSE]
    first = [whole[:at] for at in (2, len(whole) - 3)]
    assert ask(server, prompt=first, echo=True, n=2) == [PROMPT + RESPONSE] * 4


def test_names_of_tokens_join_to_the_text_and_stand_at_their_offsets(server):
    body = {"prompt": PROMPT, "max_tokens": 60, "logprobs": 3, "temperature": 0}
    (choice,) = server.http.post("/v1/completions", json=body).json()["choices"]
    logprobs = choice["logprobs"]
    at = 0
    for name, offset in zip(logprobs["tokens"][:-1], logprobs["text_offset"], strict=False):
        assert offset == at
        if name.startswith("bytes:"):
            at += name.endswith("xb1")  # the last byte of ñ
        else:
            assert choice["text"][at:].startswith(name)
            at += len(name)
    assert at == len(choice["text"]) and choice["text"] == RESPONSE
    assert all(len(top) == 4 for top in logprobs["top_logprobs"][:-1])


def test_special_tokens_are_shown_where_they_are_not_to_be_skipped(server):
    special = server.llm.tokenizer.eos_token_id
    ids = [*server.whole[:3], special, special]
    before = server.llm.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
    (text,) = complete(server, prompt=ids, echo=True, skip_special_tokens=False)
    assert text == before + RESPONSE
    (text,) = complete(server, prompt=ids, echo=True, skip_special_tokens=True)
    assert text == server.llm.tokenizer.backend_tokenizer.decode(ids) + RESPONSE


def test_a_chat_has_a_text_of_its_own(server):
    server.llm.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    body = {"messages": [{"role": "user", "content": "the dogs"}], "logprobs": True, "top_logprobs": 2}
    (choice,) = server.http.post("/v1/chat/completions", json=body).json()["choices"]
    is_byte_level = server.llm.tokenizer.bos_token_id != server.whole[0]
    assert choice["message"]["content"] == (RESPONSE if is_byte_level else RESPONSE[1:])
    content = choice["logprobs"]["content"][:-1]
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == RESPONSE
