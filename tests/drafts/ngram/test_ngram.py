"""The n-gram index against a scan of the whole log, and how many of its drafts are kept."""

import random

import numpy as np
import pytest
import torch
from tiny import tiny_target
from tiny_engine import PROMPTS, resolved, serve

from eagle_kit.config.engine import NgramConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.drafts.ngram.index import CHAIN_STEPS, NgramIndex, to_tree
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.request import Request


def longest_match(streams: list[list[int]], context: list[int], most: int) -> int:
    """Length of the longest suffix of ``context`` that has a continuation, by looking everywhere."""
    best = 0
    for stream in streams:
        for end in range(len(stream) - 1):
            length = 0
            while length < min(most, end + 1, len(context)) and stream[end - length] == context[-1 - length]:
                length += 1
            best = max(best, length)
    return best


def paths(draft, row=0) -> list[list[int]]:
    """Every root-to-node path of a window, unused nodes left out."""
    out = []
    for node in range(1, draft.tokens.shape[1]):
        if draft.parents[row, node] == node:
            continue
        path = []
        while node:
            path.append(int(draft.tokens[row, node]))
            node = int(draft.parents[row, node])
        out.append(path[::-1])
    return out


@pytest.mark.parametrize("branch_length", [1, 2, 5])
def test_no_continuation_is_longer_than_the_branch_length(branch_length):
    index = NgramIndex(NgramConfig(branch_length=branch_length))
    index.insert(0, [1, 2, 3, 4, 5, 6, 7, 8])
    draft = index.propose([[1, 2]], num_tokens=8, depth=4)
    assert max(map(len, paths(draft))) == min(branch_length, 4)


@pytest.mark.parametrize("least", [1, 2, 3, 4])
def test_matches_shorter_than_the_least_window_are_no_drafts(least):
    index = NgramIndex(NgramConfig(min_match_window_size=least))
    index.insert(0, [1, 2, 3, 4, 5, 6])
    for length in range(1, 5):
        context = [9] * (4 - length) + [1, 2, 3, 4][4 - length :]
        drafted = paths(index.propose([context], num_tokens=2, depth=1))
        assert drafted == ([[5]] if length >= least else []), length


def test_of_matches_beyond_the_largest_window_the_newer_wins():
    """Tokens before the window are not compared."""
    for most, expected in ((2, 8), (3, 7)):
        index = NgramIndex(NgramConfig(max_match_window_size=most))
        index.insert(0, [1, 2, 3, 7])
        index.insert(1, [9, 2, 3, 8])
        assert paths(index.propose([[1, 2, 3]], num_tokens=2, depth=1)) == [[expected]]


@pytest.mark.parametrize("match_type", ["BFS", "PROB"])
@pytest.mark.parametrize(
    ("least", "most", "behind_two", "behind_one"), [(1, 7, 1, 4), (2, 6, 2, 4), (3, 3, 3, 3), (7, 7, 5, 5)]
)
def test_the_shorter_a_match_the_more_children_its_nodes_have(
    least, most, behind_two, behind_one, match_type
):
    """From the least breadth for a match of the whole window, here of two tokens, in equal steps."""
    sizes = {"min_bfs_breadth": least, "max_bfs_breadth": most, "max_match_window_size": 2}
    index = NgramIndex(NgramConfig(match_type=match_type, **sizes))
    for request in range(5):
        index.insert(request, [4, 1, 10 + request])
    for context, expected in (([4, 1], behind_two), ([9, 1], behind_one)):
        newest = [[14 - i] for i in range(expected)]
        assert paths(index.propose([context], num_tokens=16, depth=1)) == newest


def test_drafts_are_counted_whatever_their_tokens():
    index = NgramIndex()
    index.insert(0, [5, 0, 0, 7])
    assert index.propose([[5], [9], [7]], 6, 8).num_drafts.tolist() == [3, 0, 0]


def test_a_request_that_ended_does_not_go_on():
    """Another of its number begins anew."""
    index = NgramIndex()
    index.insert(0, [1, 2])
    index.forget(0)
    index.insert(0, [3, 4])
    assert paths(index.propose([[1, 2]], 4, 2)) == [] and paths(index.propose([[3]], 4, 2)) == [[4]]


