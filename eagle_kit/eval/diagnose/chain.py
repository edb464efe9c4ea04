"""A head's greedy chain at every root of a row, in a few batched forwards and without decoding.

What a cycle of decoding would accept there is known beforehand: a drafted token is accepted if it and all
before it are those of the greedy reply, so the chain may read the reply's own tokens.

Legend: T packed tokens, R roots, S steps, H hidden, Vd draft vocabulary.
"""

from typing import NamedTuple

import torch

from eagle_kit.eval.diagnose.row import Row, States
from eagle_kit.models.draft_chain import ChainRows
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.models.targets.target import Target

LOGIT_ROWS = 256
"""Rows whose logits over the draft vocabulary exist at the same time."""
FLOOR = -20.0
"""Lowest log-probability that is told from others, so that no single token decides a mean."""


class View(NamedTuple):
    """How a head's inputs are read from a row; the default is serving's.

    Attributes:
        layers: whose inputs are captured, in the order of ``fc``; None for the head's own.
        feature_shift: the feature is of the position that many behind the head's (before, if negative).
        token_shift: so is the embedded token.
        truth_shift: so is the token that the first draft is compared with.
        raw: the final state before the target's last norm in place of the one behind it.
        unit_norm: captured states are divided by their root mean square.
        embedding: ``[V, H]`` in place of the target's.
        token_map: int64 ``[Vd]``, target id of every draft id, in place of the head's.
        near: ``doc_start [T]`` of the head alone: it attends, and counts positions, from there.
    """

    layers: tuple[int, ...] | None = None
    feature_shift: int = 0
    token_shift: int = 0
    truth_shift: int = 0
    raw: bool = False
    unit_norm: bool = False
    embedding: torch.Tensor | None = None
    token_map: torch.Tensor | None = None
    near: torch.Tensor | None = None


SERVED = View()


class Reading(NamedTuple):
    """What a head proposes at every root.

    Attributes:
        accepted: int64 ``[R]``, leading tokens of the chain that are the reply's, 0..S.
        possible: int64 ``[R]``, S, or less where the reply ends before.
        first: int64 ``[R]``, draft id of the first proposal.
        first_token: int64 ``[R]``, its target id.
        confidence: fp32 ``[R]``, its probability under the head.
        log_truth: fp32 ``[R]``, the head's log-probability of the target's token, at least :data:`FLOOR`, and
            that for tokens outside of the draft vocabulary.
        covered: bool ``[R]``, whether the head can propose the reply's token at all.
        entropy: fp32 ``[R]``, of the first proposal's distribution, in nats.
        is_finite: False if any logit is not.
    """

    accepted: torch.Tensor
    possible: torch.Tensor
    first: torch.Tensor
    first_token: torch.Tensor
    confidence: torch.Tensor
    log_truth: torch.Tensor
    covered: torch.Tensor
    entropy: torch.Tensor
    is_finite: bool


class Source(NamedTuple):
    """A row, the target that computed its states, and those states."""

    target: Target
    row: Row
    states: States


@torch.inference_mode()
def read_chain(head: DraftHead, source: Source, steps: int = 1, view: View = SERVED) -> Reading:
    """Draft ``steps`` tokens behind every root.

    The first proposal is compared with the target's most likely token, the others with the reply, which has
    the same tokens where it is the target's greedy one.
    """
    row, states = source.row, source.states
    steps = min(steps, head.most_steps or steps)
    token_map = head.token_map if view.token_map is None else view.token_map
    truth = _truth(row, states, view.truth_shift)
    outs = _run(head, source, steps, view)
    chunks = zip(outs[0].split(LOGIT_ROWS), truth.split(LOGIT_ROWS), strict=True)
    parts = [_propose(head, chunk, token_map, true) for chunk, true in chunks]
    first, tokens, confidence, log_truth, covered, entropy, finite = (
        torch.cat(part) for part in zip(*parts, strict=True)
    )
    right = [tokens == truth]
    for step, out in enumerate(outs[1:], 1):
        best = torch.cat([head.logits(chunk).argmax(-1) for chunk in out.split(LOGIT_ROWS)])
        behind = row.ids[(row.roots + 1 + step + view.truth_shift).clamp(max=len(row.ids) - 1)]
        right.append((best if token_map is None else token_map[best]) == behind)
    possible = (row.ends - 1 - row.roots).clamp(max=steps)
    hits = torch.stack(right, 1) & (torch.arange(steps, device=truth.device) < possible[:, None])
    accepted = hits.long().cumprod(1).sum(1)
    return Reading(
        *(accepted, possible, first, tokens, confidence, log_truth, covered, entropy),
        bool(finite.all()),
    )


