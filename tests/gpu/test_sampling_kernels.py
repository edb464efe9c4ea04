"""Distributions, draws and verification at real vocabularies, against sorting in fp64 and walks in fp64."""

import pytest
import torch

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.ops.accept import Accepted, accept_greedy, accept_most_likely
from eagle_kit.ops.sampling import (
    make_sampling_batch,
    position_uniforms,
    probabilities,
    sample,
    sample_distinct,
    target_distribution,
    target_probs,
    window_uniforms,
)
from eagle_kit.ops.tree_build import Tree
from eagle_kit.verify.proposal import Deterministic, DraftOutput, SampledChain, SampledTree
from eagle_kit.verify.verifiers import (
    BlockVerification,
    RejectionSampling,
    Relaxed,
    TargetOnly,
    accept,
)
from tests.gpu.near import assert_near
from tests.gpu.place import DEVICE, DTYPES, generator, pick, randn

pytestmark = pytest.mark.usefixtures("poisoned_memory")
VOCABS = pick([49152, 128256, 151936], [300])
SAMPLING_PARAMS = [
    {"temperature": 0.9, "top_k": 200, "top_p": 0.95, "min_p": 0.001},
    {},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.0},
    {"temperature": 1.0, "min_p": 0.02},
    {"temperature": 1.5, "top_k": 1},
    {"temperature": 0.6, "top_p": 0.3},
]
ROUNDING = 1e-5
"""A share of the mass that sums in fp32 and in fp64 may differ by, so that one keeps a token and the other
does not."""


def batch_of(count: int, vocab: int):
    params = [SamplingParams(**SAMPLING_PARAMS[i % len(SAMPLING_PARAMS)]) for i in range(count)]
    return params, make_sampling_batch(params, [[]] * count, list(range(7, 7 + count)), vocab, DEVICE)


def bounds(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """``logits [N, V]`` -> what is kept for certain and what may be, bool ``[N, V]``, by sorting."""
    if params.is_greedy:
        best = torch.zeros_like(logits, dtype=torch.bool)
        best.scatter_(-1, logits.argmax(-1, keepdim=True), True)
        return best, best
    # One subtraction and one division in fp32 are part of what the distribution is.
    distance = (logits.max(-1, keepdim=True).values - logits) / torch.tensor(
        params.temperature, device=DEVICE
    )
    ordered, order = distance.double().sort(dim=-1, stable=True)
    alive = torch.arange(logits.shape[-1], device=DEVICE) < (params.top_k or logits.shape[-1])
    weights = torch.where(alive, (-ordered).exp(), 0.0)
    before = (weights.cumsum(-1) - weights) / weights.sum(-1, keepdim=True)
    floor = -torch.tensor(params.min_p, device=DEVICE).log()
    kept = []
    for slack in (-ROUNDING, ROUNDING):
        mine = (
            alive & ((before < params.top_p + slack) | (params.top_p == 1)) & (ordered <= floor * (1 + slack))
        )
        kept.append(torch.zeros_like(mine.expand_as(order)).scatter(-1, order, mine.expand_as(order)))
    kept[0].scatter_(-1, order[..., :1], True)
    return kept[0], kept[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "nodes"), pick([(64, 1), (8, 16)], [(4, 1)]))
@pytest.mark.parametrize("vocab", VOCABS)
def test_distributions_are_those_of_sorting(vocab, batch, nodes, dtype):
    logits = randn(batch, nodes, vocab, dtype=dtype, by=generator(30), scale=2.5)
    params, sampling = batch_of(batch, vocab)
    probs = probabilities(target_distribution(logits, sampling, backend="triton"))
    for i, param in enumerate(params):
        wide = logits[i].float()
        sure, possible = bounds(wide, param)
        kept = probs[i] > 0
        faint = (wide.max(-1, keepdim=True).values - wide) / (
            param.temperature or 1.0
        ) > 80  # nothing in fp32
        assert (kept | faint | ~sure).all() and (possible | ~kept).all(), f"request {i}: {param}"
        right = (wide.double() / (param.temperature or 1.0)).masked_fill(
            ~(kept | faint & sure), float("-inf")
        )
        assert_near(f"request {i}", probs[i], right.softmax(-1))


@pytest.mark.parametrize("vocab", VOCABS)
def test_samples_are_inverses_of_the_cumulative_distribution(vocab):
    by, count = generator(31), pick(64, 4)
    _, sampling = batch_of(count, vocab)
    logits = randn(count, 3, vocab, by=by, scale=2.5)
    uniforms = torch.rand(count, 3, generator=by, device=DEVICE, dtype=torch.float64)
    uniforms[0], uniforms[1] = 0.0, 1 - 2.0**-53
    distribution = target_distribution(logits, sampling, backend="triton")
    probs = probabilities(distribution)
    upto = probs.double().cumsum(-1)
    aim = uniforms * upto[..., -1]
    for sampled in (
        sample(distribution, uniforms, backend="triton"),
        sample(probs, uniforms, backend="triton"),
    ):
        at = sampled[..., None]
        mass, reached = probs.gather(-1, at)[..., 0].double(), upto.gather(-1, at)[..., 0]
        assert (mass > 0).all()
        assert (reached > aim - 1e-6).all() and (reached - mass <= aim + 1e-6).all()
    siblings = sample_distinct(probs[:, 0].contiguous(), uniforms[:, :1].expand(-1, 4), backend="triton")
    assert all(len(set(row)) == 4 for row in siblings.tolist())
    right = sample_distinct(probs[:, 0].cpu(), uniforms[:, :1].expand(-1, 4).cpu(), backend="reference")
    assert (siblings.cpu() == right).double().mean() > 0.99, "sums that differ in the last bit draw alike"


