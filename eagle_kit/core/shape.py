"""Speculation shapes, written ``steps,topk,tokens``."""

from dataclasses import dataclass
from typing import NamedTuple

from eagle_kit.core.errors import UserError

MAX_WINDOW = 64
"""Maximum number of nodes of a window: ancestors are the bits of one 64-bit word."""
TREE_TOPK = 4
TREE_TOKENS = 8
"""Candidates and tokens of a tree that was given in part."""

MAX_DRAFT_NODES = 128
"""Maximum number of nodes that a draft runs in one cycle: their ancestors are the bits of two words."""


class SpecShape(NamedTuple):
    """Size of a draft and of the window that verifies it.

    Attributes:
        steps: depth of the draft, S. 0 is ordinary decoding.
        topk: nodes that the draft runs per depth, and children of each of them, K. 1 is a chain.
        tokens: nodes verified in one target forward, N, *root included*.

    The published code of EAGLE-3 (SafeAILab/EAGLE, ``EaModel.from_pretrained``) has ``depth=7``, ``top_k=10``
    and ``total_token=60``, which is ``8,10,60`` here. Its ``depth`` counts the draft's forwards after the
    first one, so d are d + 1 steps; its ``total_token`` counts the root.
    """

    steps: int
    topk: int
    tokens: int

    def __str__(self) -> str:
        if self.steps == 0:
            return "none"
        return f"{self.steps},{self.topk},{self.tokens}"

    @property
    def label(self) -> str:
        """The shape with its kind, such as ``4,1,5 (chain)``."""
        kind = "chain" if self.topk == 1 else "tree"
        return f"{self} ({kind})"

    @property
    def num_draft_nodes(self) -> int:
        """Nodes that an autoregressive draft runs, K (S - 1): those of the last depth are not run."""
        return self.topk * max(self.steps - 1, 0)

    @classmethod
    def parse(cls, text: "str | SpecShape | None") -> "SpecShape":
        """Parse ``"5,4,16"``; ``None`` and ``"none"`` are ordinary decoding. Raises UserError."""
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
        """Raise UserError for a shape that no draft can have or no window can hold."""
        if self == NO_SPECULATION:
            return
        steps, topk, tokens = self
        num_drafted = _num_drafted(steps, topk)
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
        if tokens - 1 > num_drafted:
            raise UserError(
                f"The shape {self} asks for {tokens} tokens, more than the draft grows "
                f"({1 + num_drafted} with the root).",
                "Lower tokens, or raise steps or topk.",
            )
        if tokens <= steps:
            raise UserError(
                f"The shape {self} verifies {tokens} tokens, too few to reach its depth of {steps}.",
                f"Use at least {steps + 1} tokens, or fewer steps.",
            )
        if topk >= MAX_WINDOW:
            raise UserError(
                f"The shape {self} drafts {topk} children of a node, and a window has room for "
                f"{MAX_WINDOW - 1} drafts.",
                f"Use topk of at most {MAX_WINDOW - 1}.",
            )
        if self.num_draft_nodes > MAX_DRAFT_NODES:
            raise UserError(
                f"The draft runs topk x (steps - 1) = {self.num_draft_nodes} nodes in the shape {self}, "
                f"more than {MAX_DRAFT_NODES}.",
                f"Use at most {1 + MAX_DRAFT_NODES // topk} steps, or a topk of at most "
                f"{MAX_DRAFT_NODES // (steps - 1)}.",
            )


NO_SPECULATION = SpecShape(0, 1, 1)


NGRAM_SHAPE = SpecShape(8, 4, 12)
"""Default of drafts from earlier text."""


