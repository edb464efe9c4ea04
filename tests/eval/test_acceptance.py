"""Acceptance that a server counts under a load that another program makes."""

import json
import sys

import pytest
from tiny import tiny_head
from tiny_run import make_target

from eagle_kit.cli import app
from eagle_kit.core.errors import UserError
from eagle_kit.engine.llm import LLM
from eagle_kit.eval.counters import take_snapshot
from eagle_kit.eval.server_acceptance import count
from tests.server.api.serving import serving


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = str(make_target(tmp_path_factory.mktemp("target")))
    plain = LLM(folder, max_context=128)
    head = tiny_head(plain.target, draft_vocab_size=67)
    llm = LLM(folder, draft=head, shape="3,1,4", max_batch_size=4, max_context=128)
    with serving(llm, llm.engine()) as running:
        yield running


CLIENT = """
import json, sys, urllib.request
body = {"prompt": "The cat sees", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
data = json.dumps({**body, "return_speculation": True}).encode()
json_type = {"Content-Type": "application/json"}
request = urllib.request.Request(sys.argv[1] + "/v1/completions", data, json_type)
open(sys.argv[2], "w").write(urllib.request.urlopen(request).read().decode())
sys.exit(int(sys.argv[3]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_command_drives_the_server_and_its_response_agrees(server, tmp_path, capsys, code):
    response, out = tmp_path / "response.json", tmp_path / "a.json"
    words = ["--base-url", server.url + "/v1", "--out", str(out)]
    driver = [sys.executable, "-c", CLIENT, server.url, str(response), str(code)]
    assert app.main(["bench", "serve", *words, "--", *driver]) == code
    told = json.loads(response.read_text())["speculation"]
    record = json.loads(out.read_text())
    figures = record["figures"]
    assert record["settings"]["driven_by"] == driver and record["seconds"] > 0
    assert figures["verifies"] == told["num_verifies"] and figures["generation_tokens"] == 20
    shares = [count / told["num_verifies"] for count in told["num_accepted_at"]]
    assert [figures[f"accepted at depth {d + 1}"] for d in range(len(shares))] == pytest.approx(shares)
    assert figures["accept length"] >= told["accept_length"] - 1e-3
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["accept", "length", f"{figures['accept length']:.3g}"] in lines


def test_without_a_command_it_counts_until_ctrl_c(server, monkeypatch, capsys):
    def generate_and_stop(seconds):
        body = {"prompt": "ab", "max_tokens": 5, "ignore_eos": True}
        server.http.post("/v1/completions", json=body)
        raise KeyboardInterrupt

    monkeypatch.setattr("eagle_kit.eval.server_acceptance.time.sleep", generate_and_stop)
    assert count(server.url, ()) == 0
    assert ["generation_tokens", "5"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_figures_are_printed_before_they_are_written(server, tmp_path, monkeypatch, capsys):
    def fail(path, value, indent):
        raise OSError("the disk is full")

    monkeypatch.setattr("eagle_kit.eval.server_acceptance.write_json_atomically", fail)
    with pytest.raises(OSError, match="full"):
        count(server.url, [sys.executable, "-c", "pass"], tmp_path / "a.json")
    assert "generation_tokens" in capsys.readouterr().out


def test_a_command_that_is_not_there_is_said(server):
    with pytest.raises(UserError, match="no-such-tool cannot be run"):
        count(server.url, ["no-such-tool"])
    assert "spec_decode_num_drafts" in take_snapshot(server.url).counters  # the server goes on


COMPLETION = {"prompt": "ab", "max_tokens": 6, "ignore_eos": True}
IN_PARTS = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}]}],
    "max_completion_tokens": 6,
}
CHAT = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 6}
USAGE = {"include_usage": True, "continuous_usage_stats": True}
BODIES = [
    pytest.param(COMPLETION | {"repetition_penalty": 1.0, "logprobs": None}, id="vllm, openai"),
    pytest.param(IN_PARTS, id="vllm, openai-chat"),
    pytest.param(COMPLETION | {"temperature": 0.0, "best_of": 1}, id="sglang, sglang-oai"),
    pytest.param(CHAT | {"temperature": 0.0}, id="sglang, sglang-oai-chat"),
    pytest.param(IN_PARTS | {"stop": None, "ignore_eos": True, "stream_options": USAGE}, id="GuideLLM"),
]


@pytest.mark.parametrize("body", BODIES)
def test_requests_of_the_load_generators_of_the_field_are_streamed_with_usage(server, body):
    path = "chat/completions" if "messages" in body else "completions"
    body = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, **body}
    with server.http.stream("POST", f"/v1/{path}", json=body) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert events[-1]["choices"] == [] and 1 <= events[-1]["usage"]["completion_tokens"] <= 6
    assert events[-1]["usage"]["prompt_tokens"] > 0 and len(events[0]["choices"]) == 1


def test_usage_can_be_in_every_chunk_and_in_no_chunk_of_its_own(server):
    """As SGLang's generator needs it, which reads the first choice of every chunk."""
    body = {**CHAT, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    events = [json.loads(line) for line in lines[:-1]]
    assert all(event["choices"] and event["usage"] for event in events)
    assert 1 <= events[-1]["usage"]["completion_tokens"] <= 6
