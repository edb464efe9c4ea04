"""Kernels of routed experts against fp64, and their fake implementation."""

import pytest
import torch
from crossed import diagonal
from hypothesis import given
from hypothesis import strategies as st
from properties import SWEEP
from tiny_experts import ROUNDINGS, SHAPES, expected, make
from torch._subclasses import FakeTensorMode

from eagle_kit.ops.experts import experts, reference


@pytest.fixture(autouse=True)
def poisoned(triton_device):
    """Memory that nobody has written is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def assert_summed(tokens, count, chosen, hidden, size, dtype, device):
    given = make(tokens, count, chosen, hidden, size, dtype, device)
    out = experts(*given, backend="triton")
    wanted, sizes = expected(*given)
    assert out.dtype == dtype and out.shape == (tokens, hidden)
    assert ((out.double() - wanted).abs() <= 2 * ROUNDINGS[dtype] * sizes + 1e-7).all()


@diagonal(("dtype", ROUNDINGS), ("tokens, count, chosen, hidden, size", SHAPES))
def test_the_sum_over_experts(triton_device, tokens, count, chosen, hidden, size, dtype):
    assert_summed(tokens, count, chosen, hidden, size, dtype, triton_device)


@pytest.mark.nightly
@SWEEP
@given(
    tokens=st.integers(1, 70),
    counts=st.tuples(st.integers(1, 9), st.integers(1, 4)),
    hidden=st.integers(1, 140),
    size=st.integers(1, 70),
    dtype=st.sampled_from(list(ROUNDINGS)),
)
def test_the_sum_over_any_experts(triton_device, tokens, counts, hidden, size, dtype):
    count, chosen = counts
    assert_summed(tokens, count, min(chosen, count), hidden, size, dtype, triton_device)


@pytest.mark.parametrize("routing", ["one", "few"])
def test_routing_that_leaves_experts_idle(triton_device, routing):
    """An expert with all rows has several blocks, and others have none."""
    given = make(50, 6, 2, 32, 24, torch.float32, triton_device, routing)
    out = experts(*given, backend="triton")
    wanted, sizes = expected(*given)
    assert ((out.double() - wanted).abs() <= 4e-6 * sizes + 1e-7).all()
    assert torch.equal(out, experts(*given, backend="triton"))


def test_many_rows_of_few_experts(triton_device):
    """Blocks of 32 and of 64 rows."""
    for tokens in (40, 200):
        given = make(tokens, 2, 1, 16, 8, torch.float32, triton_device)
        wanted, sizes = expected(*given)
        out = experts(*given, backend="triton")
        assert ((out.double() - wanted).abs() <= 4e-6 * sizes + 1e-7).all()


def test_a_token_does_not_depend_on_the_others(triton_device):
    x, ids, weights, gate_up, down = make(20, 6, 2, 32, 24, torch.float32, triton_device)
    together = experts(x, ids, weights, gate_up, down, backend="triton")
    alone = experts(x[7:8], ids[7:8], weights[7:8], gate_up, down, backend="triton")
    torch.testing.assert_close(together[7:8], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["triton", "by_expert", "dense"])
def test_experts_of_other_processes_add_nothing(triton_device, way):
    """Three processes of two experts each, one of which has no rows: what they give adds up."""
    device = triton_device if way == "triton" else "cpu"
    x, ids, weights, gate_up, down = given = make(23, 6, 2, 32, 24, torch.float32, device, "few")
    total = torch.zeros_like(x)
    for first in (0, 2, 4):
        local = torch.where((ids >= first) & (ids < first + 2), ids - first, 2)
        mine = x, local, weights, gate_up[first : first + 2], down[first : first + 2]
        part = experts(*mine, backend="triton") if way == "triton" else getattr(reference, way)(*mine)
        assert first == 0 or not part.any()
        total += part
    wanted, sizes = expected(*given)
    assert ((total.double() - wanted).abs() <= 4e-6 * sizes + 1e-7).all()


def test_no_tokens(triton_device):
    x, ids, weights, gate_up, down = make(3, 4, 2, 16, 8, torch.float32, triton_device)
    assert experts(x[:0], ids[:0], weights[:0], gate_up, down, backend="triton").shape == (0, 16)


def test_the_operation_is_described_to_tracers(triton_device):
    given = make(3, 4, 2, 16, 8, torch.float32, triton_device)
    import eagle_kit.ops.experts.triton as kernels

    x, ids, weights, gate_up, down = given
    torch.library.opcheck(
        kernels.routed_experts.overload, (x, ids, weights, gate_up, None, [], down, None, [])
    )
    with FakeTensorMode() as mode:
        x, ids, weights, gate_up, down = (mode.from_tensor(tensor) for tensor in given)
        out = kernels.routed_experts(x, ids, weights, gate_up, None, [], down, None, [])
    assert out.shape == given[0].shape and out.dtype == given[0].dtype


def test_gradients_take_the_reference(triton_device, monkeypatch):
    import eagle_kit.ops.experts.triton as kernels

    monkeypatch.setattr(kernels, "routed_experts", None)
    x, ids, weights, gate_up, down = make(3, 4, 2, 16, 8, torch.float32, triton_device)
    out = experts(x.requires_grad_(), ids, weights, gate_up, down, backend="triton")
    assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()


class OnGPU(torch.Tensor):
    """Tensor that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("capability", "takes"), [(80, "triton"), (89, "triton"), (90, "torch"), (120, "triton")]
)
def test_the_capability_decides_who_multiplies_groups(monkeypatch, capability, takes):
    """torch's grouped matmul reads the routing on the host but on 9.x and 10.x, not to be captured then."""
    import eagle_kit.ops.experts as room
    from eagle_kit.ops.capability import facts_of

    monkeypatch.setattr(room, "device_facts", lambda device: facts_of(capability))
    x = torch.zeros(2, 64, dtype=torch.bfloat16).as_subclass(OnGPU)
    assert room._groups(x, x) == (takes == "torch")
    assert not room._groups(x.float(), x.float()) and not room._groups(x[:, :3], x)
