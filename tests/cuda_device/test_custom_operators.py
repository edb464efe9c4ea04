"""Plain calls of custom operators do without torch's dispatcher, and all others go through it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.ops.norm import triton as norm
from eagle_kit.ops.norm.triton_backward import differentiable_rms_norm
from eagle_kit.ops.rows import triton as rows
from tests.cuda_device.engines import made_up_results, small_llm

CUDA = torch.device("cuda", 0)


def given():
    """Rows and a weight of a norm."""
    return torch.ones(3, 8, device=CUDA), torch.ones(8, device=CUDA)


def dispatched(run) -> list[str]:
    """Operators of ours that torch's dispatcher sees while ``run`` runs."""
    with torch.autograd.profiler.profile() as profile:
        run()
    return [event.name for event in profile.function_events if event.name.startswith("eagle_kit::")]


def plain_grad():
    return norm.rms_norm(*given(), 1e-5)


def no_grad():
    with torch.no_grad():
        x, weight = given()
        return norm.rms_norm(x, torch.nn.Parameter(weight), 1e-5)


def inference():
    with torch.inference_mode():
        return norm.rms_norm(*given(), 1e-5)


@pytest.mark.smoke
@pytest.mark.parametrize("run", [plain_grad, no_grad, inference])
def test_a_plain_call_is_a_call_of_the_function(run):
    assert dispatched(run) == []


class Seeing(TorchDispatchMode):
    """Mode that remembers operators."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Named(torch.Tensor):
    """A subclass without behaviour of its own."""


def in_dispatch_mode():
    with Seeing() as mode:
        plain_grad()
    assert "eagle_kit.rms_norm.default" in mode.seen


def in_function_mode():
    x, weight = given()
    with torch.device("cpu"):
        norm.rms_norm(x, weight, 1e-5)


def differentiated():
    x, weight = given()
    differentiable_rms_norm(x.requires_grad_(), weight, 1e-5)


def of_a_subclass():
    x, weight = given()
    norm.rms_norm(x.as_subclass(Named), weight, 1e-5)


def in_a_list():
    tables = [torch.ones(3, 8, device=CUDA).as_subclass(Named)]
    rows.gather_rows(tables, torch.zeros(2, dtype=torch.int64, device=CUDA))


def with_a_keyword():
    x, weight = given()
    norm.rms_norm(x, weight, eps=1e-5)


def in_vmap():
    x, weight = given()
    torch.func.vmap(lambda row: norm.rms_norm(row, weight, 1e-5))(x)


CALLS = [
    in_vmap,
    in_dispatch_mode,
    in_function_mode,
    differentiated,
    of_a_subclass,
    in_a_list,
    with_a_keyword,
]


@pytest.mark.parametrize("run", CALLS)
def test_a_call_that_something_must_see_goes_through_the_operator(run):
    assert len(dispatched(run)) >= 1


def test_a_compiler_sees_the_operator():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda x, weight: norm.rms_norm(x, weight, 1e-5), backend=backend, fullgraph=True
    )
    compiled(*given())
    (graph,) = graphs
    assert "eagle_kit.rms_norm" in graph.code


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("mode", [True, False], ids=["operator", "plain"])
def test_a_change_counts_in_the_version_of_a_tensor(context, mode):
    tables = [torch.ones(3, 8, device=CUDA), torch.ones(3, 2, device=CUDA)]
    index = torch.zeros(1, dtype=torch.int64, device=CUDA)
    values = [torch.ones(1, 8, device=CUDA), torch.ones(1, 2, device=CUDA)]
    with context():
        if mode:
            with Seeing():
                rows.write_rows(tables, index, values)
        else:
            rows.write_rows(tables, index, values)
    assert [table._version for table in tables] == [1, 1]
    assert [value._version for value in values] == [0, 0]


def test_a_change_of_what_a_gradient_needs_is_found():
    table = torch.ones(3, 8, device=CUDA)
    weight = torch.ones(3, 8, device=CUDA, requires_grad=True)
    loss = (table * weight).sum()
    rows.write_rows([table], torch.zeros(1, dtype=torch.int64, device=CUDA), [table[:1].clone()])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_prompts_call_no_operator():
    llm = small_llm("3,1,4")
    params = SamplingParams(max_tokens=1)
    with made_up_results():
        llm.generate([[1, 2, 3]], params)
        assert dispatched(lambda: llm.generate([[4, 5, 6]], params)) == []
