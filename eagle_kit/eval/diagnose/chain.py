"""A head's greedy chain at every root of a row, in a few batched forwards and without decoding.

A cycle of decoding accepts a drafted token if it and all before it are those of the greedy response.
So a chain may read the tokens of the response in place of its own drafts: where they differ, nothing
after that is accepted anyway.

Legend: T packed tokens, R roots, S steps, H hidden, Vd draft vocabulary.
"""

from typing import NamedTuple

import torch

from eagle_kit.eval.diagnose.row import Row, TargetStates
from eagle_kit.models.draft_chain import ChainRows
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.models.targets.target import Target

LOGIT_ROWS = 256
"""Rows whose logits over the draft vocabulary exist at the same time."""
LOG_PROB_FLOOR = -20.0
"""Lowest log-probability of a label: a lower one is raised to it, so that no single token decides a
mean."""


class InputVariant(NamedTuple):
    """How a head's inputs, and the labels of its drafts, are taken from a row; the defaults are
    serving's.

    Attributes:
        layers: captured layers, in the order of ``fc``; None for the head's own.
        feature_shift: tokens by which the features are later than the head's position (earlier,
            if negative).
        token_shift: the same of the embedded tokens.
        label_shift: the same of the tokens that drafts are compared with.
        before_final_norm: the target's final hidden states are those before its last norm.
        unit_norm: captured states are divided by their root mean square.
        embedding: ``[V, H]`` in place of the target's.
        token_map: int64 ``[Vd]``, target id of every draft id, in place of the head's.
        doc_start: int64 ``[T]`` in place of the row's: the head attends, and counts positions, from
            there. The target's states stay those of the row's documents.
    """

    layers: tuple[int, ...] | None = None
    feature_shift: int = 0
    token_shift: int = 0
    label_shift: int = 0
    before_final_norm: bool = False
    unit_norm: bool = False
    embedding: torch.Tensor | None = None
    token_map: torch.Tensor | None = None
    doc_start: torch.Tensor | None = None


SERVED = InputVariant()


class FirstDrafts(NamedTuple):
    """The first draft after every root. Its label is the token that it is compared with.

    Attributes:
        draft_id: int64 ``[R]``, index in the draft vocabulary.
        token: int64 ``[R]``, the same token in the target's vocabulary.
        confidence: fp32 ``[R]``, probability of the draft under the head.
        label_log_prob: fp32 ``[R]``, log-probability of the label under the head,
            :data:`LOG_PROB_FLOOR` at least, and for labels outside of the draft vocabulary.
        is_covered: bool ``[R]``, whether the label is in the draft vocabulary.
        entropy: fp32 ``[R]``, of the head's distribution, in nats.
        is_finite: bool ``[R]``, whether all logits are.
    """

    draft_id: torch.Tensor
    token: torch.Tensor
    confidence: torch.Tensor
    label_log_prob: torch.Tensor
    is_covered: torch.Tensor
    entropy: torch.Tensor
    is_finite: torch.Tensor


class ChainResult(NamedTuple):
    """What a head drafts after every root.

    Attributes:
        num_accepted: int64 ``[R]``, leading drafts that are the tokens of the response, 0..S.
        max_accepted: int64 ``[R]``, S, or less where the response ends before.
        first: the first drafts.
    """

    num_accepted: torch.Tensor
    max_accepted: torch.Tensor
    first: FirstDrafts

    @property
    def is_finite(self) -> bool:
        """False if any logit of a first draft is not finite."""
        return bool(self.first.is_finite.all())


class Source(NamedTuple):
    """A row, the target that computed its states, and those states."""

    target: Target
    row: Row
    states: TargetStates


@torch.inference_mode()
def draft_chains(
    head: DraftHead, source: Source, steps: int = 1, inputs: InputVariant = SERVED
) -> ChainResult:
    """Draft ``steps`` tokens after every root, or as many as the head can.

    The first draft is compared with the target's most likely token, later drafts with the tokens of
    the response. The two agree where the response is the target's greedy one.
    """
    row = source.row
    steps = min(steps, head.most_steps or steps)
    token_map = head.token_map if inputs.token_map is None else inputs.token_map
    labels = source.states.greedy
    if inputs.label_shift:
        labels = _tokens_behind(row, row.roots, inputs.label_shift)
    outputs = _run_head(head, source, steps, inputs)

    # First drafts, with their probabilities.
    chunks = []
    for hidden, chunk_labels in zip(outputs[0].split(LOGIT_ROWS), labels.split(LOGIT_ROWS), strict=True):
        chunks.append(_first_drafts(head, hidden, token_map, chunk_labels))
    first = FirstDrafts(*(torch.cat(column) for column in zip(*chunks, strict=True)))

    # Later drafts, of which only the tokens count.
    is_right = [first.token == labels]
    for step, output in enumerate(outputs[1:], 1):
        drafts = torch.cat([head.logits(chunk).argmax(-1) for chunk in output.split(LOGIT_ROWS)])
        if token_map is not None:
            drafts = token_map[drafts]
        is_right.append(drafts == _tokens_behind(row, row.roots, step + inputs.label_shift))

    # A chain is accepted up to its first wrong draft, and not beyond the end of its response.
    max_accepted = (row.ends - 1 - row.roots).clamp(max=steps)
    depths = torch.arange(steps, device=labels.device)
    is_accepted = torch.stack(is_right, 1) & (depths < max_accepted[:, None])
    num_accepted = is_accepted.long().cumprod(1).sum(1)
    return ChainResult(num_accepted, max_accepted, first)