def _truth(row: Row, states: States, shift: int) -> torch.Tensor:
    if shift == 0:
        return states.greedy
    return row.ids[(row.roots + 1 + shift).clamp(0, len(row.ids) - 1)]


def _propose(
    head: DraftHead, states: torch.Tensor, token_map: torch.Tensor | None, truth: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Columns of a :class:`Reading` at some roots."""
    log_q = head.logits(states).float().log_softmax(-1)
    best, first = log_q.max(-1)
    if token_map is None:
        ids, covered, tokens = truth, torch.ones_like(truth, dtype=torch.bool), first
    else:
        place = torch.full((head.config.vocab_size,), -1, device=truth.device)
        inside = (token_map >= 0) & (token_map < len(place))
        numbers = torch.arange(len(token_map), device=truth.device)
        place[token_map[inside]] = numbers[inside]
        ids, tokens = place[truth], token_map[first]
        covered = ids >= 0
    of_truth = log_q.gather(1, ids.clamp(min=0)[:, None])
    of_truth = of_truth[:, 0].clamp(min=FLOOR).where(covered, FLOOR)
    entropy = -(log_q.exp() * log_q.clamp(min=-1e4)).sum(-1)
    return first, tokens, best.exp(), of_truth, covered, entropy, log_q.isfinite().all(-1)


def _run(head: DraftHead, source: Source, steps: int, view: View) -> list[torch.Tensor]:
    """The head's outputs behind the roots, S tensors ``[R, H]``."""
    row, (target, _, states) = source.row, source
    doc_start = row.doc_start if view.near is None else view.near
    rows, everywhere = row.roots - 1, torch.arange(len(row.ids), device=row.ids.device)
    hidden = _features(head, target, states, view)
    if view.feature_shift:
        hidden = hidden[_moved(everywhere, view.feature_shift, row.doc_start)]
    weight = head.embedding(target.embed_tokens.weight) if view.embedding is None else view.embedding

    def tokens(at: torch.Tensor, step: int) -> torch.Tensor:
        return row.ids[(at + 1 + step + view.token_shift).clamp(0, len(row.ids) - 1)]

    def embeds(at: torch.Tensor, step: int) -> torch.Tensor:
        return torch.nn.functional.embedding(tokens(at, step), weight)

    def mask(token: int) -> torch.Tensor:
        return weight[token, None]

    return head.chain(ChainRows(hidden, tokens, embeds, mask, rows, doc_start), steps)


def _moved(rows: torch.Tensor, shift: int, doc_start: torch.Tensor) -> torch.Tensor:
    """Rows shifted within the row of tokens, and not before their own text."""
    return torch.maximum((rows + shift).clamp(max=len(rows) - 1), doc_start)


def _features(head: DraftHead, target: Target, states: States, view: View) -> torch.Tensor:
    layers = head.capture if view.layers is None else view.layers
    final = states.inputs[target.config.num_layers] if view.raw else states.hidden
    parts = [states.inputs[layer] for layer in layers]
    if view.unit_norm:
        parts = [part * part.float().square().mean(-1, keepdim=True).rsqrt().to(part.dtype) for part in parts]
    aux = torch.cat(parts, -1) if parts else final[:, :0]
    dtype = head.dtype
    return head.features(final.to(dtype), aux.to(dtype))
