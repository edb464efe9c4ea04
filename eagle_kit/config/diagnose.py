"""Options of a diagnosis: prompts, their replies, and the engine that decodes them. Torch-free."""

from pydantic import Field

from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.options import Options


class DiagnoseConfig(Options):
    """Search for the cause of low acceptance. Decoding is greedy.

    Attributes:
        task: prompts to replay: the name of a task, or a JSONL file as for eval.
        limit: prompts, drawn evenly over their categories.
        max_tokens: most tokens per reply.
        context: tokens of the long texts on which acceptance is read by position; 0 leaves them out.
        seed: seed of the draw of prompts.
        engine: options of the engine; without a shape, a chain of four.
    """

    task: str = "ours"
    limit: int = Field(default=24, ge=8)
    max_tokens: int = Field(default=64, ge=8)
    context: int = Field(default=1024, ge=0)
    seed: int = 0
    engine: EngineConfig = EngineConfig()
