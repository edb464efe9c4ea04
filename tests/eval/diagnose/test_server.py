"""A running server beside our engine: its counters before and after, and what a difference points to."""

import socket
import threading
from contextlib import contextmanager

import pytest
from fake_server import fake, sglang, sglang_gauge, vllm

from eagle_kit.core.errors import UserError
from eagle_kit.core.output import RequestOutput
from eagle_kit.core.shape import SpecShape
from eagle_kit.core.stats import SpecStats
from eagle_kit.eval.diagnose.compare import compare_server
from eagle_kit.eval.diagnose.replay import Replay
from eagle_kit.eval.diagnose.server import ServerClient, ServerResponse, ServerResult

CHATS = [[{"role": "user", "content": f"Question {i}"}] for i in range(3)]
OPTIONS = {"speculative_num_steps": 5, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}


def test_vllms_counters_give_acceptance_per_position_of_these_prompts_alone():
    steps = []
    with fake(vllm) as (url, bodies):
        seen = ServerClient(url).replay(CHATS, 32, lambda: steps.append(1))
    assert seen.engine == "vLLM" and seen.accept_length == pytest.approx(2.0) and not seen.is_gauge
    assert seen.reach == pytest.approx((0.6, 0.3, 0.1, 0.0)) and seen.num_verifies == 30
    assert seen.shape == (4, 1, 5) and seen.other_traffic == 0
    assert [body["messages"] for body in bodies] == CHATS and len(steps) == 3
    asked = {(body["model"], body["max_tokens"], body["temperature"]) for body in bodies}
    assert asked == {("the-model", 32, 0)}
    assert {body["repetition_penalty"] for body in bodies} == {1.0}, "whatever generation_config.json says"
    assert seen.responses[0] == ServerResponse("Some text", 12, 21)


def test_sglang_counts_verifies_or_has_a_gauge():
    with fake(sglang) as (url, _):
        seen = ServerClient(url).replay(CHATS, 32)
    assert seen.engine == "SGLang" and seen.accept_length == pytest.approx(30 / 20) and seen.reach == ()
    with fake(sglang_gauge) as (url, _):
        seen = ServerClient(url).replay(CHATS, 32)
    assert (seen.accept_length, seen.is_gauge, seen.num_verifies) == (1.75, True, 0)


@pytest.mark.parametrize("path", ["server_info", "get_server_info"])
def test_sglang_says_its_shape(path):
    with fake(sglang, **{path: OPTIONS}) as (url, _):
        assert ServerClient(url).replay(CHATS, 32).shape == (5, 4, 8)


@pytest.mark.parametrize("options", [{}, {**OPTIONS, "speculative_eagle_topk": None}, [1]])
def test_a_shape_that_is_not_said_is_unknown(options):
    with fake(sglang, server_info=options) as (url, _):
        assert ServerClient(url).replay(CHATS, 32).shape is None


def ours(asked: int) -> str:
    lines = vllm(asked).replace("vllm:", "eagle_kit:")
    cycles = {"5,4,16": 30 * asked, "none": asked, "3,1,4": 12}
    samples = [f'eagle_kit:spec_decode_num_cycles_total{{shape="{key}"}} {n}.0' for key, n in cycles.items()]
    return "\n".join([lines, *samples])


def test_ours_counts_cycles_by_shape_so_a_tree_is_known():
    with fake(ours) as (url, _):
        assert ServerClient(url).replay(CHATS, 32).shape == (5, 4, 16)


def test_the_traffic_of_others_is_noticed():
    with fake(lambda asked: vllm(asked + (asked > 0))) as (url, _):
        seen = ServerClient(url).replay(CHATS, 32)
    assert (seen.num_counted_tokens, seen.num_tokens) == (84, 63) and seen.other_traffic == 0.25


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_that_a_parser_takes_out_is_read_too(name):
    with fake(vllm, {"content": None, name: "Let me think."}) as (url, _):
        assert ServerClient(url).replay(CHATS, 8).responses[0].text == "Let me think."
    with fake(vllm, {"content": None}) as (url, _):
        assert ServerClient(url).replay(CHATS, 8).responses[0].text == ""


def test_a_key_is_sent_and_a_refusal_is_a_users_error():
    with fake(vllm, key="secret") as (url, _):
        assert ServerClient(url, "secret").replay(CHATS, 8).num_verifies == 30
        with pytest.raises(UserError, match=r"401 .*no key"):
            ServerClient(url).replay(CHATS, 8)


@pytest.mark.parametrize(
    "response", [{"choices": []}, {"choices": [{"text": "a"}]}, {"choices": [{"message": 1}]}, 7]
)
def test_what_is_no_chat_completion_is_a_users_error(response):
    with fake(vllm, [response]) as (url, _), pytest.raises(UserError, match="not OpenAI's API"):
        ServerClient(url).replay(CHATS, 8)


def test_a_server_without_metrics_is_told_by_a_probe_and_the_flag_is_named():
    with fake(None) as (url, bodies), pytest.raises(UserError, match="404") as raised:
        ServerClient(url).probe()
    assert "--enable-metrics" in raised.value.remedy and "Start the server" not in raised.value.remedy
    assert bodies == []
    with fake(vllm) as (url, _):
        ServerClient(url).probe()


