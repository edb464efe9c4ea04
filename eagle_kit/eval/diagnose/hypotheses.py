"""Faults that can be undone: each hypothesis says how the head or its inputs would have to be read.

Legend: Vd draft vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch

from eagle_kit.drafts.registry import kind_of
from eagle_kit.eval.diagnose.chain import SERVED, View
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.draft_head import DraftHead, StepForm

LAYERS, SHIFT, MAP = "layer ids", "one-slot shift", "vocabulary map"
EMBEDDING, STATE, DTYPE, ROPE = "embedding", "norm convention", "dtype", "RoPE"
LEAST_RATIO, LEAKED_RATIO, LEAST_SHARE = 1.03, 1.15, 0.1
MOST_MASKS = 32
"""Tokens that are tried as a head's mask."""


@dataclass(frozen=True)
class Hypothesis:
    """A fault, by what undoes it.

    Attributes:
        subject: the cause that it belongs to.
        words: the reading that undoes it, as in "0.58 with ...".
        remedy: one sentence.
        view: how inputs are read.
        change: made to a copy of the head first.
        depth: of a chain, at which it shows first.
        leaks: the head is shown more of the target than a draft can know, which may help any head.
        least_share: first drafts that must be accepted with it, for a head that is read right.
    """

    subject: str
    words: str
    remedy: str
    view: View = SERVED
    change: Callable[[Any], None] | None = None
    depth: int = 1
    leaks: bool = False
    least_share: float = LEAST_SHARE

    @property
    def least_ratio(self) -> float:
        """How many times as many drafts must be accepted for the fault to be worth naming."""
        return LEAKED_RATIO if self.leaks else LEAST_RATIO


def hypotheses(
    head: DraftHead,
    target: TargetConfig,
    embedding: torch.Tensor | None = None,
    masks: Sequence[int] = (),
) -> list[Hypothesis]:
    """All that can be tried of a head.

    Args:
        embedding: ``[V, H]`` that the draft's files bring, where it is not the target's.
        masks: tokens that may be the mask of a head that has one.
    """
    kind = kind_of(head.config)
    conventions = [*kind.conventions(head, target), *kind.token_conventions(head, masks)]
    found = [
        Hypothesis(each.subject, each.words, each.remedy, change=each.change, depth=each.depth)
        for each in conventions
    ]
    found += [*_layers(head, target), *_shifts(head), *_maps(head)]
    if embedding is not None:
        remedy = "Use the target that the draft was trained for: it brings another embedding than this one's."
        view = View(embedding=embedding)
        found.append(Hypothesis(EMBEDDING, "the embedding that the draft brings", remedy, view))
    if not head.capture:
        remedy = (
            "Train the head on final states behind the target's norm, or use an engine that gives others."
        )
        found.append(Hypothesis(STATE, "final states before the target's norm", remedy, View(raw=True)))
    elif not (getattr(head.config, "fc_norm", False) or getattr(head.config, "norm_before_fc", False)):
        remedy = "Keep the norms in front of fc (fc_norm or norm_before_fc) when the head is converted."
        view = View(unit_norm=True)
        found.append(Hypothesis(STATE, "captured states normed in front of fc", remedy, view))
    return found


def mask_tokens(tokenizer: Any, vocab_size: int) -> list[int]:
    """Tokens that a head may have for a mask, as texts do not have them: those that the tokenizer calls mask
    and padding, the first behind its own, the last of all, and its added ones; at most :data:`MOST_MASKS`."""
    named = [getattr(tokenizer, f"{name}_token_id", None) for name in ("mask", "pad")]
    found = [*named, len(tokenizer), vocab_size - 1, *sorted(tokenizer.added_tokens_decoder)]
    return list(dict.fromkeys(token for token in found if token is not None and token < vocab_size))[
        :MOST_MASKS
    ]


def layers_needed(hypotheses: list[Hypothesis], head: DraftHead, target: TargetConfig) -> set[int]:
    """Layers whose inputs must be captured to try them all."""
    needed = set(head.capture) | ({target.num_layers} if any(each.view.raw for each in hypotheses) else set())
    for each in hypotheses:
        needed |= set(each.view.layers or ())
    return needed


def _layers(head: DraftHead, target: TargetConfig) -> Iterator[Hypothesis]:
    """Neighbours of the captured layers, other orders, and the usual ids in both numberings."""
    own, last = head.capture, target.num_layers
    others: dict[tuple[int, ...], str] = {}
    for shift, numbering in ((1, "outputs"), (-1, "inputs")):
        ids = tuple(layer + shift for layer in own)
        others.setdefault(ids, f"its ids are {numbering} of layers, and were read the other way")
    kind = kind_of(head.config)
    usual = kind.usual_layers(head.config, target)
    if len(own) == len(usual):
        others.setdefault(usual, "the usual ones")
    if 1 < len(own) <= 4:
        for ids in permutations(own):
            others.setdefault(ids, "the same in another order")
    for slot in range(len(own)):
        for shift in (1, -1, 2, -2):
            ids = (*own[:slot], own[slot] + shift, *own[slot + 1 :])
            others.setdefault(ids, "one of them is a neighbour")
    for ids, why in others.items():
        if ids != own and all(0 <= layer <= last for layer in ids):
            words = f"the inputs of layers {', '.join(map(str, ids))} ({why})"
            yield Hypothesis(LAYERS, words, kind.layers_remedy(ids), View(layers=ids))


def _shifts(head: DraftHead) -> Iterator[Hypothesis]:
    """One of feature, token and taught token a slot away from the other two.

    The feature of the embedded token's own position holds what the target makes of that token, its choice of
    the next one included: with it the shipped head accepts nearly as much as with its own.
    """
    parts = {"feature_shift": "features", "token_shift": "tokens", "truth_shift": "taught tokens"}
    for field, what in parts.items():
        for by, where in ((-1, "before"), (1, "behind")):
            if head.step_form is StepForm.BLOCK and (field, by) in (("truth_shift", -1), ("token_shift", 1)):
                continue
            yield Hypothesis(
                SHIFT,
                f"{what} one slot {where}",
                "Align training as serving does: the state of position i and the token i + 1 predict the "
                "token i + 2.",
                View(**{field: by}),  # type: ignore[arg-type]
                leaks=(field, by) == ("feature_shift", 1),
            )


def _maps(head: DraftHead) -> Iterator[Hypothesis]:
    """Other readings of ``d2t``."""
    own = head.token_map
    if own is None:
        return
    number = torch.arange(len(own), device=own.device)
    others = {
        "d2t as token ids, not as offsets": own - number,
        "d2t with its offsets added twice less": own + number,
        "d2t one entry later": own.roll(-1),
        "d2t one entry earlier": own.roll(1),
        "d2t one token higher": own + 1,
        "d2t one token lower": own - 1,
        "d2t in ascending order": own.sort().values,
        "no d2t": number,
    }
    remedy = (
        "Store d2t[i] = token id - i in the order of the rows of lm_head, and t2d that marks these tokens."
    )
    for words, other in others.items():
        is_possible = bool(((other >= 0) & (other < head.config.vocab_size)).all())
        if is_possible and not torch.equal(other, own):
            yield Hypothesis(MAP, words, remedy, View(token_map=other))
