"""The engine's device is the current one in every call that computes, whichever thread makes it: kernels and
graphs run on the current CUDA device of their thread, which is device 0 in a new one."""

import threading
from contextlib import contextmanager

import pytest
import torch
from tiny_engine import PROMPTS, make_engine

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.serve import engine as room
from eagle_kit.serve import warm_up as warm_up_room
from eagle_kit.serve.graph import EagerGraph, GraphRunner
from eagle_kit.serve.request import Request
from eagle_kit.serve.runner import Runner
from eagle_kit.serve.warm_up import warm_up


@pytest.fixture
def current(monkeypatch):
    """Device of the context that each thread is in, as CUDA has it."""
    local = threading.local()

    @contextmanager
    def enter(device):
        before, local.device = getattr(local, "device", None), device
        try:
            yield
        finally:
            local.device = before

    for each in (room, warm_up_room):
        monkeypatch.setattr(each, "current_device", enter)
    return lambda: getattr(local, "device", None)


@pytest.mark.parametrize("lag", [0, 1])
def test_every_call_runs_under_the_engine_s_device(models, current, monkeypatch, lag):
    engine = make_engine(models, batch=2, lag=lag)
    engine.use_shape(SpecShape(3, 1, 4))
    engine.runner.graphs = GraphRunner("cycle", EagerGraph)
    seen = []
    for name in ("prefill", "decode", "run_idle"):
        method = getattr(Runner, name)

        def watched(self, *args, _name=name, _method=method, **kwargs):
            seen.append((_name, current()))
            return _method(self, *args, **kwargs)

        monkeypatch.setattr(Runner, name, watched)

    def serve():
        warm_up(engine)
        for i, prompt in enumerate(PROMPTS[:3]):
            engine.add_request(Request(i, list(prompt), SamplingParams(max_tokens=6)))
        while engine.has_work:
            engine.step()

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert {name for name, _ in seen} == {"prefill", "decode", "run_idle"}
    assert {device for _, device in seen} == {torch.device("cpu")} and current() is None
