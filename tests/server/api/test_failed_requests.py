"""A request whose logits are not finite gets an error of its own; the server and other requests go on."""

import json
import math

import pytest
import torch

from eagle_kit.core.output import NOT_FINITE
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.llm import LLM
from tests.server.api.serving import serving

BAD = 200
GOOD = {"prompt": [70, 71, 72], "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(target_folder):
    llm = LLM(str(target_folder), max_batch_size=4, max_context=128, page_size=4)
    weight = llm.target.embed_tokens.weight.detach().clone()  # that of the output layer stays as it is
    weight[BAD] = math.nan
    llm.target.embed_tokens.weight = torch.nn.Parameter(weight, requires_grad=False)
    return llm


@pytest.fixture
def server(llm):
    with serving(llm, llm.engine()) as running:
        yield running


def test_over_http(server):
    def post(body):
        return server.http.post("/v1/completions", json=body)

    def failed() -> float:
        lines = server.http.get("/metrics").text.splitlines()
        (count,) = (line.split()[-1] for line in lines if line.startswith("eagle_kit:requests_failed_total"))
        return float(count)

    before, expected = failed(), post(GOOD).json()["choices"][0]["text"]
    for stream in (False, True):  # a stream that has not begun has a status, too
        refused = post({**GOOD, "prompt": [70, BAD, 72], "stream": stream})
        assert refused.status_code == 500
        assert refused.json()["error"]["message"] == NOT_FINITE
        assert refused.json()["error"]["code"] == "logits_not_finite"
    assert failed() == before + 2
    assert post(GOOD).json()["choices"][0]["text"] == expected
    assert server.http.get("/health").status_code == 200


def strict(text: str):
    """Read JSON, in which NaN and infinities are no numbers."""

    def refuse(name: str):
        raise AssertionError(name)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("more", [{"logprobs": 5}, {"echo": True}])
def test_no_response_has_a_number_that_json_does_not_know(server, more):
    """The first token is good and the next one's logits are not, whole and as events."""
    body = {**GOOD, "logit_bias": {str(BAD): 100.0}, **more}
    refused = server.http.post("/v1/completions", json=body)
    assert refused.status_code == 500
    assert strict(refused.text)["error"]["code"] == "logits_not_finite"

    sent = server.http.post("/v1/completions", json={**body, "stream": True}).text
    events = [line.removeprefix("data: ") for line in sent.splitlines() if line]
    assert events.pop() == "[DONE]"
    *choices, last = map(strict, events)
    assert last["error"]["code"] == "logits_not_finite"
    assert all(event["choices"] for event in choices)


def test_generate_returns_the_others(llm):
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    (alone,) = llm.generate([GOOD["prompt"]], params)
    bad, good = llm.generate([[70, BAD, 72], GOOD["prompt"]], params)
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert (good.finish_reason, good.token_ids) == ("length", alone.token_ids)
