"""Page pool: which pages of the key-value stores are free, private to a request, or cached.

A cached page is a node of a radix tree, whose edges are the tokens of one page; requests with a common prefix
hold the same nodes. The pool is bookkeeping on the host, the tensors belong to the stores. Target and draft
share page numbers: a draft's entry has the position of the token that it embeds, so it depends on the same
tokens as the target's entry.

Recurrent layers cannot continue from keys and values alone: they need the recurrent state at that position.
So a cached prefix is usable up to its last page with a snapshot of the state. A request saves snapshots

* after its prompt,
* where its prompt diverges from a cached one,
* and, while a long prompt is computed, after the last computed chunk (a *transient* snapshot, which the next
  one replaces).

Snapshots are evicted in the order of their last use, with one exception: the snapshot of an earlier turn of a
conversation is evicted first. It counts as one if a single request has continued from it, and that request
has saved a later snapshot.

Each cache salt has a radix tree of its own. Pages of different salts are never shared.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class RadixNode:
    """Cached page.

    Attributes:
        parent: node of the page before; None once this page is evicted.
        key: tokens of the page.
        page: its number in the stores.
        refs: requests that hold the page. It may be evicted at 0.
        snapshot: index of the recurrent state after this page; None without one.
        readers: requests that have yet to read the snapshot, which is not evicted meanwhile.
        num_started: requests that have continued from the snapshot.
    """

    __slots__ = ("children", "key", "num_started", "page", "parent", "readers", "refs", "snapshot")

    def __init__(self, parent: "RadixNode | None", key: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.children: dict[tuple[int, ...], RadixNode] = {}
        self.refs = 0
        self.readers = 0
        self.num_started = 0
        self.snapshot: int | None = None


class RadixRoot(RadixNode):
    """Root of the radix tree of one cache salt. It is not a page, and exists while it has children."""

    __slots__ = ("salt",)

    def __init__(self, salt: str | None) -> None:
        super().__init__(None, (), -1)
        self.salt = salt


class Snapshot(NamedTuple):
    """Recurrent state with index ``number``; ``is_transient`` if the request's next snapshot replaces it."""

    number: int
    is_transient: bool


@dataclass
class PageAllocation:
    """Pages of one request in the order of its tokens: shared ``nodes``, then private ``pages``.

    Attributes:
        snapshots: snapshots after private pages, by the number of pages up to there.
        transient: node and index of the transient snapshot that was cached last.
        pinned: node whose snapshot the request continues from, until it has read it; None otherwise.
        started_from: the same node, also after it was read.
        shard: number of the shard that all pages belong to.
        salt: cache salt of the request; None without one.
    """

    nodes: list[RadixNode] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    transient: tuple[RadixNode, int] | None = None
    pinned: RadixNode | None = None
    started_from: RadixNode | None = None
    shard: int = 0
    salt: str | None = None

    def __len__(self) -> int:
        return len(self.nodes) + len(self.pages)

    @property
    def table(self) -> list[int]:
        """Page numbers in the order of tokens."""
        return self.table_from(0)

    def table_from(self, first: int) -> list[int]:
        """Page numbers without the first ``first`` ones."""
        num_shared = len(self.nodes)
        if first >= num_shared:
            return self.pages[first - num_shared :]
        return [node.page for node in self.nodes[first:]] + self.pages


