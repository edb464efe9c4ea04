"""Check at load: a bridged target must say what transformers' own forward says.

A model may ignore the attention interface, mix rows that lie beside each other, or read a row's number where
its position is meant, all without an error. So a packed forward of two texts, one of which ends in a tree, is
compared with the model's own forward over every text and every path of the tree: logits and captured states,
by every implementation of experts that is used. Windows too long for that are compared by the masks that the
model makes.

Legend: T rows, V vocabulary.
"""

from contextlib import suppress
from typing import Any, NamedTuple

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.models.bridge.attention import Forward, running
from eagle_kit.models.bridge.config import decoder_of
from eagle_kit.models.bridge.model import BridgedModel, as_published
from eagle_kit.models.bridge.records import GATHERED, GROUPED
from eagle_kit.ops.attention.variant import AttentionVariant
from eagle_kit.ops.recurrence import Inputs

TREE = (-1, 0, 0, 1, 2)
"""Parents of the nodes of the tree, the root's is the end of its text."""
SHORT, LONG, MOST, MOST_MASKED = 5, 12, 300, 8192
"""Tokens of the texts; the longer one is longer than the layers' limits, where these are at most ``MOST``.
Masks are compared for limits of at most ``MOST_MASKED``."""
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
    """Attention and recurrence over the rows of one forward, every pair of which is masked or not."""

    def __init__(self, rows: Rows, variants: list[AttentionVariant]) -> None:
        self._rows, self._variants = rows, variants
        self._paths = [mine.nonzero()[:, 0].tolist() for mine in rows.seen]

    def convolve(
        self, number: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See :class:`~eagle_kit.models.blocks.recurrence.Recur`."""
        width = weight.shape[1]
        padded = torch.cat((x.new_zeros(width, x.shape[1]), x))
        columns = [[-1] * width + path for path in self._paths]
        taken = padded[torch.tensor([mine[-width:] for mine in columns], device=x.device) + width]
        out = torch.einsum("twc,cw->tc", taken, weight.to(x.dtype))
        return out if bias is None else out + bias.to(x.dtype)

    def recur(self, number: int, inputs: Inputs, *, delta: bool) -> torch.Tensor:
        """See :class:`~eagle_kit.models.blocks.recurrence.Recur`: row by row, each from its parent's
        state."""
        heads = inputs.v.shape[1]
        q, k = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (inputs.q, inputs.k))
        v, g, beta = (x.float() for x in (inputs.v, inputs.g, inputs.beta))
        decay = (g if g.ndim == 3 else g[..., None]).exp()
        states: list[torch.Tensor] = []
        for row, path in enumerate(self._paths):
            before = states[path[-2]] if len(path) > 1 else v.new_zeros(heads, k.shape[2], v.shape[2])
            before = decay[row][..., None] * before
            new = v[row] - torch.einsum("hkv,hk->hv", before, k[row]) if delta else v[row]
            states.append(before + k[row][..., None] * (beta[row][:, None] * new)[:, None])
        return torch.einsum("thkv,thk->thv", torch.stack(states), q).to(inputs.v.dtype)

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


class OwnForward(NamedTuple):
    """Of the model's own forward over one text: ``logits [T, V]`` and captured ``states`` by layer."""

    logits: torch.Tensor
    states: dict[int, torch.Tensor]


@torch.no_grad()
def own_forward(model: Any, ids: torch.Tensor, capture: tuple[int, ...] = ()) -> OwnForward:
    """Run the model as transformers does."""
    with as_published(model), running(Forward(None, capture)) as forward:
        logits: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    return OwnForward(logits, forward.captured)


@torch.no_grad()
def check(target: BridgedModel) -> None:
    """Compare a target with transformers.

    Raises:
        UserError: they differ.
    """
    text = target.model.config.get_text_config()
    limits = {limit for record in target.records for limit in record.limits}
    limits |= {int(getattr(text, name, None) or 0) for name in ("sliding_window", "attention_chunk_size")}
    _check_masks(target, max((limit for limit in limits if limit <= MOST_MASKED), default=0) + 3)
    rows = make_rows(
        max(LONG, max(limit for limit in (0, *limits) if limit <= MOST) + 3), target.config.vocab_size
    )
    device, dtype = target.embed_tokens.weight.device, target.embed_tokens.weight.dtype
    count = target.config.num_layers
    capture = tuple(sorted({0, count // 2, count}))
    exact = [own_forward(target.model, rows.ids[path].to(device), capture) for path in rows.paths]
    attend = DenseAttend(rows, list(target.variants))
    for experts in (GATHERED, GROUPED):
        target.experts = experts
        out = target(rows.ids.to(device), rows.positions.to(device), attend, capture)
        logits, states = target.logits(out.hidden), out.aux.split(target.config.hidden_size, -1)
        for path, own in zip(rows.paths, exact, strict=True):
            _compare(target, logits[path], own.logits, "logits", TOLERANCE[dtype])
            for layer, state in zip(capture, states, strict=True):
                name = f"inputs of layer {layer}" if layer < count else "last states"
                _compare(target, state[path], own.states[layer], name, TOLERANCE[dtype])
        if not target.has_experts:
            break
    target.experts = None


def _compare(
    target: BridgedModel, ours: torch.Tensor, exact: torch.Tensor, name: str, tolerance: float
) -> None:
    worst, largest = (float(x.float().abs().max()) for x in (ours.float() - exact.float(), exact))
    if not worst <= tolerance * max(largest, 1.0):
        raise UserError(
            f"{type(target.model).__name__} gives other {name} with several texts in a forward than alone: "
            f"they differ by {worst:.2g}, where the largest is {largest:.2g}.",
            "It cannot be a target here; docs/targets.md lists what can.",
        )


def _check_masks(target: BridgedModel, length: int) -> None:
    """Compare the limits that were learned with the masks that the model makes for a text of ``length``
    tokens. Its layers do not run."""
    last, found = length - 1, _masks_of_last_token(target, length)
    for record in target.records:
        if record.layer is None or record.layer not in found:
            continue
        mask, first = found[record.layer], record.limits.first(last)
        seen = 0 if mask is None else int((mask if mask.dtype == torch.bool else mask == 0).int().argmax())
        if seen != first:
            raise UserError(
                f"Layer {record.layer} of {type(target.model).__name__} attends to tokens from {seen} on in "
                f"a text of {length}, and what it asked for is {record.variant}.",
                "It cannot be a target here; docs/targets.md lists what can.",
            )


def _masks_of_last_token(target: BridgedModel, length: int) -> dict[int, torch.Tensor | None]:
    """Masks ``[T]`` of the last token by layer, as the model makes them for its own attention; None without
    one."""
    found: dict[int, torch.Tensor | None] = {}

    def keep(number: int) -> Any:
        def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            mask = kwargs.get("attention_mask")
            found[number] = mask[0, 0, -1].clone() if isinstance(mask, torch.Tensor) else None
            return hidden_states

        return forward

    ids = torch.zeros(1, length, dtype=torch.int64, device=target.embed_tokens.weight.device)
    try:
        for number, layer in enumerate(target.layers):
            layer.__dict__["forward"] = keep(number)
        with as_published(target.model), suppress(IndexError, RuntimeError, TypeError, ValueError):
            decoder_of(target.model)(input_ids=ids, use_cache=False)  # what comes behind the layers may fail
    finally:
        for layer in target.layers:
            layer.__dict__.pop("forward", None)
    return found
