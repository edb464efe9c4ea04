"""Schema of a small target that is trained from nothing. Torch-free."""

from typing import Any

from pydantic import Field

from eagle_kit.config.options import Section


class TextConfig(Section):
    """Text to learn from.

    Attributes:
        source: conversations as ``data.source`` of a head's config names them.
        max_tokens: most tokens of the text.
        vocab_size: of the byte-level BPE tokenizer that is made from the same text.
    """

    source: str
    max_tokens: int = Field(default=20_000_000, ge=1000)
    vocab_size: int = Field(default=4096, ge=300, le=65536)


class OptimisationConfig(Section):
    """Optimisation: ``length`` is tokens of a row, ``rows`` the rows of a step."""

    length: int = Field(default=256, ge=8)
    rows: int = Field(default=16, ge=1)
    steps: int = Field(ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    warmup_steps: int = Field(default=50, ge=0)
    save_every: int = Field(default=100, ge=1)


class PretrainConfig(Section):
    """A whole run.

    Attributes:
        model: a Hugging Face config: ``model_type`` and its sizes. The vocabulary and the end token are set
            by the tokenizer.
        output_dir: the target's folder when it is done, with the run in ``training`` inside it.
        seed: of weights and of the order of rows.
    """

    model: dict[str, Any]
    output_dir: str
    seed: int = 0
    text: TextConfig
    training: OptimisationConfig
