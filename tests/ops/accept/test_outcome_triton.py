"""What follows of an accepted path: the kernel and the reference against plain Python."""

import math

import pytest
import torch

from eagle_kit.ops.accept import Accepted, outcome


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_what_python_says(backend, dtype, triton_device):
    generator = torch.Generator().manual_seed(4)
    b, nodes, steps, vocab = 6, 9, 4, 17
    logits = torch.randn(b, nodes, vocab, generator=generator).to(dtype)
    path = torch.tensor([[0, 2, 5, 7, 7]] * b)
    tokens = torch.randint(0, 2**40, (b, steps + 1), generator=generator)
    accepted = torch.tensor([0, 3, 4, 1, 2, 3])
    active = torch.tensor([True, True, False, True, True, True])
    lens = torch.tensor([5, 0, 7, 2**40, 1, 3])
    logits[1, 5, 3] = math.nan
    logits[2, 0, 16] = math.inf
    logits[3, 2] = -math.inf
    logits[4, 5, :16] = -math.inf  # one token is left
    logits[5, 6] = math.nan  # not on the path
    given = [part.to(triton_device) for part in (logits, path, tokens, accepted, active, lens)]
    found = outcome(given[0].amax(-1), Accepted(*given[1:4]), *given[4:], backend=backend)
    assert found.num_emitted.tolist() == [1, 4, 0, 2, 3, 4]
    assert found.is_finite.tolist() == [True, False, False, False, True, True]
    assert found.roots.tolist() == [int(tokens[i, accepted[i]]) for i in range(b)]
    assert found.seq_lens.tolist() == [6, 4, 7, 2**40 + 2, 4, 7]
