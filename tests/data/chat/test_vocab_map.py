"""The draft vocabulary is the most frequent response tokens, and belongs to its tokenizer."""

import os
from pathlib import Path

import numpy as np
import pytest

from eagle_kit.core.errors import UserError
from eagle_kit.data.chat.vocab_map import (
    VocabMap,
    build_vocab_map,
    load_vocab_map,
    vocab_map_of,
)
from eagle_kit.drafts.files.token_map import load_token_map


def tokens(found: VocabMap) -> list[int]:
    return (found.d2t + np.arange(len(found.d2t))).tolist()


def test_the_most_frequent_tokens_in_the_order_of_their_ids() -> None:
    counts = np.array([1, 9, 0, 5, 7, 2, 0])
    found = build_vocab_map(counts, 3, "f", "t")
    assert tokens(found) == [1, 3, 4] and found.d2t.dtype == np.int64
    assert np.flatnonzero(found.t2d).tolist() == [1, 3, 4] and found.t2d.shape == (7,)
    assert found.coverage == pytest.approx(21 / 24) and found.fingerprint == "f"
    assert (found.num_distinct, found.num_seen) == (5, 3)
    assert found.contents == "the responses have 5 distinct tokens, of which it has 3"


def test_a_map_says_how_much_of_it_is_in_no_response() -> None:
    found = build_vocab_map(np.array([0, 9, 0, 5, 0, 0, 0]), 5, "f", "t")
    assert found.coverage == 1.0, "which says nothing of the other three"
    assert found.contents == (
        "the responses have 2 distinct tokens, of which it has 2; its other 3 are in no response"
    )


def test_ties_go_to_the_lower_id() -> None:
    assert tokens(build_vocab_map(np.array([2, 5, 2, 2, 5, 2]), 4, "f", "t")) == [0, 1, 2, 4]
    assert tokens(build_vocab_map(np.zeros(6, dtype=np.int64), 2, "f", "t")) == [0, 1]


def test_the_whole_vocabulary_covers_everything_and_none_of_nothing_is_zero() -> None:
    whole = build_vocab_map(np.array([0, 3, 1]), 3, "f", "t")
    assert whole.coverage == 1.0 and whole.d2t.tolist() == [0, 0, 0] and whole.t2d.all()
    assert build_vocab_map(np.zeros(4, dtype=np.int64), 2, "f", "t").coverage == 0.0


def test_tokens_of_rows_that_the_tokenizer_does_not_have_are_of_no_text() -> None:
    found = vocab_map_of(np.array([1, 4, 9]), np.array([2, 3, 0, 0, 1]), "f", "t")
    assert tokens(found) == [1, 4, 9] and np.flatnonzero(found.t2d).tolist() == [1, 4, 9]
    assert found.coverage == pytest.approx(4 / 6) and len(found.t2d) == 10
    assert len(vocab_map_of(np.array([1]), np.array([2, 3, 0]), "f", "t").t2d) == 3


def test_a_draft_vocabulary_may_have_the_rows_behind_the_tokenizers_tokens() -> None:
    whole = build_vocab_map(np.ones(3, dtype=np.int64), 5, "f", "t")
    assert tokens(whole) == [0, 1, 2, 3, 4]
    assert whole.coverage == 1.0


def test_a_saved_map_comes_back_with_the_coverage_of_the_data_it_is_used_for(tmp_path: Path) -> None:
    made = build_vocab_map(np.random.default_rng(0).integers(0, 9, 131), 67, "abc", "tok")
    path = tmp_path / "a name without an ending"
    made.save(path)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
    counts = np.zeros(131, dtype=np.int64)
    inside, outside = np.flatnonzero(made.t2d), np.flatnonzero(~made.t2d)
    counts[inside[5]], counts[outside[3]] = 3, 1
    found = load_vocab_map(path, "tok", 67, counts)
    np.testing.assert_array_equal(found.d2t, made.d2t)
    np.testing.assert_array_equal(found.t2d, made.t2d)
    assert (found.coverage, found.fingerprint, found.tokenizer) == (0.75, "abc", "tok")


@pytest.mark.parametrize(
    ("tokenizer", "size", "num_tokens", "cause"),
    [
        ("other", 2, 5, "another tokenizer"),
        ("tok", 2, 6, "another tokenizer"),
        ("tok", 3, 5, "has 2 tokens, but head.draft_vocab_size is 3"),
    ],
)
def test_a_map_of_another_tokenizer_or_size_is_refused(
    tmp_path: Path, tokenizer: str, size: int, num_tokens: int, cause: str
) -> None:
    build_vocab_map(np.ones(5), 2, "abc", "tok").save(tmp_path / "map.npz")
    with pytest.raises(UserError, match=cause):
        load_vocab_map(tmp_path / "map.npz", tokenizer, size, np.ones(num_tokens))


@pytest.mark.parametrize("damage", ["missing", "text", "truncated", "foreign", "array", "inconsistent"])
def test_a_map_that_cannot_be_read_is_a_user_error(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "map.npz"
    made = build_vocab_map(np.ones(5), 2, "abc", "tok")
    if damage == "text":
        path.write_text("d2t")
    elif damage == "truncated":
        made.save(path)
        path.write_bytes(path.read_bytes()[:200])
    elif damage == "foreign":
        np.savez(path, something=np.zeros(3))
    elif damage == "array":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    elif damage == "inconsistent":
        made.d2t[1] = 3
        made.save(path)
    with pytest.raises(UserError, match="cannot be read"):
        load_vocab_map(path, "tok", 2, np.ones(5))


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"t2d": np.zeros(1 << 26, dtype=bool)}, "more than 64 MiB"),
        ({"d2t": np.zeros((2, 1), dtype=np.int64)}, "not a list"),
    ],
    ids=["compressed", "2-d"],
)
def test_a_map_is_read_within_bounds(tmp_path: Path, arrays: dict[str, np.ndarray], problem: str) -> None:
    """Zeros compress to a thousandth, and a sum with a column has as many numbers as both multiplied."""
    made = vars(build_vocab_map(np.ones(5), 2, "abc", "tok"))
    np.savez_compressed(tmp_path / "map.npz", **(made | arrays))
    with pytest.raises(UserError, match=f"cannot be read.*{problem}"):
        load_vocab_map(tmp_path / "map.npz", "tok", 2, np.ones(5))
    with pytest.raises(UserError, match="cannot be read"):
        load_token_map(tmp_path / "map.npz", 5)


def test_a_pipe_in_place_of_a_map_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "map.npz")
    with pytest.raises(UserError, match="not a file"):
        load_vocab_map(tmp_path / "map.npz", "tok", 2, np.ones(5))


def test_a_map_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="could not be written"):
        build_vocab_map(np.ones(5), 2, "abc", "tok").save(tmp_path / "file" / "map.npz")
