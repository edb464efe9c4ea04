"""The hot-token map of a draft: checked, completed, and known by a fingerprint.

Legend: Vd draft vocabulary, V target vocabulary. ``d2t`` holds offsets:
target id = draft id + ``d2t[draft id]``.
"""

import hashlib

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.models.config import HeadArchitecture


def map_fingerprint(d2t: torch.Tensor) -> str:
    """A short hash of ``d2t`` int64 ``[Vd]``."""
    return hashlib.sha256(d2t.detach().cpu().to(torch.int64).numpy().tobytes()).hexdigest()[:16]


def complete_map(
    d2t: torch.Tensor | None, t2d: torch.Tensor | None, config: HeadArchitecture, where: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Complete a checkpoint's map -> ``d2t`` int64 ``[Vd]`` and ``t2d`` bool ``[V]``.

    ``d2t`` need not be sorted. Without ``t2d`` it is made from ``d2t``; without both, the draft vocabulary
    must be the target's.

    Raises:
        UserError: a missing or impossible ``d2t``, or a ``t2d`` that says something else.
    """
    size = config.draft_vocab_size
    vocab = config.vocab_size
    if d2t is None:
        if size != vocab:
            raise UserError(
                f"The draft in {where} has a draft vocabulary of {size} tokens but no d2t.",
                "Use a complete checkpoint.",
            )
        d2t = torch.zeros(size, dtype=torch.int64)
    if tuple(d2t.shape) != (size,) or d2t.is_floating_point():
        kind = str(d2t.dtype).removeprefix("torch.")
        raise UserError(
            f"d2t of the draft in {where} is {kind} {list(d2t.shape)} instead of int64 [{size}].",
            "Use a complete checkpoint.",
        )
    d2t = d2t.to(torch.int64)
    tokens = d2t + torch.arange(size)
    members = _membership(tokens, vocab)
    stored = None if t2d is None else t2d.to(torch.bool)
    if stored is not None and tuple(stored.shape) != (vocab,):
        raise UserError(
            f"t2d of the draft in {where} has shape {list(stored.shape)} instead of [{vocab}].",
            "Use config.json and model.safetensors of one checkpoint.",
        )
    if stored is not None and members is not None and torch.equal(stored, members):
        return d2t, members
    as_ids = _membership(d2t, vocab)
    if _says_the_same(stored, as_ids) if stored is not None else members is None and as_ids is not None:
        raise UserError(
            f"d2t of the draft in {where} holds token ids, not offsets.",
            "Store d2t[i] = token id - i, as EAGLE does.",
        )
    if members is None:
        raise UserError(
            f"d2t of the draft in {where} names tokens outside the vocabulary of {vocab}, or one twice.",
            "It must hold offsets: target id = draft id + d2t[draft id].",
        )
    if stored is not None:
        raise UserError(
            f"t2d of the draft in {where} marks other tokens than d2t names.",
            "Use a complete checkpoint, or remove t2d from it if d2t is the right one.",
        )
    return d2t, members


def _membership(tokens: torch.Tensor, vocab: int) -> torch.Tensor | None:
    """Bool ``[V]``, which ids ``tokens`` holds; None when one is out of range or there twice."""
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab or tokens.unique().numel() != tokens.numel():
        return None
    members = torch.zeros(vocab, dtype=torch.bool)
    members[tokens] = True
    return members


def _says_the_same(stored: torch.Tensor, members: torch.Tensor | None) -> bool:
    return members is not None and torch.equal(stored, members)
