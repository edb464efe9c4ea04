"""Candidates of a block whose logits a Markov head corrects by the token before (DSpark, arXiv 2607.05147).

The best candidate of each depth is that of the greedy chain, which is rolled out through the correction. The
other K - 1 are those with the largest probability over all candidates of the depth before, each weighed by
its own; so they are likely somewhere in a tree and need not be likely behind the chain. A recurrent
correction carries the state of the greedy chain, also behind other candidates.

Legend: B requests, D depths, K candidates of each, P tokens before, H hidden, Vd draft vocabulary.
"""

from typing import NamedTuple

import torch

from eagle_kit.drafts.base.draft_model import DraftModel


class DraftLogits:
    """Logits of a draft's rows that are ready, one depth after the other, corrected where the head has a
    Markov head.

    Args:
        read: ``[B, D, H]``, what the output layer reads of the rows that draft.
    """

    def __init__(self, model: DraftModel, read: torch.Tensor) -> None:
        self.model, self.read, self.markov = model, read, None if model.head is None else model.head.markov
        self.logits = model.logits(read.flatten(0, 1)).float().unflatten(0, read.shape[:2])
        self.state = None if self.markov is None else self.markov.first_state(read[:, 0])

    @property
    def depths(self) -> int:
        """D."""
        return self.read.shape[1]

    def behind(self, depth: int, before: torch.Tensor) -> torch.Tensor:
        """Logits fp32 ``[B, P, Vd]`` of the next ``depth`` behind each of the tokens ``before`` int64 ``[B,
        P]``, target ids, the first of which goes on."""
        b, given = before.shape
        mine = self.logits[:, depth, None]
        if self.markov is None or self.state is None or self.model.correction is None:
            return mine.expand(b, given, -1)
        rows, states = (
            part[:, None].expand(b, given, -1).flatten(0, 1) for part in (self.read[:, depth], self.state)
        )
        values, states = self.markov.step(rows, before.flatten(), states)
        self.state = states.unflatten(0, (b, given))[:, 0]
        return mine + self.model.correction(values).float().unflatten(0, (b, given))

    def confidence(self, depth: int, before: torch.Tensor) -> torch.Tensor | None:
        """The head's confidence in the token of ``depth`` behind the token ``before`` int64 ``[B]``, a
        probability fp32 ``[B]``; None of heads that do not tell it."""
        head = self.model.head
        logits = None if head is None else head.confidence_logits(self.read[:, depth], before)
        return None if logits is None else logits.float().sigmoid()


class RolledOut(NamedTuple):
    """Candidates of all depths.

    Attributes:
        tokens: target ids int64 ``[B, D, K]``.
        scores: log-probabilities fp32 ``[B, D, K, K]`` given those of the depth before, 0 where K is 1.
        survival: fp32 ``[B, D]``, the probability by the head's confidences that the greedy chain is accepted
            up to each depth; ``[B, 0]`` where they are not told.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    survival: torch.Tensor


def roll_out(drafted: DraftLogits, roots: torch.Tensor, topk: int, *, reads_confidence: bool) -> RolledOut:
    """Roll the greedy chain and the candidates beside it out, behind the tokens ``roots`` int64 ``[B]``, with
    the head's confidences where ``reads_confidence``."""
    before, tokens, scores = roots[:, None], [], []
    confidences: list[torch.Tensor] = []
    weights = torch.zeros_like(before, dtype=torch.float32)
    for depth in range(drafted.depths):
        sure = drafted.confidence(depth, before[:, 0]) if reads_confidence else None
        confidences += [] if sure is None else [sure]
        logits = drafted.behind(depth, before)
        if topk == 1:  # a chain ranks nothing
            ids = logits[:, 0].argmax(-1, keepdim=True)
            mine = torch.zeros_like(ids, dtype=torch.float32)[:, None]
        else:
            logits = logits - logits.logsumexp(-1, keepdim=True)
            overall = (logits + weights[:, :, None]).logsumexp(1)
            best = logits[:, 0].argmax(-1, keepdim=True)
            ids = overall.scatter(1, best, torch.inf).topk(topk, -1).indices
            weights = overall.gather(1, ids)
            mine = logits.gather(2, ids[:, None].expand(-1, logits.shape[1], -1)).expand(-1, topk, -1)
        before = drafted.model.to_target(ids)
        tokens.append(before)
        scores.append(mine)
    nothing = torch.zeros(len(roots), 0, device=roots.device)
    survival = torch.stack(confidences, 1).cumprod(1) if confidences else nothing
    return RolledOut(torch.stack(tokens, 1), torch.stack(scores, 1), survival)
