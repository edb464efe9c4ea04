"""What a user asks of the engine and what comes back."""

from dataclasses import dataclass, field

from eagle_kit.core.errors import UserError
from eagle_kit.core.stats import SpecStats


@dataclass(frozen=True)
class SamplingParams:
    """How one reply is decoded.

    Attributes:
        max_tokens: most tokens of the reply, >= 1.
        temperature: 0 is greedy, the one law that is served so far.
        stop_token_ids: tokens that end the reply besides the model's own end tokens; the stop token is kept.
        ignore_eos: go on after the model's own end tokens.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UserError(f"max_tokens is {self.max_tokens}.", "Ask for at least one token.")
        if self.temperature != 0.0:
            raise UserError(
                f"A temperature of {self.temperature} was asked for, but only greedy decoding is served.",
                "Set temperature to 0.",
            )


@dataclass
class RequestOutput:
    """One finished reply.

    Attributes:
        prompt_ids: the prompt as tokens.
        token_ids: the reply, its stop token included.
        text: the reply decoded, special tokens left out.
        finish_reason: ``"stop"`` (a stop token), ``"length"`` (max_tokens) or ``"context"`` (the context is
            full).
        stats: acceptance of this reply.
        prefill_s: seconds from admission to the first token.
        decode_s: seconds from the first token to the last; shared by the batch it decoded in.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stats: SpecStats = field(default_factory=SpecStats)
    prefill_s: float = 0.0
    decode_s: float = 0.0
