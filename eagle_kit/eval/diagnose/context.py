"""Acceptance by position in long texts, and with the head's own context cut short.

Features, tokens and the target's choices stay those of the long text; only the tokens that the head
attends to, and the positions it counts, begin again with every chat. If that restores acceptance,
the head does not work at this distance: it was trained on shorter texts, or its rotation is not
that of its training.

Legend: T packed tokens, R roots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from eagle_kit.eval.diagnose.chain import ChainResult, InputVariant, Source, draft_chains
from eagle_kit.eval.diagnose.estimates import Estimate, estimate
from eagle_kit.eval.diagnose.hypotheses import Hypothesis
from eagle_kit.eval.diagnose.row import PromptResponse, compute_states, pack
from eagle_kit.eval.diagnose.trials import Trial, compare, run_hypothesis
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.models.targets.target import Target

BORDERS = (0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""First positions of the ranges that acceptance is measured in."""
SUBJECT = "context"
FAR = 256
"""Least position that is far from the beginning; from half of the length on, if that is more."""
FEWEST = 40
"""Roots that a range must have to be shown."""
NEARLY = 0.8
"""Share of the best rotation's gain with which the target's own is preferred."""


@dataclass(frozen=True)
class PositionRange:
    """Share of first drafts accepted at positions ``first`` to ``last`` of the long texts.

    Attributes:
        served: of the head as it is served.
        near: of the head with its context cut to each chat.
    """

    first: int
    last: int
    served: Estimate
    near: Estimate


@dataclass(frozen=True)
class ContextResult:
    """A head on long texts.

    Attributes:
        length: most tokens of each.
        ranges: in order of position.
        near: the context cut to each chat, at positions far from the beginning.
        rope: the other rotation that was best there; None without one.
        rope_is_targets: whether that is the target's own, and the head has another.
    """

    length: int
    ranges: tuple[PositionRange, ...]
    near: Trial
    rope: Trial | None
    rope_is_targets: bool = False


def measure_context(
    head: DraftHead,
    target: Target,
    texts: Sequence[PromptResponse],
    length: int,
    ropes: Sequence[Hypothesis],
) -> ContextResult | None:
    """Measure a head on ``texts`` that are joined to documents of ``length`` tokens.

    Texts are repeated until they have as many tokens together. A copy is no new observation: it has
    the index of its original, so that errors do not fall.

    Args:
        ropes: other rotations, the target's own first where the head has another. The even chats
            choose one, and the odd ones measure it.

    Returns:
        None where there are too few tokens far from the beginning.
    """
    # Join the texts to long ones.
    device = target.embed_tokens.weight.device
    num_texts = len(texts)
    num_tokens = sum(len(text.prompt) + len(text.response) for text in texts)
    num_copies = max(1, -(-length // max(num_tokens, 1)))
    texts = [*texts] * num_copies
    row = pack(texts, length)
    row = row._replace(text_index=row.text_index % num_texts).to(device)
    positions = row.positions[row.roots]
    is_far = positions >= max(FAR, length // 2)
    if int(is_far.sum()) < FEWEST:
        return None

    # The head as it is served, and with its context cut to each chat.
    source = Source(target, row, compute_states(target, row, head.capture))
    served = draft_chains(head, source)
    cut = Hypothesis(
        SUBJECT,
        "the head's context cut to each chat",
        "Keep requests within the length of its training, or train it on longer texts (data.max_length).",
        InputVariant(doc_start=pack(texts).doc_start.to(device)),
    )
    near = run_hypothesis(head, source, cut)

    # Acceptance by position.
    def share_accepted(result: ChainResult, is_used: torch.Tensor) -> Estimate:
        return estimate((result.num_accepted > 0)[is_used].float(), row.text_index[is_used])

    num_positions = int(positions.max()) + 1
    ranges = []
    for first, end in pairwise(BORDERS):
        is_inside = (positions >= first) & (positions < end)
        if int(is_inside.sum()) >= FEWEST:
            ranges.append(
                PositionRange(
                    first,
                    last=min(end, num_positions) - 1,
                    served=share_accepted(served, is_inside),
                    near=share_accepted(near, is_inside),
                )
            )

    # Trials far from the beginning.
    near_trial = compare(cut, served, near, row.text_index.where(is_far, -1))
    rope = _best_rope(head, source, served, is_far, ropes)
    if rope is None:
        return ContextResult(length, tuple(ranges), near_trial, None)
    is_targets = rope.is_first and head.config.layer.rotation != target.config.rotation
    return ContextResult(length, tuple(ranges), near_trial, rope.trial, is_targets)


class _RopeTrial(NamedTuple):
    """Trial of a rotation, and whether it is the first of those that were tried."""

    trial: Trial
    is_first: bool


def _best_rope(
    head: DraftHead,
    source: Source,
    served: ChainResult,
    is_far: torch.Tensor,
    ropes: Sequence[Hypothesis],
) -> _RopeTrial | None:
    """The best other rotation at roots ``is_far [R]``, or the first one where it is nearly as good;
    None where there is none to try, or there are no roots to choose or measure it on."""
    text_index = source.row.text_index
    chosen_on = is_far & (text_index % 2 == 0)
    measured_on = is_far & (text_index % 2 == 1)
    if not ropes or not chosen_on.any() or not measured_on.any():
        return None

    results = []
    gains = []
    for rope in ropes:
        result = run_hypothesis(head, source, rope)
        gain = result.first.label_log_prob - served.first.label_log_prob
        results.append(result)
        gains.append(float(gain[chosen_on].mean()))
    best = gains.index(max(gains))
    if gains[0] >= NEARLY * max(gains):
        best = 0
    trial = compare(ropes[best], served, results[best], text_index.where(measured_on, -1))
    return _RopeTrial(trial, best == 0)
