"""Rows that stay together from cycle to cycle have the bits of rows that are copied together each time, while
requests come, grow, change places and leave their pages to others."""

import itertools
import random
from collections import Counter

import pytest
import torch

from eagle_kit.kernels.variant import AttentionVariant, Limits
from eagle_kit.kernels.window_attention import chain_bits, gathered, window_attention
from eagle_kit.kv.keys_values import PagedKV
from eagle_kit.kv.store import PoolLayout, Segment

LAYERS, HEADS, GROUP, SIZE, PAGE = 2, 3, 3, 8, 4
NUM_PAGES, WIDTH = 160, 48
SINKS = torch.linspace(-1, 1, HEADS * GROUP)
VARIANTS = (
    AttentionVariant(0.3),
    AttentionVariant(0.3, Limits(window=20)),
    AttentionVariant(0.3, Limits(chunk=64), 2.0, SINKS),
)


class Life:
    """Requests over a store: prompts are computed, windows decoded and committed, some end."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        layout = PoolLayout(NUM_PAGES, PAGE, 8, window=16)
        self.kv = PagedKV(LAYERS, HEADS, SIZE, layout, gathers=True)
        self.free, self.owners = list(range(NUM_PAGES)), Counter()
        self.running = []

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def take_pages(self, pages, length):
        while len(pages) * PAGE < length:
            pages.append(self.free.pop(0))
            self.owners[pages[-1]] += 1

    def table(self, pages):
        return torch.tensor(pages + [self.kv.dummy_page] * (WIDTH - len(pages)))

    def admit(self):
        """Compute the prompt of a new request, which may begin with whole pages of another."""
        count, pages = self.rng.randrange(3, 70), []
        if self.running and self.rng.random() < 0.5:
            other, length = self.rng.choice(self.running)
            pages = other[: self.rng.randrange(length // PAGE + 1)]
            self.owners.update(pages)
        start = len(pages) * PAGE
        self.take_pages(pages, start + count)
        attend = self.kv.prefill_attend([Segment(self.table(pages), start, start + count, start)])
        for layer in range(LAYERS):
            k, v = self.normal(2, count, HEADS, SIZE)
            attend(layer, self.normal(count, HEADS * GROUP, SIZE), k, v)
        self.running.insert(self.rng.randrange(len(self.running) + 1), [pages, start + count])

    def end(self, request):
        """Give pages back; some requests leave numbers behind that are not finite."""
        self.running.remove(request)
        self.owners.subtract(request[0])
        mine = [page for page in request[0] if not self.owners[page]]
        if self.rng.random() < 0.5:
            rows = (torch.tensor(mine)[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)
            self.kv.k[:, :, rows] = self.kv.v[:, :, rows] = float("nan")
        self.free += mine
        self.rng.shuffle(self.free)

    def decode(self):
        """Attend twice, commit a part of the window -> both results of all layers."""
        batch, n = len(self.running), self.rng.choice((1, 2, 5, 9))
        for pages, length in self.running:
            self.take_pages(pages, length + 10)
        tables = torch.stack([self.table(pages) for pages, _ in self.running])
        lengths = torch.tensor([length for _, length in self.running])
        bits = chain_bits(n, lengths.device).expand(batch, n)
        plan, placed = self.kv._window(tables, lengths, bits, n, 256)
        rows = placed.tensor
        update, found = self.kv.gathered.update(plan), []
        for layer in range(LAYERS):
            k_rows, v_rows = self.kv.k[layer], self.kv.v[layer]
            k_rows[:, rows], v_rows[:, rows] = self.normal(2, HEADS, batch * n, SIZE)
            q = self.normal(batch, n, HEADS * GROUP, SIZE)
            for variant in VARIANTS:
                mine = gathered.attend(q, k_rows, v_rows, update, variant)
                found.append((mine, window_attention(q, k_rows, v_rows, plan, variant)))
        kept = torch.tensor([self.rng.randrange(1, n + 1) for _ in range(batch)])
        self.kv.commit_window(tables, torch.arange(n).expand(batch, n), lengths, kept)
        for request, count in zip(self.running, kept.tolist(), strict=True):
            request[1] += count
        return found


@pytest.mark.parametrize(
    ("seed", "run_bytes"),
    [(0, 0), pytest.param(1, 0, marks=pytest.mark.slow), (2, 20_000), (3, gathered.RUN_BYTES)],
)
@torch.no_grad()
def test_gathered_rows_have_the_bits_of_pages(monkeypatch, seed, run_bytes):
    monkeypatch.setattr(gathered, "RUN_BYTES", run_bytes)  # runs of equal columns, of similar ones, of all
    life, num_compared = Life(seed), 0
    for _ in range(200):
        chance, long = life.rng.random(), [request for request in life.running if request[1] > 110]
        if len(life.running) < 2 or (chance < 0.15 and len(life.running) < 5):
            life.admit()
        elif long or chance < 0.25:
            life.end(life.rng.choice(long or life.running))
        else:
            for mine, expected in life.decode():
                assert torch.equal(mine, expected) and mine.isfinite().all()
                num_compared += 1
    assert num_compared > 100


@pytest.mark.parametrize("seed", range(20))
def test_runs_cost_least_of_all_that_there_are(seed):
    rng = random.Random(seed)
    sizes = [rng.choice((64, 128, 384, 1024)) for _ in range(rng.randrange(1, 9))]
    run_cost = rng.choice((0, 100, 500, 10_000))

    def cost(bounds):
        return sum(
            run_cost + max(sizes[first:stop]) * (stop - first) for first, stop in itertools.pairwise(bounds)
        )

    between = range(1, len(sizes))
    every = [
        [0, *inner, len(sizes)]
        for count in range(len(sizes))
        for inner in itertools.combinations(between, count)
    ]
    found = gathered.run_bounds(sizes, run_cost)
    assert found in every and cost(found) == min(map(cost, every))


def test_batches_without_room_are_read_from_the_pages(monkeypatch):
    life = Life(9)
    life.admit()
    life.admit()
    monkeypatch.setattr(gathered, "MAX_BYTES", 1000)
    tables = torch.stack([life.table(pages) for pages, _ in life.running])
    lengths = torch.tensor([length for _, length in life.running])
    plan, _ = life.kv._window(tables, lengths, torch.ones(2, 1, dtype=torch.int64), 1, 256)
    assert life.kv.gathered.update(plan) is None
