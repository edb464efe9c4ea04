"""Accept length of a chain on a known greedy continuation, simulated from a match table.

The draft is teacher-forced along the continuation: step k at row i embeds x[i+1+k] and is fed its own output
of step k - 1, exactly as a decoder that accepted the k tokens before. The table is then walked as the
decoder walks: a round at row i accepts until the first mismatch, adds the bonus token, and the next round
starts behind it.

Legend: T tokens of prompt and continuation, R rows of the continuation, S draft steps, H hidden.
"""

from collections.abc import Iterator

import torch

from eagle_kit.core.stats import SpecStats
from eagle_kit.kernels.prefill_attention import prefill_attention
from eagle_kit.kernels.variant import AttentionVariant
from eagle_kit.models.heads.draft_head import DraftHead, StepForm
from eagle_kit.models.heads.p_eagle import PEagleHead
from eagle_kit.models.targets.target import Target


class RowAttend:
    """Attention of the chain: step 0 is causal over all rows; step k sees the keys of step 0 up to its row,
    and those that its row has made since.

    Args:
        rows: int64 ``[R]``, the rows that go on after step 0.
        variant: how the head attends.
    """

    def __init__(self, rows: torch.Tensor, variant: AttentionVariant) -> None:
        self.rows, self.variant, self.scale = rows, variant, variant.scale
        self._prefix: tuple[torch.Tensor, torch.Tensor] | None = None
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._prefix is None:
            self._prefix = k, v
            return prefill_attention(q, k, v, self.variant)
        self._own.append((k, v))
        k0, v0 = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in self._prefix)
        own_k, own_v = (
            torch.stack(x, 1).repeat_interleave(q.shape[1] // k.shape[1], 2)
            for x in zip(*self._own, strict=True)
        )
        prefix = torch.einsum("rhd,thd->rht", q, k0).float() * self.scale
        keys = torch.arange(k0.shape[0], device=q.device)
        firsts = self.variant.limits.firsts(self.rows + len(self._own))
        hidden_from_row = (keys > self.rows[:, None]) | (keys < firsts[:, None])
        prefix = prefix.masked_fill(hidden_from_row[:, None], float("-inf"))
        own = torch.einsum("rhd,rjhd->rhj", q, own_k).float() * self.scale
        weights = torch.cat((prefix, own), -1).softmax(-1).to(q.dtype)
        on_prefix, on_own = weights.split((k0.shape[0], own_k.shape[1]), -1)
        return torch.einsum("rht,thd->rhd", on_prefix, v0) + torch.einsum("rhj,rjhd->rhd", on_own, own_v)


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
    features = head.features(out.hidden[:-1].to(dtype), out.aux[:-1].to(dtype))
    for step, fed_back in enumerate(_chain(target, head, ids, features, rows, steps)):
        drafted = head.to_target(head.logits(fed_back).argmax(-1))
        exists = rows + 2 + step < length
        table[:, step] = exists & (drafted == ids[(rows + 2 + step).clamp(max=length - 1)])
    return table


def _chain(
    target: Target,
    head: DraftHead,
    ids: torch.Tensor,
    features: torch.Tensor,
    rows: torch.Tensor,
    steps: int,
) -> Iterator[torch.Tensor]:
    """The head's states at ``rows``, ``[R, H]``, for every step; one layer goes on from its own states, of
    several each runs over all rows, and masks are rows of one pass."""
    variant, positions = head.config.layer.attention, torch.arange(len(features), device=ids.device)

    def embeds(at: torch.Tensor) -> torch.Tensor:
        return target.embed(ids[at.clamp(max=len(ids) - 1)]).to(features.dtype)

    if isinstance(head, PEagleHead):
        inputs = head.midlayer.inputs(features, embeds(positions + 1))

        def attention() -> tuple[RowAttend, RowAttend]:
            attend = RowAttend(rows, variant)
            return attend, attend

        yield from head.chain(inputs, positions, rows, steps, attention)
        return
    if head.step_form is StepForm.MODULES:
        for step in range(steps):
            attend = RowAttend(rows, variant)
            features = head(features, embeds(positions + 1 + step), positions + step, attend, step)
            yield features[rows]
        return
    attend = RowAttend(rows, variant)
    fed_back = head(features, embeds(positions + 1), positions, attend)[rows]
    yield fed_back
    for step in range(1, steps):
        fed_back = head(fed_back, embeds(rows + 1 + step), rows + step, attend)
        yield fed_back


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
