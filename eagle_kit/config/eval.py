"""Options of an evaluation: tasks, shapes, sampling and the engine that decodes them. Torch-free."""

from typing import Any, NamedTuple

from pydantic import Field, field_validator, model_validator

from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.options import Options
from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import NO_SPECULATION, SpecShape

AUTO = "auto"
DEFAULT_SHAPES = ("4,1,5", "5,4,16", AUTO)


class Round(NamedTuple):
    """One pass over all prompts.

    Attributes:
        number: from 0.
        temperature: of the samples; 0 is greedy.
        seed: that the seeds of its prompts are made from.
    """

    number: int
    temperature: float
    seed: int


class EvalConfig(Options):
    """Comparison of drafts with plain decoding."""

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

    temperatures: tuple[float, ...] = (0.0,)
    """Temperatures, measured one after another; 0, the default, is greedy."""

    top_p: float = 1.0
    """Probability of the most likely tokens that are kept together, at temperatures above 0."""

    seeds: tuple[int, ...] = (0,)
    """Seeds: at each temperature above 0 all prompts are decoded once with each. The first one also draws the
    prompts of --limit.
    """

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template for prompts that have none of their own, such as {"enable_thinking":
    false}.
    """

    plots: bool = True
    """Draw the plots; needs matplotlib."""

    engine: EngineConfig = EngineConfig(max_batch_size=1)
    """Options of the engines. Plain decoding has them without those of drafts. Drafts have the shapes of
    ``shapes``; the shape in here only says what memory is planned for.
    """

    @property
    def rounds(self) -> list[Round]:
        """Passes over all prompts: one for greedy decoding, one for each seed at other temperatures."""
        rounds: list[Round] = []
        for temperature in self.temperatures:
            for seed in self.seeds if temperature > 0 else self.seeds[:1]:
                rounds.append(Round(len(rounds), temperature, seed))
        return rounds

    @field_validator("temperatures", "seeds")
    @classmethod
    def _given_once(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        if not values:
            raise UserError("No temperature or no seed was given.", "Give at least one of each.")
        if len(set(values)) < len(values):
            raise UserError("A temperature or a seed was given twice.", "Give each once.")
        return values

    @model_validator(mode="after")
    def _samples_are_possible(self) -> "EvalConfig":
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature, top_p=self.top_p)
        if self.top_p != 1.0 and not any(self.temperatures):
            raise UserError(
                f"top_p is {self.top_p}, and decoding is greedy.",
                "Give a temperature above 0, or leave it out.",
            )
        return self

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
