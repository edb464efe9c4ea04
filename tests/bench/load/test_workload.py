"""Prompts, lengths and arrivals follow their seeds and their definitions."""

import json
import math
from itertools import pairwise

import pytest

from eagle_kit.bench.load.workload import (
    WORDS,
    RandomLengths,
    arrival_times,
    make_requests,
    pick,
    read_chats,
    shorter_than,
)
from eagle_kit.core.errors import UserError


def test_arrivals_are_a_poisson_process_of_their_seed():
    times = arrival_times(4001, rate=20.0, seed=3)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert times[0] == 0.0 and min(gaps) >= 0
    assert mean == pytest.approx(1 / 20, rel=0.06)  # standard error 1.6 %
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.15)
    assert times == arrival_times(4001, 20.0, 3) != arrival_times(4001, 20.0, 4)


def test_an_infinite_rate_is_at_once_and_no_rate_is_refused():
    assert arrival_times(3, math.inf, 0) == [0.0, 0.0, 0.0]
    for rate in (0.0, -1.0, math.nan):
        with pytest.raises(UserError, match="--request-rate"):
            arrival_times(3, rate, 0)


def test_random_lengths_fill_their_range_and_prompts_share_the_prefix():
    lengths = RandomLengths(10, 20, 0.25, prefix_len=5, token_ids=(7, 1271))
    pairs = lengths.draw(500, "completions", seed=1)
    prompts = [prompt for prompt, _ in pairs]
    assert {len(prompt) - 5 for prompt in prompts} == {8, 9, 10, 11, 12}
    assert {output for _, output in pairs} == set(range(15, 26))
    assert len({prompt[:5] for prompt in prompts}) == 1 and len(set(prompts)) == 500
    assert all(7 <= token < 1271 for prompt in prompts for token in prompt)
    assert pairs == lengths.draw(500, "completions", 1) != lengths.draw(500, "completions", 2)


def test_random_chats_are_words_of_about_a_token():
    ((prompt, output),) = RandomLengths(10, 20).draw(1, "chat", seed=0)
    assert len(prompt.split()) == 10 and output == 20 and set(prompt.split()) <= set(WORDS.split())


@pytest.mark.parametrize(
    "wrong",
    [{"input_len": 0}, {"output_len": 0}, {"range_ratio": 1.0}, {"prefix_len": -1}, {"token_ids": (5, 5)}],
)
def test_impossible_lengths_are_refused(wrong):
    with pytest.raises(UserError, match="--random-"):
        RandomLengths(**wrong)


def test_prompts_are_drawn_by_seed_and_repeat_only_with_a_note():
    prompts = [f"p{i}" for i in range(10)]
    chosen, note = pick(prompts, 5, 2, seed=0)
    assert len(set(chosen)) == 7 and note == ""
    assert chosen == pick(prompts, 5, 2, 0)[0] != pick(prompts, 5, 2, 1)[0]
    chosen, note = pick(prompts, 23, 2, 0)
    assert len(chosen) == 25 and set(chosen) == set(prompts) and "repeat the 10 prompts" in note
    chosen, note = pick(prompts, None, 1, 0)
    assert len(chosen) == 11 and "warm-up" in note


def test_an_empty_set_is_refused():
    with pytest.raises(UserError, match="empty"):
        pick([], 5, 0, 0)


def test_long_prompts_are_left_out_with_a_note():
    kept, notes = shorter_than(["abc", ({"role": "user", "content": "abcd"},)], 3)
    assert kept == ["abc"] and notes == ["1 prompts left out: longer than 3 characters"]


def test_chats_are_first_questions_and_what_is_left_out_is_told(tmp_path):
    def turn(who, value):
        return {"from": who, "value": value}

    good = [turn("system", "S"), turn("human", "Q"), turn("gpt", "A"), turn("human", "later")]
    rows = [{"conversations": good}, {"conversations": [turn("human", "long" * 10)]}, {"nothing": 1}]
    (tmp_path / "chats.json").write_text(json.dumps(rows), encoding="utf-8")
    prompts, notes = read_chats(str(tmp_path / "chats.json"), 5, 0, max_chars=20)
    assert prompts == [({"role": "system", "content": "S"}, {"role": "user", "content": "Q"})]
    assert any(note.startswith("1 records") for note in notes)
    assert any(note.startswith("1 questions") for note in notes)


def test_every_kind_of_prompt_becomes_the_body_of_its_endpoint():
    chat = ({"role": "user", "content": "hi"},)

    def body(prompt, api):
        return make_requests([(prompt, 9)], api, due=[1.5], temperature=0.0, seed=0)[0]

    assert body("hi", "chat").content == {"messages": list(chat)} == body(chat, "chat").content
    assert body("hi", "completions").content == {"prompt": "hi"} == body(chat, "completions").content
    request = body((4, 5), "completions")
    assert request.content == {"prompt": [4, 5]}
    assert (request.max_tokens, request.seed, request.due_s) == (9, None, 1.5)
    with pytest.raises(UserError, match="no template"):
        body(({"role": "system", "content": "s"}, *chat), "completions")


def test_sampled_requests_have_seeds_of_their_own():
    def seeds(seed):
        pairs = [("x", 1)] * 50
        return [r.seed for r in make_requests(pairs, "chat", due=[0.0] * 50, temperature=0.7, seed=seed)]

    assert len(set(seeds(0))) == 50 and seeds(0) == seeds(0) != seeds(1)
