"""Triton kernels of filters, sampling and uniform random numbers against fp64 and sorting, and against the
reference."""

from itertools import pairwise

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.ops.backend import use
from eagle_kit.ops.sampling import (
    FilteredLogits,
    make_sampling_batch,
    position_uniforms,
    probabilities,
    sample,
    sample_distinct,
    target_distribution,
    target_probs,
    window_uniforms,
)

ROUNDING = 2e-6
JUST_BELOW_ONE = 1 - 2.0**-53
FILTERS = [
    SamplingParams(temperature=0.7, top_k=17, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=1.3, top_p=0.6),
    SamplingParams(temperature=1.0, top_k=3),
    SamplingParams(),
]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill new memory with NaN or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def make_batch(params, vocab, device):
    b = len(params)
    return make_sampling_batch(params, [[]] * b, list(range(b)), vocab, torch.device(device))


def followed_by_nan(x: torch.Tensor) -> torch.Tensor:
    """Copy of ``x`` in memory that continues with NaN."""
    memory = torch.full((x.numel() + 8192,), float("nan"), dtype=x.dtype, device=x.device)
    memory[: x.numel()] = x.flatten()
    return memory[: x.numel()].view(x.shape)


def filtered(logits: torch.Tensor, params: SamplingParams) -> tuple[set[int], set[int]]:
    """Filter by sorting, in fp64: tokens that are certainly kept, and those that rounding may keep
    besides."""
    if params.temperature == 0:
        best = {int(logits.argmax())}
        return best, best
    # One subtraction and one division in fp32 are part of the distribution's definition.
    distance = ((logits.max() - logits) / torch.tensor(params.temperature)).double()
    order = [i for _, i in sorted((d, i) for i, d in enumerate(distance.tolist()))][: params.top_k or None]
    weights = (-distance[order]).exp()
    reached = (weights.cumsum(0) - weights) / weights.sum()
    floor = -torch.tensor(params.min_p).log()
    sure, possible = set(), set()
    for i, before, d in zip(order, reached.tolist(), distance[order].tolist(), strict=True):
        for kept, slack in ((sure, -ROUNDING), (possible, ROUNDING)):
            if (
                (before < params.top_p + slack or params.top_p == 1)
                and d <= floor * (1 + slack)
                and d < torch.inf
            ):
                kept.add(i)
    return sure | {order[0]}, possible


@pytest.mark.parametrize(
    "vocab, dtype",
    [
        (1, torch.float32),
        pytest.param(7, torch.float16, marks=pytest.mark.nightly),
        pytest.param(256, torch.float32, marks=pytest.mark.nightly),
        (257, torch.float16),
        (601, torch.bfloat16),
    ],
)
def test_distributions_are_those_of_sorting(triton_device, vocab, dtype):
    """Half dtypes have many equal logits, so that ties and their order matter."""
    generator = torch.Generator().manual_seed(vocab)
    x = torch.randn(len(FILTERS), 1, vocab, generator=generator) * 3
    x.masked_fill_(torch.rand(x.shape, generator=generator) < 0.2, float("-inf"))
    x[..., vocab // 2] = 2.0
    x = x.to(dtype)
    distribution = target_distribution(
        followed_by_nan(x.to(triton_device)), make_batch(FILTERS, vocab, triton_device), backend="triton"
    )
    assert isinstance(distribution, FilteredLogits)
    probs = probabilities(distribution).cpu()
    assert (target_probs(x.float(), make_batch(FILTERS, vocab, "cpu")) - probs).abs().max() < ROUNDING
    for row, found, params in zip(x[:, 0].float(), probs[:, 0], FILTERS, strict=True):
        sure, possible = filtered(row, params)
        kept = set(found.nonzero()[:, 0].tolist())
        assert sure <= kept <= possible
        mask = torch.zeros(vocab, dtype=torch.bool)
        mask[list(kept)] = True
        scaled = row.double() / (params.temperature or 1.0)
        expected = scaled.masked_fill(~mask, float("-inf")).softmax(-1)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    "settings, kept",
    [
        ({"top_k": 300}, 300),
        ({"top_p": 0.5001}, 513),
        ({"top_k": 700, "top_p": 0.5}, 350),
        ({"top_k": 300, "top_p": 0.9999}, 300),
        ({"min_p": 1.0}, 1024),
        ({"top_k": 300, "min_p": 1.0}, 300),
    ],
)
def test_equal_tokens_are_kept_by_their_ids_across_chunks(triton_device, settings, kept):
    batch = make_batch([SamplingParams(temperature=1.0, **settings)], 1024, triton_device)
    probs = target_probs(torch.full((1, 1, 1024), -3.0, device=triton_device), batch, backend="triton")[0, 0]
    assert probs.nonzero()[:, 0].tolist() == list(range(kept))
    assert probs[:kept].tolist() == pytest.approx([1 / kept] * kept, rel=1e-6)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_min_p_that_keeps_less_than_top_k_keeps_all_of_its_equals(triton_device, backend):
    """The last token of top-k's bound is one of a lower id than those that min-p keeps."""
    device = triton_device if backend == "triton" else "cpu"
    logits = torch.full((1, 1, 600), -9.0, device=device)
    logits[..., [5, 300]] = 2.0
    logits[..., [2, 10]] = 1.0
    batch = make_batch([SamplingParams(temperature=1.0, top_k=3, min_p=1.0)], 600, device)
    probs = target_probs(logits, batch, backend=backend)[0, 0]
    assert probs.nonzero()[:, 0].tolist() == [5, 300]


