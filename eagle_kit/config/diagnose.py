"""Options of a diagnosis: prompts, their responses, and the engine that decodes them. Torch-free."""

from pydantic import Field

from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.options import Options


class DiagnoseConfig(Options):
    """Search for the cause of low acceptance. Decoding is greedy."""

    task: str = "ours"
    """Prompts to replay: the name of a task, or a JSONL file as for eval."""

    limit: int = Field(default=24, ge=8)
    """Prompts, drawn evenly over their categories; at least 8."""

    max_tokens: int = Field(default=64, ge=8)
    """Most tokens per response, at least 8; too few tokens in all are refused."""

    context: int = Field(default=1024, ge=0)
    """Tokens of the long texts on which acceptance is read by position; 0 leaves them out."""

    seed: int = 0
    """Seed of the draw of prompts."""

    engine: EngineConfig = EngineConfig()
    """Options of the engine; without a shape, a chain of four."""
