"""Values of torch's operations on the device, eagerly and in graphs, and faults that only values show."""

import copy

import pytest
import torch
from torch import nn

from tests.cuda_device import device
from tests.cuda_device.device import phase

SIZE = 1 << 20
"""Elements of a tensor that has a segment of its own."""


def capture(body, pool=None):
    """A graph of ``body`` -> the graph and what the body returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = body()
    return graph, out


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 5))


def train(model, x, labels, optimizer):
    """A step of training -> its loss."""
    optimizer.zero_grad(set_to_none=False)
    loss = nn.functional.cross_entropy(model(x), labels)
    loss.backward()
    optimizer.step()
    return loss


def test_every_launch_of_a_step_of_training_is_computed():
    model = perceptron()
    there = copy.deepcopy(model).cuda()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, there)]
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 5, (8,), generator=generator)
    with phase() as found:
        for _ in range(3):
            x = torch.randn(8, 16, generator=generator)
            expected = train(model, x, labels, optimizers[0])
            got = train(there, x.cuda(), labels.cuda(), optimizers[1])
            assert got.item() == expected.item()
    assert found.counts["uncomputed_launches"] == 0, [str(call) for call in found.calls]
    assert found.counts["computations"] > 3 * 20
    for ours, theirs in zip(model.parameters(), there.parameters(), strict=True):
        assert torch.equal(ours, theirs.cpu())


def test_a_step_of_training_as_a_graph_computes_with_the_inputs_of_each_replay():
    model = perceptron()
    there = copy.deepcopy(model).cuda()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, there)]
    labels = torch.randint(0, 5, (8,))
    labels_there = labels.cuda()
    x = torch.randn(8, 16)
    static = x.cuda()
    train(model, x, labels, optimizers[0])
    train(there, static, labels_there, optimizers[1])
    graph, loss = capture(lambda: train(there, static, labels_there, optimizers[1]))
    for _ in range(3):
        x = torch.randn(8, 16)
        static.copy_(x)
        graph.replay()
        assert loss.item() == train(model, x, labels, optimizers[0]).item()


def test_memory_that_nobody_wrote_is_not_a_number():
    assert torch.empty(SIZE, device="cuda").isnan().all()


def test_a_tensor_that_was_freed_after_the_capture_shows_in_the_values():
    inputs = [torch.ones(SIZE, device="cuda")]
    graph, out = capture(lambda: inputs[0] * 2)
    graph.replay()
    assert out[0].item() == 2.0
    inputs.clear()
    other = torch.full((SIZE,), 7.0, device="cuda")
    graph.replay()
    assert out[0].item() == 14.0, "the graph reads what took the place of its input"
    assert other[0].item() == 7.0


def test_a_replay_over_memory_that_was_given_back_is_an_illegal_access():
    inputs = [torch.ones(8 * SIZE, device="cuda")]
    graph, _ = capture(lambda: inputs[0] * 2)
    inputs.clear()
    torch.cuda.empty_cache()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        graph.replay()


def test_a_number_of_the_host_is_baked_into_a_graph():
    x = torch.ones(3, device="cuda")
    scale = 0.5
    graph, out = capture(lambda: x * scale)
    scale = 2.0
    graph.replay()
    assert out.tolist() == [0.5] * 3, "not what the body would compute now"


def test_pinned_memory_is_read_at_every_replay():
    host = torch.ones(3).pin_memory()
    there = torch.zeros(3, device="cuda")
    graph, _ = capture(lambda: there.copy_(host, non_blocking=True))
    host.fill_(5.0)
    graph.replay()
    assert there.tolist() == [5.0] * 3


def test_a_graph_that_is_gone_leaves_no_computation_behind():
    from tests.cuda_device.values import work

    x = torch.ones(3, device="cuda")
    before = len(work._computations)
    graph, _ = capture(lambda: x.mul(2).add(1))
    assert len(work._computations) == before + 2
    graph.reset()
    assert len(work._computations) == before


@pytest.mark.illegal_calls
def test_a_shape_that_depends_on_values_cannot_be_captured():
    x = torch.tensor([1.0, 0.0, 2.0], device="cuda")
    assert x.nonzero().tolist() == [[0], [2]]
    stream = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        capture(lambda: x.nonzero())
    torch.cuda.set_stream(stream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_elementwise_operations_and_products_have_the_values_of_the_cpu(dtype):
    generator = torch.Generator().manual_seed(2)
    a = torch.randint(-9, 9, (5, 7), generator=generator).to(dtype)
    b = torch.randint(-9, 9, (7, 3), generator=generator).to(dtype)
    a_there = a.cuda()
    assert torch.equal((a_there * 3 - 1).abs().cpu(), (a * 3 - 1).abs())
    assert torch.equal(a_there.sum(0).cpu(), a.sum(0))
    assert torch.equal(a_there[:, ::2].contiguous().cpu(), a[:, ::2])
    if dtype.is_floating_point:
        assert torch.equal((a_there @ b.cuda()).cpu(), a @ b)


def test_numbers_are_drawn_by_the_seed():
    torch.cuda.manual_seed(3)
    first = torch.randn(4, device="cuda")
    second = torch.randn(4, device="cuda")
    torch.cuda.manual_seed(3)
    assert torch.equal(torch.randn(4, device="cuda"), first) and not torch.equal(first, second)


def test_the_mode_is_that_of_the_process():
    assert device.has_values()
