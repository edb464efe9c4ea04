"""N-gram drafting without a model: continuations of earlier occurrences of the last tokens, in any request.

All prompts and responses are one log of tokens. Each token knows its neighbours in its own request, and, for
every indexed length m, the occurrence before it of the m tokens that end there (hash chains, as in LZ77). A
lookup walks the chains of the longest indexed length first, compares backwards to get the real length of each
match, and merges what followed the matches into a tree.

The log is a ring: the oldest tokens give way at ``capacity``. A passage that is used again is emitted again
and so written again, which makes the order of writing the order of last use.

Requests with a cache salt find only what requests with the same salt have said, as their keys depend on it.
A lookup compares tokens, so text of another salt is found only if the salts have one digest of 64 bits.

Legend: B requests, N window nodes, W longest match, m indexed lengths.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from eagle_kit.config.engine import NgramConfig
from eagle_kit.ops.attention.window import ancestor_bits
from eagle_kit.ops.transfer import to_device
from eagle_kit.ops.tree_build import Tree

CHAIN_STEPS = 32
"""Occurrences of one chain that a lookup compares, newest first."""
INDEXED = (1, 2, 4, 8)
"""Lengths with a chain. A match of another length is found through the next shorter one."""


class NgramDraft(NamedTuple):
    """Windows to verify, int64 ``[B, N]`` each: the root first, parents before children, siblings distinct.
    An unused node is its own parent, so no walk reaches it; its token is 0 for the embedding's sake."""

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray

    @property
    def num_drafts(self) -> np.ndarray:
        """Used nodes of each window besides the root, ``[B]``."""
        return (self.parents != np.arange(self.parents.shape[1])).sum(1)

    def cut(self, num_nodes: int) -> "NgramDraft":
        """Return the first nodes of each window; those after must be unused."""
        return NgramDraft(*(np.ascontiguousarray(part[:, :num_nodes]) for part in self))


@dataclass
class _Node:
    token: int
    count: int = 0
    children: dict[int, "_Node"] = field(default_factory=dict)


