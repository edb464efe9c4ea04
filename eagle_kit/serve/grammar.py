"""Replies that match a grammar: what may follow each node of a window, by xgrammar (arXiv 2411.15100).

A draft tree is walked depth first: a node is reachable when its token is allowed after its parent; the
matcher takes the token, fills the node's mask, goes on to the children, and takes the token back. So a draft
that breaks the grammar is rejected by the target's masked choice, and what is accepted always matches.

Legend: B requests, N window nodes, V vocabulary.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from eagle_kit.core.errors import UserError
from eagle_kit.core.request import Grammar
from eagle_kit.kernels.tree_build import Tree

_WHERE = re.compile(r"^\[[\d:]+\] \S+: ")
"""Time and source line in front of xgrammar's messages."""


class GrammarMatch:
    """How far one reply has come in its grammar.

    Attributes:
        is_complete: the grammar has ended, and the reply with it.
        is_stuck: no token may follow, since the grammar leads nowhere from here.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.is_complete = self.is_stuck = False

    def advance(self, tokens: Sequence[int]) -> int:
        """Take emitted tokens -> how many belong to the reply: those behind the grammar's end do not."""
        for count, token in enumerate(tokens, 1):
            if not self._matcher.accept_token(token):
                # Where nothing is allowed the masks let everything through (`allowed_tokens`).
                self.is_stuck = True
                return count - 1
            if self._matcher.is_terminated():
                self.is_complete = True
                return count
        return len(tokens)

    def fill(self, parents: np.ndarray, tokens: torch.Tensor, bitmask: torch.Tensor) -> None:
        """Write what may follow each node of a window: ``parents`` ``[N]``, ``tokens`` int64 ``[N]``,
        ``bitmask`` int32 ``[N, ceil(V / 32)]``; the rows of unreachable nodes are left alone."""
        child, sibling = first_children(parents)
        self._matcher.traverse_draft_tree(child, sibling, tokens, bitmask)


class GrammarCompiler:
    """Compiles grammars for one tokenizer; the same grammar twice is compiled once.

    Args:
        tokenizer: a Hugging Face tokenizer.
        vocab_size: V, rows of the target's output matrix.
        stop_token_ids: tokens that end a complete reply.

    Raises:
        UserError: xgrammar is not installed.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        try:
            import xgrammar
        except ImportError:
            raise UserError(
                "Structured output needs xgrammar, which is not installed.",
                "Install it with pip install 'eagle_kit[serve]'.",
            ) from None
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=list(stop_token_ids)
        )
        self._vocab_size = vocab_size
        self._compiler = xgrammar.GrammarCompiler(info)
        self._new_matcher = xgrammar.GrammarMatcher

    def start(self, grammar: Grammar) -> GrammarMatch:
        """A match of ``grammar`` that has read nothing. Several threads may call it.

        Raises:
            UserError: the grammar cannot be compiled, or no reply can match it.
        """
        compiler, name = self._compiler, grammar.kind.replace("_", " ")
        try:
            if grammar.kind == "json_object":
                compiled = compiler.compile_json_schema('{"type": "object"}')  # not any JSON value
            elif grammar.kind == "json_schema":
                compiled = compiler.compile_json_schema(grammar.text)
            else:
                compiled = compiler.compile_regex(grammar.text)
        except (RuntimeError, ValueError) as error:
            reason = _WHERE.sub("", str(error).strip()) or "unknown reason"
            raise UserError(
                f"The {name} of the request cannot be compiled ({reason}).",
                "Correct it, or use fewer features.",
            ) from None
        match = GrammarMatch(self._new_matcher(compiled))
        first = torch.zeros(1, -(-self._vocab_size // 32), dtype=torch.int32)
        match.fill(np.zeros(1, dtype=np.int64), torch.zeros(1, dtype=torch.int64), first)
        if not first.any():
            raise UserError(f"No reply can match the {name} of the request.", "Correct it.")
        return match


def allowed_tokens(matches: Sequence[GrammarMatch | None], tree: Tree, vocab_size: int) -> torch.Tensor:
    """Bool ``[B, N, V]`` on the tree's device: what may follow each node; None allows everything. The tree is
    read by the host."""
    tokens, parents = tree.tokens.cpu(), tree.parents.cpu().numpy()
    b, n = tokens.shape
    bitmask = torch.full((b, n, -(-vocab_size // 32)), -1, dtype=torch.int32)
    for i, match in enumerate(matches):
        if match is not None:
            match.fill(parents[i], tokens[i], bitmask[i])
    bits = bitmask.to(tree.tokens.device)[..., None] >> torch.arange(32, device=tree.tokens.device)
    allowed = (bits & 1).bool().flatten(2)[..., :vocab_size]
    # Behind the end of a grammar nothing is allowed. What is chosen there is dropped, but must be a number.
    return allowed | ~allowed.any(-1, keepdim=True)


def first_children(parents: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """``parents [N]`` (root first, parents before children, an unused node its own parent) -> the first child
    and the next sibling of each node, int64 ``[N]``, -1 where there is none."""
    child, sibling = np.full((2, len(parents)), -1, dtype=np.int64)
    last: dict[int, int] = {}
    for node in range(1, len(parents)):
        parent = int(parents[node])
        if parent == node:
            continue
        if parent in last:
            sibling[last[parent]] = node
        else:
            child[parent] = node
        last[parent] = node
    return torch.from_numpy(child), torch.from_numpy(sibling)