@contextmanager
def saying(data: bytes):
    """A server that says ``data`` whatever it is asked."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(data)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize(
    "data", [b"\x15\x03\x01\x00\x02\x02\x16", b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{"]
)
def test_a_port_of_another_protocol_and_a_response_cut_short_are_users_errors(data):
    with saying(data) as url, pytest.raises(UserError, match="does not answer"):
        ServerClient(url).probe()


def test_nobody_answers_and_no_url_are_users_errors():
    with pytest.raises(UserError, match="does not answer"):
        ServerClient("http://127.0.0.1:9").replay(CHATS, 8)
    for url in ("localhost:8000", "http://", "http://localhost:port", "http://localhost:99999"):
        with pytest.raises(UserError, match="not a URL"):
            ServerClient(url)


TEXTS = [
    "The sky is blue because of light that is scattered.",
    "One, two, three, four, five.",
    "Paris is it.",
]
OTHER_TEXTS = ["Light is scattered.", "1 2 3 4 5", "It is Paris."]
PLAIN = [RequestOutput([1] * 12, [2], text, "length") for text in TEXTS]


def reading(texts=TEXTS, length: float | None = 1.7, prompt=12, verifies=400, **changes) -> ServerResult:
    reach = ((length or 1.0) - 1, 0.0)
    known = {"is_gauge": False, "reach": reach, "num_verifies": verifies, "shape": SpecShape(2, 1, 3)}
    responses = [ServerResponse(text, prompt, 50) for text in texts]
    return ServerResult("vLLM", responses, length, **{**known, **changes})


def replay(length=1.7, verifies=400) -> Replay:
    accepted = round((length - 1) * verifies)
    stats = SpecStats(verifies, verifies + accepted, [], [accepted, 0])
    return Replay(SpecShape(2, 1, 3), stats, None, 0)


def test_the_same_acceptance_there_is_no_cause():
    for length in (1.7, 1.65, 2.3):
        compared = compare_server(reading(length=length), replay(), PLAIN)
        assert compared.cause is None and "accepts" in compared.verdict and "But" not in compared.verdict
    assert "more than our engine" in compare_server(reading(length=2.3), replay(), PLAIN).verdict
    few = compare_server(reading(length=1.5, verifies=12), replay(verifies=12), PLAIN)
    assert few.cause is None, "twelve verifies tell nothing"


@pytest.mark.parametrize("length", [1.7, 2.3, None])
def test_what_differs_is_said_and_no_cause_where_as_many_are_accepted(length):
    compared = compare_server(reading(length=length, prompt=13), replay(), PLAIN)
    assert compared.cause is None and "But vLLM makes 13 tokens of a prompt" in compared.verdict
    compared = compare_server(reading(OTHER_TEXTS, length=length), replay(), PLAIN)
    assert compared.cause is None and "But 3 of 3 greedy responses of vLLM part" in compared.verdict


def test_fewer_there_with_the_same_texts_is_the_other_engine():
    compared = compare_server(reading(length=1.3), replay(), PLAIN, lambda: "layer ids one later (1.31)")
    assert compared.cause.subject == "the other engine" and "the cause lies there" in compared.verdict
    assert "1.30 tokens per verify there and 1.70 in our engine, though prompts and texts agree." in (
        compared.cause.evidence
    )
    assert "layer ids one later (1.31)" in compared.cause.evidence
    assert compared.cause.cost == pytest.approx(0.4), "drafts per verify"


def test_fewer_there_with_longer_prompts_is_the_template():
    compared = compare_server(reading(length=1.3, prompt=13), replay(), PLAIN)
    assert compared.cause.subject == "chat template"
    assert "makes 13 tokens" in compared.cause.evidence and "here 12" not in compared.cause.evidence
    assert compare_server(reading(length=1.3, prompt=0), replay(), PLAIN).cause.subject == "the other engine"


def test_fewer_there_with_other_texts_is_another_target():
    compared = compare_server(reading(OTHER_TEXTS, length=1.3), replay(), PLAIN)
    assert compared.cause.subject == "another target" and "3 of 3" in compared.cause.evidence
    late = [text[:-4] + "????" for text in TEXTS]
    assert compare_server(reading(late, length=1.3), replay(), PLAIN).cause.subject == "the other engine"


def test_reasoning_is_compared_without_the_marks_that_a_parser_takes_out():
    thought = [
        RequestOutput([1] * 12, [2], f"<think>\n{text}\n</think>\n\nSo it is.", "length") for text in TEXTS
    ]
    compared = compare_server(reading([f"{text}So it is." for text in TEXTS], length=1.3), replay(), thought)
    assert compared.cause.subject == "the other engine" and "texts agree" in compared.cause.evidence


def test_empty_responses_are_not_taken_for_the_same():
    compared = compare_server(reading(["", " ", ""], length=1.3), replay(), PLAIN)
    assert "Texts could not be compared" in compared.verdict
    assert "though prompts agree." in compared.cause.evidence
    one = compare_server(reading(["", "1 2 3", ""], length=1.3), replay(), PLAIN)
    assert one.cause.subject == "another target" and "1 of 1" in one.cause.evidence


@pytest.mark.parametrize(
    ("changes", "ours", "said"),
    [
        ({"length": None, "reach": (), "num_verifies": 0}, replay(), "counts no verifies"),
        ({"length": 1.1, "is_gauge": True, "num_verifies": 0}, replay(), "tells nothing of these prompts"),
        ({"length": 1.1, "shape": None}, None, "does not say how it drafts: give --shape"),
        ({"length": 1.1, "num_counted_tokens": 200}, replay(), "used by others meanwhile"),
    ],
)
def test_nobody_is_accused_by_figures_that_cannot_be_compared(changes, ours, said):
    compared = compare_server(reading(**changes), ours, PLAIN)
    assert compared.cause is None and said in compared.verdict and "accepts" not in compared.verdict


def test_a_little_traffic_of_others_is_only_said():
    compared = compare_server(reading(length=1.1, num_counted_tokens=152), replay(), PLAIN)
    assert (
        compared.cause is not None and "counted 152 tokens, and these responses have 150" in compared.verdict
    )
