"""Models for the tests of the engine."""

import pytest
from tiny import tiny_head, tiny_target


@pytest.fixture(scope="module")
def models():
    """A vocabulary of 11 lets random heads guess right often enough to exercise acceptance."""
    target = tiny_target(vocab_size=11)
    return target, tiny_head(target, draft_vocab_size=9)
