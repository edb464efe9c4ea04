"""First weights of heads with a draft vocabulary, and checks of the settings that choose them."""

from collections.abc import Iterable

import torch

from eagle_kit.config.drafts.base import CapturedStatesHeadConfig
from eagle_kit.core.errors import UserError
from eagle_kit.drafts.base.captured_states import CapturedStatesHead
from eagle_kit.drafts.base.kind import InitContext
from eagle_kit.models.config import TargetConfig


def check_vocab_size(size: int, target: TargetConfig) -> None:
    """Raise UserError for a draft vocabulary of more tokens than the target has."""
    if size > target.vocab_size:
        raise UserError(
            f"head.draft_vocab_size is {size}, but the target has {target.vocab_size}.", "Lower it."
        )


@torch.no_grad()
def init_output_layer(
    head: CapturedStatesHead, settings: CapturedStatesHeadConfig, start: InitContext
) -> None:
    """Set the draft vocabulary of a new head (``d2t``, ``t2d``) and its output layer, in place.

    With ``lm_head_init: target`` the output layer is a copy of the target's rows of the draft vocabulary.

    Raises:
        UserError: the draft vocabulary has a token that the target's embedding does not have.
    """
    # The draft vocabulary. The target's embedding may have more rows than its tokenizer has tokens, or fewer.
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

    # The output layer.
    tokens = head.token_map
    weight = start.target.head_weight
    assert tokens is not None, "the head has an output layer of its own"
    if settings.lm_head_init == "target":
        head.output.weight.copy_(weight[tokens.to(weight.device)])


def check_start_from(folder: str, sizes: Iterable[tuple[str, object, object]]) -> None:
    """Raise UserError if the head in ``folder``, of ``head.start_from``, does not fit the run.

    Args:
        sizes: name of each size, what the head has, and what the run needs.
    """
    for name, has, needs in sizes:
        if has != needs:
            raise UserError(
                f"The head of head.start_from, {folder}, has the {name} {has}, and this run needs {needs}.",
                "Name a head of this target and kind, or leave head.start_from out.",
            )
