"""Speculation shapes, written ``steps,topk,tokens``."""

from typing import NamedTuple

from eagle_kit.core.errors import UserError

MAX_WINDOW = 64
"""Most nodes a window may hold: ancestors are the bits of one 64-bit word."""


class SpecShape(NamedTuple):
    """How a draft is grown and how much of it is verified.

    Attributes:
        steps: depth of the draft, S. 0 is ordinary decoding.
        topk: candidates kept per depth, K. 1 is a chain.
        tokens: nodes verified in one target forward, N, *root included*.
    """

    steps: int
    topk: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.steps},{self.topk},{self.tokens}"

    @classmethod
    def parse(cls, text: "str | SpecShape | None") -> "SpecShape":
        """Read ``"5,4,16"``; ``None`` and ``"none"`` are ordinary decoding. Raises UserError."""
        if isinstance(text, cls):
            text._check()
            return text
        if text is None or text == "none":
            return NO_SPECULATION
        try:
            steps, topk, tokens = (int(part) for part in str(text).split(","))
        except ValueError:
            raise UserError(
                f"The speculation shape {text!r} is not of the form steps,topk,tokens.",
                "Give three whole numbers such as 4,1,5 (a chain) or 5,4,16 (a tree).",
            ) from None
        shape = cls(steps, topk, tokens)
        shape._check()
        return shape

    def _check(self) -> None:
        steps, topk, tokens = self
        if self == NO_SPECULATION:
            return
        if steps < 1 or topk < 1 or not 2 <= tokens <= MAX_WINDOW:
            raise UserError(
                f"The speculation shape {self} has a number out of range.",
                f"Use steps >= 1, topk >= 1 and 2 to {MAX_WINDOW} tokens, or none for ordinary decoding.",
            )
        if topk == 1 and tokens != steps + 1:
            raise UserError(
                f"The chain {self} cannot verify {tokens} tokens, only a root and {steps} drafts.",
                f"Write {steps},1,{steps + 1}.",
            )
        if tokens - 1 > topk + (steps - 1) * topk * topk:
            raise UserError(
                f"The shape {self} asks for {tokens} tokens, more than the draft grows "
                f"({1 + topk + (steps - 1) * topk * topk} with the root).",
                "Lower tokens, or raise steps or topk.",
            )
        if tokens <= steps:
            raise UserError(
                f"The shape {self} verifies {tokens} tokens, too few to reach its depth of {steps}.",
                f"Use at least {steps + 1} tokens, or fewer steps.",
            )
        if topk * max(steps - 1, 0) > MAX_WINDOW:
            raise UserError(
                f"The shape {self} drafts {topk * (steps - 1)} nodes; a window holds {MAX_WINDOW}.",
                "Lower steps or topk.",
            )


NO_SPECULATION = SpecShape(0, 1, 1)


def auto_shape(model_type: str, algorithm: str = "EAGLE3") -> SpecShape:
    """The shape when nobody chose one: a short chain where every drafted or verified token is dear (whole
    models as drafts; mixtures as targets, whose windows wake more experts with every token), a tree for all
    others. ``model_type`` is the one of the target's ``config.json``."""
    is_mixture = model_type.startswith("deepseek") or model_type.endswith("_moe") or model_type == "mixtral"
    is_dear = algorithm == "STANDALONE" or is_mixture
    return SpecShape(3, 1, 4) if is_dear else SpecShape(5, 4, 8)