@pytest.mark.parametrize("match_type", ["BFS", "PROB"])
def test_windows_are_trees_of_what_followed_the_longest_match(match_type):
    rng = random.Random(7)
    for case in range(300):
        index = NgramIndex(NgramConfig(match_type=match_type, max_match_window_size=6))
        streams = [[] for _ in range(3)]
        for _ in range(rng.randrange(20)):
            which = rng.randrange(3)
            new = [rng.randrange(3) for _ in range(rng.randrange(1, 5))]
            streams[which] += new
            index.insert(which, new)
        context = [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
        draft = index.propose([context], 12, 5)
        assert draft.tokens[0, 0] == context[-1]
        used = [n for n in range(1, 12) if draft.parents[0, n] != n]
        assert used == list(range(1, 1 + len(used))), "unused nodes come last"
        assert all(draft.parents[0, n] < n for n in used)
        assert all(draft.depths[0, n] == draft.depths[0, draft.parents[0, n]] + 1 for n in used)
        assert len({(draft.parents[0, n], draft.tokens[0, n]) for n in used}) == len(used)
        length = longest_match(streams, context, 6)
        assert bool(used) == (length > 0), case
        if used and match_type == "BFS" and sum(map(len, streams)) < CHAIN_STEPS:
            suffix = context[-length:]
            text = [tuple(s[i : i + length + 1]) for s in streams for i in range(len(s))]
            assert (*suffix, int(draft.tokens[0, 1])) in text, "the first node must follow a longest match"
        for path in paths(draft):
            assert any(
                stream[i : i + 1 + len(path)] == [context[-1], *path]
                for stream in streams
                for i in range(len(stream))
            )


def test_a_loop_continues_and_newer_text_wins():
    index = NgramIndex()
    index.insert(0, [1, 2, 3] * 4)
    assert paths(index.propose([[1, 2, 3] * 4], 7, 6))[-1] == [1, 2, 3, 1, 2, 3][:6]
    index.insert(1, [9, 5, 8, 9, 6])
    assert index.propose([[9]], 2, 1).tokens.tolist() == [[9, 6]]
    index.insert(1, [9, 5])
    assert index.propose([[9]], 2, 1).tokens.tolist() == [[9, 5]]


def test_probability_prefers_what_happened_more_often():
    index = NgramIndex(NgramConfig(match_type="PROB"))
    index.insert(0, [4, 1, 4, 1, 4, 1, 4, 2])
    assert index.propose([[7, 4]], 2, 1).tokens.tolist() == [[4, 1]]
    assert NgramIndex().propose([[7, 4]], 2, 1).parents.tolist() == [[0, 1]]


def test_ten_continuations_win_over_a_newer_one():
    """Behind the longest match, where a node has one child."""
    phrase, usual, newer = list(range(20, 40)), [1, 2, 3], [7, 8, 9]
    index = NgramIndex(NgramConfig(match_type="PROB"))
    for request in range(10):
        index.insert(request, phrase + usual)
    index.insert(10, phrase + newer)
    assert paths(index.propose([phrase], 4, 3))[-1] == usual
    assert paths(index.propose([phrase + usual[:1]], 3, 2))[-1] == usual[1:]
    newest = NgramIndex()
    for request, end in enumerate([usual] * 10 + [newer]):
        newest.insert(request, phrase + end)
    assert paths(newest.propose([phrase], 4, 3))[-1] == newer, "BFS goes by length and recency"


def tokens_per_cycle(match_type: str, seed: int) -> float:
    """Responses of 60 tokens from three templates, of which 13 vary: two times in three the usual one."""
    rng = random.Random(seed)
    index = NgramIndex(NgramConfig(match_type=match_type))
    templates = [[rng.randrange(5000) for _ in range(60)] for _ in range(3)]
    varying = [
        {p: [rng.randrange(5000) for _ in range(40)] for p in rng.sample(range(2, 60), 13)} for _ in templates
    ]
    emitted, cycles = 0, 0
    for request in range(100):
        which = rng.randrange(3)
        text = list(templates[which])
        for place, values in varying[which].items():
            text[place] = values[0 if rng.random() < 0.67 else rng.randrange(1, 40)]
        end = 2
        index.insert(request, text[:end])
        while end < len(text):
            draft = index.propose([text[:end]], 12, 8)
            rest = text[end:]
            kept = max((len(path) for path in paths(draft) if path == rest[: len(path)]), default=0)
            new = rest[: kept + 1]
            index.insert(request, new)
            end += len(new)
            if request >= 30:
                emitted, cycles = emitted + len(new), cycles + 1
    return emitted / cycles


def test_templates_gain_from_counts():
    """The figures of docs/results/serving-speed.md; children cut by recency gave PROB 4.60."""
    bfs, prob = (sum(tokens_per_cycle(kind, seed) for seed in range(3)) / 3 for kind in ("BFS", "PROB"))
    print(f"BFS {bfs:.2f}, PROB {prob:.2f} tokens a cycle")
    assert prob > 4.65 and prob > 1.1 * bfs


def test_inserts_in_pieces_equal_one_insert():
    text = [random.Random(1).randrange(4) for _ in range(200)]
    whole, pieces = NgramIndex(), NgramIndex()
    whole.insert(0, text)
    for i in range(0, 200, 3):
        pieces.insert(0, text[i : i + 3])
    for end in range(1, 200, 7):
        a, b = (index.propose([text[:end]], 16, 6) for index in (whole, pieces))
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_oldest_text_gives_way_and_memory_stays_bounded():
    index = NgramIndex(NgramConfig(capacity=100))
    index.insert(0, [1000, 1001, 1002])
    assert paths(index.propose([[1000, 1001]], 2, 1)) == [[1002]]
    rng = random.Random(0)
    for request in range(1, 60):
        index.insert(request, [rng.randrange(50) for _ in range(20)])
        index.forget(request)
    assert paths(index.propose([[1000, 1001]], 2, 1)) == []
    assert len(index) == 100 and len(index._token) == 100
    assert all(len(newest) <= 200 for newest in index._newest)


@pytest.mark.parametrize("capacity", [1000, 40])
def test_drafts_with_a_salt_are_those_of_an_index_of_its_own(capacity):
    """Every salt's text in one log, against a log for each; a small log has lost the oldest text."""
    rng = random.Random(capacity)
    salts = [None, "a", "b"]
    shared = NgramIndex(NgramConfig(capacity=capacity))
    own = {salt: NgramIndex() for salt in salts}
    written = []
    for request in range(30):
        salt = rng.choice(salts)
        text = [rng.randrange(3) for _ in range(8)]
        shared.insert(request, text, salt)
        shared.forget(request)
        written.append((request, text, salt))
    for request, text, salt in written[-5:] if capacity == 40 else written:
        own[salt].insert(request, text)
        own[salt].forget(request)
    contexts = [[rng.randrange(3) for _ in range(4)] for _ in range(20)]
    for salt in salts:
        mixed = shared.propose([[0], *contexts], 8, 4, ["c", *[salt] * 20])
        alone = own[salt].propose(contexts, 8, 4)
        assert mixed.num_drafts[0] == 0, "nobody has said anything with this salt"
        assert [paths(mixed, row + 1) for row in range(20)] == [paths(alone, row) for row in range(20)]


def test_no_requests_and_a_window_of_one():
    index = NgramIndex()
    index.insert(0, [1, 2, 1, 2])
    assert index.propose([], 4, 3).tokens.shape == (0, 4)
    assert index.propose([[1, 2]], 1, 3).tokens.tolist() == [[2]]
    tree = to_tree(index.propose([[1, 2], [77]], 4, 3), torch.device("cpu"))
    assert tree.ancestors[1].tolist() == [1, 2, 4, 8], "an unused node sees only itself"


@pytest.mark.parametrize(
    "options", [{"min_match_window_size": 0}, {"max_bfs_breadth": 0}, {"match_type": "DFS"}, {"capacity": 3}]
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(UserError):
        NgramConfig(**options)


def test_many_n_gram_drafts_are_kept():
    engine = Engine(
        tiny_target(vocab_size=11), None, resolved(3, 256, kv_tokens=1200, page_size=4, algorithm="NGRAM")
    )
    engine.use_shape(SpecShape(8, 4, 12))
    requests = [Request(i, list(p), SamplingParams(max_tokens=60)) for i, p in enumerate(PROMPTS)]
    serve(engine, requests)
    assert engine.totals.spec.accept_length > 1.2


def test_windows_have_few_sizes_and_room_for_what_was_found(monkeypatch):
    """Greedy text stays that of plain decoding."""
    options = {"max_tokens": 60, "ignore_eos": True}
    target = tiny_target(vocab_size=11)
    responses, sizes = [], []
    for shape in (NO_SPECULATION, SpecShape(8, 4, 12)):
        config = resolved(3, 256, kv_tokens=1200, page_size=4, algorithm="NGRAM")
        engine = Engine(target, None, config)
        engine.use_shape(shape)
        run = engine.runner._run

        def watched(matches, inputs, settings, tree, unit, run=run):
            if tree is not None:
                is_used = tree.parents != torch.arange(tree.parents.shape[1])
                sizes.append((tree.parents.shape[1], int(is_used.sum(1).max())))
            return run(matches, inputs, settings, tree, unit)

        monkeypatch.setattr(engine.runner, "_run", watched)
        requests = [Request(i, list(p), SamplingParams(**options)) for i, p in enumerate(PROMPTS)]
        serve(engine, requests)
        responses.append([request.token_ids for request in requests])
    assert responses[0] == responses[1]
    assert {1, 12} <= {size for size, _ in sizes} <= {1, 4, 7, 10, 12}
    for size, num_used in sizes:
        assert size - 4 < num_used + 1 <= size
