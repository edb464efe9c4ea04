"""Acceptance statistics, with one definition for trainer, evaluator and server."""

from dataclasses import dataclass, field


@dataclass
class SpecStats:
    """Acceptance counts of one request, or the sum over many.

    A *verify* is one target forward over a window. It emits the accepted draft tokens and one bonus token, so
    ``accept_length`` is tokens emitted per verify, bonus included. The first token of a reply comes from
    prefill and belongs to no verify, nor do those of plain cycles: a forward without drafts is no verify, in
    a plain run as in one that drafts now and then. Tokens beyond a stop or ``max_tokens`` are never counted.

    Attributes:
        num_verifies: target forwards over windows.
        num_emitted_tokens: tokens those forwards added to the output.
        histogram: ``histogram[n]`` verifies emitted n tokens.
        num_accepted_at: ``num_accepted_at[d]`` verifies whose draft token at depth d + 1 reached the output.
    """

    num_verifies: int = 0
    num_emitted_tokens: int = 0
    histogram: list[int] = field(default_factory=list)
    num_accepted_at: list[int] = field(default_factory=list)

    @property
    def accept_length(self) -> float:
        """Tokens per verify, bonus included; 0.0 before the first verify."""
        return self.num_emitted_tokens / self.num_verifies if self.num_verifies else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of verifies whose output reached draft depth 1, 2, ... ."""
        return [n / self.num_verifies for n in self.num_accepted_at] if self.num_verifies else []

    def observe(self, num_emitted: int, num_drafts_kept: int, times: int = 1) -> None:
        """Count verifies, each of which put ``num_emitted`` tokens into the output, ``num_drafts_kept`` of
        them drafts."""
        self.num_verifies += times
        self.num_emitted_tokens += num_emitted * times
        if len(self.histogram) <= num_emitted:
            _grow(self.histogram, num_emitted + 1)
        self.histogram[num_emitted] += times
        if len(self.num_accepted_at) < num_drafts_kept:
            _grow(self.num_accepted_at, num_drafts_kept)
        for depth in range(num_drafts_kept):
            self.num_accepted_at[depth] += times

    def add(self, other: "SpecStats") -> None:
        """Add the counts of ``other`` to these."""
        self.num_verifies += other.num_verifies
        self.num_emitted_tokens += other.num_emitted_tokens
        for mine, theirs in (
            (self.histogram, other.histogram),
            (self.num_accepted_at, other.num_accepted_at),
        ):
            _grow(mine, len(theirs))
            for i, n in enumerate(theirs):
                mine[i] += n


def _grow(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))
