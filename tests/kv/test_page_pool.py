"""Page pool: shared prefixes, order of eviction, and no page lost in any order of events."""

import random

import pytest

from eagle_kit.kv.page_pool import PagePool


def _serve(pool: PagePool, tokens: list[int]) -> list[int]:
    """Serve one request from beginning to end and return its page numbers."""
    shared = pool.match(tokens)
    allocation = pool.allocate(shared, pool.pages_for(len(tokens)) - len(shared))
    assert allocation is not None
    pool.cache_pages(allocation, tokens)
    table = allocation.table
    pool.release(allocation)
    return table


def test_a_common_beginning_is_the_same_pages():
    pool = PagePool(20, 4)
    first = _serve(pool, [*range(10), 50])
    second = _serve(pool, [*range(10), 60, 61])
    assert first[:2] == second[:2]
    assert len(pool.match(list(range(8)))) == 2 and len(pool.match(list(range(7)))) == 1
    assert pool.match([9, *range(8)]) == []


def test_two_requests_that_compute_the_same_end_with_one_page():
    pool = PagePool(8, 2)
    a, b = (pool.allocate([], 3) for _ in range(2))
    assert not pool.cache_pages(a, [1, 2, 3, 4, 5])
    assert pool.cache_pages(b, [1, 2, 3, 4, 5])
    assert a.table[:2] == b.table[:2] and a.table[2] != b.table[2]
    pool.check([a, b])
    assert pool.num_available == 8 - 4


def test_the_longest_unused_page_gives_way_first_and_children_before_parents():
    pool = PagePool(6, 1)
    _serve(pool, [1, 2, 3])
    _serve(pool, [7, 8])
    _serve(pool, [1])
    assert pool.allocate([], 4) is not None
    assert [len(pool.match(tokens)) for tokens in ([1, 2, 3], [7, 8])] == [1, 1]


def test_pages_that_were_evicted_since_they_were_found_are_not_found_again():
    pool = PagePool(6, 1)
    tokens = [1, 2, 3]
    _serve(pool, tokens)
    found = pool.match(tokens)
    assert len(found) == 3
    taken = pool.allocate([], 5)
    assert taken is not None
    assert pool.match(tokens, known=found) == pool.match(tokens) == found[:1]
    assert pool.allocate([], 1) is not None
    assert pool.match(tokens, known=found) == []


def test_pages_of_one_salt_are_not_found_with_another_nor_without_one():
    pool = PagePool(16, 2, num_shards=2)
    salts = [None, "a", "b"]
    held = []
    for salt in salts:
        for shard in range(2):
            allocation = pool.allocate([], 2, shard, salt)
            pool.cache_pages(allocation, [1, 2, 3, 4])
            held.append(allocation)
    for allocation in held:
        found = pool.match([1, 2, 3, 4, 5], shard=allocation.shard, salt=allocation.salt)
        assert found == allocation.nodes
    assert pool.match([1, 2], salt="c") == []
    pool.check(held)


def test_a_salt_is_forgotten_with_the_last_of_its_pages():
    pool = PagePool(3, 1)
    for number in range(50):
        allocation = pool.allocate([], 2, salt=f"salt {number}")
        pool.cache_pages(allocation, [1, 2])
        pool.release(allocation)
        pool.check([])
    assert [len(pool.match([1, 2], salt=f"salt {number}")) for number in (47, 48, 49)] == [0, 1, 2]
    found = pool.match([1, 2], salt="salt 49")
    pool.clear()
    pool.check([])
    assert pool.match([1, 2], known=found, salt="salt 49") == []


def test_an_allocation_that_does_not_fit_changes_nothing():
    pool = PagePool(4, 1)
    _serve(pool, [1, 2])
    nodes = pool.match([1, 2])
    assert pool.allocate(nodes, 3) is None
    pool.check([])
    assert pool.num_available == 4 and len(pool.match([1, 2])) == 2


def test_without_a_prefix_cache_nothing_is_remembered():
    pool = PagePool(4, 2, prefix_cache=False)
    _serve(pool, [1, 2, 3])
    assert pool.match([1, 2]) == [] and pool.num_available == 4