def test_uniforms_are_the_host_s_to_the_bit():
    by = generator(32)
    seeds = torch.randint(-(2**62), 2**62, (64,), generator=by, device=DEVICE)
    places = torch.randint(0, 2**40, (64, 65), generator=by, device=DEVICE)
    for stream in (0, 1, 2):
        ours = position_uniforms(seeds, places, stream, backend="triton")
        assert torch.equal(
            ours.cpu(), position_uniforms(seeds.cpu(), places.cpu(), stream, backend="reference")
        )
        ours = window_uniforms(seeds, places[:, 0], 65, stream, backend="triton")
        theirs = window_uniforms(seeds.cpu(), places[:, 0].cpu(), 65, stream, backend="reference")
        assert torch.equal(ours.cpu(), theirs)


def random_tree(batch: int, nodes: int, depth: int, by: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Parents and depths int64 ``[B, N]`` of random trees of at most ``depth``, the same for all requests."""
    parents, depths = [0], [0]
    for node in range(1, nodes):
        choice = [i for i in range(node) if depths[i] < depth]
        at = choice[int(torch.randint(0, len(choice), (1,), generator=by, device=DEVICE))]
        parents.append(at)
        depths.append(depths[at] + 1)
    made = (torch.tensor(x, device=DEVICE).expand(batch, nodes) for x in (parents, depths))
    return next(made), next(made)


def drawn_from(q: torch.Tensor, parents: torch.Tensor, by: torch.Generator) -> torch.Tensor:
    """Tokens ``[B, N]`` whose every node is sampled from ``q [B, N, V]`` at its parent."""
    below = q[:, parents[0, 1:]]
    sampled = torch.multinomial(below.flatten(0, 1), 1, generator=by).view(below.shape[:2])
    return torch.cat((torch.zeros_like(sampled[:, :1]), sampled), 1)


def assert_agreed(name: str, ours: Accepted, theirs: Accepted) -> None:
    """The same path and tokens. A sum that differs in its last bit moves a draw once in 1e9 times."""
    there = torch.arange(theirs.tokens.shape[1], device=DEVICE) <= theirs.num_accepted[:, None]
    assert torch.equal(ours.num_accepted, theirs.num_accepted), name
    assert torch.equal(ours.path, theirs.path), name
    assert torch.equal(ours.tokens * there, theirs.tokens * there), name
    last = theirs.tokens.gather(1, theirs.num_accepted[:, None])
    assert torch.equal(ours.tokens[:, -1:], last), f"{name}: the next root is the last token"


VERIFIERS = {
    "target only": TargetOnly(),
    "relaxed": Relaxed(0.3, 0.6),
    "rejection, chain": RejectionSampling(),
    "rejection, tree": RejectionSampling(),
    "block": BlockVerification(),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "nodes"), pick([(1, 8), (16, 16), (64, 6)], [(2, 4)]))
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("name", VERIFIERS)
def test_verifiers_walk_as_in_fp64(name, vocab, batch, nodes, dtype):
    """The reference keeps what is left of p and q in fp64 rows; the kernels make neither rows nor copies."""
    by, verifier = generator(33), VERIFIERS[name]
    _, sampling = batch_of(batch, vocab)
    logits = randn(batch, nodes, vocab, dtype=dtype, by=by, scale=2.5)
    distribution = target_distribution(logits, sampling, backend="triton")
    near = logits.float() + randn(batch, nodes, vocab, by=by, scale=0.5)
    q = target_probs(near, sampling._replace(top_k=None, top_p=None, min_p=None), backend="triton")
    is_chain = name in ("block", "rejection, chain")
    if is_chain:
        depths = torch.arange(nodes, device=DEVICE).expand(batch, nodes)
        parents, steps = (depths - 1).clamp(min=0), nodes - 1
    else:
        parents, depths = random_tree(batch, nodes, 4, by)
        steps = int(depths.max())
    tokens = drawn_from(q, parents, by)
    proposal = Deterministic()
    if is_chain:
        proposal = SampledChain(q[:, :-1].contiguous())
    elif name == "rejection, tree":
        proposal = SampledTree(q)
    tree = Tree(tokens, parents, depths, torch.ones_like(tokens))
    roots = torch.randint(0, 30000, (batch,), generator=by, device=DEVICE)
    probs = probabilities(distribution)
    window, options = DraftOutput(tree, proposal), (verifier, sampling.seeds, roots, steps)
    theirs = accept(probs, window, *options, backend="reference")
    assert_agreed("of a distribution", accept(distribution, window, *options, backend="triton"), theirs)
    assert_agreed("of probabilities", accept(probs, window, *options, backend="triton"), theirs)
    if batch > 1:
        assert theirs.num_accepted.sum() > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "nodes"), pick([(1, 64), (64, 16)], [(5, 6)]))
@pytest.mark.parametrize("vocab", VOCABS)
def test_greedy_verification_follows_the_most_likely(vocab, batch, nodes, dtype):
    """Halves tie often: the lowest id wins."""
    by = generator(34)
    logits = (randn(batch, nodes, vocab, by=by, scale=4).round() / 2).to(dtype)
    best = logits.float().cpu().argmax(-1).to(DEVICE)
    parents, depths = random_tree(batch, nodes, 5, by)
    tokens = torch.where(
        torch.rand(batch, nodes, generator=by, device=DEVICE) < 0.7, best.gather(1, parents), 0
    )
    steps = int(depths.max())
    theirs = accept_greedy(best, tokens, parents, steps)
    assert_agreed("logits", accept_most_likely(logits, tokens, parents, steps, backend="triton"), theirs)
    assert batch == 1 or theirs.num_accepted.sum() > 0
