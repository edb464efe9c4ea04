"""Pages: shared beginnings, eviction in the right order, and no page lost in any order of events."""

import random

import pytest

from eagle_kit.kv.page_pool import KVCache


def _serve(cache: KVCache, tokens: list[int]) -> list[int]:
    """One request from beginning to end -> its page numbers."""
    shared = cache.match(tokens)
    lease = cache.lease(shared, cache.pages_for(len(tokens)) - len(shared))
    assert lease is not None
    cache.publish(lease, tokens)
    table = lease.table
    cache.release(lease)
    return table


def test_a_common_beginning_is_the_same_pages():
    cache = KVCache(20, 4)
    first = _serve(cache, [*range(10), 50])
    second = _serve(cache, [*range(10), 60, 61])
    assert first[:2] == second[:2]
    assert len(cache.match(list(range(8)))) == 2 and len(cache.match(list(range(7)))) == 1
    assert cache.match([9, *range(8)]) == []


def test_two_requests_that_compute_the_same_end_with_one_page():
    cache = KVCache(8, 2)
    a, b = (cache.lease([], 3) for _ in range(2))
    assert not cache.publish(a, [1, 2, 3, 4, 5])
    assert cache.publish(b, [1, 2, 3, 4, 5])
    assert a.table[:2] == b.table[:2] and a.table[2] != b.table[2]
    cache.check([a, b])
    assert cache.num_available == 8 - 4


def test_the_longest_unused_page_gives_way_first_and_children_before_parents():
    cache = KVCache(6, 1)
    _serve(cache, [1, 2, 3])
    _serve(cache, [7, 8])
    _serve(cache, [1])
    assert cache.lease([], 4) is not None
    assert [len(cache.match(tokens)) for tokens in ([1, 2, 3], [7, 8])] == [1, 1]


def test_a_lease_that_does_not_fit_changes_nothing():
    cache = KVCache(4, 1)
    _serve(cache, [1, 2])
    nodes = cache.match([1, 2])
    assert cache.lease(nodes, 3) is None
    cache.check([])
    assert cache.num_available == 4 and len(cache.match([1, 2])) == 2


def test_without_a_prefix_cache_nothing_is_remembered():
    cache = KVCache(4, 2, prefix_cache=False)
    _serve(cache, [1, 2, 3])
    assert cache.match([1, 2]) == [] and cache.num_available == 4


@pytest.mark.parametrize("page_size", [1, 3])
def test_no_order_of_events_loses_a_page(page_size):
    rng = random.Random(page_size)
    cache = KVCache(23, page_size)
    running = {}
    for number in range(20_000):
        event = rng.random()
        if event < 0.4:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
            shared = cache.match(tokens[:-1])
            lease = cache.lease(shared, cache.pages_for(len(tokens)) - len(shared))
            if lease is not None:
                running[number] = (lease, tokens)
        elif running:
            key = rng.choice(list(running))
            lease, tokens = running[key]
            if event < 0.6:
                if cache.extend(lease, 1):
                    tokens += [rng.randrange(2) for _ in range(page_size)]
            elif event < 0.75:
                cache.publish(lease, tokens[: rng.randrange(len(tokens) + 1)])
            else:
                cache.publish(lease, tokens)
                cache.release(lease)
                del running[key]
        if number % 10 == 0:
            cache.check([lease for lease, _ in running.values()])
    assert cache.num_evicted > 100
