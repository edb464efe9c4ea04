"""Acceptance statistics, with one definition for trainer, evaluator and server."""

from dataclasses import dataclass, field


@dataclass
class SpecStats:
    """Acceptance counts of one request, or the sum over many.

    A *verify* is one target forward over a window. It emits the accepted draft tokens and one bonus token, so
    ``accept_length`` is tokens emitted per verify, bonus included. The first token of a response comes from
    prefill and belongs to no verify. A forward without drafts is no verify either, in a plain run as in a run
    that drafts now and then. Tokens after a stop or ``max_tokens`` are never counted.

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
        if self.num_verifies == 0:
            return 0.0
        return self.num_emitted_tokens / self.num_verifies

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of verifies whose output reached draft depth 1, 2, ... ."""
        if self.num_verifies == 0:
            return []
        return [count / self.num_verifies for count in self.num_accepted_at]

    def observe(self, num_emitted: int, num_accepted: int, times: int = 1) -> None:
        """Count equal verifies.

        Args:
            num_emitted: tokens that each put into the output.
            num_accepted: accepted drafts among them.
            times: number of verifies.
        """
        self.num_verifies += times
        self.num_emitted_tokens += num_emitted * times
        if len(self.histogram) <= num_emitted:
            _grow(self.histogram, num_emitted + 1)
        self.histogram[num_emitted] += times
        if len(self.num_accepted_at) < num_accepted:
            _grow(self.num_accepted_at, num_accepted)
        for depth in range(num_accepted):
            self.num_accepted_at[depth] += times

    def add(self, other: "SpecStats") -> None:
        """Add the counts of ``other`` to these."""
        self.num_verifies += other.num_verifies
        self.num_emitted_tokens += other.num_emitted_tokens
        _add_counts(self.histogram, other.histogram)
        _add_counts(self.num_accepted_at, other.num_accepted_at)


def _add_counts(counts: list[int], others: list[int]) -> None:
    """Add ``others`` to ``counts``, which grow to their length."""
    _grow(counts, len(others))
    for i, count in enumerate(others):
        counts[i] += count


def _grow(counts: list[int], length: int) -> None:
    """Append zeros up to a length."""
    counts.extend([0] * (length - len(counts)))
