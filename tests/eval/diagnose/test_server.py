"""A running server beside our engine: its counters before and after, and what a difference points to."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from eagle_kit.core.errors import UserError
from eagle_kit.core.output import RequestOutput
from eagle_kit.core.shape import SpecShape
from eagle_kit.core.stats import SpecStats
from eagle_kit.eval.diagnose.compare import compare_server
from eagle_kit.eval.diagnose.replay import Replay
from eagle_kit.eval.diagnose.server import Server, ServerReading, ServerReply

CHATS = [[{"role": "user", "content": f"Question {i}"}] for i in range(3)]


def vllm(asked: int) -> str:
    """vLLM 0.32: 10 drafts of 4 tokens a reply, of which 6, 3, 1 and 0 are accepted by depth."""
    at = [6, 3, 1, 0]
    lines = [f'vllm:spec_decode_num_drafts_total{{model_name="m"}} {100 + 10 * asked}.0']
    lines.append(f'vllm:spec_decode_num_draft_tokens_total{{model_name="m"}} {400 + 40 * asked}.0')
    lines.append(f'vllm:spec_decode_num_accepted_tokens_total{{model_name="m"}} {50 + 10 * asked}.0')
    for depth, count in enumerate(at):
        label = f'{{model_name="m",position="{depth}"}}'
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines.append(f"{name}{label} {7 + count * asked}.0")
    return "\n".join(lines)


def sglang(asked: int) -> str:
    """SGLang 0.5: 20 verifies and 31 tokens a reply."""
    return "\n".join(
        [
            'sglang:spec_accept_length{model_name="m"} 3.9',
            f'sglang:spec_verify_calls_total{{model_name="m"}} {500 + 20 * asked}.0',
            f'sglang:num_requests_total{{model_name="m"}} {9 + asked}.0',
            f'sglang:generation_tokens_total{{model_name="m"}} {77 + 31 * asked}.0',
        ]
    )


def sglang_gauge(asked: int) -> str:
    """An SGLang that counts no verifies."""
    return 'sglang:spec_accept_length{model_name="m"} 1.75'


@contextmanager
def fake(
    metrics: Callable[[int], str], reply: object = "Some text", key: str = ""
) -> Iterator[tuple[str, list]]:
    """A server with those metrics and the same reply to every chat -> its URL, and the bodies it was sent."""
    bodies: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self.answer(metrics(len(bodies)).encode())
            else:
                self.answer(json.dumps({"data": [{"id": "the-model"}]}).encode())

        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if key and self.headers["Authorization"] != f"Bearer {key}":
                self.answer(b'{"error": "no key"}', 401)
                return
            message = {"choices": [{"message": {"content": reply}}], "usage": {"prompt_tokens": 12}}
            self.answer(json.dumps(message if isinstance(reply, str) else reply).encode())

        def answer(self, data: bytes, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_vllms_counters_give_acceptance_per_position_of_these_prompts_alone():
    steps = []
    with fake(vllm) as (url, bodies):
        seen = Server(url).replay(CHATS, 32, lambda: steps.append(1))
    assert seen.engine == "vLLM" and seen.accept_length == pytest.approx(2.0) and not seen.is_gauge
    assert seen.reach == pytest.approx((0.6, 0.3, 0.1, 0.0)) and (seen.num_verifies, seen.num_steps) == (
        30,
        4,
    )
    assert [body["messages"] for body in bodies] == CHATS and len(steps) == 3
    assert {(body["model"], body["max_tokens"], body["temperature"]) for body in bodies} == {
        ("the-model", 32, 0)
    }
    assert seen.replies[0] == ServerReply("Some text", 12)


def test_sglang_counts_verifies_or_has_a_gauge():
    with fake(sglang) as (url, _):
        seen = Server(url).replay(CHATS, 32)
    assert seen.engine == "SGLang" and seen.accept_length == pytest.approx(30 / 20) and seen.reach == ()
    with fake(sglang_gauge) as (url, _):
        seen = Server(url).replay(CHATS, 32)
    assert (seen.accept_length, seen.is_gauge, seen.num_verifies) == (1.75, True, 0)


def test_a_key_is_sent_and_a_refusal_is_a_users_error():
    with fake(vllm, key="secret") as (url, _):
        assert Server(url, "secret").replay(CHATS, 8).num_verifies == 30
        with pytest.raises(UserError, match=r"401 .*no key"):
            Server(url).replay(CHATS, 8)


@pytest.mark.parametrize("reply", [{"choices": []}, {"choices": [{"text": "a"}]}, [1, 2]])
def test_what_is_no_chat_completion_is_a_users_error(reply):
    with fake(vllm, reply) as (url, _), pytest.raises(UserError, match="not OpenAI's API"):
        Server(url).replay(CHATS, 8)


def test_nobody_answers_and_no_url_are_users_errors():
    with pytest.raises(UserError, match="does not answer"):
        Server("http://127.0.0.1:9").replay(CHATS, 8)
    with pytest.raises(UserError, match="not a URL"):
        Server("localhost:8000")


TEXTS = [
    "The sky is blue because of light that is scattered.",
    "One, two, three, four, five.",
    "Paris is it.",
]
PLAIN = [RequestOutput([1] * 12, [2], text, "length") for text in TEXTS]


def reading(texts=TEXTS, length: float | None = 1.7, prompt=12, verifies=400, **changes) -> ServerReading:
    reach = ((length or 1.0) - 1, 0.0)
    known = {"is_gauge": False, "reach": reach, "num_verifies": verifies, "num_steps": 2}
    replies = [ServerReply(text, prompt) for text in texts]
    return ServerReading("vLLM", replies, length, **{**known, **changes})


def replay(length=1.7, verifies=400) -> Replay:
    accepted = round((length - 1) * verifies)
    stats = SpecStats(verifies, verifies + accepted, [], [accepted, 0])
    return Replay(SpecShape(2, 1, 3), stats, None, 0)


def test_the_same_acceptance_there_is_no_cause():
    for length in (1.7, 1.65, 2.3):
        compared = compare_server(reading(length=length), replay(), PLAIN)
        assert compared.cause is None and "accepts" in compared.verdict
    assert "more than our engine" in compare_server(reading(length=2.3), replay(), PLAIN).verdict
    few = compare_server(reading(length=1.5, verifies=12), replay(verifies=12), PLAIN)
    assert few.cause is None, "twelve verifies tell nothing"


def test_fewer_there_with_the_same_texts_is_the_other_engine():
    compared = compare_server(reading(length=1.3), replay(), PLAIN, "layer ids one later (1.31)")
    assert compared.cause.subject == "the other engine" and "the cause lies there" in compared.verdict
    assert "1.30 tokens per verify there and 1.70 in our engine" in compared.cause.evidence
    assert "layer ids one later (1.31)" in compared.cause.evidence


def test_fewer_there_with_longer_prompts_is_the_template():
    compared = compare_server(reading(length=1.3, prompt=13), replay(), PLAIN)
    assert compared.cause.subject == "chat template"
    assert "makes 13 tokens" in compared.cause.evidence and "here 12" not in compared.cause.evidence
    assert compare_server(reading(length=1.3, prompt=0), replay(), PLAIN).cause.subject == "the other engine"


def test_fewer_there_with_other_texts_is_another_target():
    other = ["Light is scattered.", "1 2 3 4 5", "It is Paris."]
    compared = compare_server(reading(other, length=1.3), replay(), PLAIN)
    assert compared.cause.subject == "another target" and "3 of 3" in compared.cause.evidence
    late = [text[:-4] + "????" for text in TEXTS]
    assert compare_server(reading(late, length=1.3), replay(), PLAIN).cause.subject == "the other engine"


def test_a_server_without_speculation_is_said():
    compared = compare_server(reading(length=None, reach=(), num_verifies=0), replay(), PLAIN)
    assert "counts no verifies" in compared.verdict and compared.cause is None
