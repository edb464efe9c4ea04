"""Measured choice between linear kernels: time of the measurements, their result, its stability."""

import logging

import pytest
import torch

from eagle_kit.core.errors import UserError
from eagle_kit.engine.measured import choices as measured
from eagle_kit.engine.measured import linear_backends
from eagle_kit.engine.measured.choices import have_equal_parts
from eagle_kit.engine.measured.linear_backends import LinearBackends, open_linear_backends, time_backend
from eagle_kit.ops.backend import use
from eagle_kit.ops.linear import linear
from eagle_kit.ops.linear import plain as module
from eagle_kit.ops.linear.backends import Size, use_backends

CPU = torch.device("cpu")
BF16 = torch.bfloat16
SIZE = Size(4, 64, 32, BF16)


class FakeTimer:
    """Timer by which Triton takes ``ratio`` of torch's time."""

    def __init__(self, ratio=0.5):
        self.ratio, self.calls = ratio, []

    def __call__(self, backend, size, device):
        self.calls.append((backend, size))
        return 1e-5 * (self.ratio if backend == "triton" else 1.0)


@pytest.fixture
def calls(monkeypatch):
    """Treat half dtypes on the CPU as on a GPU, and record the kernels that ran."""
    ran = []

    def triton(x, weight, bias=None, *, backend):
        ran.append(Size.of(x, weight))
        return module.reference.linear(x, weight, bias)

    monkeypatch.setattr(module, "uses_triton", lambda operation, x: True)
    monkeypatch.setattr(module, "small_linear", triton)
    return ran


def operands(m=3, n=64, k=32, dtype=BF16):
    return torch.ones(m, k, dtype=dtype), torch.ones(n, k, dtype=dtype)


@pytest.mark.parametrize(
    ("ratio", "backend"), [(0.5, "triton"), (0.96, "triton"), (0.98, "torch"), (1.0, "torch"), (3.0, "torch")]
)
def test_the_faster_backend_is_chosen_and_a_tie_is_torchs(ratio, backend):
    timer = FakeTimer(ratio)
    choices = LinearBackends(CPU, timer)
    with choices.measuring():
        assert choices.backend(SIZE) == backend
    assert timer.calls == [("torch", SIZE), ("triton", SIZE)]
    assert choices.table[SIZE].seconds == {"torch": 1e-5, "triton": 1e-5 * ratio}


def test_a_choice_is_made_once_and_kept():
    timer = FakeTimer(0.5)
    choices = LinearBackends(CPU, timer)
    with choices.measuring():
        choices.backend(SIZE)
        timer.ratio = 2.0
        assert choices.backend(SIZE) == "triton"
    for _ in range(3):
        assert choices.backend(SIZE) == "triton"
    with choices.measuring():  # another engine warms up
        assert choices.backend(SIZE) == "triton"
        assert choices.backend(SIZE._replace(rows=8)) == "torch"
    assert len(timer.calls) == 4
    assert choices.backend(SIZE._replace(rows=16)) == "torch" and len(timer.calls) == 4


def test_seconds_are_those_of_all_measurements(monkeypatch):
    clock = iter((0.0, 2.0, 10.0, 13.0))
    choices = LinearBackends(CPU, FakeTimer())
    monkeypatch.setattr(measured.time, "perf_counter", lambda: next(clock))
    with choices.measuring():
        with choices.measuring():  # a cycle within a warm-up
            choices.backend(SIZE)
        choices.backend(SIZE._replace(rows=8))
    assert choices.seconds == 5.0 and len(choices.table) == 2


def test_nothing_is_measured_outside_of_a_warm_up_or_in_a_capture(monkeypatch):
    timer = FakeTimer()
    choices = LinearBackends(CPU, timer)
    assert choices.backend(SIZE) == "torch"
    with choices.measuring():
        monkeypatch.setattr(linear_backends, "_is_capturing", lambda: True)
        assert choices.backend(SIZE) == "torch"
        assert not timer.calls and not choices.table, "a backend that was not measured is not remembered"
        monkeypatch.setattr(linear_backends, "_is_capturing", lambda: False)
        assert choices.backend(SIZE) == "triton"
    with pytest.raises(KeyError), choices.measuring():
        raise KeyError
    assert choices.backend(SIZE._replace(rows=8)) == "torch" and len(timer.calls) == 2


def test_a_plain_table_says_which_backend_runs(calls):
    x, weight = operands()
    linear(x, weight)
    with use_backends({SIZE: "triton"}.get):
        linear(x, weight)
        linear(x, weight, backend="torch")
        linear(*operands(5))  # not in the table
        with use_backends({}.get):
            linear(x, weight)
    linear(x, weight)
    assert calls == [SIZE]
    linear(x, weight, backend="triton")  # forced, whatever the table says
    assert calls == [SIZE, SIZE]


