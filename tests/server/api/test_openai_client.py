"""A real model behind real HTTP: the `openai` client, clients that leave, SIGTERM, and schemathesis."""

import asyncio
import json
import os
import random
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from server_process import ServerProcess
from tiny import tiny_head

from eagle_kit.engine.llm import LLM
from tests.server.api.serving import serving, wait_until

MESSAGES = [{"role": "user", "content": "The cat sees"}]


pytestmark = pytest.mark.usefixtures("pool_is_conserved")


def create(real_server, **options):
    return real_server.openai.chat.completions.create(
        **{"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 24, **options}
    )


def test_a_stream_joins_to_the_whole_response(real_server):
    for options in ({"temperature": 0}, {"seed": 5}, {"seed": 6, "stop": ["e", "a"]}, {"seed": 7, "n": 2}):
        whole = create(real_server, **options)
        texts, reasons = [""] * len(whole.choices), [None] * len(whole.choices)
        for chunk in create(real_server, stream=True, stream_options={"include_usage": True}, **options):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] = reasons[choice.index] or choice.finish_reason
            last = chunk
        assert texts == [choice.message.content for choice in whole.choices]
        assert reasons == [choice.finish_reason for choice in whole.choices]
        assert last.usage.completion_tokens == whole.usage.completion_tokens
        assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_seed_draws_the_same_whatever_it_is_batched_with(real_server):
    alone = create(real_server, seed=11).choices[0].message.content
    with ThreadPoolExecutor(8) as pool:
        crowd = [pool.submit(create, real_server, seed=11 if i % 2 else i) for i in range(8)]
        assert [each.result().choices[0].message.content for each in crowd[1::2]] == [alone] * 4
    together = create(real_server, seed=9, n=3).choices
    assert together[2].message.content == alone
    assert len({choice.message.content for choice in together}) > 1


def test_greedy_text_is_what_the_engine_decodes_alone(real_server, target_folder):
    from eagle_kit.core.sampling_params import SamplingParams

    text = create(real_server, temperature=0).choices[0].message.content
    alone = LLM(str(target_folder), max_context=128)
    assert text == alone.chat(MESSAGES, SamplingParams(max_tokens=24))[0].text


def test_logprobs_are_those_of_the_target(real_server):
    answer = create(real_server, temperature=0, logprobs=True, top_logprobs=3, max_completion_tokens=6)
    entries = answer.choices[0].logprobs.content
    response = b"".join(bytes(entry.bytes) for entry in entries)
    ids = real_server.llm.tokenize_chat(MESSAGES)
    for entry in entries:
        logprobs = real_server.llm.logits(ids)[-1].log_softmax(-1)
        values, best = logprobs.topk(3)
        assert entry.logprob == pytest.approx(float(values[0]), abs=1e-3)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(values.tolist(), abs=1e-3)
        ids.append(int(best[0]))
    assert response.decode(errors="replace").startswith(answer.choices[0].message.content.rstrip("�"))


def test_completions_take_texts_and_ids_and_count_cached_tokens(real_server):
    client, prompt = real_server.openai, "The dog likes the river and the house and the stone."
    options = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    first = client.completions.create(prompt=prompt, **options)
    ids = real_server.http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
    second = client.completions.create(prompt=[ids, ids], **options)
    assert [choice.text for choice in second.choices] == [first.choices[0].text] * 2
    assert second.usage.prompt_tokens == 2 * len(ids)
    assert second.usage.prompt_tokens_details.cached_tokens > len(ids)


def test_structured_responses_match_their_grammar(real_server):
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["cat", "dog"]}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    for seed in range(4):
        answer = create(real_server, seed=seed, response_format=wanted, max_completion_tokens=90).choices[0]
        if answer.finish_reason == "stop":
            assert set(json.loads(answer.message.content)) == {"name", "ok"}
        else:
            assert answer.message.content.startswith("{")
        regex = create(real_server, seed=seed, extra_body={"regex": "[ab]{2,6}c"}).choices[0]
        assert re.fullmatch("[ab]{2,6}c", regex.message.content) and regex.finish_reason == "stop"
    for options in (
        {"extra_body": {"regex": "(((a"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "wrong"}},
            }
        },
    ):
        with pytest.raises(openai.BadRequestError, match="cannot be compiled"):
            create(real_server, **options)


@pytest.mark.parametrize("choice", ["x|y (z).", "50% \\n", "[q]{2}^$ é", "two\nlines"])
def test_one_of_the_choices_is_written_as_it_is(real_server, choice):
    for body in ({"guided_choice": [choice, "b"]}, {"structured_outputs": {"choice": [choice, "b"]}}):
        answer = create(real_server, seed=1, extra_body=body).choices[0]
        assert answer.message.content in (choice, "b") and answer.finish_reason == "stop"


def test_only_allowed_tokens_are_sent(real_server):
    ids = real_server.http.post("/tokenize", json={"prompt": "xyz"}).json()["tokens"]
    body = {"allowed_token_ids": ids}
    for temperature in (0, 100.0):
        answer = create(
            real_server, seed=1, temperature=temperature, max_completion_tokens=30, extra_body=body
        )
        assert set(answer.choices[0].message.content) <= set("xyz")


