"""The server, regeneration and training render a conversation by one object."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import tokenizer_for

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.data.chat.forms import to_conversation
from eagle_kit.data.chat.messages import ChatPrompt
from eagle_kit.datagen.regenerate.regenerate import RegenerateOptions, regenerate
from eagle_kit.datagen.regenerate.responder import EngineResponder
from tests.server.api.scripted import ScriptedEngine, scripted_llm
from tests.server.api.serving import serving

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Łódź"}'}}
RECORDED = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Rain in Łódź?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "none, にほん", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "You are welcome."},
]
CALLED = (
    '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
)
SAID = "<think>\nhm, 🙂\n</think>\n\nDry."
KWARGS = {"enable_thinking": True}


def test_server_regeneration_and_training_render_a_conversation_to_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the responses two share a row of training, and one has a row of its own."""
    tokenizer = tokenizer_for("qwen3")
    llm = scripted_llm(tokenizer, max_context=4000)

    def script(request: Any) -> list[int]:
        asked = tokenizer.decode(request.prompt_ids).rpartition("<|im_start|>user")[2]
        text = CALLED if "Rain" in asked and "tool_response" not in asked else SAID
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    engine = ScriptedEngine(llm, script)
    llm._engine = engine

    # Note the prompts that the object renders.
    prompts: list[str] = []
    render = llm.renderer.render

    def noted(prompt: ChatPrompt, *, generation_prompt: bool, **more: bool) -> str:
        text = render(prompt, generation_prompt=generation_prompt, **more)
        if generation_prompt:
            prompts.append(text)
        return text

    monkeypatch.setattr(llm.renderer, "render", noted)

    # Regenerate the responses.
    source = tmp_path / "source.jsonl"
    out = tmp_path / "out.jsonl"
    record = {"messages": RECORDED, "tools": [TOOL], "chat_template_kwargs": KWARGS}
    source.write_text(json.dumps(record) + "\n")
    options = RegenerateOptions(SamplingParams(max_tokens=200, temperature=0.0))
    regenerate(EngineResponder(llm), str(source), out, options, progress=False)
    regenerated = [list(request.prompt_ids) for request in engine.seen]
    of_regeneration = set(prompts)
    prompts.clear()
    record = json.loads(out.read_text())
    turns = [i for i, message in enumerate(record["messages"]) if message["role"] == "assistant"]
    assert len(regenerated) == len(turns) == 3

    # Tokenise them for training.
    remarks: Counter[str] = Counter()
    rows = llm.renderer.tokenize_chat(to_conversation(record, "x"), 10_000, remarks)
    learned = []
    for row in rows:
        for number in range(row.num_responses):
            first = int(np.flatnonzero(row.response == number)[0])
            learned.append(row.ids[:first].tolist())
    responses = [tokenizer.decode(row.ids[row.response >= 0].tolist()) for row in rows]
    of_training = set(prompts)
    prompts.clear()
    assert not remarks and responses == [f"{CALLED}<|im_end|>{SAID}<|im_end|>", f"{SAID}<|im_end|>"]

    # Ask a server for the same prompts.
    served = []
    with serving(llm, engine) as server:
        assert server.service.response_forms.renderer is llm.renderer
        for turn in turns:
            messages = [dict(message) for message in record["messages"][:turn]]
            for message in messages:
                message.pop("generated", None)
            body = {"messages": messages, "tools": [TOOL], "chat_template_kwargs": KWARGS}
            served.append(server.http.post("/tokenize", json=body).json()["tokens"])
    of_server = set(prompts)

    # All three are the same, and come from the one object.
    assert served == regenerated == learned
    texts = {tokenizer.decode(ids) for ids in served}
    assert len(texts) == 3
    for rendered in (of_regeneration, of_training, of_server):
        assert texts <= rendered
