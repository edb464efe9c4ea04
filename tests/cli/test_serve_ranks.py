"""`eagle-kit serve --tensor-parallel`: ranks that it starts itself or torchrun does, one that dies, one that
hangs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import openai
import psutil
import pytest
from nodes import finish, start_nodes
from tiny_run import make_target

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.llm import LLM

SERVE = [
    "serve",
    "--tensor-parallel",
    "2",
    "--rank-timeout",
    "5",
    "--device",
    "cpu",
    "--port",
    "0",
    "--max-context",
    "512",
    "--served-model-name",
    "tiny",
]
TORCHRUN = "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "eagle_kit"
DEMO_HEAD = Path(__file__).parents[2] / "checkpoints" / "smollm2-135m-eagle3"
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


@contextmanager
def server(folder, *launcher, options=()):
    """A server's process and its address, once it is ready."""
    command = [sys.executable, "-m", *(launcher or ("eagle_kit.cli",)), *SERVE, *options, str(folder)]
    with subprocess.Popen(command, env=ENV, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = []
            while (line := process.stderr.readline()) and "Serving" not in line:
                lines.append(line)
            assert line, "".join(lines)
            yield process, re.search(r"http://\S+", line)[0]
        finally:
            process.kill()


def post(address, **options):
    body = {"model": "tiny", "prompt": "The cat sees", "max_tokens": 12, "temperature": 0, **options}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=60)


def complete(address):
    with post(address) as answer:
        return json.load(answer)["choices"][0]["text"]


def kill_while_a_response_streams(address, pid):
    """What its reader gets from then on, event by event."""
    with post(address, stream=True, max_tokens=480, ignore_eos=True) as answer:
        assert "text" in json.loads(answer.readline().removeprefix(b"data: "))["choices"][0]
        os.kill(pid, signal.SIGKILL)
        return answer.read().decode().strip().split("\n\n")


def children_of(process):
    return list(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))


def environ_of(pid):
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def expected(folder):
    llm = LLM(folder, max_context=128, device="cpu")
    ids = llm.tokenizer("The cat sees")["input_ids"]
    return llm.generate([ids], SamplingParams(max_tokens=12))[0].text


def is_there(pid):
    return Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def test_a_server_of_two_ranks_answers_and_ends_with_one_sentence_when_one_is_killed(folder):
    with server(folder) as (process, address):
        assert complete(address) == expected(folder)
        (child,) = children_of(process)
        *_, error, end = kill_while_a_response_streams(address, child)
        assert "The engine has failed (RankLost)." in error and end == "data: [DONE]"
        assert process.wait(30) == 1
        last = process.stderr.read()
    assert f"error: Rank 1 of tensor parallelism (process {child}) was ended by SIGKILL." in last
    assert "Traceback" not in last


@pytest.mark.nightly
def test_an_idle_server_ends_with_a_rank_that_is_killed(folder):
    with server(folder) as (process, _):
        (child,) = children_of(process)
        os.kill(child, signal.SIGKILL)
        assert process.wait(30) == 1
        last = process.stderr.read()
    assert f"error: Rank 1 of tensor parallelism (process {child}) was ended by SIGKILL." in last


@pytest.mark.nightly
def test_a_rank_that_hangs_is_found(folder):
    with server(folder) as (process, address):
        (child,) = children_of(process)
        os.kill(child, signal.SIGSTOP)
        with pytest.raises(urllib.error.HTTPError, match="500"):
            complete(address)
        assert process.wait(30) == 1
        last = process.stderr.read()
        assert "error: A rank has not answered for 5 seconds." in last and "Traceback" not in last
        assert not is_there(child)


@pytest.mark.nightly
def test_a_server_that_is_told_to_end_ends_its_ranks(folder):
    with server(folder) as (process, _):
        (child,) = children_of(process)
        process.terminate()
        assert process.wait(30) == 0
        time.sleep(0.2)
        assert not is_there(child)


@pytest.mark.nightly
def test_a_rank_of_torchrun_that_falls_silent_ends_an_idle_server(folder):
    """As one on a machine without network: nothing is asked of it, and no connection is closed."""
    with server(folder, *TORCHRUN) as (process, _):
        silent = next(pid for pid in children_of(process) if b"RANK=1" in environ_of(pid))
        os.kill(silent, signal.SIGSTOP)
        assert process.wait(90) == 1
        last = process.stderr.read()
    assert "Process 1 of 2 has not been heard from for 5 seconds." in last


