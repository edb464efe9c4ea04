"""Check of a bridged target when it is loaded: its forward must give what transformers' own forward gives.

A model may ignore the attention interface, mix neighbouring rows, or read the index of a row in place of
its position, all without an error. So a packed forward over two texts, one of which ends in a tree, is
compared with the model's own forward over every text and every path of the tree: logits and captured hidden
states, with every implementation of experts that is used. Windows that are too long for that are compared
by the masks that the model makes.

Legend: T rows, V vocabulary, H heads, D head size, C channels and W width of a convolution.
"""

from contextlib import suppress
from typing import Any, NamedTuple

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.models.bridge.attention import BridgedForward, running
from eagle_kit.models.bridge.config import decoder_of
from eagle_kit.models.bridge.model import BridgedModel, as_published
from eagle_kit.models.bridge.records import GATHERED, GROUPED
from eagle_kit.ops.attention.variant import AttentionVariant
from eagle_kit.ops.recurrence import Inputs

TREE = (-1, 0, 0, 1, 2)
"""Parent of each node of the tree. The parent of the root, -1, is the last token of the text."""
SHORT_TEXT = 5
"""Number of tokens of the shorter text."""
LONG_TEXT = 12
"""Smallest number of tokens of the longer text, which is longer than the windows of the layers."""
MAX_COMPARED_WINDOW = 300
"""Largest window that the longer text exceeds."""
MAX_MASKED_WINDOW = 8192
"""Largest window that is compared by masks."""
MARGIN = 3
"""Number of tokens by which a text exceeds a window."""
TOLERANCE = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest difference that is allowed, relative to the largest value."""


class Rows(NamedTuple):
    """Rows of a packed forward.

    Attributes:
        ids: int64 ``[T]``.
        positions: int64 ``[T]``.
        seen: bool ``[T, T]``, True where the row of the first dimension attends to that of the second,
            windows aside.
        paths: rows of each text that is read alone, one for each leaf of the tree.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    seen: torch.Tensor
    paths: list[list[int]]


def make_rows(num_long: int, vocab_size: int, seed: int = 0) -> Rows:
    """Make two texts of random tokens, the first with a tree behind it.

    Args:
        num_long: number of tokens of the first text.
    """
    # Parent of each row: the token before it, or a node of the tree.
    parents: list[int | None] = [None, *range(num_long - 1)]
    for parent in TREE:
        parents.append(num_long - 1 if parent < 0 else num_long + parent)
    first_short = len(parents)
    parents += [None, *range(first_short, first_short + SHORT_TEXT - 1)]

    # Paths to each row.
    num_rows = len(parents)
    paths = [_path(parents, row) for row in range(num_rows)]
    leaf_paths = [paths[row] for row in range(num_rows) if row not in parents]
    seen = torch.zeros(num_rows, num_rows, dtype=torch.bool)
    for row, path in enumerate(paths):
        seen[row, path] = True

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (num_rows,), generator=generator)
    positions = torch.tensor([len(path) - 1 for path in paths])
    return Rows(ids, positions, seen, leaf_paths)


def _path(parents: list[int | None], row: int) -> list[int]:
    """Rows from the first token of a text to ``row``."""
    path: list[int] = []
    ancestor: int | None = row
    while ancestor is not None:
        path.append(ancestor)
        ancestor = parents[ancestor]
    return path[::-1]


