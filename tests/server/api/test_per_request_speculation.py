"""Speculation of one request over HTTP: limits, counts under other engines' names, and the histogram."""

import pytest

from eagle_kit.engine.llm import LLM
from tests.server.api.serving import serving

COMPLETIONS = "/v1/completions"
BODY = {
    "prompt": [70, 71, 72] * 6,
    "max_tokens": 20,
    "temperature": 0,
    "ignore_eos": True,
    "return_speculation": True,
}


@pytest.fixture(scope="module")
def server(target_folder):
    llm = LLM(
        str(target_folder), algorithm="NGRAM", shape="4,2,9", max_batch_size=4, max_context=128, page_size=4
    )
    with serving(llm, llm.engine()) as running:
        yield running


def ask(server, **body):
    answer = server.http.post(COMPLETIONS, json={**BODY, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_limit_changes_the_counts_and_not_the_text(server):
    free = ask(server)
    assert free["speculation"]["num_accepted_tokens"] > 0
    for body in (
        {"speculative": False},
        {"speculative_depth": 0},
        {"speculative": False, "speculative_depth": 0},
    ):
        plain = ask(server, **body)
        assert plain["choices"] == free["choices"]
        assert plain["speculation"]["num_verifies"] == plain["speculation"]["num_draft_tokens"] == 0
        assert set(plain["speculation"]["shapes"]) == {"none"}
    one = ask(server, speculative_depth=1)
    assert one["choices"] == free["choices"] and len(one["speculation"]["num_accepted_at"]) == 1
    again = ask(server, speculative=True)["speculation"]  # the n-grams have learnt meanwhile
    assert again["num_accepted_tokens"] >= free["speculation"]["num_accepted_tokens"]


def test_the_names_of_other_engines_have_the_same_numbers(server):
    body = ask(server)
    found = body["speculation"]
    assert found["num_drafts"] == found["spec_verify_ct"] == found["num_verifies"] > 0
    assert found["num_accepted_tokens_per_pos"] == found["num_accepted_at"]
    assert found["spec_accept_token_num"] == found["num_accepted_tokens"] == sum(found["num_accepted_at"])
    assert found["spec_draft_token_num"] == found["num_draft_tokens"] >= found["num_accepted_tokens"]
    assert found["spec_accept_length"] == found["accept_length"]
    rate = found["num_accepted_tokens"] / found["num_draft_tokens"]
    assert found["spec_accept_rate"] == pytest.approx(rate, abs=1e-4)
    counts = found["spec_accept_histogram"]
    assert sum(counts) == found["num_verifies"]
    assert sum(number * count for number, count in enumerate(counts)) == found["num_accepted_tokens"]
    details = body["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == found["num_accepted_tokens"]
    assert sum(details.values()) == found["num_draft_tokens"]


def test_a_request_without_verifies_is_not_in_the_histogram(server):
    def observed():
        lines = server.http.get("/metrics").text.splitlines()
        return {
            name: float(line.split()[-1])
            for line in lines
            for name in ("count", "sum")
            if line.startswith(f"eagle_kit:request_accept_length_{name}")
        }

    before = observed()
    ask(server, speculative=False)
    assert observed() == before
    length = ask(server)["speculation"]["accept_length"]
    after = observed()
    assert after["count"] == before["count"] + 1
    assert after["sum"] - before["sum"] == pytest.approx(length, abs=1e-3)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"speculative": False, "speculative_depth": 2}, "excludes"),
        ({"speculative_depth": -1}, "speculative_depth"),
        ({"speculative": "no"}, "speculative"),
    ],
)
def test_what_cannot_be_is_refused(server, body, message):
    answer = server.http.post(COMPLETIONS, json={**BODY, **body})
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]
