"""Faults that can be undone: each hypothesis says how the head or its inputs would have to be read.

Legend: Vd draft vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch

from eagle_kit.drafts.registry import kind_of
from eagle_kit.eval.diagnose.chain import SERVED, InputVariant
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.draft_head import DraftHead, StepForm

LAYERS = "layer ids"
SHIFT = "one-slot shift"
MAP = "vocabulary map"
EMBEDDING = "embedding"
STATE = "norm convention"
DTYPE = "dtype"
ROPE = "RoPE"
LEAST_RATIO = 1.03
"""Times as many drafts that must be accepted for a fault to be worth naming."""
LEAST_RATIO_IF_LEAKED = 1.15
"""The same where the head is shown more of the target than a draft can know."""
LEAST_SHARE = 0.1
"""Share of first drafts that must be accepted for a head to be read right."""
MOST_MASKS = 32
"""Tokens that are tried as a head's mask."""


@dataclass(frozen=True)
class Hypothesis:
    """A fault, by what undoes it.

    Attributes:
        subject: the cause that it belongs to.
        words: how head and inputs are read without the fault, as in "0.58 with ...".
        remedy: what the user does if acceptance rises, one sentence.
        inputs: inputs of the head without the fault.
        change: undoes the fault in a copy of the head, in place; None where only inputs change.
        depth: first depth of a chain at which acceptance differs.
        leaks: the head is shown more of the target than a draft can know, which may help any head.
        least_share: share of first drafts that must be accepted without the fault.
    """

    subject: str
    words: str
    remedy: str
    inputs: InputVariant = SERVED
    change: Callable[[Any], None] | None = None
    depth: int = 1
    leaks: bool = False
    least_share: float = LEAST_SHARE

    @property
    def least_ratio(self) -> float:
        """How many times as many drafts must be accepted for the fault to be worth naming."""
        return LEAST_RATIO_IF_LEAKED if self.leaks else LEAST_RATIO


def hypotheses(
    head: DraftHead,
    target: TargetConfig,
    embedding: torch.Tensor | None = None,
    masks: Sequence[int] = (),
) -> list[Hypothesis]:
    """All hypotheses that can be tried with a head.

    Args:
        embedding: ``[V, H]`` of the draft's files, where it is not the target's.
        masks: tokens that may be the mask of a head that has one.
    """
    # The head's own tensors.
    kind = kind_of(head.config)
    conventions = [*kind.conventions(head, target), *kind.token_conventions(head, masks)]
    found = [
        Hypothesis(each.subject, each.words, each.remedy, change=each.change, depth=each.depth)
        for each in conventions
    ]

    # Its inputs and its vocabulary.
    found += [*_layers(head, target), *_shifts(head), *_maps(head)]
    if embedding is not None:
        words = "the embedding that the draft brings"
        remedy = "Use the target that the draft was trained for: it brings another embedding than this one's."
        found.append(Hypothesis(EMBEDDING, words, remedy, InputVariant(embedding=embedding)))

    # Norms of the target's states.
    has_norms = getattr(head.config, "fc_norm", False) or getattr(head.config, "norm_before_fc", False)
    if not head.capture:
        words = "final states before the target's norm"
        remedy = (
            "Train the head on final states behind the target's norm, or use an engine that gives others."
        )
        found.append(Hypothesis(STATE, words, remedy, InputVariant(before_final_norm=True)))
    elif not has_norms:
        words = "captured states normed in front of fc"
        remedy = "Keep the norms in front of fc (fc_norm or norm_before_fc) when the head is converted."
        found.append(Hypothesis(STATE, words, remedy, InputVariant(unit_norm=True)))
    return found


def mask_tokens(tokenizer: Any, vocab_size: int) -> list[int]:
    """Tokens that may be a head's mask, since no text has them; at most :data:`MOST_MASKS`.

    They are the tokenizer's mask and padding, the first id after its vocabulary, the target's last
    id, and the tokenizer's added tokens.
    """
    candidates = [
        getattr(tokenizer, "mask_token_id", None),
        getattr(tokenizer, "pad_token_id", None),
        len(tokenizer),
        vocab_size - 1,
        *sorted(tokenizer.added_tokens_decoder),
    ]
    tokens = dict.fromkeys(token for token in candidates if token is not None and token < vocab_size)
    return list(tokens)[:MOST_MASKS]


