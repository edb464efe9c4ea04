"""Replies that match a grammar: what may follow each node of a window, by xgrammar (arXiv 2411.15100).

A draft tree is walked depth first: a node is reachable when its token is allowed after its parent; the
matcher takes the token, fills the node's mask, goes on to the children, and takes the token back. So a draft
that breaks the grammar is rejected by the target's masked choice, and what is accepted always matches.

Grammars come from strangers, and some are cheap to write and dear to match. The worst are refused
(`regex_rules`, `schema_rules`). Masks are filled beside the engine's thread, which waits for a bounded time
only: a reply whose grammar takes longer ends as if it were stuck, and holds no other up.

Legend: B requests, N window nodes, V vocabulary.
"""

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from eagle_kit.core.errors import UserError
from eagle_kit.core.request import Grammar
from eagle_kit.kernels.tree_build import Tree
from eagle_kit.serve.grammar.regex_rules import check_regex
from eagle_kit.serve.grammar.schema_rules import check_schema

_WHERE = re.compile(r"\[[\d:]+\] \S+: |Failed to build the automaton for rule root with regex .*: (?=Regex )")
"""Time and source line in front of xgrammar's messages."""

CACHE_BYTES = 256 * 1024 * 1024
"""Compiled grammars that are remembered; the least recently used go first."""
MAX_WHITESPACE = 2
"""Spaces and line ends in a row between the parts of a JSON text, which could go on for ever otherwise."""
MAX_START_S = 2.0
MAX_FILL_S = 0.25
"""The engine waits this long for the masks of one window."""
FREE_S, MAX_EXTRA_S = 0.02, 1.0
"""What the calls of one reply take beyond ``FREE_S`` each, in CPU time, may add up to ``MAX_EXTRA_S``."""


class _Aside:
    """Calls functions in a thread of its own. One that takes too long keeps the thread, which ends after it;
    the next gets another."""

    def __init__(self) -> None:
        self._queue: _Queue | None = None

    def call(self, function: Callable[[], object], seconds: float) -> float:
        """CPU seconds that ``function`` took; raises TimeoutError when it has not ended in time."""
        if self._queue is None:
            self._queue = SimpleQueue()
            args = (self._queue,)
            threading.Thread(target=_work_off, args=args, name="eagle-kit masks", daemon=True).start()
        future: Future[float] = Future()
        self._queue.put((future, function))
        try:
            return future.result(seconds)
        except TimeoutError:
            self.close()
            raise

    def close(self) -> None:
        """Let the thread end."""
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None

    __del__ = close


_Queue = SimpleQueue[tuple["Future[float]", Callable[[], object]] | None]


def _work_off(queue: _Queue) -> None:
    while (item := queue.get()) is not None:
        future, function = item
        started = time.thread_time()
        try:
            function()
        except BaseException as error:  # it belongs to the one who waits
            future.set_exception(error)
        else:
            future.set_result(time.thread_time() - started)
        del item, future, function


class _Cache:
    """Compiled grammars by what they were made of. xgrammar's own cache takes quadratic time over long
    constants, and fails on patterns with counts above 128."""

    def __init__(self) -> None:
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, grammar: Grammar) -> Any | None:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
            return self._compiled.get(grammar)

    def put(self, grammar: Grammar, compiled: Any) -> None:
        """Remember it, and forget the least recently used ones beyond ``CACHE_BYTES``."""
        with self._lock:
            if grammar in self._compiled:
                return
            self._compiled[grammar] = compiled
            self._num_bytes += _num_bytes(grammar, compiled)
            while self._num_bytes > CACHE_BYTES:
                self._num_bytes -= _num_bytes(*self._compiled.popitem(last=False))


def _num_bytes(grammar: Grammar, compiled: Any) -> int:
    return len(grammar.text) * 4 + compiled.memory_size_bytes


