"""Counts of acceptance: of one verify, of several alike, and of several requests together."""

import pytest

from eagle_kit.core.stats import SpecStats


def test_counts_of_several_verifies():
    stats = SpecStats()
    assert stats.accept_length == 0.0 and stats.acceptance_per_position == []
    stats.observe(3, 2)
    stats.observe(1, 0, times=4)
    stats.observe(2, 2, times=3)
    assert (stats.num_verifies, stats.num_emitted_tokens) == (8, 13)
    assert stats.histogram == [0, 4, 3, 1] and stats.num_accepted_at == [4, 4]
    assert stats.accept_length == 13 / 8 and stats.acceptance_per_position == [0.5, 0.5]


@pytest.mark.parametrize("is_longer_first", [True, False])
def test_a_sum_has_the_counts_of_both(is_longer_first):
    short = SpecStats()
    long = SpecStats()
    short.observe(2, 1)
    long.observe(5, 4, times=2)
    parts = [long, short] if is_longer_first else [short, long]
    total = parts[0]
    total.add(parts[1])
    assert total.num_verifies == 3 and total.num_emitted_tokens == 12
    assert total.histogram == [0, 0, 1, 0, 0, 2] and total.num_accepted_at == [3, 2, 2, 2]
