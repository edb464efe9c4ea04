"""Schema of a small target that is trained from nothing. Torch-free."""

from typing import Any

from pydantic import Field

from eagle_kit.config.options import Section


class TextConfig(Section):
    """Text to learn from."""

    source: str
    """Conversations as ``data.source`` of a head's config names them."""

    max_tokens: int = Field(default=20_000_000, ge=1000)
    """Most tokens of the text."""

    vocab_size: int = Field(default=4096, ge=300, le=65536)
    """Of the byte-level BPE tokenizer that is made from the same text."""


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


class PretrainConfig(Section):
    """A whole run."""

    model: dict[str, Any]
    """A Hugging Face config: ``model_type`` and its sizes. The vocabulary and the end token are set by the
    tokenizer.
    """

    output_dir: str
    """The target's folder when it is done, with the run in ``training`` inside it."""

    seed: int = 0
    """Of weights and of the order of rows."""

    text: TextConfig
    training: OptimisationConfig
