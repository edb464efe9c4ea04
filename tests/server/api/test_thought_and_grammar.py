"""Structured output and calls that are insisted on, of a target that reasons first: a real engine whose
logits are biased towards the end of reasoning."""

import json
from typing import Any

import pytest

from eagle_kit.core.structured_outputs import Thought
from eagle_kit.data.chat.response.choice import choose_forms
from eagle_kit.engine.llm import LLM
from tests.server.api.serving import serving
from tests.server.api.test_response_parts import both

BEGIN, END = 259, 260
ENDING = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
OPENING = "{% if add_generation_prompt %}<think>\n{% endif %}"
SCHEMA = {
    "type": "object",
    "properties": {"pet": {"enum": ["cat", "dog"]}},
    "required": ["pet"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "feed", "parameters": SCHEMA}}
SOON = {"logit_bias": {END: 9.0, BEGIN: 10.0}, "max_tokens": 200, "tools": None, "temperature": 1}


@pytest.fixture(scope="module")
def served(target_folder):
    from tiny import tiny_head

    llm = LLM(str(target_folder), max_batch_size=4, max_context=400, kv_tokens=1600)
    llm = LLM(
        llm.target, tiny_head(llm.target, 250), tokenizer=llm.tokenizer, shape="3,4,12", max_batch_size=4
    )
    llm.tokenizer.add_tokens(["<think>", "</think>"])
    assert llm.tokenizer.convert_tokens_to_ids(["<think>", "</think>"]) == [BEGIN, END]
    plain = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + llm.tokenizer.chat_template
    llm.tokenizer.chat_template = plain + ENDING
    with serving(llm, llm.engine()) as running:

        def server(ending: str = ENDING) -> Any:
            llm.tokenizer.chat_template = plain + ending
            running.service.response_forms = choose_forms(llm.renderer)
            return running

        yield server


@pytest.mark.parametrize("ending", [ENDING, OPENING + "{# </think> #}"], ids=["optional", "opened"])
@pytest.mark.parametrize("seed", [1, 3])
def test_a_schema_holds_behind_the_reasoning(served: Any, ending: str, seed: int) -> None:
    found = both(served(ending), **SOON, seed=seed, response_format=FORMAT)
    assert found["reasoning"] and found["reason"] == "stop"
    assert json.loads(found["content"]) in ({"pet": "cat"}, {"pet": "dog"})
    found = both(served(ending), **SOON, seed=seed, extra_body={"regex": r"\s\s[ab]{2}"})
    assert found["reasoning"] and len(found["content"]) == 4 and found["content"][:2].isspace()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "feed"}}])
def test_a_call_that_is_insisted_on_comes_behind_the_reasoning(served: Any, choice: Any) -> None:
    found = both(served(), **{**SOON, "tools": [TOOL]}, seed=1, tool_choice=choice)
    assert found["reasoning"] and not found["content"]
    assert found["reason"] == ("tool_calls" if choice == "required" else "stop")
    ((name, arguments),) = found["calls"]
    assert name == "feed" and arguments["pet"] in ("cat", "dog")


def test_where_the_prompt_has_closed_the_reasoning_the_grammar_begins_at_once(served: Any) -> None:
    body = {"response_format": FORMAT, "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    found = both(served(), **SOON, seed=1, **body)
    assert not found["reasoning"] and json.loads(found["content"])["pet"] in ("cat", "dog")


def test_a_response_that_is_cut_within_its_reasoning_is_reasoning(served: Any) -> None:
    body = {"logit_bias": {END: -50.0, BEGIN: 50.0}, "max_tokens": 9, "tools": None, "seed": 1}
    found = both(served(), **body, response_format=FORMAT)
    assert found["reasoning"] and not found["content"] and found["reason"] == "length"


def test_completions_have_no_reasoning(served: Any) -> None:
    made = served().openai.completions.create(
        model="tiny", prompt="Hi", max_tokens=50, seed=1, extra_body={"regex": "[ab]{3}"}
    )
    assert set(made.choices[0].text) <= {"a", "b"} and made.choices[0].finish_reason == "stop"


def test_words_are_forbidden_in_the_reasoning_and_behind_it_in_every_choice(served: Any) -> None:
    """Without the words the letter is in both parts; a choice among several is the one that is made alone."""
    server = served()
    (letter,) = server.llm.tokenizer("a", add_special_tokens=False)["input_ids"]
    body = {"max_tokens": 100, "temperature": 1, "seed": 1, "regex": "[a-h]{6}"}
    body["logit_bias"] = {END: 9.0, BEGIN: 10.0, letter: 9.0}
    body["messages"] = [{"role": "user", "content": "Hi"}]

    def parts_of(**more: Any) -> list[tuple[str, str]]:
        answer = server.http.post("/v1/chat/completions", json={**body, **more})
        messages = [choice["message"] for choice in answer.json()["choices"]]
        return [(message["reasoning_content"], message["content"]) for message in messages]

    ((thought, text),) = parts_of()
    assert "a" in thought and "a" in text
    several = parts_of(n=2, bad_words=["a"])
    assert not any("a" in part for parts in several for part in parts)
    assert all(len(text) == 6 for _, text in several)
    assert parts_of(bad_words=["a"]) == several[:1]


@pytest.mark.parametrize("ending", [ENDING, OPENING + "{# </think> #}"], ids=["optional", "opened"])
@pytest.mark.parametrize("more", [{}, {"response_format": FORMAT}], ids=["free", "schema"])
def test_usage_counts_the_tokens_of_the_reasoning(served: Any, ending: str, more: dict[str, Any]) -> None:
    server = served(ending)
    messages = [{"role": "user", "content": "hi"}]
    body = {**SOON, **more, "tools": None, "messages": messages, "logprobs": True, "seed": 1}
    body["logit_bias"] = {str(token): bias for token, bias in SOON["logit_bias"].items()}
    body["skip_special_tokens"] = False
    found = server.http.post("/v1/chat/completions", json=body).json()
    names = [entry["token"] for entry in found["choices"][0]["logprobs"]["content"]]
    assert "</think>" in names
    before = names[: names.index("</think>")]
    is_opened = ending != ENDING
    expected = len(before) if is_opened else max(len(before) - 1, 0)  # without the opener
    assert expected > 0 or (not is_opened and not more), "a free response may begin with its end"
    usage = found["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == expected
    plain = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).json()["usage"]
    assert plain["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize(
    ("opener", "tokens", "expected"),
    [
        (None, [5, 6, 9, 1], 2),
        (None, [5, 6], 2),
        (None, [9, 5], 0),
        (8, [8, 5, 6, 9, 9], 2),
        (8, [5, 6, 9], 0),
        (8, [], 0),
    ],
)
def test_tokens_before_the_end_are_reasoning(opener: int | None, tokens: list[int], expected: int) -> None:
    assert Thought((9,), opener).num_tokens_of(tokens) == expected