def test_only_few_rows_of_half_types_without_gradient_are_chosen_for(calls):
    timer = FakeTimer(0.5)
    choices = LinearBackends(CPU, timer)
    x, weight = operands()
    with choices.measuring():
        for args in (
            operands(m=65),
            operands(dtype=torch.float32),
            operands(m=0),
            (x, weight.clone().requires_grad_()),
            (x, weight.t().contiguous().t()),
            (x[0], weight),
        ):
            out = linear(*args)
            assert out.shape == (*args[0].shape[:-1], 64)
        assert not timer.calls and not calls
        for m in (1, 2, 3, 4, 5, 64):
            linear(*operands(m))
    assert [size.rows for size in calls] == [1, 2, 4, 4, 8, 64]
    assert len(timer.calls) == 2 * 5


def test_the_reference_can_be_asked_for_and_a_cpu_measures_nothing():
    timer = FakeTimer(0.5)
    choices = LinearBackends(CPU, timer)
    x, weight = operands()
    with choices.measuring():
        linear(x, weight)
        with use("reference"):
            linear(x, weight)
    assert not timer.calls and not choices.table


def test_without_memory_torch_is_taken_and_said(caplog):
    def timer(*_):
        raise torch.OutOfMemoryError

    choices = LinearBackends(CPU, timer)
    with choices.measuring():
        assert choices.backend(SIZE) == "torch"
    assert "no memory" in caplog.text and choices.report() == ["4 x 32 -> 64 bfloat16: torch (not measured)"]


def test_choices_are_logged(caplog):
    choices = LinearBackends(CPU, FakeTimer(0.5))
    with caplog.at_level(logging.INFO), choices.measuring():
        choices.backend(SIZE)
        choices.backend(SIZE._replace(rows=1))
    line = "4 x 32 -> 64 bfloat16: triton (torch 10.0 us, triton 5.0 us)"
    assert line in caplog.text
    assert choices.report() == [line.replace("4 x", "1 x", 1), line]


def test_a_forced_backend_is_not_measured():
    timer = FakeTimer(3.0)
    choices = LinearBackends(CPU, timer, forced="triton")
    with choices.measuring():
        assert choices.backend(SIZE) == "triton"
    assert choices.backend(SIZE._replace(rows=8)) == "triton" and not timer.calls and not choices.report()


@pytest.mark.parametrize("option", ["torch", "triton"])
def test_a_cpu_has_no_choice(option):
    assert str(open_linear_backends("auto", CPU)) == "torch"
    with pytest.raises(UserError, match=f"{option} was asked for") as error:
        open_linear_backends(option, CPU)
    assert "linear backend at auto" in error.value.remedy


class RanksInTurn:
    """Ranks that run one after the other: the first one's messages are read by the others."""

    def __init__(self, messages, is_first):
        self.messages = messages
        self.is_first = is_first

    def agree(self, value):
        if self.is_first:
            self.messages.append(value)
            return value
        return self.messages.pop(0)

    def all(self, value):
        return [value, self.messages]


def test_the_first_rank_measures_and_the_others_take_its_choice():
    messages = []
    sizes = [SIZE, SIZE._replace(rows=8)]
    timers = FakeTimer(0.5), FakeTimer(2.0)
    tables = []
    for timer, is_first in zip(timers, (True, False), strict=True):
        choices = LinearBackends(CPU, timer, ranks=RanksInTurn(messages, is_first))
        with choices.measuring():
            for size in [*sizes, *sizes]:
                assert choices.backend(size) == "triton"
        tables.append(choices.table)
    assert tables[0] == tables[1] and not messages
    assert len(timers[0].calls) == 4 and not timers[1].calls


def test_ranks_choose_together_only_if_their_parts_have_equal_sizes():
    modules = [torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)]
    shapes = [(5, 3), (5,), (2, 5), (2,)]
    assert have_equal_parts(modules, None)
    assert have_equal_parts(modules, RanksInTurn(shapes, True))
    assert not have_equal_parts(modules, RanksInTurn([(4, 3), *shapes[1:]], True))


def test_ranks_with_different_parts_use_torch(caplog):
    gpu = torch.device("cuda", 0)
    choices = open_linear_backends("auto", gpu, has_equal_parts=False)
    assert choices.forced == "torch" and "parts of different sizes" in caplog.text
    assert open_linear_backends("triton", gpu, has_equal_parts=False).forced == "triton"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_both_backends_are_timed_and_one_of_them_is_captured():
    pytest.importorskip("triton")
    device = torch.device("cuda")
    size = Size(4, 1024, 4096, BF16)
    seconds = {backend: time_backend(backend, size, device) for backend in ("torch", "triton")}
    assert all(1e-6 < second < 1e-3 for second in seconds.values()), seconds
    choices = LinearBackends(device)
    x = torch.randn(3, 4096, device=device, dtype=BF16)
    weight = torch.randn(1024, 4096, device=device, dtype=BF16)
    with choices.measuring(), torch.inference_mode():
        expected = linear(x, weight)
        assert set(choices.table) == {size}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = linear(x, weight)
            linear(x[:1], weight)
        graph.replay()
    assert torch.equal(out, expected) and set(choices.table) == {size}
