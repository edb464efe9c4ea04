"""A scripted server for every test that asks for one."""

import time

import pytest

from tests.bench.load.scripted_server import Server, scripted_server


@pytest.fixture(scope="module")
def running():
    """The server of a test file."""
    with scripted_server() as server:
        yield server


@pytest.fixture
def server(running):
    """See ``scripted_server.Server``; as new, whatever the test before has done."""
    until = time.monotonic() + 10
    while running.at_once:
        assert time.monotonic() < until, "replies of the test before still run"
        time.sleep(0.005)
    for name, value in vars(Server(url=running.origin, origin=running.origin)).items():
        setattr(running, name, value)
    return running
