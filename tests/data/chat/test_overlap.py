"""Near duplicates are those of an exhaustive comparison; test prompts are found inside longer texts."""

import random

import pytest

from eagle_kit.data.chat.overlap import WORDING, NearDuplicates, TestPrompts, ngrams, words


def test_near_duplicates_are_those_of_an_exhaustive_comparison() -> None:
    """Texts of 40 words with up to 4 of them changed, against Jaccard similarity by definition."""
    rng = random.Random(0)
    vocabulary = [f"word{i}" for i in range(500)]
    bases = [rng.choices(vocabulary, k=40) for _ in range(20)]
    texts = []
    for _ in range(300):
        text = list(rng.choice(bases))
        for _ in range(rng.randrange(5)):
            text[rng.randrange(40)] = rng.choice(vocabulary)
        texts.append(" ".join(text))
    near, kept, verdicts = NearDuplicates(0.7), [], []
    for text in texts:
        grams = ngrams(words(text), 3)
        expected = all(len(grams & other) < 0.7 * len(grams | other) for other in kept)
        verdicts.append((near.is_new(text), expected))
        if expected:
            kept.append(grams)
    assert all(found == expected for found, expected in verdicts)
    assert 50 < len(kept) < 250


@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.5, 0.62, 0.8])
def test_pairs_at_the_threshold_are_found(threshold: float) -> None:
    """200 pairs of texts whose sets of n-grams have that similarity or a little more: 99 % are found, where
    99.5 % or more are expected."""
    rng = random.Random(1)
    num_found = 0
    for pair in range(200):
        both, first, second = (
            [f"{name}{pair}x{rng.randrange(10**9)}" for _ in range(num)]
            for name, num in (("a", 100), ("b", 931), ("c", 931))
        )
        num_alone = int((98 / threshold - 98) / 2)  # 98 three-word sequences in common
        texts = [" ".join([*both, *one[:num_alone]]) for one in (first, second)]
        grams = [ngrams(words(text), 3) for text in texts]
        assert 0 <= len(grams[0] & grams[1]) / len(grams[0] | grams[1]) - threshold < 0.01
        near = NearDuplicates(threshold)
        num_found += near.is_new(texts[0]) and not near.is_new(texts[1])
    assert num_found >= 198


def test_case_punctuation_and_texts_without_words_do_not_count() -> None:
    near = NearDuplicates(1.0)
    assert (
        near.is_new("Hello, world!") and not near.is_new("hello WORLD") and near.is_new("hello there world")
    )
    assert near.is_new("?!") and near.is_new("?!")
    assert words("Die 3 Äpfel: 日本語!") == ["die", "3", "äpfel", "日", "本", "語"]


def test_a_long_prompt_is_found_by_thirteen_words_and_a_short_one_whole() -> None:
    long = "a train leaves the station at noon and travels sixty miles every hour until it stops"
    tests = TestPrompts([long, "what is the capital city of the french republic", "Say hi."])
    assert tests.are_in(f"Solve this: {long.upper()}!")
    assert tests.are_in(" ".join(long.split()[2:15])) and not tests.are_in(" ".join(long.split()[:12]))
    assert tests.are_in("Tell me: what is the capital city of the French Republic?")
    assert tests.are_in("say HI") and not tests.are_in("Say hi to everybody.") and not tests.are_in("")
    assert not TestPrompts([]).are_in("anything")


@pytest.mark.parametrize(
    ("num_words", "whole", "inside", "part"),
    [
        (1, True, False, False),
        (7, True, False, False),
        (8, True, True, False),
        (12, True, True, False),
        (13, True, True, False),
        (14, True, True, True),
    ],
)
def test_prompts_of_every_length_are_looked_for_as_documented(
    num_words: int, whole: bool, inside: bool, part: bool
) -> None:
    """A prompt alone, within a longer text, and all of it but the last word within one."""
    said = [f"word{i}" for i in range(num_words)]
    tests = TestPrompts([" ".join(said), "another prompt"])
    assert tests.are_in(" ".join(said)) is whole
    assert tests.are_in(" ".join(["so", *said, "then"])) is inside
    assert tests.are_in(" ".join(["so", *said[:-1], "then"])) is part


def test_the_wording_that_many_prompts_share_is_no_contamination() -> None:
    wording = (
        "Complete the following function of the language and answer with the whole function in one block"
    )
    bodies = [
        f"def f{i}(x): return the sum of x and {i} and twice the number {i + 7}" for i in range(WORDING)
    ]
    found = TestPrompts([f"{wording} {body}" for body in bodies])
    assert not found.are_in(f"{wording} def mine(x): return x")
    assert found.are_in(f"Look: {bodies[3]}") and found.are_in(f"block {bodies[3]}")
    few = TestPrompts([f"{wording} {body}" for body in bodies[: WORDING - 1]] * 2)
    assert few.are_in(f"{wording} def mine(x): return x"), "a repeated prompt counts once"