class GrammarMatch:
    """How far one reply has come in its grammar.

    Attributes:
        is_complete: the grammar has ended, and the reply with it.
        is_stuck: no token may follow: the grammar leads nowhere from here, or takes too long.
    """

    def __init__(self, matcher: Any, aside: _Aside) -> None:
        self._matcher, self._aside = matcher, aside
        self._extra_s = 0.0
        self.is_complete = self.is_stuck = False

    def advance(self, tokens: Sequence[int]) -> int:
        """Take emitted tokens -> how many belong to the reply: those behind the grammar's end do not."""
        if self.is_stuck:
            return 0
        started = time.thread_time()
        count = self._advance(tokens)
        self._spend(time.thread_time() - started)
        return count

    def _advance(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens, 1):
            if not self._matcher.accept_token(token):
                # Where nothing is allowed the masks let everything through (`allowed_tokens`).
                self.is_stuck = True
                return count - 1
            if self._matcher.is_terminated():
                self.is_complete = True
                return count
        return len(tokens)

    def fill(
        self, parents: np.ndarray, tokens: torch.Tensor, bitmask: torch.Tensor, seconds: float = MAX_FILL_S
    ) -> None:
        """Write what may follow each node of a window; it is stuck when that takes longer than ``seconds``.

        Args:
            parents: ``[N]``.
            tokens: int64 ``[N]``.
            bitmask: int32 ``[N, ceil(V / 32)]``; the rows of unreachable nodes are left alone, and all of
                them when the match is stuck.
        """
        if self.is_stuck:
            return  # and a thread may still be at work on the matcher
        child, sibling = first_children(parents)
        filled = bitmask.clone()  # what has been given up writes into memory of its own
        matcher = self._matcher
        try:
            spent = self._aside.call(
                lambda: matcher.traverse_draft_tree(child, sibling, tokens, filled, seconds), seconds
            )
        except TimeoutError:
            self.is_stuck = True
            return
        self._spend(spent)
        bitmask.copy_(filled)

    def _spend(self, seconds: float) -> None:
        self._extra_s += max(0.0, seconds - FREE_S)
        self.is_stuck |= self._extra_s > MAX_EXTRA_S


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
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._cache = _Cache()
        self._aside = _Aside()
        self._new_matcher = xgrammar.GrammarMatcher

    def start(self, grammar: Grammar) -> GrammarMatch:
        """A match of ``grammar`` that has read nothing. Several threads may call it.

        Raises:
            UserError: the grammar cannot be compiled, or no reply can match it.
        """
        name = grammar.kind.replace("_", " ")
        try:
            compiled = self._cache.get(grammar)
            if compiled is None:
                compiled = self._compile(grammar)
                self._cache.put(grammar, compiled)
        except UserError:
            raise
        except (RuntimeError, ValueError, RecursionError) as error:
            reason = _WHERE.sub("", str(error).strip()) or "unknown reason"
            raise UserError(
                f"The {name} of the request cannot be compiled ({reason}).",
                "Correct it, or use fewer features.",
            ) from None
        match = GrammarMatch(self._new_matcher(compiled), self._aside)
        first = torch.zeros(1, -(-self._vocab_size // 32), dtype=torch.int32)
        trial = GrammarMatch(self._new_matcher(compiled), _Aside())  # the engine may be using ours
        trial.fill(np.zeros(1, dtype=np.int64), torch.zeros(1, dtype=torch.int64), first, MAX_START_S)
        if trial.is_stuck:
            raise UserError(f"The {name} of the request takes too long to follow.", "Use a simpler one.")
        if not first.any():
            raise UserError(f"No reply can match the {name} of the request.", "Correct it.")
        return match

    def _compile(self, grammar: Grammar) -> Any:
        if grammar.kind == "regex":
            # One automaton, which takes seconds less than the rules that compile_regex makes of some.
            text = json.dumps(check_regex(grammar.text).text, ensure_ascii=False)
            return self._compiler.compile_grammar(f"root ::= Regex({text})\n")
        schema: Any = {"type": "object"}  # not any JSON value
        if grammar.kind == "json_schema":
            schema = check_schema(json.loads(grammar.text))
        return self._compiler.compile_json_schema(json.dumps(schema), max_whitespace_cnt=MAX_WHITESPACE)


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
