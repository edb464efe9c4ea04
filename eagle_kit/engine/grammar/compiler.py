"""Responses that match a grammar: the tokens allowed after each node of a window, by llguidance.

A node of a draft tree is reachable when its token is allowed after its parent, whose matcher is copied for
it (the copies share one automaton). So a draft that breaks the grammar is rejected by the target's
masked choice, and what is accepted always matches.

Grammars come from strangers. llguidance counts its work and gives up beyond ``LIMITS``, in compiling as in
every mask; `schema_rules` refuses what these limits do not see. Nothing is forced: every token that keeps the
response a prefix of a match is allowed, in whatever pieces the text comes.

Legend: B requests, N window nodes, V vocabulary.
"""

import itertools
import json
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from eagle_kit.core.errors import UserError, cut
from eagle_kit.core.structured_outputs import Grammar
from eagle_kit.engine.grammar.protocols import Match
from eagle_kit.engine.grammar.schema_rules import MAX_SCHEMA_CHARS, check_pattern, check_schema
from eagle_kit.engine.grammar.thought import MatchBehindThought

MAX_REGEX_CHARS = 4096
NUM_COMPILED = 16
"""Compiled grammars that are remembered; the least recently used go first."""
NUM_STARTS = 64
"""Responses share the automaton of a compiled grammar, which grows; it is made anew after so many starts."""
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,  # about 15 ms a mask
    "max_lexer_states": 50_000,  # about 20 MB
    "max_items_in_row": 8_000,  # of an object, 4 for each optional property
    "step_max_items": 50_000,
    "verbose_errors": False,
}
JSON_OPTIONS = {
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,2}",  # between two parts of a JSON text, which may have none
    "json_allowed_escapes": 'nrbtf\\"',  # no \u, by which the name of a property can be written in other ways
    "coerce_one_of": True,  # schema_rules has shown that no value matches two branches
}
NO_FORCING = '%llguidance {"no_forcing": true}\n'
MAX_FILL_S = 0.25
"""CPU time for the masks of one window."""
FREE_S = 0.02
"""CPU time of a call for a response that is not counted."""
MAX_EXTRA_S = 1.0
"""Most CPU time of all calls for one response together, beyond :data:`FREE_S` of each."""