@pytest.mark.nightly
def test_a_rank_of_torchrun_that_is_killed_ends_the_server(folder):
    with server(folder, *TORCHRUN) as (process, address):
        killed = next(pid for pid in children_of(process) if b"RANK=1" in environ_of(pid))
        *_, error, end = kill_while_a_response_streams(address, killed)
        assert "The engine has failed (RankLost)." in error and end == "data: [DONE]"
        assert process.wait(60) == 1
        last = process.stderr.read()
    assert "A rank was lost; the first error was RuntimeError: " in last  # in gloo's words
    assert "error: A rank has ended. The server has ended." in last
    assert "(exitcode: -9) local_rank: 1" in last  # which one, torchrun says


@pytest.mark.nightly
def test_torchrun_starts_a_server(folder):
    with server(folder, *TORCHRUN) as (process, address):
        assert complete(address) == expected(folder)
        process.terminate()
        process.wait(60)


@pytest.mark.nightly
@pytest.mark.real
def test_torchrun_serves_the_demo_to_a_client_of_openai():
    """Greedy, streamed and whole: the text of one process without speculation. Sampled, which may differ from
    it where sums of another order meet the boundary of a token: the same text for the same seed."""
    greedy, sampled = {"temperature": 0.0}, {"temperature": 0.8, "seed": 7}
    chat, length = [{"role": "user", "content": "Name three rivers and where they flow."}], 48
    options = ("--shape", "4,1,5", "--rank-timeout", "60")
    with (
        server(DEMO_HEAD, *TORCHRUN, options=options) as (process, address),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        ask = partial(client.chat.completions.create, model="tiny", messages=chat, max_tokens=length)
        whole, *seeded = [ask(**params).choices[0].message.content for params in (greedy, sampled, sampled)]
        stream = "".join(chunk.choices[0].delta.content or "" for chunk in ask(**greedy, stream=True))
        metrics = urllib.request.urlopen(f"{address}/metrics", timeout=60).read().decode()
        process.terminate()
        process.wait(60)
    drafts, accepted = (
        float(re.search(rf"^eagle_kit:spec_decode_num_{name}_total\S* (\S+)$", metrics, re.MULTILINE)[1])
        for name in ("drafts", "accepted_tokens")
    )
    assert accepted / drafts > 0.3
    llm = LLM("smollm2-135m-instruct", max_context=512)
    prompt = llm.renderer.prompt_token_ids(chat)
    (alone,) = llm.generate([prompt], SamplingParams(max_tokens=length, **greedy))
    assert whole == stream == alone.text
    assert seeded[0] and seeded[0] == seeded[1]


def at_endpoint(count, per_node, node, port):
    """``torchrun`` of machine ``node``, as the documentation has it."""
    machines = ("--nnodes", str(count), "--node-rank", str(node), "--rdzv-endpoint", f"127.0.0.1:{port}")
    return ("-m", "torch.distributed.run", *machines, "--nproc-per-node", str(per_node))


@pytest.mark.nightly
@pytest.mark.parametrize("is_lost", [False, True])
def test_two_machines_serve_together(folder, is_lost):
    """The first has the server. It ends the other, or ends with one sentence when that is lost."""
    nodes = start_nodes(2, 1, "-m", "eagle_kit", *SERVE, str(folder), launcher=at_endpoint)
    try:
        lines = []
        while (line := nodes[0].stdout.readline()) and "Serving" not in line:
            lines.append(line)
        assert line, "".join(lines)
        assert complete(re.search(r"http://\S+", line)[0]) == expected(folder)
        if is_lost:
            other = psutil.Process(nodes[1].pid)
            for process in (*other.children(recursive=True), other):
                process.kill()
        else:
            nodes[0].terminate()
        first, second = finish(nodes, 60)
    finally:
        for node in nodes:
            node.kill()
    if is_lost:
        ours = first.said.split("Traceback")[0]  # what follows is the launcher's own
        assert first.code != 0 and ours.count("error: ") == 1 and "The server has ended." in ours
    else:
        assert second.code == 0 and "error: " not in second.said
