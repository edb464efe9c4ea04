"""eagle_kit: train, export and serve EAGLE-3 draft heads for speculative decoding."""

from typing import TYPE_CHECKING, Any

from eagle_kit.core.process import limit_spinning

if TYPE_CHECKING:
    from eagle_kit.config.engine import EngineConfig
    from eagle_kit.core.output import RequestOutput, ResponseDelta
    from eagle_kit.core.sampling_params import SamplingParams
    from eagle_kit.core.shape import SpecShape
    from eagle_kit.core.structured_outputs import StructuredOutputs
    from eagle_kit.engine.llm import LLM

__version__ = "0.2.0"
__all__ = [
    "LLM",
    "EngineConfig",
    "RequestOutput",
    "ResponseDelta",
    "SamplingParams",
    "SpecShape",
    "StructuredOutputs",
    "__version__",
]

limit_spinning()  # OpenMP reads it when torch is loaded

_HOMES = {
    "EngineConfig": "eagle_kit.config.engine",
    "LLM": "eagle_kit.engine.llm",
    "ResponseDelta": "eagle_kit.core.output",
    "RequestOutput": "eagle_kit.core.output",
    "SamplingParams": "eagle_kit.core.sampling_params",
    "SpecShape": "eagle_kit.core.shape",
    "StructuredOutputs": "eagle_kit.core.structured_outputs",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``import eagle_kit`` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'eagle_kit' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