def _tokens_behind(row: Row, rows: torch.Tensor, shift: int) -> torch.Tensor:
    """Tokens ``1 + shift`` after ``rows``; at the ends of the row, its last and first token."""
    return row.ids[(rows + 1 + shift).clamp(0, len(row.ids) - 1)]


def _first_drafts(
    head: DraftHead, hidden: torch.Tensor, token_map: torch.Tensor | None, labels: torch.Tensor
) -> FirstDrafts:
    """First drafts of some roots.

    Args:
        hidden: ``[n, H]``, outputs of the head's first step.
        labels: int64 ``[n]``, ids of the target.
    """
    log_q = head.logits(hidden).float().log_softmax(-1)  # [n, Vd]
    best_log_q, draft_id = log_q.max(-1)

    # Labels as draft ids, -1 outside of the draft vocabulary.
    if token_map is None:
        token = draft_id
        label_ids = labels
    else:
        token = token_map[draft_id]
        draft_ids = torch.full((head.config.vocab_size,), -1, device=labels.device)
        is_valid = (token_map >= 0) & (token_map < len(draft_ids))
        draft_ids[token_map[is_valid]] = torch.arange(len(token_map), device=labels.device)[is_valid]
        label_ids = draft_ids[labels]
    is_covered = label_ids >= 0

    label_log_prob = log_q.gather(1, label_ids.clamp(min=0)[:, None])[:, 0]
    label_log_prob = label_log_prob.clamp(min=LOG_PROB_FLOOR).where(is_covered, LOG_PROB_FLOOR)
    entropy = -(log_q.exp() * log_q.clamp(min=-1e4)).sum(-1)  # 0 * -inf would be NaN
    return FirstDrafts(
        draft_id=draft_id,
        token=token,
        confidence=best_log_q.exp(),
        label_log_prob=label_log_prob,
        is_covered=is_covered,
        entropy=entropy,
        is_finite=log_q.isfinite().all(-1),
    )


def _run_head(head: DraftHead, source: Source, steps: int, inputs: InputVariant) -> list[torch.Tensor]:
    """The head's outputs after the roots, S tensors ``[R, H]``."""
    row = source.row
    target = source.target
    doc_start = row.doc_start if inputs.doc_start is None else inputs.doc_start

    # Features. A shifted one is not taken from before its own document.
    features = _features(head, target, source.states, inputs)
    if inputs.feature_shift:
        rows = torch.arange(len(row.ids), device=row.ids.device)
        shifted = (rows + inputs.feature_shift).clamp(max=len(rows) - 1)
        features = features[torch.maximum(shifted, row.doc_start)]

    # Tokens that the head embeds.
    weight = inputs.embedding
    if weight is None:
        weight = head.embedding(target.embed_tokens.weight)

    def tokens(rows: torch.Tensor, step: int) -> torch.Tensor:
        return _tokens_behind(row, rows, step + inputs.token_shift)

    def embeds(rows: torch.Tensor, step: int) -> torch.Tensor:
        return torch.nn.functional.embedding(tokens(rows, step), weight)

    def mask(token: int) -> torch.Tensor:
        return weight[token, None]

    # The head's row before a root embeds the root.
    return head.chain(ChainRows(features, tokens, embeds, mask, row.roots - 1, doc_start), steps)


def _features(head: DraftHead, target: Target, states: TargetStates, inputs: InputVariant) -> torch.Tensor:
    """The head's features of every token, ``[T, H]``."""
    final = states.hidden
    if inputs.before_final_norm:
        final = states.inputs[target.config.num_layers]
    layers = head.capture if inputs.layers is None else inputs.layers
    captured = []
    for layer in layers:
        hidden = states.inputs[layer]
        if inputs.unit_norm:
            scale = hidden.float().square().mean(-1, keepdim=True).rsqrt()
            hidden = hidden * scale.to(hidden.dtype)
        captured.append(hidden)
    aux = torch.cat(captured, -1) if captured else final[:, :0]
    return head.features(final.to(head.dtype), aux.to(head.dtype))