@dataclass(frozen=True)
class ShapeTable:
    """Speculation shape by batch size: draft tokens are cheap while a batch is memory-bound and expensive
    once it is compute-bound.

    Attributes:
        by_batch: (smallest batch size, shape), ascending; the first entry is for a batch of one.
    """

    by_batch: tuple[tuple[int, SpecShape], ...]

    @classmethod
    def parse(cls, text: "str | SpecShape | ShapeTable | None") -> "ShapeTable":
        """Parse ``"5,4,16"``, or ``"5,4,16 8:4,1,5 32:none"``: chains from 8 requests on, ordinary decoding
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
        parts: list[str] = []
        for size, shape in self.by_batch:
            parts.append(str(shape) if not parts else f"{size}:{shape}")
        return " ".join(parts)

    def at(self, batch_size: int) -> SpecShape:
        """Shape for a batch of ``batch_size`` requests."""
        return next(shape for size, shape in reversed(self.by_batch) if size <= batch_size)

    def shapes_at(self, batch_size: int) -> list[SpecShape]:
        """Shapes that a batch of ``batch_size`` requests may have, as a policy lists them: here one."""
        return [self.at(batch_size)]

    @property
    def shapes(self) -> tuple[SpecShape, ...]:
        """All shapes of the table."""
        return tuple(shape for _, shape in self.by_batch)

    @property
    def steps(self) -> int:
        """Depth of the deepest shape; 0 is ordinary decoding at every batch size."""
        return max(shape.steps for shape in self.shapes)

    @property
    def topk(self) -> int:
        """Largest ``topk`` of the shapes."""
        return max(shape.topk for shape in self.shapes)

    @property
    def num_draft_nodes(self) -> int:
        """Most nodes that a draft runs in one of the shapes."""
        return max(shape.num_draft_nodes for shape in self.shapes)

    @property
    def tokens(self) -> int:
        """Largest window of the shapes."""
        return max(shape.tokens for shape in self.shapes)


def auto_shape(model_type: str, *, drafts_are_expensive: bool = False) -> SpecShape:
    """Default speculation shape.

    It is a short chain if every drafted or verified token is expensive: with whole models as drafts, and with
    mixture-of-experts targets, whose windows activate more experts with every token. Otherwise it is a tree.

    Args:
        model_type: from the target's ``config.json``.
        drafts_are_expensive: True for a whole model as draft.
    """
    is_mixture = model_type.startswith(("deepseek", "llama4", "minimax")) or "moe" in model_type
    is_mixture |= model_type in ("mixtral", "gpt_oss", "qwen3_next", "kimi_linear")
    if drafts_are_expensive or is_mixture:
        return SpecShape(3, 1, 4)
    return SpecShape(5, 4, 8)


def complete_shape(
    usual: SpecShape, *, steps: int | None = None, topk: int | None = None, tokens: int | None = None
) -> SpecShape:
    """Complete a shape that was given in part.

    Args:
        usual: default shape, whose numbers are taken for the missing ones and changed where they do not fit
            the given ones. A chain has ``steps + 1`` tokens. A tree has at least so many, 8 doubled until
            they are enough, and at most what its draft grows.

    Raises:
        UserError: a number that no shape has.
    """
    given = [number for number in (steps, topk, tokens) if number is not None]
    if any(number < 1 for number in given):
        raise UserError(
            "A number of the speculation shape is below 1.", "Give whole numbers, or none for plain decoding."
        )

    # A chain.
    is_chain = topk == 1 or (topk is None and usual.topk == 1)
    if is_chain and None not in (steps, tokens):
        is_chain = tokens == steps + 1  # type: ignore[operator]
    if is_chain:
        if steps is None:
            steps = usual.steps if tokens is None else tokens - 1
        return SpecShape.parse(f"{steps},1,{steps + 1}")

    # The depth, at most one less than the tokens.
    has_steps = steps is not None
    has_topk = topk is not None
    depth = usual.steps if steps is None else steps
    if not has_steps and tokens is not None:
        depth = min(depth, max(tokens - 1, 1))
    width = max(usual.topk, TREE_TOPK) if topk is None else topk

    # At most as many nodes as a draft may run.
    if not has_topk and depth > 1:
        width = max(1, min(width, MAX_DRAFT_NODES // (depth - 1)))
    if not has_steps:
        depth = min(depth, 1 + MAX_DRAFT_NODES // width)

    # The tokens, or a draft that grows so many.
    if tokens is None:
        tokens = max(usual.tokens, TREE_TOKENS)
        while tokens <= depth:
            tokens *= 2
        tokens = min(tokens, 1 + _num_drafted(depth, width), MAX_WINDOW)
    while 1 + _num_drafted(depth, width) < tokens <= MAX_WINDOW:
        if not has_topk:
            width += 1
        elif not has_steps:
            depth += 1
        else:
            break
    return SpecShape.parse(f"{depth},{width},{tokens}")


def _num_drafted(steps: int, topk: int) -> int:
    """Nodes that a draft grows below its root."""
    return topk + (steps - 1) * topk**2
