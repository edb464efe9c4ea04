"""Steps of a draft of more than 64 nodes, whose ancestors are bits of two words, against softmax in fp64."""

from dataclasses import dataclass, replace

import pytest
import torch

from eagle_kit.engine.graphs import cpu_graph
from eagle_kit.engine.graphs.cuda_graph import Lengths
from eagle_kit.ops.attention.mla import mla_window_attention
from eagle_kit.ops.attention.variant import AttentionVariant
from eagle_kit.ops.attention.window import WindowPlan, window_attention
from tests.ops.attention.test_variant import VARIANTS, dense, normal, on

PREFIXES = (3, 0, 131, 64)
PAGE = 8
HEADS = 6
KV_HEADS = 2
SIZE = 16
LATENT = 64
ROPE = 16
ALL_VARIANTS = {"plain": AttentionVariant(0.3), **VARIANTS}


@dataclass
class Step:
    """A step of a draft: the ``width`` nodes of depth ``depth`` behind those of the depths before.

    Attributes:
        seen: bool ``[B, K, M]``, window keys that each node attends to.
        depths: int64 ``[M]``, depth of each window key, 0 for the first.
        plan: the plan, with ``rows`` of each request in it: those of the prefix, then of the window.
    """

    width: int
    depth: int
    device: str = "cpu"
    lengths: tuple[int, ...] = PREFIXES

    def __post_init__(self) -> None:
        batch = len(self.lengths)
        generator = torch.Generator().manual_seed(self.width)
        keys = self.width * self.depth
        self.depths = torch.arange(keys) // self.width

        # Every node has a parent among those of the depth before.
        seen = torch.eye(keys, dtype=torch.bool).repeat(batch, 1, 1)
        for node in range(self.width, keys):
            first = (node // self.width - 1) * self.width
            parent = first + torch.randint(0, self.width, (batch,), generator=generator)
            seen[:, node] |= seen[torch.arange(batch), parent]
        self.seen = seen[:, -self.width :]

        # Pages, and scratches behind them.
        pages = -(-(max(PREFIXES) + keys) // PAGE) + 1
        table = torch.randperm(pages * batch, generator=generator).view(batch, pages)
        self.start = pages * batch * PAGE
        self.stride = keys + 3
        self.rows = []
        for b, prefix in enumerate(self.lengths):
            slots = torch.arange(prefix)
            of_prefix = table[b, slots // PAGE] * PAGE + slots % PAGE
            of_window = self.start + b * self.stride + torch.arange(keys)
            self.rows.append(torch.cat((of_prefix, of_window)))
        self.plan = WindowPlan(
            page_table=table.to(self.device),
            page_size=PAGE,
            prefix_lens=torch.tensor(self.lengths).to(self.device),
            first_position=0,
            scratch_start=self.start,
            scratch_stride=self.stride,
            num_keys=keys,
            ancestors=words_of(self.seen).to(self.device),
            num_columns=max(self.lengths) + keys,
            dummy_row=self.num_rows - 1,
            dtype=torch.float32,
        )

    @property
    def num_rows(self) -> int:
        return self.start + len(self.lengths) * self.stride + 1

    def exact(self, b: int, q, k, v, variant) -> torch.Tensor:
        """Attention of request ``b`` in fp64; k and v are ``[rows, heads, size]``."""
        slots = torch.arange(self.lengths[b])
        places = torch.cat((slots, self.lengths[b] + self.depths))
        of_prefix = torch.ones(self.width, len(slots), dtype=torch.bool)
        seen = torch.cat((of_prefix, self.seen[b]), 1)
        rows = self.rows[b]
        return dense(q[b], k[rows], v[rows], places[-self.width :], places, seen, variant)


def words_of(seen):
    """bool ``[B, N, M]`` -> int64 ``[B, N, W]``."""
    bits = torch.nn.functional.pad(seen.long(), (0, -seen.shape[2] % 64)).unflatten(2, (-1, 64))
    return (bits << torch.arange(64)).sum(-1)


STEPS = [(10, 7), (16, 8), (2, 62), (63, 2)]
"""EAGLE-3's last step; both words full; the deepest and the widest."""


@pytest.mark.parametrize("name", ["plain", "wide window", "wide chunk", "both", "all"])
@pytest.mark.parametrize("size", STEPS, ids=str)
@pytest.mark.parametrize("backend", ["reference", None])
def test_heads_on_a_cpu(backend, size, name):
    """In torch; in C++, where it is at hand."""
    check_heads(Step(*size), ALL_VARIANTS[name], backend)


@pytest.mark.parametrize(
    ("size", "name"),
    [((10, 7), "plain"), ((10, 7), "all"), ((16, 8), "both"), ((2, 62), "wide chunk"), ((63, 2), "plain")],
)
def test_heads_in_triton(triton_device, size, name):
    check_heads(Step(*size, triton_device), ALL_VARIANTS[name], "triton")


def check_heads(step, variant, backend):
    k, v = normal(2, KV_HEADS, step.num_rows, SIZE)
    q = normal(len(PREFIXES), step.width, HEADS, SIZE, seed=2)
    inputs = (x.to(step.device) for x in (q, k, v))
    out = window_attention(*inputs, step.plan, on(variant, step.device), backend=backend).cpu()
    for b in range(len(PREFIXES)):
        exact = step.exact(b, q, k.transpose(0, 1), v.transpose(0, 1), variant)
        torch.testing.assert_close(out[b].double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", STEPS, ids=str)
@pytest.mark.parametrize("backend", ["reference", None])
def test_latents_on_a_cpu(backend, size):
    check_latents(Step(*size), backend)


@pytest.mark.parametrize("size", STEPS[:2], ids=str)
def test_latents_in_triton(triton_device, size):
    check_latents(Step(*size, triton_device), "triton")


def check_latents(step, backend):
    rows = normal(step.num_rows, LATENT + ROPE)
    q = normal(len(PREFIXES), step.width, HEADS, LATENT + ROPE, seed=2)
    given = (x.to(step.device) for x in (q, rows))
    out = mla_window_attention(*given, step.plan, 0.1, latent_dim=LATENT, backend=backend).cpu()
    for b in range(len(PREFIXES)):
        exact = step.exact(b, q, rows[:, None], rows[:, None, :LATENT], AttentionVariant(0.1))
        torch.testing.assert_close(out[b].double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not cpu_graph.available(), reason="torch without TorchScript's graphs")
@pytest.mark.parametrize("name", ["plain", "all"])
def test_recordings_replay_for_other_lengths(name):
    """In half types, which C++ does not take: the groups by length are made in the recording."""
    variant = ALL_VARIANTS[name]
    step = Step(10, 7)
    stores = normal(2, KV_HEADS, step.num_rows, SIZE).bfloat16()
    q = normal(len(PREFIXES), step.width, HEADS, SIZE, seed=2).bfloat16()

    def body(inputs):
        plan = replace(step.plan, prefix_lens=inputs[0], dtype=torch.bfloat16)
        return (window_attention(inputs[1], *stores, plan, variant),)

    with torch.inference_mode():
        first = (torch.tensor(PREFIXES), q)
        recording = cpu_graph.Recording(body, first)
        recording.compile(Lengths(first[0], torch.arange(len(PREFIXES))))
        for lengths in (PREFIXES, (131, 131, 5, 70)):
            inputs = (torch.tensor(lengths), q)
            (ours,) = recording.replay(inputs)
            (theirs,) = body(inputs)
            assert theirs.isfinite().all() and torch.equal(ours, theirs)
