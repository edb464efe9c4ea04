"""How new heads with an output layer of their own begin, and heads that go on from another."""

from collections.abc import Iterable

import torch

from eagle_kit.config.drafts.base import CapturedStatesHeadConfig
from eagle_kit.core.errors import UserError
from eagle_kit.drafts.base.kind import InitContext
from eagle_kit.drafts.dflash.head import DFlashHead
from eagle_kit.drafts.eagle3.head import Eagle3Head
from eagle_kit.models.config import TargetConfig


def check_vocab_size(size: int, target: TargetConfig) -> None:
    """Raise UserError for a draft vocabulary of more tokens than the target has."""
    if size > target.vocab_size:
        raise UserError(
            f"head.draft_vocab_size is {size}, but the target has {target.vocab_size}.", "Lower it."
        )


@torch.no_grad()
def init_output_layer(
    head: Eagle3Head | DFlashHead, settings: CapturedStatesHeadConfig, start: InitContext
) -> None:
    """Give a new head the vocabulary of the data, and the target's output rows of it unless the settings ask
    for random ones."""
    # A target may have more rows than its tokenizer has tokens, or fewer.
    t2d = torch.as_tensor(start.vocab.t2d)
    num_rows = head.config.vocab_size
    if t2d[num_rows:].any():
        raise UserError(
            f"The draft vocabulary has the token {int(t2d.nonzero().max())}, and the target's embedding has "
            f"{num_rows} rows.",
            "Use a vocabulary map that was made for this target.",
        )
    in_draft = torch.zeros(num_rows, dtype=torch.bool)
    in_draft[: len(t2d)] = t2d[:num_rows]
    head.set_vocab_map(torch.as_tensor(start.vocab.d2t), in_draft)
    tokens, weight = head.token_map, start.target.head_weight
    assert tokens is not None, "the head has an output layer of its own"
    if settings.lm_head_init == "target":
        head.output.weight.copy_(weight[tokens.to(weight.device)])


def check_start_from(folder: str, sizes: Iterable[tuple[str, object, object]]) -> None:
    """Raise UserError where the head of ``head.start_from``, in ``folder``, is another one than a run needs.

    Args:
        sizes: name of each size, what the head has, and what the run needs.
    """
    for name, has, needs in sizes:
        if has != needs:
            raise UserError(
                f"The head of head.start_from, {folder}, has the {name} {has}, and this run needs {needs}.",
                "Name a head of this target and kind, or leave head.start_from out.",
            )
