"""Profiles that /start_profile and /stop_profile start and stop."""

import asyncio
import gzip
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from tiny import tiny_head

from eagle_kit.cli import main
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.step_profile import StepProfile
from tests.server.api.serving import serving, wait_until

COMPLETIONS = "/v1/completions"
LONG = "a long response " * 8


@pytest.fixture(scope="module")
def llm(target_folder):
    """A random target with a random head."""
    plain = LLM(str(target_folder), max_context=128)
    head = tiny_head(plain.target, draft_vocab_size=67)
    return LLM(str(target_folder), head, shape="3,1,4", max_batch_size=4, max_context=128, page_size=4)


def ask(server, num_tokens=20, prompt="abcd"):
    """Text of a greedy response."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    answer = server.http.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def names_of(path):
    """Names of the events of a trace, with how often each occurs."""
    with gzip.open(path) as file:
        return Counter(event["name"] for event in json.load(file)["traceEvents"] if "name" in event)


def test_a_profile_shows_the_parts_of_every_step_and_its_operations(llm, tmp_path):
    engine = llm.engine()
    with serving(llm, engine, profile_dir=tmp_path) as server:
        expected = ask(server)
        started = server.http.post("/start_profile")
        assert started.status_code == 200 and started.json()["status"] == "running"
        before = engine.totals.num_steps
        assert ask(server) == expected, "a profile changes no text"
        num_steps = engine.totals.num_steps - before
        stopped = server.http.post("/stop_profile")
        assert stopped.json() == {**started.json(), "status": "written", "num_steps": num_steps}
        assert ask(server) == expected and engine.profile is None

    (name,) = stopped.json()["files"]
    assert [path.name for path in tmp_path.iterdir()] == [name] and name.endswith("-rank0.pt.trace.json.gz")
    found = names_of(tmp_path / name)
    assert found["eagle_kit.step"] == found["eagle_kit.schedule"] == num_steps > 5
    assert found["eagle_kit.prefill 1 prompts"] == 1
    assert found["eagle_kit.decode"] == found["eagle_kit.cycle 3,1,4 batch 1"] == num_steps - 1
    assert found["eagle_kit.collect"] == found["eagle_kit.wait"] == num_steps
    assert sum(count for operation, count in found.items() if operation.startswith("aten::")) > num_steps


def test_a_profile_ends_by_itself_after_its_steps(scripted, tmp_path):
    with serving(*scripted(LONG), profile_dir=tmp_path) as server:
        assert server.http.post("/start_profile", json={"num_steps": 3}).json()["num_steps"] == 3
        assert server.engine.profile is not None
        ask(server, num_tokens=60)
        assert server.engine.profile is None and server.engine.totals.num_steps > 5
        wait_until(lambda: len(list(tmp_path.glob("*.gz"))) == 1)
        stopped = server.http.post("/stop_profile").json()
        assert stopped["num_steps"] == 3 and stopped["status"] == "written"
        assert names_of(tmp_path / stopped["files"][0])["eagle_kit.step"] == 3


def test_there_is_one_profile_at_a_time(scripted, tmp_path):
    with serving(*scripted("abc"), profile_dir=tmp_path) as server:
        answer = server.http.post("/stop_profile")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "no_profile")
        for _ in range(2):
            assert server.http.post("/start_profile").status_code == 200
            answer = server.http.post("/start_profile")
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "profile_running")
            assert "100 more steps" in answer.json()["error"]["message"]
            assert server.http.post("/stop_profile").status_code == 200
        assert server.http.post("/stop_profile").status_code == 409
    assert len(list(tmp_path.iterdir())) == 2, "each has a name of its own"


def test_without_a_folder_there_are_no_profiles(scripted):
    with serving(*scripted("abc")) as server:
        for path in ("/start_profile", "/stop_profile"):
            answer = server.http.post(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "profiles_off")
            assert "--profile-dir" in answer.json()["error"]["message"]
        assert server.engine.profile is None


def test_profiles_need_the_key_and_count_against_the_limit(scripted, tmp_path):
    with serving(*scripted("abc"), profile_dir=tmp_path, api_key="se", max_requests_per_minute=3) as server:
        assert server.http.post("/start_profile").status_code == 401
        headers = {"Authorization": "Bearer se"}
        assert server.http.post("/start_profile", headers=headers).status_code == 200
        assert server.http.post("/stop_profile", headers=headers).status_code == 200
        assert server.http.post("/start_profile", headers=headers).status_code == 429


def test_traces_stay_in_the_servers_folder(scripted, tmp_path):
    folder = tmp_path / "traces"
    with serving(*scripted("abc"), profile_dir=folder) as server:
        for outside in ("..", "/tmp", "a/../../b", str(tmp_path)):
            answer = server.http.post("/start_profile", json={"output_dir": outside})
            assert answer.status_code == 400 and "output_dir" in answer.json()["error"]["message"], outside
        for inside in ("first", str(folder / "second")):
            assert server.http.post("/start_profile", json={"output_dir": inside}).status_code == 200
            (name,) = server.http.post("/stop_profile").json()["files"]
            assert name.startswith(f"{inside.rpartition('/')[2]}/") and (folder / name).is_file()


@pytest.mark.parametrize(
    ("body", "about"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": 1001}, "num_steps"),
        ({"activities": ["GPU"]}, "runs on a CPU"),
        ({"activities": ["MEM"]}, "activities"),
        ({"start_step": 3}, "start_step"),
        ({"profile_by_stage": True}, "profile_by_stage"),
        ({"output_dir": "a\0b"}, "output_dir"),
    ],
)
def test_what_a_profile_cannot_record_is_refused(scripted, tmp_path, body, about):
    with serving(*scripted("abc"), profile_dir=tmp_path) as server:
        answer = server.http.post("/start_profile", json=body)
        assert answer.status_code == 400 and about in answer.json()["error"]["message"]
        assert server.engine.profile is None


def test_the_bodies_of_other_engines_load_generators_start_one(scripted, tmp_path):
    ours = {"num_steps": 5, "activities": ["CPU"], "with_stack": True, "record_shapes": True}
    sglang = {**ours, "output_dir": None, "profile_by_stage": False, "merge_profiles": False}
    vllm = {"model": "m", "prompt": "a b", "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 9}
    vllm |= {"logprobs": None, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    with serving(*scripted(LONG), profile_dir=tmp_path) as server:
        for body in (ours, sglang, vllm):
            answer = server.http.post("/start_profile", json=body)
            assert answer.status_code == 200, answer.text
            ask(server, num_tokens=60)
            assert server.http.post("/stop_profile", json=body).status_code == 200


def test_a_file_that_cannot_be_written_is_an_error_and_responses_go_on(scripted, tmp_path):
    (tmp_path / "taken").write_text("a file")
    with serving(*scripted(LONG), profile_dir=tmp_path) as server:
        server.http.post("/start_profile", json={"output_dir": "taken"})
        answer = server.http.post("/stop_profile")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "profile_not_written")
        assert ask(server) == LONG[:20]
        assert server.http.post("/start_profile").status_code == 200


def test_a_call_that_is_cancelled_leaves_the_writing_alone(scripted, tmp_path, monkeypatch):
    llm, engine = scripted(LONG)
    may_write = threading.Event()
    write = StepProfile._write

    def late(self):
        may_write.wait(20)
        write(self)

    monkeypatch.setattr(StepProfile, "_write", late)
    with serving(llm, engine, profile_dir=tmp_path) as server:
        assert server.http.post("/start_profile").status_code == 200
        profile = engine.profile
        profiles = server.service.profiles

        async def give_up():
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(profiles.stop(), 0.5)

        loop = server.service.engine._loop
        asyncio.run_coroutine_threadsafe(give_up(), loop).result(10)
        may_write.set()
        assert profile.written.result(10).exists()


def test_a_server_that_stops_finishes_its_profile(scripted, tmp_path):
    llm, engine = scripted(LONG, hold_at=6)
    with serving(llm, engine, profile_dir=tmp_path) as server, ThreadPoolExecutor(1) as pool:
        (name,) = server.http.post("/start_profile").json()["files"]
        body = {"prompt": "a", "max_tokens": 50}
        pool.submit(httpx.post, server.url + COMPLETIONS, json=body, timeout=30)
        wait_until(lambda: bool(engine.running and engine.running[0].token_ids))
    wait_until(lambda: (tmp_path / name).exists())
    assert names_of(tmp_path / name)["eagle_kit.step"] >= 2


def test_an_engine_that_fails_finishes_its_profile(scripted, tmp_path):
    llm, engine = scripted(LONG)
    with serving(llm, engine, profile_dir=tmp_path) as server:
        (name,) = server.http.post("/start_profile").json()["files"]
        engine.fail_at = 0
        assert server.http.post(COMPLETIONS, json={"prompt": "a"}).status_code == 500
        wait_until(lambda: (tmp_path / name).exists())
        assert server.http.post("/start_profile").status_code == 500


def test_a_folder_that_cannot_be_written_is_found_before_anything_is_loaded(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["serve", str(tmp_path), "--profile-dir", str(tmp_path / "file" / "traces")]) == 2
    assert "--profile-dir" in capsys.readouterr().err
