"""Checks of attention: windows of nodes and prompt chunks over a paged store, latents, packed texts."""

from dataclasses import replace
from typing import Literal

import torch

from eagle_kit.doctor.operations.inputs import (
    PLAIN,
    Positions,
    attention,
    error_of,
    largest,
    limited_variant,
    normal,
)
from eagle_kit.ops.attention.mla import mla_window_attention
from eagle_kit.ops.attention.packed import packed_attention
from eagle_kit.ops.attention.prefill import PrefillPlan, paged_prefill_attention, prefill_attention
from eagle_kit.ops.attention.ttt import plan_queries, ttt_attention
from eagle_kit.ops.attention.variant import AttentionVariant
from eagle_kit.ops.attention.window import WindowPlan, ancestor_bits, window_attention
from eagle_kit.ops.backend import Backend
from eagle_kit.ops.fp8 import E4M3

PARENTS = [0, 0, 0, 1, 3]
"""Parents of a window's nodes, two of which are siblings."""
ANCESTORS = ([0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4])
"""Ancestors of each of these nodes, and the node itself."""
PAGES = ([2, 0], [4, 1], [3, 3])
"""Pages of three requests, in random order."""
PREFIXES = (7, 1, 0)
"""Tokens of each of them before the window."""
PAGE_SIZE = 4
SCRATCH_START = 20
SCRATCH_STRIDE = 7
NUM_ROWS = SCRATCH_START + 3 * SCRATCH_STRIDE + 1
NUM_BRANCHES = 3
"""Nodes of a draft step."""


