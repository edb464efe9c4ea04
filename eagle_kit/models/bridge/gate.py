"""Check at load: a bridged target must say what transformers' own forward says.

A model may ignore the attention interface, mix rows that lie beside each other, or read a row's number where
its position is meant, all without an error. So one packed forward of two texts, one of which ends in a tree,
is compared with the model's own forward over every text and every path of the tree.

Legend: T rows, V vocabulary.
"""

from typing import Any, NamedTuple

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.kernels.variant import AttentionVariant
from eagle_kit.models.bridge.model import BridgedModel, as_published

TREE = (-1, 0, 0, 1, 2)
"""Parents of the nodes of the tree, the root's is the end of its text."""
SHORT, LONG, MOST = 5, 12, 300
"""Tokens of the texts; the longer one is longer than the layers' limits, where these are at most ``MOST``."""
TOLERANCE = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Differences beside the largest logit."""


class Rows(NamedTuple):
    """Rows of a packed forward: ``ids``, ``positions`` and, for each row, the rows that it may see, ``seen
    [T, T]``; ``paths`` are the rows of each text as it is read alone, of the tree one for every leaf."""

    ids: torch.Tensor
    positions: torch.Tensor
    seen: torch.Tensor
    paths: list[list[int]]


def make_rows(long: int, vocab_size: int, seed: int = 0) -> Rows:
    """Two texts of random tokens, the longer with a tree behind it."""
    parents: list[int | None] = [None, *range(long - 1)]
    parents += [long - 1 if parent < 0 else long + parent for parent in TREE]
    stop = len(parents)
    parents += [None, *range(stop, stop + SHORT - 1)]
    paths = [_path(parents, row) for row in range(len(parents))]
    leaves = [row for row in range(len(parents)) if row not in parents]
    seen = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for row, path in enumerate(paths):
        seen[row, path] = True
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (len(parents),), generator=generator)
    positions = torch.tensor([len(path) - 1 for path in paths])
    return Rows(ids, positions, seen, [paths[leaf] for leaf in leaves])


def _path(parents: list[int | None], row: int) -> list[int]:
    path: list[int] = []
    at: int | None = row
    while at is not None:
        path.append(at)
        at = parents[at]
    return path[::-1]


class DenseAttend:
    """Attention over the rows of one forward, every pair of which is masked or not."""

    def __init__(self, rows: Rows, variants: list[AttentionVariant]) -> None:
        self._rows, self._variants = rows, variants

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        variant, positions = self._variants[layer], self._rows.positions.to(q.device)
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("thd,shd->hts", q.float(), k.float().repeat_interleave(group, 1))
        scores = scores * variant.scale
        if variant.soft_cap is not None:
            scores = variant.soft_cap * torch.tanh(scores / variant.soft_cap)
        inside = positions >= variant.limits.firsts(positions)[:, None]
        scores = scores.masked_fill(~(self._rows.seen.to(q.device) & inside), float("-inf"))
        if variant.sinks is not None:
            sinks = variant.sinks.float().view(-1, 1, 1).expand(-1, len(q), 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., : len(k)]
        out = torch.einsum("hts,shd->thd", weights, v.float().repeat_interleave(group, 1))
        return out.to(q.dtype)


@torch.no_grad()
def own_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[T, V]`` of the model's own forward over one text."""
    with as_published(model):
        logits: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    return logits


@torch.no_grad()
def check(target: BridgedModel) -> None:
    """Compare a target with transformers.

    Raises:
        UserError: they differ.
    """
    limits = [limit for record in target.records for limit in record.limits if limit <= MOST]
    rows = make_rows(max(LONG, max(limits, default=0) + 3), target.config.vocab_size)
    device = target.embed_tokens.weight.device
    attend = DenseAttend(rows, list(target.variants))
    hidden = target(rows.ids.to(device), rows.positions.to(device), attend).hidden
    ours = target.logits(hidden).float()
    worst = largest = 0.0
    for path in rows.paths:
        exact = own_logits(target.model, rows.ids[path].to(device)).float()
        worst = max(worst, float((ours[path] - exact).abs().max()))
        largest = max(largest, float(exact.abs().max()))
    if not worst <= TOLERANCE[target.embed_tokens.weight.dtype] * max(largest, 1.0):
        raise UserError(
            f"{type(target.model).__name__} gives other logits with several texts in a forward than alone: "
            f"they differ by {worst:.2g}, where the largest is {largest:.2g}.",
            "It cannot be a target here; docs/targets.md lists what can.",
        )
