"""What a setting promises of its text against plain decoding, by its options and the temperature."""

from enum import StrEnum

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


def promise_of(setting: NamedSetting, plain: EngineConfig, temperature: float) -> Promise:
    """What a setting promises at a temperature.

    Args:
        plain: options of plain decoding, which the setting is compared with.
    """
    engine = setting.engine

    # Another target, or keys and values that are rounded after some of the tokens have been computed.
    is_same_target = all(getattr(engine, name) == getattr(plain, name) for name in TARGET_OPTIONS)
    if not is_same_target or "fp8_e4m3" in (engine.kv_dtype, plain.kv_dtype):
        return Promise.NOTHING

    # Verifiers are of requests that sample.
    if temperature == 0:
        return Promise.TEXT
    if engine.is_relaxed:
        return Promise.NOTHING
    if engine.sampled_drafts or engine.verifier not in (None, "target-only"):
        return Promise.DISTRIBUTION
    return Promise.TEXT