def test_errors_are_the_clients_own_exceptions(real_server):
    with pytest.raises(openai.BadRequestError, match="best_of"):
        real_server.openai.completions.create(model="tiny", prompt="a", best_of=3)
    with pytest.raises(openai.BadRequestError, match="room for"):
        create(real_server, max_completion_tokens=128)
    with pytest.raises(openai.NotFoundError, match="not served"):
        create(real_server, model="gpt-5")


def test_200_clients_that_leave_at_random_lose_no_page(real_server):
    rng = random.Random(0)

    async def client(http, delay, stream, length):
        body = {
            "prompt": "x" * length,
            "max_tokens": 60,
            "stream": stream,
            "n": 1 + length % 2,
            "temperature": 0,
        }
        try:
            async with asyncio.timeout(delay):
                async with http.stream("POST", "/v1/completions", json=body) as response:
                    async for _ in response.aiter_raw():
                        pass
        except (TimeoutError, httpx.HTTPError):
            return 1
        return 0

    async def crowd():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=real_server.url, limits=limits, timeout=60) as http:
            jobs = [
                client(http, rng.choice((0.0, 0.01, 0.1, 0.5, 2.0)), rng.random() < 0.6, rng.randint(1, 60))
                for _ in range(200)
            ]
            return sum(await asyncio.gather(*jobs))

    assert asyncio.run(crowd()) > 50, "too few left for this to test anything"
    assert (
        create(real_server, temperature=0).choices[0].message.content
        == create(real_server, temperature=0).choices[0].message.content
    )
    wait_until(lambda: not real_server.engine.has_work)
    assert real_server.engine.totals.num_finished["abort"] > 20


def test_memory_stays_flat_under_bodies_that_are_refused(real_server):
    resident = lambda: int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")  # noqa: E731, SIM115
    body = json.dumps({"prompt": "a" * 10_000_000}).encode()
    headers = {"Content-Type": "application/json"}

    def flood(times):
        for _ in range(times):
            assert real_server.http.post("/v1/completions", content=body, headers=headers).status_code == 413
            assert (
                real_server.http.post("/v1/completions", content=b"[" * 100_000, headers=headers).status_code
                == 400
            )

    flood(3)
    before = resident()
    flood(10)
    assert resident() - before < 40e6
    assert create(real_server).choices


def num_requests(url: str) -> float:
    """Running and waiting ones, by the metrics."""
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("eagle_kit:num_requests"))


def test_sigterm_under_load_returns_every_response_and_exits_with_0(target_folder, tmp_path):
    options = ["--max-running-requests", 2, "--grace-period", 0.5, "--max-context", 512]
    process = ServerProcess(target_folder, "--port", 0, *options, log=tmp_path / "log")
    try:
        wait_until(lambda: "Serving" in process.said or not process.is_alive, 120)
        url = next(line for line in process.said.splitlines() if "Serving" in line).split()[-1]
        body = {"messages": MESSAGES, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
        with ThreadPoolExecutor(6) as pool:
            posts = [
                pool.submit(
                    httpx.post, f"{url}/v1/chat/completions", json={**body, "stream": i % 2 == 0}, timeout=60
                )
                for i in range(6)
            ]
            wait_until(lambda: num_requests(url) == len(posts))
            process.terminate()
            answers = [post.result() for post in posts]
        for i, answer in enumerate(answers):
            if answer.status_code == 503:
                assert answer.headers["retry-after"] and answer.json()["error"]["code"] == "overloaded"
            elif i % 2 == 0:
                assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
                assert '"finish_reason":"' in answer.text
            else:
                assert answer.status_code == 200
                assert answer.json()["choices"][0]["finish_reason"] in ("abort", "length")
        assert process.wait(30) == 0
    finally:
        process.kill()
    assert "Traceback" not in process.said


def test_shapes_that_are_chosen_by_measurements_are_shown(target_folder):
    llm = LLM(str(target_folder), max_context=128)
    head = tiny_head(llm.target, draft_vocab_size=67)
    llm = LLM(str(target_folder), head, max_context=128, max_batch_size=2, graph_mode="off")
    with serving(llm, llm.engine()) as server:
        details = create(server, temperature=0, extra_body={"return_speculation": True}).speculation
        drafting = sum(count for shape, count in details["shapes"].items() if shape != "none")
        assert drafting == details["num_verifies"]
        assert [line.partition(":")[0] for line in details["reasons"][:2]] == ["batch 1", "batch 2"]
        assert "measure" in details["reasons"][-1]
        lines = server.http.get("/metrics").text.splitlines()
    cycles = [line for line in lines if line.startswith("eagle_kit:spec_decode_num_cycles_total{")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in cycles) == sum(details["shapes"].values())
    gains = [line for line in lines if line.startswith("eagle_kit:spec_decode_expected_speedup{")]
    assert len(gains) == 2
    assert all(float(line.rsplit(" ", 1)[1]) >= 1 for line in gains)