class DenseAttend:
    """Attention and recurrence over the rows of one forward, computed plainly from their paths.

    Args:
        rows: rows of the forward.
        variants: variant of attention of each layer.
    """

    def __init__(self, rows: Rows, variants: list[AttentionVariant]) -> None:
        self._rows = rows
        self._variants = variants
        self._paths = [seen.nonzero()[:, 0].tolist() for seen in rows.seen]

    def convolve(
        self, number: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See :class:`~eagle_kit.models.blocks.recurrence.Recur`."""
        # The last W rows of each path; row -1 is zeros, in front of all.
        width = weight.shape[1]
        columns = [([-1] * width + path)[-width:] for path in self._paths]
        index = torch.tensor(columns, device=x.device)  # [T, W]
        padded = torch.cat((x.new_zeros(1, x.shape[1]), x))
        inputs = padded[index + 1]  # [T, W, C]

        out = torch.einsum("twc,cw->tc", inputs, weight.to(x.dtype))
        if bias is not None:
            out = out + bias.to(x.dtype)
        return out

    def recur(self, number: int, inputs: Inputs, *, delta: bool) -> torch.Tensor:
        """See :class:`~eagle_kit.models.blocks.recurrence.Recur`. Rows are computed one after the other,
        each from the state of its parent."""
        num_heads = inputs.v.shape[1]
        q = inputs.q.float().repeat_interleave(num_heads // inputs.q.shape[1], 1)
        k = inputs.k.float().repeat_interleave(num_heads // inputs.k.shape[1], 1)
        v = inputs.v.float()
        beta = inputs.beta.float()
        log_decay = inputs.g.float()
        if log_decay.ndim == 2:
            log_decay = log_decay[..., None]
        decay = log_decay.exp()

        states: list[torch.Tensor] = []
        for row, path in enumerate(self._paths):
            state = v.new_zeros(num_heads, k.shape[2], v.shape[2])
            if len(path) > 1:
                parent = path[-2]
                state = states[parent]
            state = decay[row][..., None] * state
            update = v[row]
            if delta:
                update = update - torch.einsum("hkv,hk->hv", state, k[row])
            states.append(state + k[row][..., None] * (beta[row][:, None] * update)[:, None])
        return torch.einsum("thkv,thk->thv", torch.stack(states), q).to(inputs.v.dtype)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        variant = self._variants[layer]
        group_size = q.shape[1] // k.shape[1]

        # Scores ``[H, T, T]``.
        scores = torch.einsum("thd,shd->hts", q.float(), k.float().repeat_interleave(group_size, 1))
        scores = scores * variant.scale
        if variant.soft_cap is not None:
            scores = variant.soft_cap * torch.tanh(scores / variant.soft_cap)

        # Rows of the path and inside the window.
        positions = self._rows.positions.to(q.device)
        is_inside = positions >= variant.limits.firsts(positions)[:, None]
        is_seen = self._rows.seen.to(q.device) & is_inside
        scores = scores.masked_fill(~is_seen, float("-inf"))

        # Weights, without those of the sinks.
        if variant.sinks is not None:
            sinks = variant.sinks.float().view(-1, 1, 1).expand(-1, len(q), 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., : len(k)]
        out = torch.einsum("hts,shd->thd", weights, v.float().repeat_interleave(group_size, 1))
        return out.to(q.dtype)


class OwnForward(NamedTuple):
    """Result of the model's own forward over one text.

    Attributes:
        logits: ``[T, V]``.
        states: captured hidden states by layer.
    """

    logits: torch.Tensor
    states: dict[int, torch.Tensor]


@torch.no_grad()
def own_forward(model: Any, ids: torch.Tensor, capture: tuple[int, ...] = ()) -> OwnForward:
    """Run a model over one text as transformers does."""
    with as_published(model), running(BridgedForward(None, capture)) as forward:
        logits: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    return OwnForward(logits, forward.captured)


@torch.no_grad()
def check(target: BridgedModel) -> None:
    """Compare the forward of a target with transformers' own.

    Raises:
        UserError: they differ.
    """
    # Windows and chunks of the layers; 0 is none.
    text = target.model.config.get_text_config()
    limits = {0}
    for record in target.records:
        limits.update(record.limits)
    for name in ("sliding_window", "attention_chunk_size"):
        limits.add(int(getattr(text, name, None) or 0))
    _check_masks(target, max(limit for limit in limits if limit <= MAX_MASKED_WINDOW) + MARGIN)

    # The model's own forwards, over each text alone.
    longest = max(limit for limit in limits if limit <= MAX_COMPARED_WINDOW)
    rows = make_rows(max(LONG_TEXT, longest + MARGIN), target.config.vocab_size)
    embedding = target.embed_tokens.weight
    device = embedding.device
    num_layers = target.config.num_layers
    capture = tuple(sorted({0, num_layers // 2, num_layers}))
    expected = [own_forward(target.model, rows.ids[path].to(device), capture) for path in rows.paths]

    # The target's forward over all rows, with each implementation of experts.
    attend = DenseAttend(rows, list(target.variants))
    for experts in (GATHERED, GROUPED):
        target.experts = experts
        out = target(rows.ids.to(device), rows.positions.to(device), attend, capture)
        logits = target.logits(out.hidden)
        states = out.aux_hidden_states.split(target.config.hidden_size, -1)
        tolerance = TOLERANCE[embedding.dtype]
        for path, own in zip(rows.paths, expected, strict=True):
            _compare(target, logits[path], own.logits, "logits", tolerance)
            for layer, state in zip(capture, states, strict=True):
                name = f"inputs of layer {layer}" if layer < num_layers else "last states"
                _compare(target, state[path], own.states[layer], name, tolerance)
        if not target.has_experts:
            break
    target.experts = None


def _compare(
    target: BridgedModel, found: torch.Tensor, expected: torch.Tensor, name: str, tolerance: float
) -> None:
    """Raise UserError if values differ by more than ``tolerance``, relative to the largest; also for NaN."""
    difference = float((found.float() - expected.float()).abs().max())
    largest = float(expected.float().abs().max())
    if not difference <= tolerance * max(largest, 1.0):
        raise UserError(
            f"{type(target.model).__name__} gives other {name} with several texts in a forward than alone: "
            f"they differ by {difference:.2g}, where the largest is {largest:.2g}.",
            "It cannot be a target here; docs/reference/targets.md lists what can.",
        )


def _check_masks(target: BridgedModel, length: int) -> None:
    """Compare the recorded limits with the masks that the model makes for a text of ``length`` tokens. The
    layers do not run.

    Raises:
        UserError: they differ.
    """
    last = length - 1
    masks = _masks_of_last_token(target, length)
    for record in target.records:
        if record.layer is None or record.layer not in masks:
            continue

        # First token that the last one attends to: the first with True, or with 0 in an additive mask.
        mask = masks[record.layer]
        first_seen = 0
        if mask is not None:
            is_seen = mask if mask.dtype == torch.bool else mask == 0
            first_seen = int(is_seen.int().argmax())
        if first_seen != record.limits.first(last):
            raise UserError(
                f"Layer {record.layer} of {type(target.model).__name__} attends to tokens from {first_seen} "
                f"on in a text of {length}, and what it asked for is {record.variant}.",
                "It cannot be a target here; docs/reference/targets.md lists what can.",
            )


def _masks_of_last_token(target: BridgedModel, length: int) -> dict[int, torch.Tensor | None]:
    """Masks ``[T]`` of the last token of a text by layer, as the model makes them for its own attention;
    None without a mask."""
    masks: dict[int, torch.Tensor | None] = {}

    def keep_mask(layer: int) -> Any:
        """Forward of a layer that keeps its mask and returns its input."""

        def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            mask = kwargs.get("attention_mask")
            masks[layer] = None
            if isinstance(mask, torch.Tensor):
                masks[layer] = mask[0, 0, -1].clone()
            return hidden_states

        return forward

    ids = torch.zeros(1, length, dtype=torch.int64, device=target.embed_tokens.weight.device)
    try:
        for number, layer in enumerate(target.layers):
            layer.__dict__["forward"] = keep_mask(number)
        # What follows the layers may fail on their inputs.
        with as_published(target.model), suppress(IndexError, RuntimeError, TypeError, ValueError):
            decoder_of(target.model)(input_ids=ids, use_cache=False)
    finally:
        for layer in target.layers:
            layer.__dict__.pop("forward", None)
    return masks
