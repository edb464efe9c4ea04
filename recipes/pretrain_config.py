"""Schema of a small model that is trained from nothing, or from layers of a larger one. Torch-free."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from eagle_kit.config.options import Section


class TextConfig(Section):
    """Text to learn from."""

    source: str | tuple[str, ...] = Field(min_length=1)
    """Conversations as ``data.source`` of a head's config names them, or a list of such sources."""

    max_tokens: int = Field(default=20_000_000, ge=1000)
    """Most tokens of the text."""

    vocab_size: int = Field(default=4096, ge=300, le=65536)
    """Of the byte-level BPE tokenizer that is made from the same text; not with ``start_from``."""


class StartConfig(Section):
    """Layers of a target that a smaller model begins with. It keeps the target's tokenizer, embedding, last
    norm and output layer; embedding and output layer are not trained.
    """

    target: str
    """The target, as ``target`` of a head's config names it."""

    layers: tuple[int, ...] = Field(min_length=1)
    """Numbers of its layers from 0, in increasing order."""

    @model_validator(mode="after")
    def _layers_increase(self) -> Self:
        if list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ValueError("give layers as different numbers from 0, in increasing order")
        return self


class OptimisationConfig(Section):
    """Optimisation with AdamW, with a linear warm-up and a cosine."""

    length: int = Field(default=256, ge=8)
    """Tokens of a row."""

    rows: int = Field(default=16, ge=1)
    """Rows of a step."""

    steps: int = Field(ge=1)
    """Optimiser steps."""

    learning_rate: float = Field(default=1e-3, gt=0)
    """Largest learning rate, after the warm-up."""

    warmup_steps: int = Field(default=50, ge=0)
    """Steps of the warm-up."""

    save_every: int = Field(default=100, ge=1)
    """Steps between checkpoints."""

    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the products; weights are float32. ``auto`` is bfloat16 on a GPU that has it, float32
    elsewhere.
    """


class PretrainConfig(Section):
    """A whole run."""

    model: dict[str, Any] | None = None
    """A Hugging Face config: ``model_type`` and its sizes. The vocabulary and the end token are set by the
    tokenizer.
    """

    start_from: StartConfig | None = None
    """Layers of a target to begin with, in place of ``model``."""

    output_dir: str
    """The model's folder when it is done, with the run in ``training`` inside it."""

    seed: int = 0
    """Of weights and of the order of rows."""

    text: TextConfig
    training: OptimisationConfig

    @model_validator(mode="after")
    def _model_comes_from_somewhere(self) -> Self:
        if (self.model is None) == (self.start_from is None):
            raise ValueError("give either model or start_from")
        if self.start_from is not None and "vocab_size" in self.text.model_fields_set:
            raise ValueError("leave text.vocab_size out: the tokenizer is that of start_from.target")
        return self