def test_params_beyond_fp32_leave_a_distribution(triton_device):
    logits = torch.tensor([1.0, 0.0, -2.0, float("-inf"), 40.0, -40.0, 0.5, 0.25], device=triton_device)
    settings = [
        {"temperature": 1e300},
        {"temperature": 1e-300},
        {"temperature": 1e-40},
        {"temperature": 1.0, "top_p": 1e-300},
        {"temperature": 1.0, "top_k": 10**30},
        {"temperature": 1.0, "top_k": 8, "top_p": 0.999999},
        {"temperature": 1.0, "min_p": 1.0},
    ]
    params = [SamplingParams(**setting) for setting in settings]
    logits = logits.expand(len(params), 1, 8)
    ours, theirs = (
        target_probs(logits, make_batch(params, 8, triton_device), backend=name)
        for name in ("triton", "reference")
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-9)
    assert torch.equal(ours > 0, theirs > 0) and (ours[..., 3] == 0).all()


def test_distributions_are_batch_invariant_to_the_bit(triton_device):
    x = (torch.randn(len(FILTERS), 1, 300, generator=torch.Generator().manual_seed(3)) * 3).to(triton_device)
    together = target_probs(x, make_batch(FILTERS, 300, triton_device), backend="triton")
    for i in (0, 2):
        alone = target_probs(
            x[i : i + 1], make_batch(FILTERS[i : i + 1], 300, triton_device), backend="triton"
        )
        assert torch.equal(alone[0], together[i])


