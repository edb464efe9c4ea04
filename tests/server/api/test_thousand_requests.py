"""A thousand prompts at once: all are answered, and another client gets its turn meanwhile."""

import asyncio

import httpx
import pytest
from tiny_run import make_target

from eagle_kit.engine.llm import LLM
from tests.server.api.serving import serving

NUM_REQUESTS = 1000
MAX_TOKENS = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A tiny target on a CPU, with the default limits of a server."""
    folder = make_target(tmp_path_factory.mktemp("target"))
    llm = LLM(str(folder), max_context=96, graph_mode="off")
    with serving(llm, llm.engine()) as running:
        yield running


def body(number: int, **fields):
    return {
        "model": "tiny",
        "prompt": [70 + number % 100, 71, 72 + number % 7],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


async def send_all(url: str) -> tuple[list[httpx.Response], int]:
    """Send all requests at once, every other one as a stream -> their responses, and how many responses
    another client had before the last of them."""
    no_limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    num_of_other = 0
    async with httpx.AsyncClient(base_url=url, limits=no_limits, timeout=None) as http:
        load = asyncio.gather(
            *(
                http.post("/v1/completions", json=body(number, stream=number % 2 == 1))
                for number in range(NUM_REQUESTS)
            )
        )
        # Another address is another client; it opens a connection for each request.
        no_idle = httpx.Limits(max_keepalive_connections=0)
        transport = httpx.AsyncHTTPTransport(local_address="127.0.0.2", limits=no_idle)
        async with httpx.AsyncClient(base_url=url, transport=transport, timeout=None) as other:
            while not load.done():
                await asyncio.sleep(0.2)
                response = await other.post("/v1/completions", json=body(0))
                assert response.status_code == 200
                num_of_other += not load.done()
        return await load, num_of_other


def test_a_thousand_prompts_at_once_lose_none(server):
    responses, num_of_other = asyncio.run(send_all(server.url))
    statuses = {response.status_code for response in responses}
    assert statuses == {200}
    for response in responses[::2]:
        assert response.json()["usage"]["completion_tokens"] == MAX_TOKENS
    for response in responses[1::2]:
        assert response.text.rstrip().endswith("data: [DONE]")

    # Another client was answered all along, not behind the thousand.
    assert num_of_other >= 1
    server.engine.check()
    assert server.engine.totals.num_finished["length"] >= NUM_REQUESTS
