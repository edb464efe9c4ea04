"""schemathesis against our own OpenAPI description: what is generated from it, well formed or not, is
answered as described, and the server goes on."""

from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance, unsupported_method

from generate.http_api import server_description

pytestmark = pytest.mark.usefixtures("pool_is_conserved")

# Rules between parameters are no part of a JSON schema, so what it allows may still be refused.
EXCLUDED = [positive_data_acceptance, unsupported_method]


@pytest.fixture(scope="module")
def description(real_server):
    return real_server.http.get("/openapi.json").json()


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.name.lower())
def test_our_description_of_ourselves_holds_for_generated_requests(real_server, description, mode):
    statuses: Counter[int] = Counter()
    for found in schemathesis.openapi.from_dict(description).get_all_operations():
        operation = found.ok()
        try:
            strategy = operation.as_strategy(generation_mode=mode)

            @seed(1)
            @settings(
                max_examples=15 if operation.method == "post" else 2,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=strategy)
            def check(case):
                if isinstance(case.body, dict) and isinstance(case.body.get("max_tokens"), int):
                    case.body["max_tokens"] = min(case.body["max_tokens"], 2)
                response = case.call(base_url=real_server.url, timeout=30)
                case.validate_response(response, excluded_checks=EXCLUDED)
                statuses[response.status_code] += 1

            check()
        except Unsatisfiable:  # nothing can be wrong with a request without parameters
            continue
    assert statuses[400] > 30 and set(statuses) <= {200, 400, 404, 405, 415}, statuses
    if mode is GenerationMode.POSITIVE:
        assert statuses[200] > 10
    body = {"prompt": "ab", "temperature": 0}
    assert real_server.http.post("/v1/completions", json=body).status_code == 200


def test_every_parameter_and_every_error_is_described(description):
    schemas = description["components"]["schemas"]
    assert set(schemas["CompletionRequest"]["properties"]) >= {
        "prompt",
        "echo",
        "regex",
        "priority",
        "logprobs",
    }
    assert schemas["ChatRequest"]["additionalProperties"] is False
    for path in ("/v1/chat/completions", "/v1/completions"):
        post = description["paths"][path]["post"]
        assert set(post["responses"]) >= {"200", "400", "401", "413", "415", "429", "500", "503"}
        assert post["requestBody"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1] in schemas


def test_no_status_is_described_that_is_never_sent(description):
    operations = [operation for path in description["paths"].values() for operation in path.values()]
    assert not [operation for operation in operations if "422" in operation["responses"]]
    assert not [name for name in description["components"]["schemas"] if "ValidationError" in name]


def test_the_fields_of_a_message_are_described(description):
    """It leaves fields out when it is written, which pydantic describes as any object."""
    message = description["components"]["schemas"]["ChatMessage"]
    assert message["properties"].keys() >= {"role", "content", "reasoning_content", "tool_calls"}
    assert message["required"] == ["content"] and message["description"]


def test_the_reference_describes_the_routes_of_the_server(description):
    """The page of the HTTP interface is made without a model."""
    written = server_description()
    assert written["paths"] == description["paths"]
    assert written["components"] == description["components"]
