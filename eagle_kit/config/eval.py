"""Options of an evaluation: tasks, shapes and the engine that decodes them. Torch-free."""

from typing import Any

from pydantic import Field, field_validator

from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.options import Options
from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import NO_SPECULATION, SpecShape

AUTO = "auto"
DEFAULT_SHAPES = ("4,1,5", "5,4,16", AUTO)


class EvalConfig(Options):
    """Comparison of drafts with plain decoding. Decoding is greedy."""

    tasks: tuple[str, ...] = ("human_eval", "ours")
    """Tasks: human_eval, ours, bfcl, or files of prompts: published sets as they are, .jsonl, .jsonl.gz or
    .json; the name of a known set says where to get it.
    """

    shapes: tuple[str, ...] = DEFAULT_SHAPES
    """Speculation shapes steps,topk,tokens, tried with every draft; auto chooses from cycle to cycle."""

    max_tokens: int = Field(default=128, ge=1)
    """Most tokens per response."""

    limit: int | None = None
    """Prompts of each task, drawn evenly over its categories; default all."""

    seed: int = 0
    """Seed of the draw of prompts."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template for prompts that have none of their own, such as {"enable_thinking":
    false}.
    """

    plots: bool = True
    """Draw the plots; needs matplotlib."""

    engine: EngineConfig = EngineConfig(max_batch_size=1)
    """Options of the engines; its algorithm is not looked at, and its shape only says what memory is planned
    for.
    """

    @field_validator("shapes")
    @classmethod
    def _shapes_in_one_spelling(cls, shapes: tuple[str, ...]) -> tuple[str, ...]:
        parsed = [shape if shape == AUTO else SpecShape.parse(shape) for shape in shapes]
        if not parsed:
            raise UserError(
                "No shape was given.", f"Give steps,topk,tokens such as {' '.join(DEFAULT_SHAPES)}."
            )
        if NO_SPECULATION in parsed:
            raise UserError(
                "The shape none is ordinary decoding, which always runs.", "Leave it out of the shapes."
            )
        if len(set(parsed)) < len(parsed):
            raise UserError("A shape was given twice.", "Give every shape once.")
        return tuple(str(shape) for shape in parsed)
