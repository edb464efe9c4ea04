"""Acceptance by position in long texts, and with the head's own context cut short.

Features, tokens and the target's choices stay those of the long text; only what the head attends to, and the
positions it counts, begin again with every chat. Where that restores acceptance, the head does not stand the
distance: it was trained on shorter texts, or rotates otherwise than in training.

Legend: T packed tokens, R roots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from eagle_kit.eval.diagnose.chain import Reading, Source, View, read_chain
from eagle_kit.eval.diagnose.estimates import Estimate, estimate
from eagle_kit.eval.diagnose.hypotheses import Hypothesis
from eagle_kit.eval.diagnose.row import Text, compute_states, pack
from eagle_kit.eval.diagnose.trials import Trial, compare, read
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.models.targets.target import Target

BORDERS = (0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""First positions of the parts that acceptance is read in."""
SUBJECT = "context"
FAR = 256
"""First position that is far from the beginning, and at least half of the length."""
FEWEST = 40
"""Roots that a part must have to be shown."""
NEARLY = 0.8
"""Share of the best rotation's gain with which the target's own is preferred."""


@dataclass(frozen=True)
class Part:
    """Positions ``first`` to ``last`` of the long texts: first drafts accepted there, and with the head's
    context cut to each chat."""

    first: int
    last: int
    served: Estimate
    near: Estimate


@dataclass(frozen=True)
class ContextReading:
    """A head on long texts.

    Attributes:
        length: most tokens of each.
        parts: in order of position.
        near: the context cut short, at positions far from the beginning.
        rope: the other rotation that was best there; None without one.
        rope_is_targets: whether that is the target's own, which the head has not.
    """

    length: int
    parts: tuple[Part, ...]
    near: Trial
    rope: Trial | None
    rope_is_targets: bool = False


def read_context(
    head: DraftHead, target: Target, texts: Sequence[Text], length: int, ropes: Sequence[Hypothesis]
) -> ContextReading | None:
    """Read a head over ``texts`` that are joined to some of ``length`` tokens.

    Texts are repeated until they have as many together. A copy is no new observation: it has the number of
    its original, so that errors do not fall.

    Args:
        ropes: other rotations, the target's own first where the head has another; chosen on every second
            chat, and judged on the others.

    Returns:
        None where there are too few tokens far from the beginning.
    """
    device, count = target.embed_tokens.weight.device, len(texts)
    total = sum(len(text.prompt) + len(text.reply) for text in texts)
    texts = [*texts] * max(1, -(-length // max(total, 1)))
    row = pack(texts, length)
    row = row._replace(texts=row.texts % count).to(device)
    positions = row.positions[row.roots]
    far = positions >= max(FAR, length // 2)
    if int(far.sum()) < FEWEST:
        return None
    source = Source(target, row, compute_states(target, row, head.capture))
    served = read_chain(head, source)
    cut = Hypothesis(
        SUBJECT,
        "the head's context cut to each chat",
        "Keep requests within the length of its training, or train it on longer texts (data.max_length).",
        View(near=pack(texts).doc_start.to(device)),
    )
    near = read(head, source, cut)
    parts = []
    for first, behind in pairwise(BORDERS):
        mine = (positions >= first) & (positions < behind)
        if int(mine.sum()) >= FEWEST:
            shares = [estimate((each.accepted > 0)[mine].float(), row.texts[mine]) for each in (served, near)]
            parts.append(Part(first, min(behind, int(positions.max()) + 1) - 1, *shares))
    trial = compare(cut, served, near, row.texts.where(far, -1))
    rope, is_first = _best_rope(head, source, served, far, ropes)
    is_targets = is_first and head.config.layer.rotation != target.config.rotation
    return ContextReading(length, tuple(parts), trial, rope, is_targets)


def _best_rope(
    head: DraftHead, source: Source, served: Reading, far: torch.Tensor, ropes: Sequence[Hypothesis]
) -> tuple[Trial | None, bool]:
    """The best other rotation, the first of ``ropes`` where it is nearly as good, and whether it is that."""
    texts = source.row.texts
    chosen_on, judged_on = far & (texts % 2 == 0), far & (texts % 2 == 1)
    if not ropes or not chosen_on.any() or not judged_on.any():
        return None, False
    tried = [(each, read(head, source, each)) for each in ropes]
    gains = [float((found.log_truth - served.log_truth)[chosen_on].mean()) for _, found in tried]
    best = 0 if gains[0] >= NEARLY * max(gains) else gains.index(max(gains))
    return compare(tried[best][0], served, tried[best][1], texts.where(judged_on, -1)), best == 0
