"""Candidates of a block whose logits a Markov head corrects by the token before (DSpark, arXiv 2607.05147).

The best candidate of each depth is that of the greedy chain, which is rolled out through the correction. The
other K - 1 are those with the largest probability over all candidates of the depth before, each weighed by
its own; so they are likely somewhere in a tree and need not be likely after the chain. A recurrent
correction carries the state of the greedy chain, also after other candidates.

Legend: B requests, D depths, K candidates of each, P tokens before, H hidden, Vd draft vocabulary.
"""

from typing import NamedTuple

import torch

from eagle_kit.drafts.base.draft_model import DraftModel


class DraftLogits:
    """Logits of the rows of a draft, one depth after the other, corrected where the head has a Markov head.

    Args:
        model: the draft model.
        lm_head_input: ``[B, D, H]``, input of the output layer at the rows of all depths.
    """

    def __init__(self, model: DraftModel, lm_head_input: torch.Tensor) -> None:
        self.model = model
        self.lm_head_input = lm_head_input
        self.markov = None if model.head is None else model.head.markov
        logits = model.logits(lm_head_input.flatten(0, 1)).float()
        self.logits = logits.unflatten(0, lm_head_input.shape[:2])  # [B, D, Vd]
        self.state = None if self.markov is None else self.markov.first_state(lm_head_input[:, 0])

    @property
    def depths(self) -> int:
        """D."""
        return self.lm_head_input.shape[1]

    def after(self, depth: int, before: torch.Tensor) -> torch.Tensor:
        """Logits of the next ``depth`` after each of P tokens.

        Args:
            before: target ids int64 ``[B, P]``; the first of them continues the chain.

        Returns:
            fp32 ``[B, P, Vd]``.
        """
        b, num_before = before.shape
        logits = self.logits[:, depth, None]  # [B, 1, Vd]
        if self.markov is None or self.state is None or self.model.correction is None:
            return logits.expand(b, num_before, -1)

        # One step of the Markov head for every token, from the state of the chain.
        rows = self.lm_head_input[:, depth][:, None].expand(b, num_before, -1).flatten(0, 1)  # [B * P, H]
        states = self.state[:, None].expand(b, num_before, -1).flatten(0, 1)
        values, states = self.markov.step(rows, before.flatten(), states)
        self.state = states.unflatten(0, (b, num_before))[:, 0]
        return logits + self.model.correction(values).float().unflatten(0, (b, num_before))

    def confidence(self, depth: int, before: torch.Tensor) -> torch.Tensor | None:
        """The head's confidence in the token of ``depth`` after the token ``before`` int64 ``[B]``, a
        probability fp32 ``[B]``; None for heads that do not predict it."""
        head = self.model.head
        logits = None if head is None else head.confidence_logits(self.lm_head_input[:, depth], before)
        return None if logits is None else logits.float().sigmoid()


class RolledOut(NamedTuple):
    """Candidates of all depths.

    Attributes:
        tokens: target ids int64 ``[B, D, K]``.
        scores: log-probabilities fp32 ``[B, D, K, K]`` given those of the depth before, 0 where K is 1.
        survival: fp32 ``[B, D]``, the probability by the head's confidences that the greedy chain is accepted
            up to each depth; ``[B, 0]`` if they are not needed.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    survival: torch.Tensor


def roll_out(drafted: DraftLogits, roots: torch.Tensor, topk: int, *, needs_confidence: bool) -> RolledOut:
    """Roll out the greedy chain and the candidates beside it.

    Args:
        drafted: logits of all depths.
        roots: int64 ``[B]``, the tokens before depth 1.
        topk: K.
        needs_confidence: return the head's confidences too.
    """
    before = roots[:, None]
    tokens = []
    scores = []
    confidences: list[torch.Tensor] = []
    weights = torch.zeros_like(before, dtype=torch.float32)  # log-probabilities of ``before``, [B, P]
    for depth in range(drafted.depths):
        confidence = drafted.confidence(depth, before[:, 0]) if needs_confidence else None
        if confidence is not None:
            confidences.append(confidence)

        logits = drafted.after(depth, before)  # [B, P, Vd]
        if topk == 1:  # a chain ranks nothing
            ids = logits[:, 0].argmax(-1, keepdim=True)
            depth_scores = torch.zeros_like(ids, dtype=torch.float32)[:, None]
        else:
            # The chain's best token, then those of the largest probability over all tokens before.
            logits = logits - logits.logsumexp(-1, keepdim=True)
            overall = (logits + weights[:, :, None]).logsumexp(1)
            best = logits[:, 0].argmax(-1, keepdim=True)
            ids = overall.scatter(1, best, torch.inf).topk(topk, -1).indices
            weights = overall.gather(1, ids)
            depth_scores = logits.gather(2, ids[:, None].expand(-1, logits.shape[1], -1))
            depth_scores = depth_scores.expand(-1, topk, -1)
        before = drafted.model.to_target(ids)
        tokens.append(before)
        scores.append(depth_scores)

    survival = torch.zeros(len(roots), 0, device=roots.device)
    if confidences:
        survival = torch.stack(confidences, 1).cumprod(1)
    return RolledOut(torch.stack(tokens, 1), torch.stack(scores, 1), survival)
