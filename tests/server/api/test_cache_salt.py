"""A client does not find out what others have sent by guessing at it, where requests have cache salts or the
server separates clients."""

import random
from types import SimpleNamespace

import pytest

from eagle_kit.config.server import ServerConfig
from eagle_kit.drafts.ngram.index import NgramIndex
from eagle_kit.engine.llm import LLM
from eagle_kit.server.api.protocol import CompletionRequest
from eagle_kit.server.api.service import Service
from tests.server.api.serving import serving
from tests.server.api.test_clients import client_at

COMPLETE = "/v1/completions"
CHAT = "/v1/chat/completions"
SECRET = random.Random(0).choices(range(97, 117), k=48)


@pytest.fixture(scope="module")
def ngram_llm(target_folder):
    sizes = {"max_batch_size": 2, "max_context": 256, "page_size": 1}
    return LLM(str(target_folder), algorithm="NGRAM", shape="8,4,12", **sizes)


def ask(http, prompt, **body):
    """Cached tokens and accept length of a greedy response, and its text."""
    given = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **body}
    answer = http.post(COMPLETE, json={**given, "return_speculation": True})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, found["speculation"]["accept_length"], found["choices"][0]["text"]


@pytest.fixture
def engine(ngram_llm):
    """An engine that has cached nothing."""
    engine = ngram_llm.engine()
    engine.page_pool.clear()
    engine.ngram = NgramIndex(engine.config.ngram)
    return engine


def test_guesses_at_a_prompt_with_a_salt_find_nothing(ngram_llm, engine):
    """Without a salt, cached tokens say how far a guess is right, and the accept length that it is."""
    with serving(ngram_llm, engine) as server:
        victim = ask(server.http, SECRET, cache_salt="of the victim")
        for length in (8, 20, 47):
            assert ask(server.http, SECRET[:length] + [96], cache_salt=f"guess {length}")[0] == 0
        assert ask(server.http, SECRET) == (0, victim[1], victim[2])
        assert ask(server.http, SECRET, cache_salt="of another") == (0, victim[1], victim[2])
        cached, accept_length, text = ask(server.http, SECRET, cache_salt="of the victim")
        assert cached == len(SECRET) - 1
        assert accept_length > victim[1] + 1
        assert text == victim[2]


@pytest.mark.parametrize("salt", [None, "chosen by both"])
def test_separate_clients_find_what_they_have_sent_themselves_only(ngram_llm, engine, salt, monkeypatch):
    salts = []
    add = engine.add_request

    def recorded(request):
        salts.append(request.params.cache_salt)
        add(request)

    monkeypatch.setattr(engine, "add_request", recorded)
    with serving(ngram_llm, engine, separate_clients=True) as server:
        victim = ask(server.http, SECRET, cache_salt=salt)
        with client_at(server, "127.0.0.2") as other:
            assert ask(other, SECRET[:20] + [96], cache_salt=salt)[0] == 0
            found = ask(other, SECRET, cache_salt=salt)
            assert found == (20, victim[1], victim[2]), "its own guess is cached"
            # The salt that the server has made of the victim's address is of no use to others.
            assert len(set(salts)) == 2
            assert ask(other, SECRET[:40], cache_salt=salts[0])[0] == 0
        assert ask(server.http, SECRET, cache_salt=salt)[0] == len(SECRET) - 1
        assert ask(server.http, SECRET, cache_salt="another")[0] == 0, "a client separates its users"


def test_salts_of_a_server_are_not_those_of_another_process(ngram_llm, engine):
    body = CompletionRequest(prompt="a")
    http = SimpleNamespace(client=SimpleNamespace(host="127.0.0.1"))
    config = ServerConfig(model_name="m", separate_clients=True)
    services = [Service(ngram_llm, engine, config) for _ in range(2)]
    salts = {service._cache_salt(http, body) for service in services}
    for service in services:
        service.close()
    assert len(salts) == 2


def test_grammars_with_a_salt_do_not_show_whether_others_have_used_them(ngram_llm, engine):
    """The number of compiled grammars is in the metrics, and compiling takes time."""
    with serving(ngram_llm, engine) as server:
        numbers = []
        for salt in ("of the victim", "of another", None, "of the victim"):
            ask(server.http, [97], regex="ab|cd", cache_salt=salt, ignore_eos=False)
            numbers.append(engine.num_grammars)
    assert numbers == [numbers[0] + more for more in (0, 1, 2, 2)]


def test_a_salt_that_is_no_short_text_is_refused(scripted):
    bodies = {CHAT: {"messages": [{"role": "user", "content": "a"}]}, COMPLETE: {"prompt": "a"}}
    with serving(*scripted("abc"), max_body_bytes=2**24) as server:
        for path, body in bodies.items():
            for salt in ("", 5, True, ["s"], {"s": "s"}, "s" * 257, "s" * 10_000_000):
                answer = server.http.post(path, json={**body, "cache_salt": salt})
                assert answer.status_code == 400 and len(answer.content) < 2000
                assert answer.json()["error"]["param"].startswith("cache_salt")
            for salt in (None, "s" * 256, "\U0001f512", "\0"):
                assert server.http.post(path, json={**body, "cache_salt": salt}).status_code == 200


def test_chats_take_a_salt(ngram_llm, engine):
    with serving(ngram_llm, engine) as server:
        cached = []
        for salt in ("a", "b", "a"):
            body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "cache_salt": salt}
            usage = server.http.post(CHAT, json=body).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            num_prompt_tokens = usage["prompt_tokens"]
    assert cached == [0, 0, num_prompt_tokens - 1]