def spread(generator, rows, vocab, zeros=0.5):
    probs = torch.randn(rows, vocab, generator=generator).mul(3).exp()
    probs *= torch.rand(rows, vocab, generator=generator) >= zeros
    probs[:, vocab // 2] += 0.1
    return probs


@pytest.mark.parametrize("vocab", [1, pytest.param(255, marks=pytest.mark.nightly), 1025])
def test_samples_are_the_first_tokens_beyond_the_uniform(triton_device, vocab):
    generator = torch.Generator().manual_seed(vocab)
    probs = spread(generator, 12, vocab)
    uniforms = torch.rand(12, generator=generator, dtype=torch.float64)
    uniforms[:3] = torch.tensor([0.0, JUST_BELOW_ONE, 1.0])  # a uniform may round to one
    sampled = sample(
        followed_by_nan(probs.to(triton_device)), uniforms.to(triton_device), backend="triton"
    ).cpu()
    for row, uniform, token in zip(probs.double(), uniforms, sampled.tolist(), strict=True):
        upto = row.cumsum(0) / row.sum()
        assert row[token] > 0
        assert upto[token] > uniform - 1e-12 and upto[token] - row[token] / row.sum() <= uniform + 1e-12
    assert torch.equal(sampled, sample(probs, uniforms))


def test_filtered_logits_are_sampled_as_their_probabilities_are(triton_device):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(len(FILTERS), 1, 300, generator=generator) * 2
    uniforms = torch.rand(len(FILTERS), 1, generator=generator, dtype=torch.float64)
    batch = make_batch(FILTERS, 300, triton_device)
    distribution = target_distribution(x.to(triton_device), batch, backend="triton")
    sampled = sample(distribution, uniforms.to(triton_device), backend="triton").cpu()
    assert torch.equal(sampled, sample(target_probs(x, make_batch(FILTERS, 300, "cpu")), uniforms))
    assert torch.equal(sampled, sample(probabilities(distribution).cpu(), uniforms))


def test_uniforms_on_a_grid_sample_every_token_by_its_probability(triton_device):
    probs = torch.tensor([0.125, 0.0, 0.625, 0.25], device=triton_device)
    uniforms = (torch.arange(32, dtype=torch.float64, device=triton_device) + 0.5) / 32
    sampled = sample(probs.expand(32, 4), uniforms, backend="triton")
    assert torch.bincount(sampled, minlength=4).tolist() == [4, 0, 20, 8]


def test_rows_that_are_no_distribution_still_give_a_token(triton_device):
    rows = torch.stack((torch.zeros(300), torch.full((300,), float("nan")))).to(triton_device)
    uniforms = torch.full((2,), 0.5, dtype=torch.float64, device=triton_device)
    assert all(0 <= token < 300 for token in sample(rows, uniforms, backend="triton").tolist())
    logits = torch.stack((torch.full((300,), float("-inf")), torch.full((300,), float("nan"))))[:, None]
    params = [SamplingParams(temperature=1.0, top_k=5, top_p=0.5)] * 2
    distribution = target_distribution(
        logits.to(triton_device), make_batch(params, 300, triton_device), backend="triton"
    )
    assert all(
        0 <= token < 300
        for token in sample(distribution, uniforms[:, None], backend="triton").flatten().tolist()
    )


@pytest.mark.parametrize("vocab", [6, 600])
def test_distinct_draws_equal_the_reference(triton_device, vocab):
    generator = torch.Generator().manual_seed(vocab)
    probs = spread(generator, 6, vocab)
    probs[4] = 0
    probs[4, vocab - 1] = 1.0  # fewer tokens than are sampled: the lowest ids follow
    probs[5] = 0
    uniforms = torch.rand(6, 5, generator=generator, dtype=torch.float64)
    uniforms[0], uniforms[1] = 0.0, JUST_BELOW_ONE
    sampled = sample_distinct(probs.to(triton_device), uniforms.to(triton_device), backend="triton").cpu()
    assert torch.equal(sampled, sample_distinct(probs, uniforms))
    assert sampled[4].tolist() == [vocab - 1, 0, 1, 2, 3] and sampled[5].tolist() == [0, 1, 2, 3, 4]


def hashed(seed: int, position: int, stream: int) -> tuple[int, float]:
    """Hash and uniform in Python integers, taken modulo 2^64."""

    def mix(x):
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = ((x ^ (x >> 33)) * factor) % 2**64
        return x ^ (x >> 33)

    golden = 0x9E3779B97F4A7C15
    key = mix((seed + golden) % 2**64) + position * golden + stream * 0x5851F42D4C957F2D
    return mix(key % 2**64), (mix(key % 2**64) >> 11) * 2.0**-53


@pytest.mark.parametrize("stream", [0, pytest.param(1, marks=pytest.mark.nightly), 2])
def test_uniforms_are_the_reference_s_to_the_bit(triton_device, stream):
    seeds = torch.tensor([0, 5, -1, -(2**63), 2**63 - 1], device=triton_device)
    roots = torch.tensor([0, 7, 131071, 2**40, -3], device=triton_device)
    shared = (torch.arange(70, device=triton_device) * 977 + 2**33).expand(5, 70)
    strided = torch.arange(5 * 6, device=triton_device).view(6, 5).T * 2**31
    for positions in (shared, strided):
        ours = position_uniforms(seeds, positions, stream, backend="triton")
        assert torch.equal(ours, position_uniforms(seeds, positions, stream, backend="reference"))
        expected = [
            [hashed(s, p, stream)[1] for p in row]
            for s, row in zip(seeds.tolist(), positions.tolist(), strict=True)
        ]
        assert ours.tolist() == expected
    ours = window_uniforms(seeds, roots, 65, stream, backend="triton")
    assert torch.equal(ours, window_uniforms(seeds, roots, 65, stream, backend="reference"))
    pairs = zip(seeds.tolist(), roots.tolist(), strict=True)
    assert ours.tolist() == [
        [hashed(hashed(s, r, stream)[0], i, stream)[1] for i in range(65)] for s, r in pairs
    ]
    assert ours.dtype == torch.float64


def test_nothing_is_drawn_for_no_request(triton_device):
    x = torch.ones(0, 3, 9, device=triton_device)
    uniforms = torch.ones(0, 3, dtype=torch.float64, device=triton_device)
    batch = make_batch(FILTERS, 9, triton_device)
    batch = type(batch)(*(None if field is None else field[:0] for field in batch))
    distribution = target_distribution(x, batch, backend="triton")
    assert probabilities(distribution).shape == x.shape and sample(
        distribution, uniforms, backend="triton"
    ).shape == (0, 3)
    assert sample(x, uniforms, backend="triton").shape == (0, 3)
    assert sample_distinct(x[:, 0], uniforms, backend="triton").shape == (0, 3)
    seeds = torch.ones(0, dtype=torch.int64, device=triton_device)
    assert window_uniforms(seeds, seeds, 4, 0, backend="triton").shape == (0, 4)


def test_fake_tensors_pass():
    pytest.importorskip("triton")
    with FakeTensorMode(), use("triton"):
        x = torch.ones(len(FILTERS), 2, 50, dtype=torch.bfloat16)
        batch = make_batch(FILTERS, 50, "cpu")
        uniforms = window_uniforms(batch.seeds, batch.seeds, 2, 1)
        distribution = target_distribution(x, batch)
        assert (
            sample(distribution, uniforms).shape == uniforms.shape == (4, 2)
            and distribution.sums.dtype == torch.float64
        )
        probs = target_probs(x, batch)
        assert probs.shape == x.shape and probs.dtype == torch.float32
        assert sample(probs, uniforms).dtype == sample_distinct(probs[:, 0], uniforms).dtype == torch.int64


def test_the_radix_search_covers_every_distance(triton_device):
    """Distances of all binary orders, from the smallest number to infinity, and neighbours of one bit."""
    powers = torch.tensor([0.0, 1e-45, 1e-38, 2.0**-60, 1e-9, 0.5, 1.0, 60.0, 1e9, 3e38, float("inf")])
    one_bit = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    logits = -torch.cat((powers, one_bit[None]))
    order = [0, 1, 2, 3, 4, 5, 6, 11, 7, 8, 9, 10]
    assert all(logits[a] >= logits[b] for a, b in pairwise(order))
    counts = (1, 2, 3, 6, 7, 8, 9, 11)
    params = [SamplingParams(temperature=1.0, top_k=k) for k in counts]
    distribution = target_distribution(
        logits.expand(len(counts), 1, 12).to(triton_device),
        make_batch(params, 12, triton_device),
        backend="triton",
    )
    for k, bound in zip(counts, distribution.stats[:, 0, 2].tolist(), strict=True):
        assert bound == -float(logits[order[k - 1]])
