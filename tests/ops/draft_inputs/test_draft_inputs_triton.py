"""Input of a draft head's layer: the kernel against the reference, and both against fp64."""

import pytest
import torch
from crossed import crossed

from eagle_kit.ops.draft_inputs import draft_inputs

EPS = 1e-5


def _given(dtype, norm_dtype, device, size=80, rows=5, count=7, vocab=31):
    generator = torch.Generator().manual_seed(6)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    features, embedding = (draw(n, size).to(dtype).to(device) for n in (rows, vocab))
    norms = tuple((1 + 0.3 * draw(size)).to(norm_dtype).to(device) for _ in range(2))
    index, tokens = torch.tensor([4, 0, 0, 2, 3, 1, 4]), torch.tensor([30, 0, 5, 5, 17, 2, 1])
    return features, index[:count].to(device), tokens[:count].to(device), embedding, norms


def _exact(part, norm):
    part, norm = part.double(), norm.double()
    return part / (part.square().mean(-1, keepdim=True) + EPS).sqrt() * norm


@pytest.mark.parametrize("backend", ["reference", "triton"])
@crossed(
    ("gathers", [pytest.param(True, id="gathered"), pytest.param(False, id="in order")]),
    (
        "dtype, norm_dtype, tolerance",
        [
            (torch.float32, torch.float32, 1e-6),
            (torch.bfloat16, torch.bfloat16, 2**-7),
            (torch.bfloat16, torch.float32, 2**-8),
            (torch.float16, torch.float16, 2**-10),
        ],
    ),
)
def test_it_is_the_normed_embedding_beside_the_normed_feature(
    dtype, norm_dtype, tolerance, gathers, backend, triton_device
):
    """Rounded once or, with a half weight, twice."""
    features, rows, tokens, embedding, norms = _given(dtype, norm_dtype, triton_device, rows=7)
    index = rows if gathers else None
    x, taken = draft_inputs(features, index, tokens, embedding, norms, EPS, backend=backend)
    own = features[rows] if gathers else features
    exact = torch.cat((_exact(embedding[tokens], norms[0]), _exact(own, norms[1])), -1)
    assert x.dtype == dtype
    assert torch.equal(taken, own)
    torch.testing.assert_close(x.double(), exact, rtol=tolerance, atol=1e-6)


def test_memory_behind_a_row_is_not_read(triton_device):
    features, rows, tokens, embedding, norms = _given(torch.float32, torch.float32, triton_device)
    expected = draft_inputs(features, rows, tokens, embedding, norms, EPS, backend="triton")[0]
    unused = [i for i in range(len(embedding)) if i not in tokens.tolist()]
    embedding[unused] = torch.nan
    found = draft_inputs(features, rows, tokens, embedding, norms, EPS, backend="triton")[0]
    assert torch.equal(found, expected)


def test_tensors_that_the_kernel_does_not_take_are_those_of_the_reference(triton_device):
    """An embedding of another dtype, and features that are columns of a wider tensor."""
    features, rows, tokens, embedding, norms = _given(torch.float32, torch.float32, triton_device, rows=7)
    wide = torch.cat((features, torch.full_like(features, torch.nan)), 1)
    for given in (
        (features, rows, tokens, embedding.bfloat16(), norms),
        (wide[:, : features.shape[1]], rows, tokens, embedding, norms),
        (wide[:, : features.shape[1]], None, tokens, embedding, norms),
    ):
        ours, theirs = (draft_inputs(*given, EPS, backend=backend) for backend in ("triton", "reference"))
        for mine, wanted in zip(ours, theirs, strict=True):
            assert mine.dtype == wanted.dtype and torch.equal(mine, wanted)
