"""Candidates of a block whose logits a Markov head corrects by the token before (DSpark, arXiv 2607.05147).

The best candidate of each depth is that of the greedy chain, which is rolled out through the correction. The
other K - 1 are those with the largest probability over all candidates of the depth before, each weighed by
its own; so they are likely somewhere in a tree and need not be likely behind the chain. A recurrent
correction carries the state of the greedy chain, also behind other candidates.

Legend: B requests, D depths, K candidates of each, P 1 or K, H hidden, Vd draft vocabulary.
"""

import torch

from eagle_kit.models.heads.markov import MarkovHead
from eagle_kit.speculation.propose.draft_model import HeadDraftModel
from eagle_kit.speculation.propose.ready import Candidates


class Corrections:
    """Corrected logits of a block's rows, one depth after the other.

    Args:
        read: ``[B, D, H]``, what the output layer reads of the rows that draft.
    """

    def __init__(self, model: HeadDraftModel, markov: MarkovHead, read: torch.Tensor) -> None:
        assert model.correction is not None
        self.markov, self.read, self.output = markov, read, model.correction
        self.logits = model.logits(read.flatten(0, 1)).float().unflatten(0, read.shape[:2])
        self.state = markov.first_state(read[:, 0])

    def behind(self, depth: int, before: torch.Tensor) -> torch.Tensor:
        """Logits fp32 ``[B, P, Vd]`` of the next ``depth`` behind each of the tokens ``before`` int64 ``[B,
        P]``, the first of which goes on."""
        b, given = before.shape
        rows, states = (
            part[:, None].expand(b, given, -1).flatten(0, 1) for part in (self.read[:, depth], self.state)
        )
        values, states = self.markov.step(rows, before.flatten(), states)
        self.state = states.unflatten(0, (b, given))[:, 0]
        return self.logits[:, depth, None] + self.output(values).float().unflatten(0, (b, given))


def roll_out(
    model: HeadDraftModel, markov: MarkovHead, read: torch.Tensor, roots: torch.Tensor, topk: int
) -> Candidates:
    """Candidates of all depths, behind the tokens ``roots`` int64 ``[B]``; ``read`` as of
    :class:`Corrections`."""
    corrections, before = Corrections(model, markov, read), roots[:, None]
    tokens, scores = [], []
    weights = torch.zeros_like(before, dtype=torch.float32)
    for depth in range(read.shape[1]):
        logits = corrections.behind(depth, before)
        if topk == 1:  # a chain ranks nothing
            ids = logits.argmax(-1)
            mine = torch.zeros_like(ids, dtype=torch.float32)[:, None]
        else:
            logits -= logits.logsumexp(-1, keepdim=True)
            overall = (logits + weights[:, :, None]).logsumexp(1)
            best = logits[:, 0].argmax(-1, keepdim=True)
            ids = overall.scatter(1, best, torch.inf).topk(topk, -1).indices
            weights = overall.gather(1, ids)
            mine = logits.gather(2, ids[:, None].expand(-1, logits.shape[1], -1)).expand(-1, topk, -1)
        before = model.to_target(ids)
        tokens.append(before)
        scores.append(mine)
    return Candidates(torch.stack(tokens, 1), torch.stack(scores, 1))