class PagePool:
    """Allocator of the page numbers 0..num_pages-1, with a prefix cache.

    For data-parallel attention the pool has several shards of equal size, one for each rank. Each has its own
    prefix cache. All pages of a request come from one shard.

    Args:
        prefix_cache: keep the pages of finished requests until their memory is needed.
        snapshots: indices of the states that may hold snapshots; None for targets without recurrent layers.
        num_shards: number of shards, a divisor of ``num_pages``.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        prefix_cache: bool = True,
        snapshots: range | None = None,
        num_shards: int = 1,
    ) -> None:
        assert num_pages % num_shards == 0, "all shards have the same size"
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.num_shards = num_shards
        self.pages_per_shard = num_pages // num_shards
        self.num_evicted = 0

        # Free pages of each shard, the lowest number last, which is taken first.
        size = self.pages_per_shard
        self._free = [list(range((i + 1) * size - 1, i * size - 1, -1)) for i in range(num_shards)]

        # Radix trees of each shard by cache salt, and their pages that nobody holds, least recently used
        # first. A request holds all ancestors of a node and releases the deepest first, so the oldest unused
        # node never has children.
        self._roots: list[dict[str | None, RadixRoot]] = [{} for _ in range(num_shards)]
        self._unused: list[OrderedDict[RadixNode, None]] = [OrderedDict() for _ in range(num_shards)]

        # Snapshots of recurrent states, least recently used first.
        self.has_snapshots = snapshots is not None
        self._snapshots = snapshots or range(0)
        self._free_snapshots = list(self._snapshots)
        self._with_snapshot: OrderedDict[RadixNode, None] = OrderedDict()

    @property
    def num_snapshots(self) -> int:
        """Largest number of snapshots at a time."""
        return len(self._snapshots)

    @property
    def can_reuse(self) -> bool:
        """True if a request may continue from the tokens of another one."""
        return self.prefix_cache and (not self.has_snapshots or self.num_snapshots > 0)

    @property
    def num_available(self) -> int:
        """Number of pages that are free, or cached and not held, in all shards."""
        return sum(map(self.num_available_in, range(self.num_shards)))

    def num_available_in(self, shard: int) -> int:
        """Number of pages of ``shard`` that are free, or cached and not held."""
        return len(self._free[shard]) + len(self._unused[shard])

    def pages_for(self, num_tokens: int) -> int:
        """Number of pages that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.page_size)

    def match(
        self,
        tokens: Sequence[int],
        stop: int | None = None,
        known: Sequence[RadixNode] = (),
        *,
        shard: int = 0,
        salt: str | None = None,
    ) -> list[RadixNode]:
        """Find the longest cached prefix of ``tokens``, in whole pages. No page is held by it.

        Args:
            tokens: token ids of a request.
            stop: number of tokens to look for; None for all.
            known: result of an earlier call for the same tokens and salt, from which the search continues.
            shard: shard of the pool to search.
            salt: cache salt of the request.
        """
        # Drop known pages that have been evicted since.
        nodes = list(known)
        while nodes and nodes[-1].parent is None:
            nodes.pop()

        # Descend from the last known page, or from the root.
        node: RadixNode | None = self._roots[shard].get(salt)
        if nodes:
            node = nodes[-1]
        if node is None:
            return nodes
        if stop is None:
            stop = len(tokens)
        for start in range(len(nodes) * self.page_size, stop - self.page_size + 1, self.page_size):
            child = node.children.get(tuple(tokens[start : start + self.page_size]))
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def reusable(self, nodes: Sequence[RadixNode]) -> list[RadixNode]:
        """Cut cached pages to those that a request can continue from: all, or for recurrent layers up to the
        last page with a snapshot."""
        if not self.has_snapshots:
            return list(nodes)
        for count in range(len(nodes), 0, -1):
            if nodes[count - 1].snapshot is not None:
                return list(nodes[:count])
        return []

    def pin_snapshot(self, allocation: PageAllocation) -> None:
        """Protect the snapshot that a new request continues from, until :meth:`unpin_snapshot`."""
        if not self.has_snapshots or not allocation.nodes:
            return
        node = allocation.nodes[-1]
        allocation.pinned = node
        allocation.started_from = node
        node.readers += 1
        node.num_started += 1
        self._with_snapshot.move_to_end(node)

    def unpin_snapshot(self, allocation: PageAllocation) -> None:
        """End the protection of the snapshot, which the request has read."""
        if allocation.pinned is not None:
            allocation.pinned.readers -= 1
            allocation.pinned = None

    def take_snapshot(self, allocation: PageAllocation, num_pages: int, *, is_transient: bool) -> int | None:
        """Choose the index of the state to save after the first ``num_pages`` pages of a request.

        The least recently used snapshot is evicted where none is free. A request keeps its last two transient
        snapshots, because the step that wrote the last one may still be in flight.

        Returns:
            None where nothing is to be saved: there is a snapshot already, or no cache, or all are in use.
        """
        if not self.can_reuse or num_pages <= len(allocation.nodes):
            return None
        known = allocation.snapshots.get(num_pages)
        if known is not None:
            is_transient = is_transient and known.is_transient
            allocation.snapshots[num_pages] = known._replace(is_transient=is_transient)
            return None

        # Free the request's transient snapshots but the last one.
        transient = sorted(pages for pages, given in allocation.snapshots.items() if given.is_transient)
        for pages in transient[:-1]:
            self._free_snapshots.append(allocation.snapshots.pop(pages).number)

        # Evict a snapshot of the cache where none is free.
        if not self._free_snapshots:
            node = next((each for each in self._with_snapshot if not each.readers), None)
            if node is None:
                return None
            self._drop_snapshot(node)
        number = self._free_snapshots.pop()
        allocation.snapshots[num_pages] = Snapshot(number, is_transient)
        return number

    def num_resumable(self, allocation: PageAllocation, num_tokens: int) -> int:
        """Number of tokens, at most ``num_tokens``, after which the request has a snapshot."""
        held = [pages for pages in allocation.snapshots if pages * self.page_size <= num_tokens]
        return max([len(self.reusable(allocation.nodes)), *held]) * self.page_size

    def _drop_snapshot(self, node: RadixNode) -> None:
        assert node.snapshot is not None and not node.readers
        self._free_snapshots.append(node.snapshot)
        node.snapshot = None
        del self._with_snapshot[node]

    def _attach(self, allocation: PageAllocation, node: RadixNode) -> None:
        """Move the snapshot after the request's last shared page to that page's ``node``."""
        given = allocation.snapshots.pop(len(allocation.nodes), None)
        if given is None:
            return

        # The node takes the snapshot, unless it has one already.
        is_mine = node.snapshot is None
        if is_mine:
            node.snapshot = given.number
        else:
            self._free_snapshots.append(given.number)
        self._with_snapshot[node] = None
        self._with_snapshot.move_to_end(node)

        # Earlier snapshots of the request lose their use.
        if not given.is_transient:
            self._retire(allocation.started_from)
        before = allocation.transient
        allocation.transient = None
        if given.is_transient and is_mine:
            allocation.transient = (node, given.number)
        if before is not None and before[0].snapshot == before[1] and not before[0].readers:
            self._drop_snapshot(before[0])

    def _retire(self, node: RadixNode | None) -> None:
        """Evict the snapshot of ``node`` next if only one request has continued from it."""
        if node is not None and node in self._with_snapshot and node.num_started == 1:
            self._with_snapshot.move_to_end(node, last=False)

    def allocate(
        self, nodes: Iterable[RadixNode], num_pages: int, shard: int = 0, salt: str | None = None
    ) -> PageAllocation | None:
        """Hold the cached ``nodes`` and ``num_pages`` private pages.

        Args:
            nodes: result of :meth:`match` with the same ``shard`` and ``salt``.

        Returns:
            None, with no change, where too few pages are available.
        """
        allocation = PageAllocation(shard=shard, salt=salt)
        for node in nodes:
            self._hold(node)
            allocation.nodes.append(node)
        if not self.extend(allocation, num_pages):
            self.release(allocation)
            return None
        return allocation

    def extend(self, allocation: PageAllocation, num_pages: int) -> bool:
        """Add private pages to ``allocation``, all or none. Cached pages are evicted, least recently used
        first."""
        shard = allocation.shard
        if num_pages > self.num_available_in(shard):
            return False
        while len(self._free[shard]) < num_pages:
            self._evict(shard)
        allocation.pages += [self._free[shard].pop() for _ in range(num_pages)]
        return True

    def cache_pages(self, allocation: PageAllocation, tokens: Sequence[int]) -> bool:
        """Cache the whole pages of ``tokens``, which the request has computed and still holds.

        Where a page of the same tokens is cached already, the request holds that page and frees its own.

        Returns:
            True if a page number of the allocation changed.
        """
        if not self.prefix_cache:
            return False

        # Continue from the last shared page.
        changed = False
        node: RadixNode | None = None
        if allocation.nodes:
            node = allocation.nodes[-1]
        for i in range(len(allocation.nodes), len(tokens) // self.page_size):
            if node is None:
                node = self._root(allocation)
            key = tuple(tokens[i * self.page_size : (i + 1) * self.page_size])
            page = allocation.pages.pop(0)

            # Cache the page, or free it where its tokens are cached already.
            child = node.children.get(key)
            if child is None:
                child = RadixNode(node, key, page)
                node.children[key] = child
            else:
                self._free[allocation.shard].append(page)
                changed = True

            # Hold the cached page in place of the private one.
            self._hold(child)
            allocation.nodes.append(child)
            self._attach(allocation, child)
            node = child
        return changed

    def _root(self, allocation: PageAllocation) -> RadixRoot:
        """Find or make the root of the radix tree of the allocation's salt."""
        roots = self._roots[allocation.shard]
        root = roots.get(allocation.salt)
        if root is None:
            root = RadixRoot(allocation.salt)
            roots[allocation.salt] = root
        return root

    def release(self, allocation: PageAllocation) -> None:
        """Release all pages of ``allocation``, which is empty afterwards."""
        for node in reversed(allocation.nodes):
            node.refs -= 1
            if node.refs == 0:
                self._unused[allocation.shard][node] = None
        self._free[allocation.shard] += reversed(allocation.pages)
        self._free_snapshots += [each.number for each in allocation.snapshots.values()]
        self.unpin_snapshot(allocation)
        allocation.nodes = []
        allocation.pages = []
        allocation.snapshots = {}
        allocation.transient = None
        allocation.started_from = None

    def clear(self) -> None:
        """Evict every cached page that is not held."""
        for shard, unused in enumerate(self._unused):
            while unused:
                self._evict(shard)

    def _hold(self, node: RadixNode) -> None:
        if node.refs == 0:
            self._unused[node.page // self.pages_per_shard].pop(node, None)
        node.refs += 1

    def _evict(self, shard: int) -> None:
        node, _ = self._unused[shard].popitem(last=False)
        assert not node.children and node.parent is not None
        if node.snapshot is not None:
            self._drop_snapshot(node)
        parent = node.parent
        del parent.children[node.key]
        if isinstance(parent, RadixRoot) and not parent.children:
            del self._roots[shard][parent.salt]
        node.parent = None
        self._free[shard].append(node.page)
        self.num_evicted += 1

    def check(self, allocations: Iterable[PageAllocation]) -> None:
        """Assert that every page and snapshot has exactly one owner and that all counts are right.

        Args:
            allocations: of all requests that hold pages.
        """
        allocations = list(allocations)

        # Free, cached and private pages of a shard are together all of its pages.
        cached: list[RadixNode] = []
        for shard, roots in enumerate(self._roots):
            assert all(root.children for root in roots.values()), "a salt without pages has a root"
            nodes = _descendants(roots.values())
            private = [page for each in allocations if each.shard == shard for page in each.pages]
            pages = sorted(self._free[shard] + private + [node.page for node in nodes])
            first = shard * self.pages_per_shard
            last = first + self.pages_per_shard
            assert pages == list(range(first, last)), "a page was lost or has two owners"
            cached += nodes

        # Counts of every cached page.
        holders = Counter(node for allocation in allocations for node in allocation.nodes)
        readers = Counter(allocation.pinned for allocation in allocations if allocation.pinned is not None)
        for node in cached:
            unused = self._unused[node.page // self.pages_per_shard]
            assert node.refs == holders[node], "a cached page has a wrong number of holders"
            assert (node.refs == 0) == (node in unused), "a cached page is in the wrong list"
            assert (node.snapshot is not None) == (node in self._with_snapshot), "a snapshot is in no list"
            assert node.readers == readers[node], "a snapshot has a wrong number of readers"

        # Free, cached and private snapshots are together all of them.
        snapshots = [node.snapshot for node in cached if node.snapshot is not None]
        snapshots += [each.number for allocation in allocations for each in allocation.snapshots.values()]
        everything = sorted(self._free_snapshots + snapshots)
        assert everything == list(self._snapshots), "a snapshot was lost or has two owners"


def _descendants(nodes: Iterable[RadixNode]) -> list[RadixNode]:
    """All nodes below ``nodes``."""
    found: list[RadixNode] = []
    stack = [child for node in nodes for child in node.children.values()]
    while stack:
        node = stack.pop()
        found.append(node)
        stack += node.children.values()
    return found
