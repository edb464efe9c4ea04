"""Accept length of a chain on a known greedy continuation, simulated from a match table.

The draft is teacher-forced along the continuation: step k at row i embeds x[i+1+k] and is fed its own output
of step k - 1, exactly as a decoder that accepted the k tokens before. The table is then walked as the
decoder walks: a round at row i accepts until the first mismatch, adds the bonus token, and the next round
starts behind it.

Legend: T tokens of prompt and continuation, R rows of the continuation, S draft steps.
"""

import torch

from eagle_kit.core.stats import SpecStats
from eagle_kit.models.draft_chain import ChainRows
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.models.targets.target import Target


@torch.no_grad()
def match_table(
    target: Target, head: DraftHead, ids: torch.Tensor, prompt_length: int, steps: int
) -> torch.Tensor:
    """Matches of the draft's best token with the token that follows, by row and step.

    Args:
        ids: int64 ``[T]``, a prompt and its greedy continuation.
        prompt_length: tokens of the prompt, >= 1.
        steps: S, length of the chain.

    Returns:
        Bool ``[R, S]`` for the rows ``prompt_length - 1 .. T - 3``; False where the continuation has ended.
    """
    device = ids.device
    length = ids.shape[0]
    positions = torch.arange(length, device=device)
    out = target(ids, positions, target.causal(), head.capture)
    rows = torch.arange(prompt_length - 1, max(prompt_length - 1, length - 2), device=device)
    table = torch.zeros(rows.shape[0], steps, dtype=torch.bool, device=device)
    if rows.shape[0] == 0:
        return table
    dtype = head.dtype
    features = head.features(out.hidden[:-1].to(dtype), out.aux_hidden_states[:-1].to(dtype))

    def tokens(at: torch.Tensor, step: int) -> torch.Tensor:
        return ids[(at + 1 + step).clamp(max=length - 1)]

    def embeds(at: torch.Tensor, step: int) -> torch.Tensor:
        if head.embed_tokens is not None:
            return head.embed_tokens(tokens(at, step)).to(dtype)
        return target.embed(tokens(at, step)).to(dtype)

    def mask(token: int) -> torch.Tensor:
        return target.embed(torch.tensor([token], device=device)).to(dtype)

    given = ChainRows(features, tokens, embeds, mask, rows, torch.zeros_like(positions[:-1]))
    for step, fed_back in enumerate(head.chain(given, steps)):
        drafted = head.to_target(head.logits(fed_back).argmax(-1))
        exists = rows + 2 + step < length
        table[:, step] = exists & (drafted == ids[(rows + 2 + step).clamp(max=length - 1)])
    return table


def walk(table: torch.Tensor) -> SpecStats:
    """Decode along a match table ``[R, S]`` with a chain of S; the same counts as the engine's.

    Row r is the round whose draft follows the (r + 1)-th token of the continuation, so R rounds at most emit
    R tokens.
    """
    stats = SpecStats()
    rows = table.tolist()
    row = 0
    while row < len(rows):
        accepted = next((step for step, match in enumerate(rows[row]) if not match), len(rows[row]))
        emitted = min(accepted + 1, len(rows) - row)
        stats.observe(emitted, min(accepted, emitted))
        row += emitted
    return stats
