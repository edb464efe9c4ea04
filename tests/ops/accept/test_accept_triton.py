"""Triton kernels of the verifiers against plain Python loops, exact small distributions, and the
reference."""

from fractions import Fraction

import pytest
import torch
from crossed import crossed
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.ops.accept import (
    accept_block,
    accept_greedy,
    accept_most_likely,
    accept_rejection_chain,
    accept_rejection_tree,
    accept_relaxed,
    accept_target_only,
)
from eagle_kit.ops.sampling import make_sampling_batch, probabilities, target_distribution, target_probs
from eagle_kit.ops.tree_build import Tree
from eagle_kit.verify.proposal import Deterministic, DraftOutput, SampledChain, SampledTree
from eagle_kit.verify.verifiers import (
    BlockVerification,
    RejectionSampling,
    Relaxed,
    TargetOnly,
    accept,
)
from tests.ops.accept import test_accept_distributions as enumerated

S = 4
PARENTS = [0, 0, 0, 0, 1, 1, 4, 6]
DEPTHS = [0, 1, 1, 1, 2, 2, 3, 4]
JUST_BELOW_ONE = 1 - 2.0**-53


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill new memory with NaN or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_same(ours, theirs, is_triton=True):
    """Assert equality of all meaningful entries; Triton fills the others with the bonus token."""
    emitted = torch.arange(theirs.tokens.shape[1]) <= theirs.num_accepted[:, None]
    ours = [x.cpu() for x in ours]
    assert torch.equal(ours[2], theirs.num_accepted)
    assert torch.equal(ours[0], theirs.path)
    assert torch.equal(ours[1] * emitted, theirs.tokens * emitted)
    if is_triton:
        assert torch.equal(ours[1][:, -1:], theirs.tokens.gather(1, theirs.num_accepted[:, None]))


