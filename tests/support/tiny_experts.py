"""Routed experts of any size with random weights, and their sum in fp64."""

import pytest
import torch

ROUNDINGS = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Inner states, the outputs of experts, and their sum are rounded once each."""


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