class NgramIndex:
    """Log of tokens and its hash chains. Positions count up forever; ``position % capacity`` is their
    place."""

    def __init__(self, config: NgramConfig | None = None) -> None:
        self.config = config or NgramConfig()
        self._token = array("i")
        self._before = array("q")
        self._after = array("q")
        shortest = self.config.min_match_window_size
        longest = self.config.max_match_window_size
        self._lengths = tuple(m for m in INDEXED if m <= longest)
        # A shorter match than allowed is not looked for; the chain below it may be the one that finds it.
        floor = max(m for m in INDEXED if m <= shortest)
        self._lookups = tuple(m for m in reversed(self._lengths) if m >= floor)
        self._newest: list[dict[int, int]] = [{} for _ in self._lengths]
        self._older = [array("q") for _ in self._lengths]
        self._end = 0
        self._last: dict[int, int] = {}

    def __len__(self) -> int:
        """Number of tokens that can be found."""
        return min(self._end, self.config.capacity)

    def insert(self, request: int, tokens: Sequence[int], salt: str | None = None) -> None:
        """Append ``tokens`` to what ``request`` has in the log; only requests with the same ``salt`` find
        them."""
        space = _space(salt)
        recent = self._recent(request)
        last = self._last.get(request, -1)
        for token in tokens:
            recent.append(token)
            last = self._append(token, last, recent, space)
        if tokens:
            self._last[request] = last

    def forget(self, request: int) -> None:
        """End a request's stream. Its tokens stay until their room is needed."""
        self._last.pop(request, None)

    def propose(
        self,
        contexts: Sequence[Sequence[int]],
        num_tokens: int,
        depth: int,
        salts: Sequence[str | None] = (),
    ) -> NgramDraft:
        """Draft a tree after every context, whose last token is the root.

        Args:
            contexts: the last tokens of each request; more than W are ignored.
            num_tokens: N, nodes of a window.
            depth: most tokens of a path below the root.
            salts: of each request; empty where none has one.
        """
        b = len(contexts)
        tokens, depths = np.zeros((2, b, num_tokens), dtype=np.int64)
        parents = np.tile(np.arange(num_tokens), (b, 1))
        for i, context in enumerate(contexts):
            window = list(context[-self.config.max_match_window_size :])
            tokens[i, 0] = window[-1]
            matches = self._matches(window, _space(salts[i]) if salts else 0)
            if matches:
                trie = self._merge(matches, min(depth, self.config.branch_length))
                self._fill(trie, self._breadth(matches[0][0]), tokens[i], parents[i], depths[i])
        return NgramDraft(tokens, parents, depths)

    def _append(self, token: int, last: int, recent: list[int], space: int) -> int:
        capacity = self.config.capacity
        position = self._end
        self._end += 1
        place = position % capacity
        grows = place == len(self._token)
        columns: list[tuple[array, int]] = [(self._token, token), (self._before, last), (self._after, -1)]
        for newest, older, m in zip(self._newest, self._older, self._lengths, strict=True):
            previous = -1
            if len(recent) >= m:
                key = hash(tuple(recent[-m:])) ^ space
                previous = newest.get(key, -1)
                newest[key] = position
            columns.append((older, previous))
        for column, value in columns:
            if grows:
                column.append(value)
            else:
                column[place] = value
        if last >= self._first:
            self._after[last % capacity] = position
        if position and position % capacity == 0:
            self._drop_lost_keys()
        return position

    @property
    def _first(self) -> int:
        """Oldest position that is still in the log."""
        return max(0, self._end - self.config.capacity)

    def _drop_lost_keys(self) -> None:
        """Drop keys whose newest occurrence is gone, once per turn of the ring: memory stays bounded."""
        first = self._first
        for newest in self._newest:
            for key in [key for key, position in newest.items() if position < first]:
                del newest[key]

    def _recent(self, request: int) -> list[int]:
        """The last tokens that a request has in the log, as many as the longest key needs."""
        return self._backwards(self._last.get(request, -1), self._lengths[-1])[::-1]

    def _backwards(self, position: int, count: int) -> list[int]:
        out: list[int] = []
        first = self._first
        capacity = self.config.capacity
        while position >= first and len(out) < count:
            out.append(self._token[position % capacity])
            position = self._before[position % capacity]
        return out

    def _matches(self, window: list[int], space: int) -> list[tuple[int, int]]:
        """(length, position of the last matched token), the longest first, then the newest."""
        found: dict[int, int] = {}
        first = self._first
        capacity = self.config.capacity
        backwards = window[::-1]
        for m in self._lookups:
            if m > len(window):
                continue
            at = self._lengths.index(m)
            position = self._newest[at].get(hash(tuple(window[-m:])) ^ space, -1)
            for _ in range(CHAIN_STEPS):
                if position < first:
                    break
                if position not in found and self._after[position % capacity] >= 0:
                    length = 0
                    for mine, theirs in zip(
                        backwards, self._backwards(position, len(backwards)), strict=False
                    ):
                        if mine != theirs:
                            break
                        length += 1
                    if length >= max(m, self.config.min_match_window_size):
                        found[position] = length
                position = self._older[at][position % capacity]
            if len(found) >= self.config.max_bfs_breadth:
                break
        return sorted(((length, at) for at, length in found.items()), reverse=True)

    def _merge(self, matches: list[tuple[int, int]], depth: int) -> _Node:
        """Merge every continuation into one trie, children in the order of their best match."""
        root = _Node(-1, len(matches))
        first = self._first
        capacity = self.config.capacity
        for _, position in matches:
            node = root
            for _ in range(depth):
                position = self._after[position % capacity]
                if position < first:
                    break
                token = self._token[position % capacity]
                node = node.children.setdefault(token, _Node(token))
                node.count += 1
        return root

    def _breadth(self, length: int) -> int:
        config = self.config
        span = config.max_match_window_size - config.min_match_window_size + 1
        share = (config.max_match_window_size - length) / span
        extra = (config.max_bfs_breadth - config.min_bfs_breadth) * share
        return config.min_bfs_breadth + round(extra)

    def _fill(
        self, trie: _Node, breadth: int, tokens: np.ndarray, parents: np.ndarray, depths: np.ndarray
    ) -> None:
        """Choose nodes of the trie for one window: of equals, in shares or in BFS, the earlier in the
        frontier."""
        by_probability = self.config.match_type == "PROB"
        frontier: list[tuple[float, int, _Node]] = []

        def extend(share: float, place: int, node: _Node) -> None:
            children = list(node.children.values())
            if by_probability:  # a stable sort: of equal counts the longer, then the newer match
                children.sort(key=lambda child: -child.count)
            frontier.extend((share * child.count / node.count, place, child) for child in children[:breadth])

        extend(1.0, 0, trie)
        size = 1
        while frontier and size < len(tokens):
            at = max(range(len(frontier)), key=lambda i: frontier[i][0]) if by_probability else 0
            share, parent, node = frontier.pop(at)
            tokens[size], parents[size], depths[size] = node.token, parent, depths[parent] + 1
            extend(share, size, node)
            size += 1


def _space(salt: str | None) -> int:
    """Number that is combined with the hashes of a salt's keys: a digest of 64 bits, 0 without a salt."""
    if salt is None:
        return 0
    digest = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def to_tree(draft: NgramDraft, device: torch.device) -> Tree:
    """Convert windows to tensors; an unused node attends only to itself."""
    tokens, parents, depths = (to_device(torch.from_numpy(part), device) for part in draft)
    deepest = int(draft.depths.max()) if draft.depths.size else 0
    return Tree(tokens, parents, depths, ancestor_bits(parents, deepest))
