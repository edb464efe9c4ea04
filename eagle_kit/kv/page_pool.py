"""Page pool: private, shared and cached pages of the key-value stores.

A page is free, private to one request, or *cached*: a node of a radix tree whose edges are the tokens of one
page. Requests with a common prefix hold the same nodes. Target and draft share page numbers, because a
draft's entry lives at the slot of the token it embeds and so depends on the same tokens as the target's. The
pool is bookkeeping on the host; the tensors belong to the stores.

A target with recurrent layers needs the state before the tokens that it goes on with, so a cached prefix is
of use as far as its last page with a snapshot of the state. Requests leave one behind their prompts, where
their prompt leaves that of another, and, while a prompt is computed, behind its last part. A snapshot that
one request alone has gone on from, as the last turn of a conversation, is the first to be evicted when that
has left its own.

Each cache salt has a tree of its own, whose root holds the salt. Pages of different salts are in different
trees, whatever their tokens.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class RadixNode:
    """Cached page, held by ``refs`` requests; with none it may be evicted. ``key``: its tokens, which follow
    those of its ancestors; ``parent``: None once it was evicted. ``snapshot``: number of the state behind it,
    None without one, in use by ``readers`` requests; ``num_begun`` have gone on from it."""

    __slots__ = ("children", "key", "num_begun", "page", "parent", "readers", "refs", "snapshot")

    def __init__(self, parent: "RadixNode | None", key: tuple[int, ...], page: int) -> None:
        self.parent, self.key, self.page = parent, key, page
        self.children: dict[tuple[int, ...], RadixNode] = {}
        self.refs = self.readers = self.num_begun = 0
        self.snapshot: int | None = None


class RadixRoot(RadixNode):
    """Root of the pages of one cache salt, which exists as long as it has children. It is no page itself."""

    __slots__ = ("salt",)

    def __init__(self, salt: str | None) -> None:
        super().__init__(None, (), -1)
        self.salt = salt


class Snapshot(NamedTuple):
    """State ``number`` behind a page; ``is_passing`` if it gives way to the next of its request."""

    number: int
    is_passing: bool


@dataclass
class PageAllocation:
    """Pages of one request in the order of its tokens: shared ``nodes``, then private ``pages``.

    Attributes:
        snapshots: states behind private pages, by the number of pages before them.
        passing: node, and number of its snapshot, which gives way to the request's next.
        source: node whose snapshot the request begins with, until it has done so.
        began: the same, afterwards too.
        part: of the pool, that all pages are from.
        salt: cache salt of the request, None without one.
    """

    nodes: list[RadixNode] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    passing: tuple[RadixNode, int] | None = None
    source: RadixNode | None = None
    began: RadixNode | None = None
    part: int = 0
    salt: str | None = None

    def __len__(self) -> int:
        return len(self.nodes) + len(self.pages)

    @property
    def table(self) -> list[int]:
        """Page numbers in the order of tokens."""
        return self.table_from(0)

    def table_from(self, first: int) -> list[int]:
        """Page numbers but for the ``first``."""
        num_shared = len(self.nodes)
        if first >= num_shared:
            return self.pages[first - num_shared :]
        return [node.page for node in self.nodes[first:]] + self.pages


class PagePool:
    """Allocator of the page numbers 0..num_pages-1 with a prefix cache of the pages of computed tokens.

    Its parts are as many successive pages each, with a prefix cache of their own, for data-parallel
    attention: a request has all its pages from one of them.

    Args:
        prefix_cache: keep pages after their requests have left, until their memory is needed.
        snapshots: numbers of states for snapshots; None for targets without recurrent layers.
        num_parts: a divisor of ``num_pages``.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        prefix_cache: bool = True,
        snapshots: range | None = None,
        num_parts: int = 1,
    ) -> None:
        assert num_pages % num_parts == 0, "parts are equal"
        self.num_parts, self.pages_of_part = num_parts, num_pages // num_parts
        self.num_pages, self.page_size, self.prefix_cache = num_pages, page_size, prefix_cache
        self.has_snapshots = snapshots is not None
        self._snapshots = snapshots or range(0)
        self._free_snapshots = list(self._snapshots)
        self._with_snapshot: OrderedDict[RadixNode, None] = OrderedDict()  # the least recently used first
        size = self.pages_of_part
        self._free = [list(range((i + 1) * size - 1, i * size - 1, -1)) for i in range(num_parts)]
        self._roots: list[dict[str | None, RadixRoot]] = [{} for _ in range(num_parts)]
        # A request holds every ancestor of a node it holds and releases the deepest first, so the oldest
        # unused node never has children.
        self._unused: list[OrderedDict[RadixNode, None]] = [OrderedDict() for _ in range(num_parts)]
        self.num_evicted = 0

    @property
    def num_snapshots(self) -> int:
        """Most snapshots at a time."""
        return len(self._snapshots)

    @property
    def can_reuse(self) -> bool:
        """True if a request may go on from what another has computed."""
        return self.prefix_cache and (not self.has_snapshots or self.num_snapshots > 0)

    @property
    def num_available(self) -> int:
        """Pages that are free, or cached and not held."""
        return sum(map(self.num_available_in, range(self.num_parts)))

    def num_available_in(self, part: int) -> int:
        """Those of a part."""
        return len(self._free[part]) + len(self._unused[part])

    def pages_for(self, num_tokens: int) -> int:
        """Number of pages that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.page_size)

    def match(
        self,
        tokens: Sequence[int],
        stop: int | None = None,
        known: Sequence[RadixNode] = (),
        *,
        part: int = 0,
        salt: str | None = None,
    ) -> list[RadixNode]:
        """Find the longest cached prefix of ``tokens``, or of the first ``stop``, in a part of the pool,
        whole pages only. Holds nothing.

        Args:
            known: what was found for the same tokens and salt before; only what has changed since is looked
                at.
            salt: only pages of requests with the same salt are found.
        """
        nodes = list(known)
        while nodes and nodes[-1].parent is None:  # evicted, and so is all that was behind it
            nodes.pop()
        node = nodes[-1] if nodes else self._roots[part].get(salt)
        if node is None:
            return nodes
        stop = len(tokens) if stop is None else stop
        for start in range(len(nodes) * self.page_size, stop - self.page_size + 1, self.page_size):
            child = node.children.get(tuple(tokens[start : start + self.page_size]))
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def reusable(self, nodes: Sequence[RadixNode]) -> list[RadixNode]:
        """Those of cached pages that a request can go on from: up to the last one with a snapshot, where
        states are needed."""
        if not self.has_snapshots:
            return list(nodes)
        count = next((i for i in range(len(nodes), 0, -1) if nodes[i - 1].snapshot is not None), 0)
        return list(nodes[:count])

    def begin(self, allocation: PageAllocation) -> None:
        """Keep the snapshot behind the shared pages of a new request until :meth:`has_begun`."""
        if self.has_snapshots and allocation.nodes:
            node = allocation.source = allocation.began = allocation.nodes[-1]
            node.readers += 1
            node.num_begun += 1
            self._with_snapshot.move_to_end(node)

    def has_begun(self, allocation: PageAllocation) -> None:
        """The request has read its snapshot."""
        if allocation.source is not None:
            allocation.source.readers -= 1
            allocation.source = None

    def take_snapshot(self, allocation: PageAllocation, num_pages: int, *, is_passing: bool) -> int | None:
        """Number of the state to save behind the first ``num_pages`` pages of a request, evicting the least
        recently used snapshot; None where all are in use, or there is no cache. Of passing ones the request
        keeps the last two, for results of the last one may be on their way."""
        if not self.can_reuse or num_pages <= len(allocation.nodes):
            return None
        if (known := allocation.snapshots.get(num_pages)) is not None:
            is_passing = is_passing and known.is_passing
            allocation.snapshots[num_pages] = known._replace(is_passing=is_passing)
            return None
        passing = sorted(pages for pages, given in allocation.snapshots.items() if given.is_passing)
        for pages in passing[:-1]:
            self._free_snapshots.append(allocation.snapshots.pop(pages).number)
        if not self._free_snapshots:
            node = next((each for each in self._with_snapshot if not each.readers), None)
            if node is None:
                return None
            self._drop_snapshot(node)
        number = self._free_snapshots.pop()
        allocation.snapshots[num_pages] = Snapshot(number, is_passing)
        return number

    def num_resumable(self, allocation: PageAllocation, num_tokens: int) -> int:
        """Of the first ``num_tokens`` of a request, those behind which it has a snapshot."""
        held = [pages for pages in allocation.snapshots if pages * self.page_size <= num_tokens]
        return max([len(self.reusable(allocation.nodes)), *held]) * self.page_size

    def _drop_snapshot(self, node: RadixNode) -> None:
        assert node.snapshot is not None and not node.readers
        self._free_snapshots.append(node.snapshot)
        node.snapshot = None
        del self._with_snapshot[node]

    def _attach(self, allocation: PageAllocation, node: RadixNode) -> None:
        """Hand the request's snapshot behind its last node over to the node."""
        given = allocation.snapshots.pop(len(allocation.nodes), None)
        if given is None:
            return
        is_mine = node.snapshot is None
        if is_mine:
            node.snapshot = given.number
        else:
            self._free_snapshots.append(given.number)
        self._with_snapshot[node] = None
        self._with_snapshot.move_to_end(node)
        if not given.is_passing:
            self._retire(allocation.began)
        before = allocation.passing
        allocation.passing = (node, given.number) if given.is_passing and is_mine else None
        if before is not None and before[0].snapshot == before[1] and not before[0].readers:
            self._drop_snapshot(before[0])

    def _retire(self, began: RadixNode | None) -> None:
        """Let a snapshot be the next to go that only the request has gone on from which has now left a later
        one."""
        if began is not None and began in self._with_snapshot and began.num_begun == 1:
            self._with_snapshot.move_to_end(began, last=False)

    def allocate(
        self, nodes: Iterable[RadixNode], num_pages: int, part: int = 0, salt: str | None = None
    ) -> PageAllocation | None:
        """Hold ``nodes``, which were found with the same ``salt``, and ``num_pages`` private pages of a part;
        None, with no change, when too few are left."""
        allocation = PageAllocation(part=part, salt=salt)
        for node in nodes:
            self._hold(node)
            allocation.nodes.append(node)
        if not self.extend(allocation, num_pages):
            self.release(allocation)
            return None
        return allocation

    def extend(self, allocation: PageAllocation, num_pages: int) -> bool:
        """Add private pages to ``allocation``, all or none; evicts cached pages, least recently used
        first."""
        part = allocation.part
        if num_pages > self.num_available_in(part):
            return False
        while len(self._free[part]) < num_pages:
            self._evict(part)
        allocation.pages += [self._free[part].pop() for _ in range(num_pages)]
        return True

    def publish(self, allocation: PageAllocation, tokens: Sequence[int]) -> bool:
        """Cache the whole pages of ``tokens``, which the request has computed and continues to hold.

        Where the tree already has a page of the same tokens, that page is held and the request's own is
        freed.

        Returns:
            True when a page number of the allocation changed.
        """
        if not self.prefix_cache:
            return False
        changed = False
        node = allocation.nodes[-1] if allocation.nodes else None
        for i in range(len(allocation.nodes), len(tokens) // self.page_size):
            if node is None:
                node = self._root(allocation)
            key = tuple(tokens[i * self.page_size : (i + 1) * self.page_size])
            page = allocation.pages.pop(0)
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = RadixNode(node, key, page)
            else:
                self._free[allocation.part].append(page)
                changed = True
            self._hold(child)
            allocation.nodes.append(child)
            self._attach(allocation, child)
            node = child
        return changed

    def _root(self, allocation: PageAllocation) -> RadixRoot:
        """Root of the pages that a request with the allocation's salt shares, made where there is none."""
        roots = self._roots[allocation.part]
        root = roots.get(allocation.salt)
        if root is None:
            root = roots[allocation.salt] = RadixRoot(allocation.salt)
        return root

    def release(self, allocation: PageAllocation) -> None:
        """Release every page of ``allocation``, which is empty afterwards."""
        for node in reversed(allocation.nodes):
            node.refs -= 1
            if node.refs == 0:
                self._unused[allocation.part][node] = None
        self._free[allocation.part] += reversed(allocation.pages)
        self._free_snapshots += [each.number for each in allocation.snapshots.values()]
        self.has_begun(allocation)
        allocation.nodes, allocation.pages = [], []
        allocation.snapshots, allocation.passing, allocation.began = {}, None, None

    def clear(self) -> None:
        """Evict every cached page that is not held."""
        for part, unused in enumerate(self._unused):
            while unused:
                self._evict(part)

    def _hold(self, node: RadixNode) -> None:
        if node.refs == 0:
            self._unused[node.page // self.pages_of_part].pop(node, None)
        node.refs += 1

    def _evict(self, part: int) -> None:
        node, _ = self._unused[part].popitem(last=False)
        assert not node.children and node.parent is not None
        if node.snapshot is not None:
            self._drop_snapshot(node)
        parent = node.parent
        del parent.children[node.key]
        if isinstance(parent, RadixRoot) and not parent.children:
            del self._roots[part][parent.salt]
        node.parent = None
        self._free[part].append(node.page)
        self.num_evicted += 1

    def check(self, allocations: Iterable[PageAllocation]) -> None:
        """Assert that free, cached and private pages are together all pages, each once, and so with
        snapshots, and that the reference count of every node is the number of ``allocations`` that hold
        it."""
        cached: list[RadixNode] = []
        allocations = list(allocations)
        for part, roots in enumerate(self._roots):
            assert all(root.children for root in roots.values()), "a salt without pages is remembered"
            stack = [node for root in roots.values() for node in root.children.values()]
            mine = []
            while stack:
                node = stack.pop()
                mine.append(node)
                stack += node.children.values()
            private = [page for each in allocations if each.part == part for page in each.pages]
            everything = sorted(self._free[part] + private + [node.page for node in mine])
            first, last = part * self.pages_of_part, (part + 1) * self.pages_of_part
            assert everything == list(range(first, last)), "a page was lost or has two owners"
            cached += mine
        holders: dict[RadixNode, int] = {}
        for allocation in allocations:
            for node in allocation.nodes:
                holders[node] = holders.get(node, 0) + 1
        for node in cached:
            assert node.refs == holders.get(node, 0), "a cached page counts its holders wrongly"
            unused = self._unused[node.page // self.pages_of_part]
            assert (node.refs == 0) == (node in unused), "a cached page is in the wrong list"
            assert (node.snapshot is not None) == (node in self._with_snapshot), "a snapshot is in no list"
            readers = sum(allocation.source is node for allocation in allocations)
            assert node.readers == readers, "a snapshot counts its readers wrongly"
        kept = [node.snapshot for node in cached if node.snapshot is not None]
        kept += [each.number for allocation in allocations for each in allocation.snapshots.values()]
        assert sorted(self._free_snapshots + kept) == list(self._snapshots), (
            "a snapshot was lost or has two owners"
        )
