"""Kernels of routed experts against fp64, and their fake implementation."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from eagle_kit.kernels.experts import experts

ROUNDINGS = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Inner states, the outputs of experts, and their sum are rounded once each."""


@pytest.fixture(autouse=True)
def poisoned(triton_device):
    """Memory that nobody has written is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def make(tokens, count, chosen, hidden, size, dtype, device, routing="even"):
    generator = torch.Generator().manual_seed(tokens * count + hidden)
    x = torch.randn(tokens, hidden, generator=generator)
    gate_up = torch.randn(count, 2 * size, hidden, generator=generator) / hidden**0.5
    down = torch.randn(count, hidden, size, generator=generator) / size**0.5
    scores = torch.rand(tokens, count, generator=generator)
    if routing == "one":
        scores[:, count - 1] += 2.0  # everybody's first choice
    elif routing == "few":
        scores[:, chosen:] -= 2.0  # the others have no rows
    ids = scores.topk(chosen, -1).indices
    weights = torch.rand(tokens, chosen, generator=generator)
    floats = (x.to(dtype), gate_up.to(dtype), down.to(dtype))
    x, gate_up, down = (tensor.to(device) for tensor in floats)
    return x, ids.to(device), weights.to(device), gate_up, down


def expected(x, ids, weights, gate_up, down):
    """Every expert of every token in fp64, and the sum of the sizes of what is added up."""
    x, gate_up, down = x.double(), gate_up.double(), down.double()
    gate, up = torch.einsum("th,tkih->tki", x, gate_up[ids]).chunk(2, -1)
    parts = torch.einsum("tki,tkhi->tkh", torch.nn.functional.silu(gate) * up, down[ids])
    sizes = torch.einsum("tki,tkhi->tkh", (torch.nn.functional.silu(gate) * up).abs(), down[ids].abs())
    share = weights.double()[:, :, None]
    return (parts * share).sum(1), (sizes * share).sum(1)


SHAPES = [
    pytest.param(1, 1, 1, 1, 1, id="one number"),
    pytest.param(1, 8, 2, 64, 64, id="one token"),
    pytest.param(5, 7, 3, 50, 37, id="primes"),
    pytest.param(33, 4, 2, 130, 65, id="one beyond the tiles"),
    pytest.param(70, 3, 3, 40, 20, id="every expert"),
]


@pytest.mark.parametrize("dtype", ROUNDINGS, ids=str)
@pytest.mark.parametrize(("tokens", "count", "chosen", "hidden", "size"), SHAPES)
def test_the_sum_over_experts(triton_device, tokens, count, chosen, hidden, size, dtype):
    given = make(tokens, count, chosen, hidden, size, dtype, triton_device)
    out = experts(*given, backend="triton")
    wanted, sizes = expected(*given)
    assert out.dtype == dtype and out.shape == (tokens, hidden)
    assert ((out.double() - wanted).abs() <= 2 * ROUNDINGS[dtype] * sizes + 1e-7).all()


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


def test_no_tokens(triton_device):
    x, ids, weights, gate_up, down = make(3, 4, 2, 16, 8, torch.float32, triton_device)
    assert experts(x[:0], ids[:0], weights[:0], gate_up, down, backend="triton").shape == (0, 16)


def test_the_operation_is_described_to_tracers(triton_device):
    given = make(3, 4, 2, 16, 8, torch.float32, triton_device)
    import eagle_kit.kernels.experts.triton as kernels

    torch.library.opcheck(kernels.routed_experts, given)
    with FakeTensorMode() as mode:
        out = kernels.routed_experts(*(mode.from_tensor(tensor) for tensor in given))
    assert out.shape == given[0].shape and out.dtype == given[0].dtype


def test_gradients_take_the_reference(triton_device, monkeypatch):
    import eagle_kit.kernels.experts.triton as kernels

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
    import eagle_kit.kernels.experts as room
    from eagle_kit.kernels.capability import facts_of

    monkeypatch.setattr(room, "device_facts", lambda device: facts_of(capability))
    x = torch.zeros(2, 64, dtype=torch.bfloat16).as_subclass(OnGPU)
    assert room._groups(x, x) == (takes == "torch")
    assert not room._groups(x.float(), x.float()) and not room._groups(x[:, :3], x)