def layers_needed(hypotheses: list[Hypothesis], head: DraftHead, target: TargetConfig) -> set[int]:
    """Layers whose inputs must be captured to try them all."""
    needed = set(head.capture)
    for each in hypotheses:
        needed |= set(each.inputs.layers or ())
        if each.inputs.before_final_norm:
            needed.add(target.num_layers)
    return needed


def _layers(head: DraftHead, target: TargetConfig) -> Iterator[Hypothesis]:
    """Neighbours of the captured layers, other orders, and the usual ids in both numberings."""
    own = head.capture
    kind = kind_of(head.config)
    reasons: dict[tuple[int, ...], str] = {}

    # The ids in the other numbering, the usual ids, other orders of the ids, and neighbours of one of them.
    for shift, numbering in ((1, "outputs"), (-1, "inputs")):
        ids = tuple(layer + shift for layer in own)
        reasons.setdefault(ids, f"its ids are {numbering} of layers, and were read the other way")
    usual = kind.usual_layers(head.config, target)
    if len(own) == len(usual):
        reasons.setdefault(usual, "the usual ones")
    if 1 < len(own) <= 4:
        for ids in permutations(own):
            reasons.setdefault(ids, "the same in another order")
    for slot in range(len(own)):
        for shift in (1, -1, 2, -2):
            ids = (*own[:slot], own[slot] + shift, *own[slot + 1 :])
            reasons.setdefault(ids, "one of them is a neighbour")

    for ids, reason in reasons.items():
        if ids != own and all(0 <= layer <= target.num_layers for layer in ids):
            words = f"the inputs of layers {', '.join(map(str, ids))} ({reason})"
            yield Hypothesis(LAYERS, words, kind.layers_remedy(ids), InputVariant(layers=ids))


def _shifts(head: DraftHead) -> Iterator[Hypothesis]:
    """Features, embedded tokens or labels one slot away from the other two.

    The feature of the embedded token's own position holds the target's output for that token, from
    which the target chooses the next one. With it the shipped head accepts nearly as much as with
    its own feature.
    """
    remedy = (
        "Align training as serving does: the state of position i and the token i + 1 predict the token i + 2."
    )
    variants = [
        ("features one slot before", InputVariant(feature_shift=-1)),
        ("features one slot behind", InputVariant(feature_shift=1)),
        ("tokens one slot before", InputVariant(token_shift=-1)),
        ("tokens one slot behind", InputVariant(token_shift=1)),
        ("taught tokens one slot before", InputVariant(label_shift=-1)),
        ("taught tokens one slot behind", InputVariant(label_shift=1)),
    ]
    for words, inputs in variants:
        # In a block these two would put the label itself among the embedded tokens.
        if head.step_form is StepForm.BLOCK and (inputs.label_shift == -1 or inputs.token_shift == 1):
            continue
        yield Hypothesis(SHIFT, words, remedy, inputs, leaks=inputs.feature_shift == 1)


def _maps(head: DraftHead) -> Iterator[Hypothesis]:
    """Other readings of ``d2t``."""
    own = head.token_map
    if own is None:
        return
    draft_ids = torch.arange(len(own), device=own.device)
    others = {
        "d2t as token ids, not as offsets": own - draft_ids,
        "d2t with its offsets added twice less": own + draft_ids,
        "d2t one entry later": own.roll(-1),
        "d2t one entry earlier": own.roll(1),
        "d2t one token higher": own + 1,
        "d2t one token lower": own - 1,
        "d2t in ascending order": own.sort().values,
        "no d2t": draft_ids,
    }
    remedy = (
        "Store d2t[i] = token id - i in the order of the rows of lm_head, and t2d that marks these tokens."
    )
    for words, other in others.items():
        is_possible = bool(((other >= 0) & (other < head.config.vocab_size)).all())
        if is_possible and not torch.equal(other, own):
            yield Hypothesis(MAP, words, remedy, InputVariant(token_map=other))