@pytest.mark.parametrize(("page_size", "salts"), [(1, [None]), (3, [None]), (1, [None, "a", "b"])])
def test_no_order_of_events_loses_a_page(page_size, salts):
    rng = random.Random(page_size)
    pool = PagePool(23, page_size)
    running = {}
    for number in range(20_000):
        event = rng.random()
        if event < 0.4:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
            salt = rng.choice(salts)
            shared = pool.match(tokens[:-1], salt=salt)
            allocation = pool.allocate(shared, pool.pages_for(len(tokens)) - len(shared), salt=salt)
            if allocation is not None:
                running[number] = (allocation, tokens)
        elif running:
            key = rng.choice(list(running))
            allocation, tokens = running[key]
            if event < 0.6:
                if pool.extend(allocation, 1):
                    tokens += [rng.randrange(2) for _ in range(page_size)]
            elif event < 0.75:
                pool.cache_pages(allocation, tokens[: rng.randrange(len(tokens) + 1)])
            else:
                pool.cache_pages(allocation, tokens)
                pool.release(allocation)
                del running[key]
        if number % 10 == 0:
            pool.check([allocation for allocation, _ in running.values()])
    assert pool.num_evicted > 100


@pytest.mark.parametrize("page_size", [1, 3])
def test_no_order_of_events_loses_or_mixes_up_a_snapshot(page_size):
    """``held`` are the tokens before each state, which a request may only go on from if they are its own."""
    rng = random.Random(page_size)
    pool = PagePool(23, page_size, snapshots=range(5, 12))
    running, held, num_used, num_denied = {}, {}, 0, 0
    for number in range(20_000):
        event = rng.random()
        if event < 0.4:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
            shared = pool.reusable(pool.match(tokens[:-1]))
            allocation = pool.allocate(shared, pool.pages_for(len(tokens)) - len(shared))
            if allocation is not None:
                pool.pin_snapshot(allocation)
                running[number] = (allocation, tokens)
        elif running:
            key = rng.choice(list(running))
            allocation, tokens = running[key]
            if allocation.pinned is not None:
                assert held[allocation.pinned.snapshot] == tokens[: len(allocation.nodes) * page_size]
                num_used += 1
                pool.unpin_snapshot(allocation)
            if event < 0.6 and (whole := len(tokens) // page_size):
                pages = rng.randint(1, whole)
                snapshot = pool.take_snapshot(allocation, pages, is_transient=rng.random() < 0.5)
                num_denied += snapshot is None
                if snapshot is not None:
                    assert 5 <= snapshot < 12
                    held[snapshot] = tokens[: pages * page_size]
                    assert pool.num_resumable(allocation, len(tokens)) >= pages * page_size
            elif event < 0.75:
                pool.cache_pages(allocation, tokens[: rng.randrange(len(tokens) + 1)])
            else:
                pool.cache_pages(allocation, tokens)
                pool.release(allocation)
                del running[key]
        pool.check([allocation for allocation, _ in running.values()])
    assert num_used > 100 and num_denied > 100
    for allocation, _ in running.values():
        pool.release(allocation)
    pool.clear()
    pool.check([])
    assert pool.num_available == 23


def _turn(pool: PagePool, tokens: list[int]) -> int:
    """Serve a request that leaves a state behind its tokens -> tokens before the state that it began with."""
    shared = pool.reusable(pool.match(tokens[:-1]))
    allocation = pool.allocate(shared, pool.pages_for(len(tokens)) - len(shared))
    assert allocation is not None
    pool.pin_snapshot(allocation)
    pool.unpin_snapshot(allocation)
    pool.take_snapshot(allocation, len(tokens) // pool.page_size, is_transient=False)
    pool.cache_pages(allocation, tokens)
    pool.release(allocation)
    pool.check([])
    return len(shared) * pool.page_size


def test_a_snapshot_that_one_request_went_on_from_gives_way_and_a_shared_one_stays():
    pool = PagePool(60, 1, snapshots=range(3))
    assert [_turn(pool, tokens) for tokens in ([1, 1], [2, 2], [1, 1, 5, 5])] == [0, 0, 2]
    _turn(pool, [3, 3])  # takes the state of [1, 1], whose conversation has left a later one
    found = [len(pool.reusable(pool.match(tokens))) for tokens in ([1, 1, 5, 5], [2, 2], [3, 3])]
    assert found == [4, 2, 2]
    pool.clear()
    assert [_turn(pool, tokens) for tokens in ([1, 1], [1, 1, 5], [1, 1, 6], [2, 2])] == [0, 2, 2, 0]
    found = [len(pool.reusable(pool.match(tokens))) for tokens in ([1, 1], [1, 1, 6], [2, 2])]
    assert found == [2, 3, 2], "two requests have gone on from the first one"


def test_of_passing_snapshots_a_request_keeps_the_last_two():
    pool = PagePool(20, 1, snapshots=range(9))
    allocation = pool.allocate([], 8)
    assert allocation is not None
    for pages in (2, 4, 6):
        pool.take_snapshot(allocation, pages, is_transient=True)
    assert pool.take_snapshot(allocation, 6, is_transient=True) is None, "it is there"
    assert list(allocation.snapshots) == [4, 6]
    assert [pool.num_resumable(allocation, tokens) for tokens in (3, 4, 5, 6)] == [0, 4, 4, 6]
    pool.cache_pages(allocation, list(range(6)))
    assert pool.take_snapshot(allocation, 6, is_transient=False) is None, "behind shared pages there is none"
    assert pool.num_resumable(allocation, 6) == 6
    pool.release(allocation)
    pool.check([])
    nodes = pool.match(list(range(8)))
    assert [node.snapshot is not None for node in nodes] == [False] * 5 + [True], "the later takes its place"


def test_a_passing_snapshot_that_is_asked_for_again_to_stay_stays():
    pool = PagePool(20, 1, snapshots=range(9))
    allocation = pool.allocate([], 8)
    assert allocation is not None
    pool.take_snapshot(allocation, 2, is_transient=True)
    pool.take_snapshot(allocation, 2, is_transient=False)
    for pages in (3, 5, 7):
        pool.take_snapshot(allocation, pages, is_transient=True)
    assert list(allocation.snapshots) == [2, 5, 7]
    pool.cache_pages(allocation, list(range(8)))
    kept = [i + 1 for i, node in enumerate(allocation.nodes) if node.snapshot is not None]
    assert kept == [2, 7], "a passing one gives way to the next, others do not"


def test_a_prefix_ends_at_the_token_that_it_is_asked_for():
    pool = PagePool(20, 2)
    tokens = list(range(8))
    _serve(pool, tokens)
    assert [len(pool.match(tokens, stop)) for stop in (0, 1, 2, 5, 7, 8)] == [0, 0, 1, 2, 3, 4]
    assert len(pool.match(tokens, 7, pool.match(tokens, 4))) == 3
    assert pool.num_evicted == 0
    pool.clear()
    assert pool.num_evicted == 4 and pool.num_available == 20


def test_parts_of_the_pool_have_pages_and_caches_of_their_own():
    """In any order of events: every request has its pages from one shard, whose cache alone it finds."""
    pool, rng = PagePool(12, 2, num_shards=3), random.Random(1)
    held, texts = [], [[i % 3, *[rng.randrange(4) for _ in range(6)]] for i in range(6)]
    for _ in range(400):
        shard, tokens = rng.randrange(3), rng.choice(texts)
        shared = pool.match(tokens, shard=shard)
        assert all(node.page // 4 == shard for node in shared)
        allocation = pool.allocate(shared, pool.pages_for(len(tokens)) - len(shared), shard)
        if allocation is not None:
            assert {page // 4 for page in allocation.table} == {shard}
            pool.cache_pages(allocation, tokens)
            held.append(allocation)
        while held and (allocation is None or rng.random() < 0.4):
            pool.release(held.pop(rng.randrange(len(held))))
            allocation = held
        pool.check(held)
    assert pool.num_evicted > 20
    for allocation in held:
        pool.release(allocation)
    pool.clear()
    assert pool.num_available == 12 and [pool.num_available_in(shard) for shard in range(3)] == [4] * 3
