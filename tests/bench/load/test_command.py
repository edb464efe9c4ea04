"""`eagle-kit bench serve` from the command line to its files, and `eagle-kit bench` as it was."""

import json
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from eagle_kit.cli import app, bench
from tests.bench.load.scripted_server import Script, scripted_server, text, three_token_chunks


def serve(server, *options):
    return app.main(["bench", "serve", "--base-url", server.url, "--no-progress", *map(str, options)])


@pytest.fixture
def prompts(tmp_path):
    rows = [{"prompt": f"prompt {i}"} for i in range(5)] + [{"messages": [{"role": "user", "content": "m"}]}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_a_run_prints_and_writes_everything_but_the_key(server, prompts, tmp_path, capsys, monkeypatch):
    def respond(body):
        server.counters["eagle_kit:spec_decode_num_drafts_total"] += 2
        server.counters["eagle_kit:spec_decode_num_accepted_tokens_total"] += 3
        return three_token_chunks(body, delay=0.002)

    server.counters = dict.fromkeys(
        (f"eagle_kit:spec_decode_num_{name}_total" for name in ("drafts", "accepted_tokens")), 0
    )
    server.respond = respond
    out, png = tmp_path / "new" / "run.json", tmp_path / "run.png"
    key = ["--api-key", "sesame"]
    options = ["--dataset", prompts, "--num-prompts", 4, "--max-tokens", 6, "--request-rate", 200, *key]
    files = ["--out", out, "--plot", png]
    monkeypatch.setattr(sys, "argv", ["eagle-kit", "bench", "serve", *map(str, options)])
    assert serve(server, *options, *files) == 0
    shown = capsys.readouterr().out
    assert "4 of 4 sent: 4 ok" in shown
    assert "2.500 by the responses (8 verifies" in shown and "2.500 by /metrics (8 drafts)" in shown
    assert png.read_bytes().startswith(b"\x89PNG")
    written = out.read_text(encoding="utf-8")
    result = json.loads(written)
    assert "sesame" not in written and "--api-key KEY" in result["command"]
    assert result["workload"]["num_requests"] == 4 and result["workload"]["request_rate"] == 200
    assert result["versions"]["httpx"] and result["client"]["cpu"] and result["date"]
    (endpoint,) = result["endpoints"]
    assert endpoint["tokens"]["output"] == 24 and len(endpoint["replies"]) == 4
    assert endpoint["tokens"]["per_chunk"] == 2 and endpoint["itl_ms"]["num"] == 20
    assert sum(endpoint["over_time"]["tokens_per_s"]) * endpoint["over_time"]["bin_s"] == pytest.approx(24)


def test_two_servers_are_compared(server, prompts, capsys):
    server.respond = lambda body: three_token_chunks(body, delay=0.002)
    with scripted_server(respond=lambda body: three_token_chunks(body, delay=0.03)) as other:
        options = ["--dataset", prompts, "--compare", other.url, "--rounds", 2, "--max-concurrency", 2]
        assert serve(server, *options, "--warmup", 0) == 0
    shown = capsys.readouterr().out
    assert "same text: 6 of 6" in shown and "ratios" in shown
    line = next(line for line in shown.splitlines() if line.startswith("  output tokens/s"))
    assert float(line.split()[-1]) > 1.5


def test_random_prompts_go_to_completions_as_ids(server):
    lengths = ["--random-input-len", 5, "--random-output-len", 3, "--random-token-ids", "0,1271"]
    assert (
        serve(server, "--dataset", "random", *lengths, "--endpoint", "completions", "--num-prompts", 3) == 0
    )
    bodies = [body for body in server.bodies if isinstance(body["prompt"], list)]
    assert len(bodies) == 5 and {len(body["prompt"]) for body in bodies} == {5}
    assert {body["max_tokens"] for body in bodies} == {3}


def test_when_no_request_succeeds_the_exit_code_is_1(server, prompts, capsys):
    failing = Script(status=503, body={"error": {"message": "full"}})
    server.respond = lambda body: three_token_chunks(body) if body["max_tokens"] == 1 else failing
    assert serve(server, "--dataset", prompts) == 1
    captured = capsys.readouterr()
    assert "6 x HTTP 503: full" in captured.out and "2 warm-up requests failed" in captured.out
    assert "warm-up requests repeat prompts" in captured.err


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (["--dataset", "no_such"], "no_such"),
        (["--dataset", "no_such.jsonl"], "no_such.jsonl"),
        (["--dataset", "EMPTY"], "holds no prompts"),
        (["--dataset", "PROMPTS", "--max-input-chars", "0"], "--max-input-chars is 0"),
        (["--dataset", "ours", "--max-input-chars", "1"], "empty"),
        (["--dataset", "ours", "--num-prompts", "0"], "--num-prompts is 0"),
        (["--dataset", "ours", "--random-input-len", "5"], "--random-input-len belongs to"),
        (["--dataset", "random", "--max-tokens", "5"], "--max-tokens does not apply"),
        (["--dataset", "random", "--random-token-ids", "5"], "--random-token-ids is '5'"),
        (["--request-rate", "0"], "--request-rate is 0"),
        (["--rounds", "2"], "--rounds is for two"),
        (["--compare-model", "x"], "--compare-model is for"),
        (["--warmup", "-1"], "--warmup is -1"),
        (["--extra-body", "[1]"], "--extra-body"),
        (["--temperature", "nan"], "--temperature"),
        (["--model", "other"], "no model 'other'"),
        (["--compare", "http://127.0.0.1:9"], "Nobody answers at http://127.0.0.1:9"),
    ],
)
def test_mistakes_are_one_cause_and_one_remedy(server, prompts, tmp_path, options, cause, capsys):
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    paths = {"EMPTY": tmp_path / "empty.jsonl", "PROMPTS": prompts}
    assert serve(server, *(paths.get(option, option) for option in options)) == 2
    lines = capsys.readouterr().err.splitlines()[-2:]
    assert cause in lines[0] and lines[0].startswith("error: ") and lines[1].startswith("  -> ")


