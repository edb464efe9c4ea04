"""Speculation shapes, written ``steps,topk,tokens``."""

from dataclasses import dataclass
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


@dataclass(frozen=True)
class ShapeTable:
    """The shape for every batch size: drafts are cheap while a batch waits for memory, and dear when it
    computes.

    Attributes:
        by_batch: (smallest batch size, shape), ascending, the first for a batch of one.
    """

    by_batch: tuple[tuple[int, SpecShape], ...]

    @classmethod
    def parse(cls, text: "str | SpecShape | ShapeTable | None") -> "ShapeTable":
        """Read ``"5,4,16"``, or ``"5,4,16 8:4,1,5 32:none"``: chains from 8 requests on, ordinary decoding
        from 32 on. Raises UserError."""
        if isinstance(text, ShapeTable):
            return text
        if not isinstance(text, str):
            return cls(((1, SpecShape.parse(text)),))
        first, *others = text.split() or [""]
        table = [(1, SpecShape.parse(first))]
        for part in others:
            size, _, shape = part.partition(":")
            if not size.isdecimal() or int(size) <= table[-1][0]:
                raise UserError(
                    f"The batch size in {part!r} is not a number above {table[-1][0]}.",
                    "Write shapes such as '5,4,16 8:4,1,5 32:none', batch sizes ascending.",
                )
            table.append((int(size), SpecShape.parse(shape)))
        return cls(tuple(table))

    def __str__(self) -> str:
        first, *others = self.by_batch
        return " ".join([str(first[1]), *(f"{size}:{shape}" for size, shape in others)])

    def at(self, batch_size: int) -> SpecShape:
        """The shape of a batch."""
        return next(shape for size, shape in reversed(self.by_batch) if size <= batch_size)

    @property
    def shapes(self) -> tuple[SpecShape, ...]:
        """All of them."""
        return tuple(shape for _, shape in self.by_batch)

    @property
    def steps(self) -> int:
        """Of the deepest shape; 0 is ordinary decoding throughout."""
        return max(shape.steps for shape in self.shapes)

    @property
    def topk(self) -> int:
        """Of the broadest shape."""
        return max(shape.topk for shape in self.shapes)

    @property
    def tokens(self) -> int:
        """Of the largest window."""
        return max(shape.tokens for shape in self.shapes)


def auto_shape(model_type: str, *, drafts_are_dear: bool = False) -> SpecShape:
    """The shape when nobody chose one: a short chain where every drafted or verified token is dear (whole
    models as drafts; mixtures as targets, whose windows wake more experts with every token), a tree for all
    others. ``model_type`` is the one of the target's ``config.json``."""
    is_mixture = model_type.startswith("deepseek") or model_type.endswith("_moe") or model_type == "mixtral"
    return SpecShape(3, 1, 4) if drafts_are_dear or is_mixture else SpecShape(5, 4, 8)
