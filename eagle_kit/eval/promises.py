"""What a setting promises of its text against plain decoding, by its options and the temperature."""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from eagle_kit.config.engine import EngineConfig
from eagle_kit.eval.engines import TARGET_OPTIONS, NamedSetting


class Promise(StrEnum):
    """What is the same as with plain decoding."""

    TEXT = "text"
    """Every token, of greedy responses and of responses with a seed."""
    DISTRIBUTION = "distribution"
    """The distribution of each token after the ones before it."""
    NOTHING = "nothing"
    """Nothing: the setting is lossy."""


class Promised(NamedTuple):
    """Promises of a setting.

    Attributes:
        greedy: of responses at temperature 0.
        sampled: of responses at others.
        has_same_target: False where the target's numbers are other ones than in plain decoding.
    """

    greedy: Promise
    sampled: Promise
    has_same_target: bool = True

    def at(self, temperature: float) -> Promise:
        """The promise at a temperature."""
        return self.greedy if temperature == 0 else self.sampled


Promises = Mapping[str | None, Promised]
"""By the name of a setting."""
EXACT = Promised(Promise.TEXT, Promise.TEXT)
"""Promises of a setting whose options are not known."""


def promised(setting: NamedSetting, plain: EngineConfig) -> Promised:
    """What a setting promises.

    Args:
        plain: options of plain decoding, which the setting is compared with.
    """
    engine = setting.engine

    # Another target, or keys and values that are rounded after some of the tokens have been computed.
    is_same_target = all(getattr(engine, name) == getattr(plain, name) for name in TARGET_OPTIONS)
    if not is_same_target or "fp8_e4m3" in (engine.kv_dtype, plain.kv_dtype):
        return Promised(Promise.NOTHING, Promise.NOTHING, has_same_target=False)

    # Verifiers are of requests that sample.
    if engine.is_relaxed:
        return Promised(Promise.TEXT, Promise.NOTHING)
    if engine.sampled_drafts or engine.verifier not in (None, "target-only"):
        return Promised(Promise.TEXT, Promise.DISTRIBUTION)
    return EXACT
