"""Checks of a decode cycle's operations: drafts, trees, sampling, acceptance, commits, rows of slots."""

import torch

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.doctor.operations.inputs import error_of, largest, normal
from eagle_kit.ops.accept import (
    Accepted,
    accept_greedy,
    accept_most_likely,
    accept_rejection_chain,
    most_likely,
    outcome,
)
from eagle_kit.ops.best_first import best_first
from eagle_kit.ops.commit import commit_path
from eagle_kit.ops.draft_inputs import draft_inputs
from eagle_kit.ops.draft_topk import draft_topk, topk_of_logits
from eagle_kit.ops.rows import append_rows, gather_rows, write_rows
from eagle_kit.ops.sampling import make_sampling_batch, position_uniforms, sample, target_probs
from eagle_kit.ops.tree_build import grow_beam, start_beam, tree_build


def inputs_of_head(dtype: torch.dtype) -> float:
    """Embeddings and features of four rows, each normed, side by side."""
    features = normal(dtype, 3, 24)
    table = normal(dtype, 9, 24, seed=1)
    weights = normal(dtype, 2, 24, seed=2)
    rows = torch.tensor([2, 0, 1, 2])
    tokens = torch.tensor([8, 1, 0, 3])
    got, taken = draft_inputs(features, rows, tokens, table, (weights[0], weights[1]), 1e-5)
    parts = torch.stack((table[tokens], features[rows])).double()
    normed = parts / (parts.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[:, None].double()
    return largest(error_of(got, torch.cat(tuple(normed), -1)), error_of(taken, features[rows]))


def most_likely_drafts(dtype: torch.dtype) -> float:
    """The three most likely of 131 tokens and their log-probabilities; sums are fp32 for every dtype."""
    x = normal(dtype, 3, 16)
    weight = normal(dtype, 131, 16, seed=1)
    ids, logprobs = draft_topk(x, weight, 3)
    expected = (x.double() @ weight.double().T).log_softmax(-1).topk(3, -1)
    return largest(error_of(logprobs, expected.values), error_of(ids, expected.indices))


def drafts_of_logits(dtype: torch.dtype) -> float:
    """The same of given logits."""
    logits = normal(dtype, 4, 50)
    ids, logprobs = topk_of_logits(logits, 3)
    expected = logits.double().log_softmax(-1).topk(3, -1)
    return largest(error_of(logprobs, expected.values), error_of(ids, expected.indices))


def tree(dtype: torch.dtype) -> float:
    """Two steps of two candidates: a window of four keeps the three best, in the order of drafting."""
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15]] * 3)
    parents = torch.tensor([[-1, -1, 0, 0, 1, 1]] * 3)
    scores = torch.tensor([[-0.1, -2.0, -0.5, -3.0, -2.5, -4.0]] * 3, dtype=dtype)
    found = tree_build(torch.tensor([9, 9, 9]), tokens, scores, parents, SpecShape(2, 2, 4))
    got = torch.stack((found.tokens, found.parents, found.depths, found.ancestors), 1)
    return error_of(got, torch.tensor([[[9, 10, 11, 12], [0, 0, 0, 1], [0, 1, 1, 2], [1, 3, 5, 11]]] * 3))


def deep_beam(dtype: torch.dtype) -> float:
    """33 depths of two nodes, whose ancestors take two words. A second child is worth more than a first, so
    both nodes of a depth are children of the better one above: its keys are 1, 2, 4, 6 and so on."""
    shape = SpecShape(34, 2, 60)
    tokens = torch.tensor([[5, 6]] * 3)
    beam, candidates = start_beam(tokens, torch.tensor([[-9.0, -0.5]] * 3, dtype=dtype), shape)
    next_scores = torch.tensor([[-3.0, -0.5]] * 6, dtype=dtype)
    for step in range(1, 33):
        beam = grow_beam(beam, candidates, tokens.repeat(2, 1), next_scores, step)
    bits = (beam.ancestors[..., None] >> torch.arange(64)) & 1  # [B, K, W, 64]
    expected = torch.zeros(3, 2, 128, dtype=torch.int64)
    expected[:, :, [1, *range(2, 64, 2)]] = 1
    expected[:, [0, 1], [64, 65]] = 1
    scores = torch.tensor([[-16.5, -19.0]] * 3)
    return largest(error_of(bits.flatten(2), expected), error_of(beam.scores, scores))


def best_first_tree(dtype: torch.dtype) -> float:
    """Two depths of two candidates: the better one's better child (0.42) beats the other (0.4), whose own one
    (0.28) beats the better one's second child (0.18)."""
    tokens = torch.tensor([[[10, 11], [12, 13]]])
    scores = torch.tensor([[[[0.6, 0.4]], [[0.7, 0.3]]]], dtype=dtype).log()
    found = best_first(torch.tensor([9]), tokens, scores, SpecShape(2, 2, 5))
    got = torch.cat((found.tokens, found.parents, found.depths, found.ancestors))
    return error_of(
        got, torch.tensor([[9, 10, 12, 11, 12], [0, 0, 1, 0, 3], [0, 1, 2, 1, 2], [1, 3, 7, 9, 25]])
    )


def greedy_acceptance(dtype: torch.dtype) -> float:
    """The target agrees with the second child of the root and then with nothing. It is given by its most
    likely tokens, and by logits, of which the lowest id among equals is taken.
    """
    tokens = torch.tensor([[9, 10, 11, 12]])
    parents = torch.tensor([[0, 0, 0, 2]])
    best = torch.tensor([[11, 1, 13, 2]])
    logits = torch.zeros(1, 4, 37, dtype=dtype).scatter_(-1, best[..., None], 2.0)
    logits[0, :, 33] = 2.0
    errors = []
    for accepted in (
        accept_greedy(best, tokens, parents, 2),
        accept_most_likely(logits, tokens, parents, 2),
    ):
        got = torch.cat((accepted.num_accepted, accepted.tokens[0, :2], accepted.path[0, :2]))
        errors.append(error_of(got, torch.tensor([1, 11, 13, 0, 2])))
    return largest(*errors)