def test_options_of_the_engine_are_not_dropped_silently(capsys):
    assert app.main(["bench", "--draft", "x", "serve", "--base-url", "http://127.0.0.1:9"]) == 2
    assert "--draft does not apply to bench serve" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to another process")
def test_ctrl_c_prints_and_writes_what_there_is(server, prompts, tmp_path):
    quick, endless = Script([(0, text("a", "stop"))]), Script([(0, text("b")), (60, text("c", "stop"))])
    server.respond = lambda body: (
        quick if body["max_tokens"] == 1 or body["messages"][0]["content"] == "prompt 0" else endless
    )
    out = tmp_path / "run.json"
    command = [
        sys.executable,
        "-m",
        "eagle_kit.cli",
        "bench",
        "serve",
        "--base-url",
        server.url,
        "--warmup",
        "0",
    ]
    options = ["--dataset", str(prompts), "--out", str(out)]
    process = subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + 30
    while server.at_once < 5:
        assert time.monotonic() < until and process.poll() is None, process.communicate()
        time.sleep(0.01)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "6 of 6 sent: 1 ok, 0 failed, 5 interrupted" in shown
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["interrupted"] is True
    assert [row["outcome"] for row in result["endpoints"][0]["replies"]].count("interrupted") == 5


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["decode", "train"]),
        (["decode"], ["decode"]),
        (["train"], ["train"]),
        (["train", "decode"], ["decode", "train"]),
    ],
)
def test_the_benchmark_of_the_engine_is_what_it_was(words, parts, monkeypatch, tmp_path, capsys):
    calls = []

    def decoding(*args, **options):
        calls.append(("decode", args, options))
        return {"a": 1}

    def training(*args):
        calls.append(("train", args))

    # The benchmarks themselves load real models.
    for name, module in (
        ("serve", SimpleNamespace(benchmark_decoding=decoding, format_decoding=str)),
        ("train", SimpleNamespace(benchmark_training=training, format_training=str)),
    ):
        monkeypatch.setitem(sys.modules, f"eagle_kit.{name}.bench", module)
    out = tmp_path / "bench.json"
    for command in ([*words, "--draft", "d", "--out", str(out)], ["--draft", "d", "--out", str(out), *words]):
        calls.clear()
        assert app.main(["bench", *command]) == 0
        assert [call[0] for call in calls] == parts
        for call in calls:
            assert call[1][0] == "smollm2-135m-instruct"
            assert call[0] == "train" or (call[1][1], call[2]) == ("d", {"compare": True})
        written = set(json.loads(out.read_text(encoding="utf-8")))
        assert written == {*parts, "date", "command", "machine", "versions"}


def test_an_unknown_part_is_refused(capsys):
    assert app.main(["bench", "decode", "nonsense"]) == 2
    assert "There is no benchmark 'nonsense'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        app.main(["bench", "nonsense"])
    assert "nonsense" in capsys.readouterr().err


def test_every_option_has_help():
    import argparse

    parser = argparse.ArgumentParser()
    bench.add_load(parser)
    assert all(action.help for action in parser._actions)