def distributions(generator, *shape, vocab, zeros=0.0):
    weights = torch.randn(*shape, vocab, generator=generator).mul(2).exp()
    weights *= torch.rand(*shape, vocab, generator=generator) >= zeros
    weights[..., vocab // 2] += 0.01
    return weights / weights.sum(-1, keepdim=True)


def random_parents(generator, batch, nodes):
    parents = torch.zeros(batch, nodes, dtype=torch.int64)
    for i in range(1, nodes):
        parents[:, i] = torch.randint(0, i, (batch,), generator=generator)
    return parents


def walk(predicted, tokens, parents):
    node, emitted = 0, []
    while True:
        emitted.append(predicted[node])
        children = [i for i in range(1, len(tokens)) if parents[i] == node and tokens[i] == predicted[node]]
        if not children:
            return emitted
        node = children[0]


@crossed(
    ("dtype", [torch.float32, torch.float16, torch.bfloat16]),
    ("nodes, vocab", [(1, 1), (6, 3), (17, 3), (3, 700)]),
)
def test_the_most_likely_token_is_followed(triton_device, nodes, vocab, dtype):
    """Rounded logits tie; the lowest id wins, as it would in a loop."""
    generator = torch.Generator().manual_seed(nodes)
    b = 2 if vocab > 3 else 6
    logits = (torch.randn(b, nodes, vocab, generator=generator) * 2).round().to(dtype)
    parents = random_parents(generator, b, nodes)
    tokens = torch.randint(0, vocab, (b, nodes), generator=generator)
    best = [[max(range(vocab), key=lambda i: (row[i], -i)) for row in rows] for rows in logits.tolist()]
    if vocab > 3:
        tokens[:, 1:] = torch.tensor(best).gather(1, parents)[:, 1:]
    tokens[0, nodes // 2 :] = -1  # unused
    window = tokens.to(triton_device), parents.to(triton_device)
    ours = accept_most_likely(logits.to(triton_device), *window, nodes, backend="triton")
    for i in range(b):
        count = int(ours.num_accepted[i]) + 1
        assert ours.tokens[i, :count].tolist() == walk(best[i], tokens[i].tolist(), parents[i].tolist())
    theirs = accept_greedy(torch.tensor(best), tokens, parents, nodes)
    assert_same(ours, theirs)
    assert nodes < 3 or theirs.num_accepted.max() > 0


def test_the_walk_ends_with_the_steps_and_the_root_is_no_child(triton_device):
    same = torch.full((1, 3), 5, device=triton_device)
    logits = torch.nn.functional.one_hot(same, 6).float()
    chain = torch.tensor([[0, 0, 1]], device=triton_device)
    assert accept_most_likely(logits, same, chain, 1, backend="triton").num_accepted.tolist() == [1]
    tokens = torch.tensor([[5, 1, 2]], device=triton_device)
    out = accept_most_likely(logits, tokens, chain, 2, backend="triton")
    assert out.num_accepted.tolist() == [0] and out.tokens.tolist() == [[5, 5, 5]]


def drawn_from(q, parents, generator):
    """Tokens ``[B, N]`` of a tree whose children are sampled from ``q [B, N, V]`` of their parents."""
    below = q[:, parents[1:]]
    sampled = torch.multinomial(below.flatten(0, 1), 1, generator=generator).view(below.shape[:2])
    return torch.cat((torch.zeros_like(sampled[:, :1]), sampled), 1)


VERIFIERS = ("tree", "chain", "block", "target", "relaxed")


def verify(name, probs, q, tokens, uniforms, bonus, backend):
    """Result of a verifier on windows of 8 nodes; ``uniforms [B, 8]``."""
    b, device = len(tokens), tokens.device
    parents, depths = (torch.tensor(x, device=device).expand(b, 8) for x in (PARENTS, DEPTHS))
    chain, q_chain = (probs[:, : S + 1], tokens[:, : S + 1]), q[:, :S]
    tree, half = (tokens, parents), {"backend": backend}
    if name == "tree":
        return accept_rejection_tree(probs, q[:, :7], *tree, uniforms, bonus, S, **half)
    if name == "chain":
        return accept_rejection_chain(chain[0], q_chain, chain[1], uniforms[:, 1 : S + 1], bonus, **half)
    if name == "block":
        return accept_block(chain[0], q_chain, chain[1], uniforms[:, 1 : S + 1], bonus, **half)
    if name == "target":
        return accept_target_only(probs, *tree, depths, uniforms[:, : S + 1], S, **half)
    return accept_relaxed(probs, *tree, uniforms[:, : S + 1], bonus, S, 0.4, 0.7, **half)


@pytest.mark.parametrize("b, vocab", [(8, 5), pytest.param(2, 257, marks=pytest.mark.nightly), (2, 1271)])
@pytest.mark.parametrize("name", VERIFIERS)
def test_every_verifier_equals_the_reference(triton_device, name, b, vocab):
    """Small vocabularies reject several siblings in a row, repeat siblings and have tokens of q = 0."""
    generator = torch.Generator().manual_seed(vocab)
    probs, q = (
        distributions(generator, b, 8, vocab=vocab, zeros=0.3),
        distributions(generator, b, 8, vocab=vocab, zeros=0.3),
    )
    q[1::2] = 0.3 * q[1::2] + 0.7 * probs[1::2]
    tokens = drawn_from(q, PARENTS, generator)
    tokens[0, 5] = -1
    tokens[1, 3] = tokens[1, 1]
    uniforms = torch.rand(b, 8, generator=generator, dtype=torch.float64)
    bonus = torch.rand(b, generator=generator, dtype=torch.float64)
    inputs = probs, q, tokens, uniforms, bonus
    chain = tokens[:, : S + 1]
    chain[:, 1:] = drawn_from(q[:, : S + 1], [0, 0, 1, 2, 3], generator)[:, 1:]
    theirs = verify(name, *inputs, "reference")
    assert_same(verify(name, *(x.to(triton_device) for x in inputs), "triton"), theirs)
    if vocab == 5:
        assert set(theirs.num_accepted.tolist()) != {0}
        assert name != "tree" or (theirs.num_accepted < S).any()


@pytest.mark.parametrize("uniform", [0.0, JUST_BELOW_ONE])
@pytest.mark.parametrize("name", VERIFIERS)
def test_a_token_of_probability_zero_is_never_emitted(triton_device, name, uniform):
    generator = torch.Generator().manual_seed(1)
    probs = distributions(generator, 3, 8, vocab=300, zeros=0.7)
    q = probs + 1e-7 * torch.rand(3, 8, 300, generator=generator)
    tokens = drawn_from(q, PARENTS, generator)
    uniforms = torch.full((3, 8), uniform, dtype=torch.float64)
    inputs = [x.to(triton_device) for x in (probs, q, tokens, uniforms, uniforms[:, 0])]
    path, emitted, count = (x.cpu() for x in verify(name, *inputs, "triton"))
    for b in range(3):
        for i in range(int(count[b]) + 1):
            assert probs[b, path[b, i], emitted[b, i]] > 0


def draft_of(verifier, q, generator):
    """Window ``[B, 8]`` sampled from ``q [B, 8, V]`` for ``verifier``, its proposal, its depth."""
    if isinstance(verifier, BlockVerification):
        parents, depths = [0, 0, 1, 2, 3, 4, 5, 6], list(range(8))
        proposal = SampledChain(q[:, :7])
    else:
        parents, depths = PARENTS, DEPTHS
        proposal = SampledTree(q) if isinstance(verifier, RejectionSampling) else Deterministic()
    tokens = drawn_from(q, parents, generator)
    shared = (torch.tensor(x).expand_as(tokens) for x in (parents, depths))
    return Tree(tokens, *shared, torch.ones_like(tokens)), proposal, max(depths)


def type_name(value: object) -> str:
    return type(value).__name__


@pytest.mark.parametrize(
    "verifier", [TargetOnly(), RejectionSampling(), BlockVerification(), Relaxed(0.4, 0.8)], ids=type_name
)
def test_filtered_logits_are_verified_as_their_probabilities_are(triton_device, verifier):
    """From logits to accepted tokens, for requests with different filters."""
    generator = torch.Generator().manual_seed(7)
    params = [
        SamplingParams(temperature=0.8, min_p=0.05),
        SamplingParams(),
        SamplingParams(temperature=1.0),
    ]

    def batch_on(device):
        return make_sampling_batch(params, [[]] * 3, [3, 4, 5], 300, torch.device(device))

    logits = torch.randn(3, 8, 300, generator=generator) * 3
    distribution = target_distribution(logits.to(triton_device), batch_on(triton_device), backend="triton")
    probs = target_probs(logits, batch_on("cpu"))
    q = target_probs(logits + torch.randn(logits.shape, generator=generator) / 3, batch_on("cpu"))
    roots = torch.tensor([11, 0, 131071])
    tree, proposal, steps = draft_of(verifier, q, generator)
    seeds = batch_on("cpu").seeds
    theirs = accept(probs, DraftOutput(tree, proposal), verifier, seeds, roots, steps, backend="reference")
    assert theirs.num_accepted.sum() > 0
    there = [x.to(triton_device) for x in (seeds, roots)]
    tree = Tree(*(x.to(triton_device) for x in tree))
    if not isinstance(proposal, Deterministic):
        proposal = type(proposal)(proposal.q.to(triton_device))
    for backend in ("triton", "reference"):
        window = DraftOutput(tree, proposal)
        ours = accept(distribution, window, verifier, *there, steps, backend=backend)
        assert_same(ours, theirs, backend == "triton")


@pytest.mark.parametrize("verifier", [accept_rejection_chain, accept_block])
def test_equal_distributions_keep_every_draft(triton_device, verifier):
    """p of a ``FilteredLogits`` and q from ``probabilities`` are bit-identical."""
    generator = torch.Generator().manual_seed(2)
    params = [SamplingParams(temperature=0.7)] * 2
    batch = make_sampling_batch(params, [[]] * 2, [0, 1], 300, torch.device(triton_device))
    distribution = target_distribution(
        torch.randn(2, S + 1, 300, generator=generator).to(triton_device), batch, backend="triton"
    )
    probs = probabilities(distribution)
    q = probs[:, :S]
    tokens = drawn_from(probs.cpu(), [0, 0, 1, 2, 3], generator).to(triton_device)
    uniforms = torch.full((2, S), JUST_BELOW_ONE, dtype=torch.float64, device=triton_device)
    for target in (distribution, probs):
        accepted = verifier(target, q, tokens, uniforms, uniforms[:, 0], backend="triton")
        assert accepted.num_accepted.tolist() == [S] * 2
        assert torch.equal(accepted.tokens[:, :S], tokens[:, 1:])


def test_distributions_that_differ_by_rounding_leave_the_target_s(triton_device):
    """p - q has no residual, and the draft has p = 0: the bonus is sampled from p."""
    p = torch.tensor([[[0.25, 0.75, 0.0]] * 2], device=triton_device)
    q = torch.tensor([[[0.25, 0.75, 1e-9]]], device=triton_device)
    tokens = torch.tensor([[0, 2]], device=triton_device)
    for uniform, bonus in ((0.1, 0), (0.9, 1)):
        uniforms = torch.full((1, 1), uniform, dtype=torch.float64, device=triton_device)
        for verifier in (accept_rejection_chain, accept_block):
            out = verifier(p, q, tokens, uniforms, uniforms[:, 0], backend="triton")
            assert out.num_accepted.tolist() == [0] and out.tokens.tolist() == [[bonus, bonus]]


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(("single", "accepted"), [(0.25, 1), (0.2500001, 0)])
def test_a_probability_of_the_threshold_itself_is_accepted(triton_device, backend, single, accepted):
    """0.25 of four tokens: the uniform alone would refuse it."""
    device = triton_device if backend == "triton" else "cpu"
    probs = torch.full((1, 2, 4), 0.25, device=device)
    tokens = torch.tensor([[0, 3]], device=device)
    uniforms = torch.full((1, 2), 0.9, dtype=torch.float64, device=device)
    window = tokens, torch.zeros_like(tokens), uniforms, uniforms[:, 0]
    out = accept_relaxed(probs, *window, 1, single, 1.0, backend=backend)
    assert out.num_accepted.tolist() == [accepted]


def emitted_first(accepted, weights, vocab):
    distribution = [Fraction(0)] * vocab
    for token, weight in zip(accepted.tokens[:, 0].tolist(), weights, strict=True):
        distribution[token] += weight
    return distribution


@pytest.mark.parametrize("verifier", [accept_rejection_chain, accept_block])
def test_a_chain_emits_exactly_the_distribution_of_the_target(triton_device, verifier):
    """Every threshold is a multiple of 1/4, so uniforms in the middle of quarters integrate without an
    error."""
    p, q = torch.tensor([0.25, 0.75, 0.0]), torch.tensor([0.5, 0.25, 0.25])
    tokens = torch.tensor([[0, x] for x in range(3) for _ in range(4)], device=triton_device)
    weights = [Fraction(float(q[x])) / 4 for x in range(3) for _ in range(4)]
    uniforms = ((torch.arange(12, dtype=torch.float64) % 4 + 0.5) / 4).to(triton_device)
    distributions = (x.to(triton_device).expand(12, n, 3) for x, n in ((p, 2), (q, 1)))
    out = verifier(*distributions, tokens, uniforms[:, None], uniforms.flip(0), backend="triton")
    assert emitted_first(out, weights, 3) == [Fraction(1, 4), Fraction(3, 4), 0]
    assert sum(w * n for w, n in zip(weights, out.num_accepted.tolist(), strict=True)) == Fraction(1, 2)


def test_siblings_emit_exactly_the_distribution_of_the_target(triton_device):
    """Two siblings sampled without replacement: all six orders, with uniforms in the middle of halves."""
    p, q = [0.25, 0.25, 0.5], [0.5, 0.25, 0.25]
    orders = [(a, b) for a in range(3) for b in range(3) if a != b]
    tokens = torch.tensor([[0, a, b] for a, b in orders for _ in range(2)], device=triton_device)
    weights = [
        Fraction(q[a]) * Fraction(q[b]) / (1 - Fraction(q[a])) / 2 for a, b in orders for _ in range(2)
    ]
    uniforms = ((torch.arange(12, dtype=torch.float64) % 2 + 0.5) / 2).to(triton_device)
    p, q = (torch.tensor(x, device=triton_device).expand(12, n, 3) for x, n in ((p, 3), (q, 1)))
    window = tokens, torch.zeros_like(tokens), uniforms[:, None].expand(12, 3), uniforms
    out = accept_rejection_tree(p, q, *window, 1, backend="triton")
    assert emitted_first(out, weights, 3) == [Fraction(1, 4), Fraction(1, 4), Fraction(1, 2)]


@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("chain", "block", "tree")),
        "target",
        "relaxed",
    ],
)
def test_enumerated_windows_are_verified_losslessly(triton_device, kind):
    """All of them on a GPU, with the distribution they emit; under the interpreter a few, held to the
    reference, whose distribution is enumerated in ``test_accept_distributions``."""
    on_gpu, shape = triton_device == "cuda", enumerated.TREE
    points = 2048 if on_gpu else 1
    if kind in ("chain", "block"):
        shape, windows = [0, 0, 1], enumerated.chains(enumerated.Q)
    elif kind == "tree":
        windows = enumerated.trees(enumerated.Q, distinct=True)
    else:
        windows = enumerated.fixed_tree([0, 1, 2, 3]), torch.ones(1, dtype=torch.float64)
        points = 32768 if on_gpu else 12
    tokens, weights, uniforms = enumerated.cross(*windows, enumerated.sobol(points, 6))
    if not on_gpu:
        few = torch.arange(0, len(tokens), max(1, len(tokens) // 14))
        tokens, weights, uniforms = tokens[few], weights[few], uniforms[few]
        # one uniform per window would be the same for all
        uniforms = (uniforms + torch.rand(len(few), 6, generator=torch.Generator().manual_seed(3))).remainder(
            1.0
        )
    probs, q = (enumerated.rows(x, tokens, shape) for x in (enumerated.P, enumerated.Q))
    parents = torch.tensor(shape).expand_as(tokens)
    depths = torch.tensor([0, 1, 1, 2, 2]).expand(len(tokens), 5)

    def verify(device, backend):
        def on(*tensors):
            return (x.to(device) for x in tensors)

        p, n, draft, half = (*on(probs, tokens, q), {"backend": backend})
        if kind in ("chain", "block"):
            verifier = accept_rejection_chain if kind == "chain" else accept_block
            return verifier(p, draft[:, :2], n, *on(uniforms[:, :2], uniforms[:, 5]), **half)
        if kind == "tree":
            window = on(parents, uniforms[:, :5], uniforms[:, 5])
            return accept_rejection_tree(p, draft[:, :2], n, *window, 2, **half)
        if kind == "target":
            return accept_target_only(p, n, *on(parents, depths, uniforms[:, :3]), 2, **half)
        return accept_relaxed(p, n, *on(parents, uniforms[:, :3], uniforms[:, 5]), 2, 1.0, 1.0, **half)

    ours, theirs = verify(triton_device, "triton"), verify("cpu", "reference")
    if on_gpu:
        enumerated.check_lossless(type(theirs)(*(x.cpu() for x in ours)), weights)
    else:
        assert_same(ours, theirs)
        assert len(set(theirs.num_accepted.tolist())) > 1


def test_no_request_gives_no_token(triton_device):
    window = [torch.zeros(0, 3, dtype=torch.int64, device=triton_device)] * 2
    probs, uniforms = torch.ones(0, 3, 9, device=triton_device), torch.ones(0, 3, dtype=torch.float64)
    uniforms = uniforms.to(triton_device)
    for out in (
        accept_most_likely(probs, *window, 2, backend="triton"),
        accept_target_only(probs, *window, window[0], uniforms, 2, backend="triton"),
        accept_rejection_tree(probs, probs, *window, uniforms, uniforms[:, 0], 2, backend="triton"),
        accept_block(probs, probs[:, :2], window[0], uniforms[:, :2], uniforms[:, 0], backend="triton"),
    ):
        assert out.tokens.shape == out.path.shape == (0, 3) and out.num_accepted.shape == (0,)


def test_fake_tensors_pass():
    pytest.importorskip("triton")
    with FakeTensorMode():
        probs, tokens = torch.ones(3, 8, 300), torch.zeros(3, 8, dtype=torch.int64)
        uniforms = torch.ones(3, 8, dtype=torch.float64)
        for name in VERIFIERS:
            accepted = verify(name, probs, probs, tokens, uniforms, uniforms[:, 0], "triton")
            assert accepted.tokens.shape == accepted.path.shape == (3, S + 1)
            assert accepted.num_accepted.shape == (3,) and accepted.tokens.dtype == torch.int64
        assert accept_most_likely(probs.bfloat16(), tokens, tokens, 2, backend="triton").path.shape == (3, 3)