class GrammarMatch:
    """State of one response in its grammar.

    Args:
        matcher: an `LLMatcher` at the beginning of its grammar; nobody else may use it.
        stop_token_ids: tokens that end a complete response.

    Attributes:
        is_complete: the grammar has ended, and the response with it.
        is_stuck: no token may follow: the grammar leads nowhere from here, or takes too long.
    """

    def __init__(self, matcher: Any, stop_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._stop_token_ids = stop_token_ids
        self._extra_s = 0.0
        self.is_complete = self.is_stuck = False

    def advance(self, tokens: Sequence[int]) -> int:
        """Take emitted tokens -> how many belong to the response: those behind the grammar's end do not."""
        if self.is_stuck:
            return 0
        started = time.thread_time()
        for count, token in enumerate(tokens):
            if token in self._stop_token_ids and self._matcher.is_accepting():
                self.is_complete = True
                return count + 1
            # Where nothing is allowed the masks let everything through (`masks.allowed_bits`).
            if not self._matcher.try_consume_tokens([token]):
                self.is_stuck = True
                return count
        self._spend(started)
        return len(tokens)

    def fill(self, parents: np.ndarray, tokens: torch.Tensor, bitmask: torch.Tensor) -> None:
        """Write the tokens allowed after each node of a window; the match is stuck when that takes longer
        than ``MAX_FILL_S``, or nothing may follow the root.

        Args:
            parents: ``[N]``, parents before children; an unused node is its own parent.
            tokens: int64 ``[N]``.
            bitmask: int32 ``[N, ceil(V / 32)]`` of the host; the rows of nodes that are unreachable, or not
                yet reached when the match is stuck, stay as they are.
        """
        if self.is_stuck:
            return
        started = time.thread_time()
        matchers: dict[int, Any] = {}
        for node, (parent, token) in enumerate(zip(parents.tolist(), tokens.tolist(), strict=True)):
            if node and (parent == node or parent not in matchers):
                continue
            matcher = matchers[parent].deep_copy() if node else self._matcher
            if node and not matcher.try_consume_tokens([token]):
                continue
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
            if not matcher.is_error():
                matchers[node] = matcher
                bitmask[node] = torch.from_numpy(mask[: bitmask.shape[1]].copy())
            self.is_stuck = 0 not in matchers or time.thread_time() - started > MAX_FILL_S
            if self.is_stuck:
                return
        self._spend(started)

    def _spend(self, started: float) -> None:
        self._extra_s += max(0.0, time.thread_time() - started - FREE_S)
        self.is_stuck |= self._extra_s > MAX_EXTRA_S


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Several threads may use it.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        vocab_size: V, rows of the target's output matrix.
        stop_token_ids: tokens that end a complete response.

    Raises:
        UserError: llguidance is not installed, or cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        try:
            import llguidance
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise UserError(
                "Structured output needs llguidance, which is not installed.",
                "Install it with pip install 'eagle_kit[serve]'.",
            ) from None
        size = max(vocab_size, len(tokenizer))
        try:
            self._tokenizer = from_tokenizer(tokenizer, n_vocab=size, eos_token=list(stop_token_ids))
        except ValueError as error:
            raise UserError(
                f"Structured output cannot be had with the target's tokenizer ({_one_line(error)}).",
                "Leave the grammar out.",
            ) from None
        self._library = llguidance
        self._vocab_size = vocab_size
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._stop_token_ids = frozenset(token for token in stop_token_ids if token < vocab_size)
        self._num_starts = itertools.count()
        self._compiled = lru_cache(maxsize=NUM_COMPILED)(self._compile)

    @property
    def num_compiled(self) -> int:
        """Grammars that are remembered."""
        return self._compiled.cache_info().currsize

    def start(self, grammar: Grammar, salt: str | None = None) -> Match:
        """Return a match of ``grammar`` that has read nothing. Requests with the same cache ``salt`` share
        what is compiled.

        Raises:
            UserError: the grammar cannot be compiled within its limits, or no response can match it, or its
                reasoning has tokens that the target does not know.
        """
        thought = grammar.thought
        if (
            thought is not None
            and max(*thought.end, *thought.others, thought.opener or 0) >= self._vocab_size
        ):
            raise UserError(
                "The tokens that bound the reasoning are outside the target's vocabulary.",
                "Serve with --reasoning-parser none.",
            )
        generation = next(self._num_starts) // NUM_STARTS
        compiled = self._compiled(grammar._replace(thought=None), generation, salt)
        match = GrammarMatch(compiled.deep_copy(), self._stop_token_ids)
        return match if thought is None else MatchBehindThought(match, thought, self._stop_token_ids)

    def _compile(self, grammar: Grammar, generation: int, salt: str | None) -> Any:
        """Compile a grammar; ``generation`` and ``salt`` only tell entries of the cache apart."""
        name = grammar.kind.replace("_", " ")
        try:
            text = NO_FORCING + self._rules(grammar)
        except UserError:
            raise
        except (ValueError, RecursionError) as error:
            raise _not_compiled(name, _one_line(error)) from None
        matcher = self._library.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise _not_compiled(name, _one_line(matcher.get_error()))
        matcher.compute_bitmask()  # the first mask takes longest, and shows whether there is a way at all
        if matcher.get_error().startswith("NoExtensionBias"):
            raise UserError(f"No response can match the {name} of the request.", "Correct it.")
        if matcher.is_error():
            raise UserError(
                f"The {name} of the request takes too long to follow ({_one_line(matcher.get_error())}).",
                "Use a simpler one.",
            )
        return matcher

    def _rules(self, grammar: Grammar) -> str:
        """The grammar in llguidance's Lark syntax."""
        kind, text, _ = grammar
        longest = MAX_SCHEMA_CHARS if kind == "json_schema" else MAX_REGEX_CHARS
        if len(text) > longest:
            raise UserError(
                f"The {kind.replace('_', ' ')} has {len(text)} characters, {longest} are allowed.",
                "Write a shorter one.",
            )
        if kind == "lark":
            return text
        if kind == "regex":
            check_pattern(text)
            return f"start: /{self._library.regex_to_lark(text, 'dws')}/" if text else 'start: ""'
        schema = check_schema(json.loads(text)) if kind == "json_schema" else {"type": "object"}
        return "start: %json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS})


def _not_compiled(name: str, reason: str) -> UserError:
    return UserError(
        f"The {name} of the request cannot be compiled ({reason}).", "Correct it, or use fewer features."
    )


def _one_line(error: object) -> str:
    return cut(" ".join(str(error).split()))