def sampled_acceptance(dtype: torch.dtype) -> float:
    """Uniform random numbers 0.3 and 0.7 against p / q of 0.5 and 0.5: the first draft is kept, the second is
    replaced."""
    probs = torch.tensor([[[0.2, 0.3, 0.5], [0.4, 0.1, 0.5], [0.1, 0.8, 0.1]]], dtype=dtype)
    q = torch.tensor([[[0.4, 0.3, 0.3], [0.4, 0.2, 0.4]]], dtype=dtype)
    tokens = torch.tensor([[9, 0, 1]])
    uniforms = torch.tensor([[0.3, 0.7]], dtype=torch.float64)
    last = torch.tensor([0.5], dtype=torch.float64)
    accepted = accept_rejection_chain(probs, q, tokens, uniforms, last)
    got = torch.cat((accepted.num_accepted, accepted.tokens[0, :2]))
    return error_of(got, torch.tensor([1, 0, 2]))


def outcome_of_path(dtype: torch.dtype) -> float:
    """Two drafts of one request are accepted; the other is padding, and has NaN on its path."""
    logits = normal(dtype, 2, 4, 9)
    logits[1, 0, 3] = torch.nan
    num_accepted = torch.tensor([2, 0])
    tokens = torch.tensor([[5, 6, 7], [8, 0, 0]])
    path = torch.tensor([[0, 1, 3], [0, 0, 0]])
    is_request = torch.tensor([True, False])
    accepted = Accepted(path, tokens, num_accepted)
    found = outcome(logits.amax(-1), accepted, is_request, num_accepted + 9)
    expected = torch.tensor([[3, 0], [1, 0], [7, 8], [14, 9]])
    return error_of(torch.stack([part.long() for part in found]), expected)


def most_likely_tokens(dtype: torch.dtype) -> float:
    """Largest of 70 logits, and its token."""
    logits = normal(dtype, 5, 70)
    best = logits.double().max(-1)
    got = most_likely(logits)
    return largest(error_of(got.values, best.values), error_of(got.tokens, best.indices))


def distribution(dtype: torch.dtype) -> float:
    """Temperature 0.5, top-k 3 and top-p 0.9 of four tokens: the two most likely ones stay."""
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.9)
    batch = make_sampling_batch([params], [[]], [0], 4, torch.get_default_device())
    logits = torch.tensor([2.0, 1.0, 0.0, 1.5], dtype=dtype)
    weights = (logits.double() / 0.5).exp() * torch.tensor([1, 0, 0, 1])
    return error_of(target_probs(logits.view(1, 1, 4), batch)[0, 0], weights / weights.sum())


def samples(dtype: torch.dtype) -> float:
    """Uniform random numbers on a grid of 1,024 draw every token as often as its distribution says."""
    probs = torch.tensor([0.125, 0.0, 0.625, 0.25], dtype=dtype)
    uniforms = (torch.arange(1024, dtype=torch.float64) + 0.5) / 1024
    counts = torch.bincount(sample(probs.expand(1024, 4), uniforms), minlength=4)
    return error_of(counts / 1024, probs)


def uniform_numbers(dtype: torch.dtype) -> float:
    """Random numbers of seeds and positions, fp64 whatever the dtype, are the host's to the bit."""
    seeds = torch.tensor([3, -5, 2**62])
    positions = torch.tensor([[0, 1, 131071], [7, 2**31, 2**40], [5, 5, 6]])
    got = position_uniforms(seeds, positions, 0)
    return error_of(got.cpu(), position_uniforms(seeds.cpu(), positions.cpu(), 0, backend="reference"))


def commits(dtype: torch.dtype) -> float:
    """Nodes 0 and 2 of a window go to positions 3 and 4 of one request, node 1 to position 0 of the next, and
    nothing of a third; pages of two rows."""
    k = normal(dtype, 2, 3, 32, 3)
    v = normal(dtype, 2, 3, 32, 3, seed=1)
    expected = torch.cat((k, v)).double()
    expected[:, :, [3, 0]] = expected[:, :, [20, 22]]
    expected[:, :, 8] = expected[:, :, 25]
    pages = torch.tensor([[2, 1, 0], [4, 3, 3], [5, 5, 5]])
    nodes = torch.tensor([[0, 2, 1], [1, 0, 0], [2, 1, 0]])
    commit_path(k, v, pages, 2, nodes, torch.tensor([3, 0, 1]), torch.tensor([2, 1, 0]), 20, 4)
    return error_of(torch.cat((k, v)), expected)


def slot_rows(dtype: torch.dtype) -> float:
    """Rows of tables of different widths and dtypes move to other rows; row 3 gets a third entry."""
    tables = [normal(dtype, 6, 5), torch.arange(6) * 7]
    source = torch.tensor([4, 1])
    destination = torch.tensor([0, 5])
    entries = normal(dtype, 6, 4, 3, seed=1)
    counts = torch.full((6,), 2)
    expected = [table.clone() for table in (*tables, entries, counts)]
    for table in expected[:2]:
        table[[0, 5]] = table[[4, 1]]
    expected[2][3, 2] = 7.0
    expected[3][3] = 3
    write_rows(tables, destination, gather_rows(tables, source))
    row = torch.tensor([3])
    append_rows([entries], counts, row, [torch.full((1, 3), 7.0, dtype=dtype)], torch.ones_like(row))
    tables += [entries, counts]
    return largest(*(error_of(*pair) for pair in zip(tables, expected, strict=True)))
