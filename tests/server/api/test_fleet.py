"""Two servers behind a balancer: a rolling restart under load loses no response."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from balancer import balancing
from nodes import bound_socket
from server_process import ServerProcess

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.llm import LLM
from tests.server.api.serving import wait_until

NUM_TOKENS = 200
PAUSE_S = 0.3
PROMPTS = ("The cat sees", "A dog likes the river", "the house and the stone", "12 birds")
OPTIONS = ("--max-context", "512", "--max-running-requests", "4", "--served-model-name", "tiny")


class Replica:
    """A server's process at a fixed port, which can be started again. The port is kept by a socket that never
    listens, so that no other process is given it meanwhile."""

    def __init__(self, folder, log):
        self.socket = bound_socket()
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.log = log
        self.process = None

    def start(self):
        self.process = ServerProcess(self.folder, "--port", self.port, *OPTIONS, log=self.log)

    def terminate(self):
        """Send SIGTERM -> when it was sent."""
        self.process.terminate()
        return time.monotonic()

    def end(self):
        self.process.kill()
        self.socket.close()


class Load:
    """Clients that ask again and again, for streams and for whole responses in turn.

    Attributes:
        under_way: servers that stream to a client now.
        finished: servers of responses, with the text that one process alone gives, and when they ended.
        errors: of clients, which end with them.
    """

    def __init__(self, url, expected):
        self.url, self.expected = url, expected
        self.under_way, self.finished, self.errors, self.is_over = [], [], [], threading.Event()

    def client(self, number):
        turn = number
        try:
            while not self.is_over.wait(PAUSE_S):
                self.ask(turn % len(PROMPTS), turn // len(PROMPTS) % 2 == 0)
                turn += 1
        except BaseException as error:
            self.errors.append(error)
            raise

    def ask(self, which, stream):
        body = {"prompt": PROMPTS[which], "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        path = f"{self.url}/v1/completions"
        with httpx.stream("POST", path, json={**body, "stream": stream}, timeout=60) as answer:
            assert answer.status_code == 200
            server = answer.headers["server-address"]
            if stream:
                self.under_way.append(server)
                lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
                self.under_way.remove(server)
                assert lines.pop() == "[DONE]"
                text = "".join(json.loads(line)["choices"][0]["text"] for line in lines)
            else:
                text = json.loads(answer.read())["choices"][0]["text"]
        assert text == self.expected[which]
        self.finished.append((server, time.monotonic()))

    def has_finished(self, replica, since=0.0):
        """Whether a response of the replica has come, or a client has failed."""
        return bool(self.errors) or any(server == replica.url and at > since for server, at in self.finished)


@contextmanager
def load(url, expected, num_clients=2):
    """Load, until the end; raises what a client has raised."""
    load = Load(url, expected)
    with ThreadPoolExecutor(num_clients) as pool:
        clients = [pool.submit(load.client, number) for number in range(num_clients)]
        try:
            yield load
        finally:
            load.is_over.set()
        for each in clients:
            each.result()


@pytest.fixture(scope="module")
def expected(target_folder):
    llm = LLM(target_folder, max_context=512, device="cpu")
    ids = [llm.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    return [out.text for out in llm.generate(ids, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))]


def test_a_rolling_restart_under_load_loses_no_response(target_folder, expected, tmp_path):
    first, second = replicas = [Replica(target_folder, tmp_path / f"replica-{i}.log") for i in range(2)]
    with ExitStack() as stack:
        for replica in replicas:
            replica.start()
            stack.callback(replica.end)
        url, balancer = stack.enter_context(balancing([replica.url for replica in replicas]))
        wait_until(lambda: len(balancer.ready) == 2, 120)
        with load(url, expected) as clients:
            wait_until(lambda: clients.has_finished(first) and clients.has_finished(second), 60)
            end_amid_a_stream(first, clients)
            first.start()
            wait_until(lambda: first.url in balancer.ready, 120)
            told = end_amid_a_stream(second, clients)
            wait_until(lambda: clients.has_finished(first, told), 60)
        assert not clients.errors and balancer.broken == 0
        assert sum(balancer.served.values()) == len(clients.finished)


def end_amid_a_stream(replica, clients):
    """End it while it streams to a client -> when it was told to."""
    wait_until(lambda: clients.errors or replica.url in clients.under_way, 60)
    told = replica.terminate()
    assert replica.process.wait(60) == 0
    assert clients.has_finished(replica, told)
    return told