def _prefix_rows(request: int) -> list[int]:
    """Rows of the store with the prefix of a request."""
    pages = PAGES[request]
    slots = range(PREFIXES[request])
    return [pages[slot // PAGE_SIZE] * PAGE_SIZE + slot % PAGE_SIZE for slot in slots]


def _window_plan(dtype: torch.dtype, ancestors: torch.Tensor) -> WindowPlan:
    """Plan of three windows; ``ancestors`` int64 ``[1, N]`` is the same for all."""
    num_nodes = ancestors.shape[1]
    return WindowPlan(
        page_table=torch.tensor(PAGES),
        page_size=PAGE_SIZE,
        prefix_lens=torch.tensor(PREFIXES),
        first_position=0,
        scratch_start=SCRATCH_START,
        scratch_stride=SCRATCH_STRIDE,
        num_keys=num_nodes,
        ancestors=ancestors.expand(len(PAGES), -1).contiguous(),
        num_columns=16,
        dummy_row=NUM_ROWS - 1,
        dtype=dtype,
        arrivals=torch.zeros(512 * len(PAGES), dtype=torch.int32),
    )


def window(dtype: torch.dtype, variant: AttentionVariant = PLAIN, stored: torch.dtype | None = None) -> float:
    """Five nodes of three requests behind prefixes of 7, 1 and 0 tokens; six heads over two.

    ``stored`` is the dtype of the store; default ``dtype``. An fp8 store has scales.
    """
    # A store of two heads, and queries of six.
    num_nodes = len(PARENTS)
    bits = ancestor_bits(torch.tensor([PARENTS]), 3)
    q = normal(dtype, 3, num_nodes, 6, 16, seed=2)
    k = normal(stored or dtype, 2, NUM_ROWS, 16)
    v = normal(stored or dtype, 2, NUM_ROWS, 16, seed=1)
    k_scale = 1.0 if stored is None else 0.5
    v_scale = 1.0 if stored is None else 3.0
    got = window_attention(q, k, v, _window_plan(dtype, bits), variant, k_scale=k_scale, v_scale=v_scale)

    # Each request: its prefix, then the nodes of its window.
    wide_k = k.double() * k_scale
    wide_v = v.double() * v_scale
    expected = []
    for request, length in enumerate(PREFIXES):
        start = SCRATCH_START + request * SCRATCH_STRIDE
        rows = torch.tensor([*_prefix_rows(request), *range(start, start + num_nodes)])
        seen = torch.zeros(num_nodes, length + num_nodes, dtype=torch.bool)
        seen[:, :length] = True
        for node, ancestors in enumerate(ANCESTORS):
            seen[node, [length + ancestor for ancestor in ancestors]] = True
        depths = torch.tensor([length + len(ancestors) - 1 for ancestors in ANCESTORS])
        positions = Positions(depths, torch.cat((torch.arange(length), depths)))
        keys = wide_k[:, rows].transpose(0, 1)
        values = wide_v[:, rows].transpose(0, 1)
        expected.append(attention(q[request], keys, values, seen, variant, positions))
    return error_of(got, torch.stack(expected))


def limited_window(dtype: torch.dtype) -> float:
    """The same with a sliding window, capped scores and sinks."""
    return window(dtype, limited_variant(dtype))


def fp8_window(dtype: torch.dtype) -> float:
    """The same over a store in e4m3."""
    return window(dtype, stored=E4M3)


def latents(dtype: torch.dtype, stored: torch.dtype | None = None) -> float:
    """Chains of three behind prefixes of three requests, three heads; the value is the front of the key."""
    rows = normal(stored or dtype, NUM_ROWS, 80)
    q = normal(dtype, 3, 3, 3, 80, seed=1)
    kv_scale = 1.0 if stored is None else 0.5
    plan = _window_plan(dtype, torch.tensor([[1, 3, 7]]))
    got = mla_window_attention(q, rows, plan, 0.2, latent_dim=64, kv_scale=kv_scale)
    wide = rows.double() * kv_scale
    expected = []
    for request, length in enumerate(PREFIXES):
        start = SCRATCH_START + request * SCRATCH_STRIDE
        keys = wide[torch.tensor([*_prefix_rows(request), *range(start, start + 3)])]
        scores = torch.einsum("nhd,cd->hnc", q[request].double(), keys) * 0.2
        seen = torch.ones(3, length + 3, dtype=torch.bool).tril(length)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        expected.append(torch.einsum("hnc,cl->nhl", weights, keys[:, :64]))
    return error_of(got, torch.stack(expected))


def fp8_latents(dtype: torch.dtype) -> float:
    """The same over a store in e4m3."""
    return latents(dtype, stored=E4M3)


def draft_step(dtype: torch.dtype, variant: AttentionVariant = PLAIN) -> float:
    """The last three of 66 drafted nodes of each request, in three branches; six heads over two."""
    plan, rows_of_node = _draft_step_plan(dtype)
    q = normal(dtype, 3, NUM_BRANCHES, 6, 16, seed=2)
    k = normal(dtype, 2, plan.dummy_row + 1, 16)
    v = normal(dtype, 2, plan.dummy_row + 1, 16, seed=1)
    got = window_attention(q, k, v, plan, variant)

    # Each node: the prefix and its branch, one after another.
    errors = []
    for (request, node), rows in rows_of_node.items():
        positions = torch.arange(len(rows))
        seen = torch.ones(1, len(rows), dtype=torch.bool)
        keys = k.double()[:, rows].transpose(0, 1)
        values = v.double()[:, rows].transpose(0, 1)
        of_node = Positions(positions[-1:], positions)
        exact = attention(q[request, node : node + 1], keys, values, seen, variant, of_node)
        errors.append(error_of(got[request, node : node + 1], exact))
    return largest(*errors)


def limited_draft_step(dtype: torch.dtype) -> float:
    """The same with a sliding window, capped scores and sinks."""
    return draft_step(dtype, limited_variant(dtype))


def draft_step_over_latents(dtype: torch.dtype) -> float:
    """The same over latents, three heads; the value is the front of the key."""
    plan, rows_of_node = _draft_step_plan(dtype)
    rows = normal(dtype, plan.dummy_row + 1, 80)
    q = normal(dtype, 3, NUM_BRANCHES, 3, 80, seed=1)
    got = mla_window_attention(q, rows, plan, 0.2, latent_dim=64)
    errors = []
    for (request, node), rows_of_keys in rows_of_node.items():
        keys = rows.double()[rows_of_keys]
        weights = (q[request, node].double() @ keys.T * 0.2).softmax(-1)
        errors.append(error_of(got[request, node], weights @ keys[:, :64]))
    return largest(*errors)


def _draft_step_plan(dtype: torch.dtype) -> tuple[WindowPlan, dict[tuple[int, int], torch.Tensor]]:
    """Plan of a step of a draft of three branches of 22 nodes, and the rows of the store that each node of
    each request attends to."""
    depth = 22
    num_keys = NUM_BRANCHES * depth
    keys_of_node = [torch.arange(node, num_keys, NUM_BRANCHES) for node in range(NUM_BRANCHES)]
    words = torch.zeros(NUM_BRANCHES, 2, dtype=torch.int64)
    for node, keys in enumerate(keys_of_node):
        for key in keys.tolist():
            words[node, key // 64] |= torch.tensor(1) << key % 64
    rows_of_node = {}
    for request in range(len(PAGES)):
        start = SCRATCH_START + request * num_keys
        prefix = torch.tensor(_prefix_rows(request), dtype=torch.int64)
        for node, keys in enumerate(keys_of_node):
            rows_of_node[request, node] = torch.cat((prefix, start + keys))
    plan = replace(
        _window_plan(dtype, torch.zeros(1, NUM_BRANCHES, dtype=torch.int64)),
        ancestors=words.expand(len(PAGES), -1, -1).contiguous(),
        scratch_stride=num_keys,
        num_keys=num_keys,
        num_columns=max(PREFIXES) + num_keys,
        dummy_row=SCRATCH_START + len(PAGES) * num_keys,
    )
    return plan, rows_of_node


def prompt(dtype: torch.dtype, variant: AttentionVariant = PLAIN) -> float:
    """The last 19 of 30 tokens of a prompt that is in no pool."""
    q = normal(dtype, 19, 6, 16)
    k = normal(dtype, 30, 2, 16, seed=1)
    v = normal(dtype, 30, 2, 16, seed=2)
    seen = torch.ones(19, 30, dtype=torch.bool).tril(11)
    return error_of(prefill_attention(q, k, v, variant), attention(q, k, v, seen, variant))


def limited_prompt(dtype: torch.dtype) -> float:
    """The same with a sliding window, capped scores and sinks."""
    return prompt(dtype, limited_variant(dtype))


def paged_prompts(dtype: torch.dtype, stored: torch.dtype | None = None) -> float:
    """Rows 3 to 7, 0 to 1 and 6 of three requests, on pages of four in random order."""
    # Our result.
    q = normal(dtype, 8, 6, 16, seed=2)
    k = normal(stored or dtype, 2, 24, 16)
    v = normal(stored or dtype, 2, 24, 16, seed=1)
    k_scale = 1.0 if stored is None else 0.5
    v_scale = 1.0 if stored is None else 3.0
    tables = torch.tensor([[5, 1], [3, 0], [2, 4]])
    ends = torch.tensor([0, 5, 7, 8])
    plan = PrefillPlan(tables, 4, ends, torch.tensor([3, 0, 6]), 0, 5)
    got = paged_prefill_attention(q, k, v, plan, PLAIN, k_scale=k_scale, v_scale=v_scale)

    # Each request alone, over the rows of its pages.
    wide_k = k.double() * k_scale
    wide_v = v.double() * v_scale
    expected = []
    for queries, rows, seen in (
        (q[:5], [20, 21, 22, 23, 4, 5, 6, 7], torch.ones(5, 8, dtype=torch.bool).tril(3)),
        (q[5:7], [12, 13], torch.ones(2, 2, dtype=torch.bool).tril()),
        (q[7:], [8, 9, 10, 11, 16, 17, 18], torch.ones(1, 7, dtype=torch.bool)),
    ):
        keys = wide_k[:, rows].transpose(0, 1)
        values = wide_v[:, rows].transpose(0, 1)
        expected.append(attention(queries, keys, values, seen))
    return error_of(got, torch.cat(expected))


def fp8_paged_prompts(dtype: torch.dtype) -> float:
    """The same over a store in e4m3."""
    return paged_prompts(dtype, stored=E4M3)


def packed_texts(dtype: torch.dtype, variant: AttentionVariant = PLAIN) -> float:
    """Two texts of 9 and 14 tokens in one sequence."""
    q = normal(dtype, 23, 6, 16)
    k = normal(dtype, 23, 2, 16, seed=1)
    v = normal(dtype, 23, 2, 16, seed=2)
    document = torch.tensor([0] * 9 + [1] * 14)
    seen = torch.ones(23, 23, dtype=torch.bool).tril() & (document[:, None] == document)
    got = packed_attention(q, k, v, [(0, 9), (9, 23)], variant)
    return error_of(got, attention(q, k, v, seen, variant))


def limited_packed_texts(dtype: torch.dtype) -> float:
    """The same with a sliding window, capped scores and sinks."""
    return packed_texts(dtype, limited_variant(dtype))


def packed_gradients(dtype: torch.dtype) -> float:
    """Gradients of queries, keys and values of two texts."""
    inputs = [normal(dtype, 23, heads, 16, seed=heads) for heads in (6, 2, 2)]
    upstream = normal(dtype, 23, 6, 16, seed=3)
    document = torch.tensor([0] * 9 + [1] * 14)
    seen = torch.ones(23, 23, dtype=torch.bool).tril() & (document[:, None] == document)
    ours = [each.clone().requires_grad_() for each in inputs]
    q, k, v = ours
    got = torch.autograd.grad(packed_attention(q, k, v, [(0, 9), (9, 23)], PLAIN), ours, upstream)
    exact = [each.double().requires_grad_() for each in inputs]
    q, k, v = exact
    expected = torch.autograd.grad(attention(q, k, v, seen), exact, upstream.double())
    return largest(*(error_of(*pair) for pair in zip(got, expected, strict=True)))


def training_time_test(dtype: torch.dtype, backend: Backend | Literal["cpu"] | None = None) -> float:
    """Rows 3 to 8 of a text of nine, each with two own keys besides its prefix; values and gradients."""
    # Queries, keys and values of the prefix, own keys and values.
    shapes = [(6, 6, 16), (9, 2, 16), (9, 2, 16), (6, 2, 2, 16), (6, 2, 2, 16)]
    inputs = [normal(dtype, *shape, seed=seed) for seed, shape in enumerate(shapes)]
    rows = torch.arange(3, 9)
    upstream = normal(dtype, 6, 6, 16, seed=5)
    blocks = plan_queries(rows, torch.zeros(9, dtype=torch.int64))
    ours = [each.clone().requires_grad_() for each in inputs]
    q, k, v, own_k, own_v = ours
    got = ttt_attention(q, k, v, own_k, own_v, blocks, PLAIN.scale, backend=backend)
    gradients = torch.autograd.grad(got, ours, upstream)

    # The same row by row.
    exact = [each.double().requires_grad_() for each in inputs]
    q, k, v, own_k, own_v = exact
    each_row = []
    for i, row in enumerate(rows.tolist()):
        keys = torch.cat((k[: row + 1], own_k[i].transpose(0, 1)))
        values = torch.cat((v[: row + 1], own_v[i].transpose(0, 1)))
        each_row.append(attention(q[i : i + 1], keys, values, torch.ones(1, row + 3, dtype=torch.bool)))
    expected = torch.cat(each_row)
    expected_gradients = torch.autograd.grad(expected, exact, upstream.double())
    errors = [error_of(*pair) for pair in zip(gradients, expected_gradients, strict=True)]
    return largest(error_of(got.detach(), expected.detach()), *errors)
