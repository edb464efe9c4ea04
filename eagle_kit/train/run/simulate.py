"""Accept length of a chain on a known greedy continuation, simulated from a match table.

The draft is teacher-forced along the continuation: step k at row i embeds x[i + 1 + k] and reads its own
output of step k - 1, exactly as in a decoder that has accepted the k tokens before. The table is then walked
as a decoder would: a round at row i accepts until the first mismatch and adds the bonus token, and the next
round starts after it.

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
    """Compare the draft's most likely token with the token of the text, by row and step.

    Args:
        ids: int64 ``[T]``, a prompt and its greedy continuation.
        prompt_length: tokens of the prompt, >= 1.
        steps: S, length of the chain.

    Returns:
        Bool ``[R, S]`` for the rows ``prompt_length - 1 .. T - 3``; False past the end of the text.
    """
    # Rows of the continuation, and the features of all rows.
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

    # Tokens that rows embed, and their embeddings.
    def tokens(rows: torch.Tensor, step: int) -> torch.Tensor:
        return ids[(rows + 1 + step).clamp(max=length - 1)]

    def embeds(rows: torch.Tensor, step: int) -> torch.Tensor:
        if head.embed_tokens is not None:
            return head.embed_tokens(tokens(rows, step)).to(dtype)
        return target.embed(tokens(rows, step)).to(dtype)

    def mask(token: int) -> torch.Tensor:
        return target.embed(torch.tensor([token], device=device)).to(dtype)

    # Run the chains, and compare each step with the text.
    chains = ChainRows(features, tokens, embeds, mask, rows, torch.zeros_like(positions[:-1]))
    for step, fed_back in enumerate(head.chain(chains, steps)):
        drafted = head.to_target(head.logits(fed_back).argmax(-1))
        next_rows = rows + 2 + step
        next_tokens = ids[next_rows.clamp(max=length - 1)]
        table[:, step] = (next_rows < length) & (drafted == next_tokens)
    return table


def walk(table: torch.Tensor) -> SpecStats:
    """Simulate decoding with a chain of S along a match table ``[R, S]``; it counts as the engine does.

    Row r is the round whose draft follows the (r + 1)-th token of the continuation, so all rounds together
    emit at most R tokens.
    """
    stats = SpecStats()
    rows = table.tolist()
    row = 0
    while row < len(rows):
        # Drafts are accepted until the first mismatch.
        num_accepted = 0
        for is_match in rows[row]:
            if not is_match:
                break
            num_accepted += 1

        # They are emitted with the bonus token, up to the end of the continuation.
        num_emitted = min(num_accepted + 1, len(rows) - row)
        stats.observe(num_emitted, min(num_accepted, num_emitted))
        row += num_emitted
    return stats
