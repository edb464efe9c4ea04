import pytest

from eagle_kit.core.stats import SpecStats
from eagle_kit.eval.answers import PLAIN, Answer, Setting
from eagle_kit.eval.report import category_table, identity_lines, table
from eagle_kit.eval.summary import find_row, summarise

CHAIN = Setting("head", "4,1,5")


def answer(
    run: Setting,
    task: str,
    number: int,
    category: str,
    emitted: list[int],
    seconds: float,
    temperature: float = 0.0,
    seed: int = 0,
) -> Answer:
    stats = SpecStats()
    for n in emitted:
        if run == PLAIN:
            continue  # plain cycles are no verifies
        stats.observe(n, n - 1)
    ids = list(range(sum(emitted) + 1))
    same = None if run == PLAIN else True
    name = f"{category}{number}"
    return Answer(
        task,
        name,
        category,
        turn=0,
        temperature=temperature,
        seed=seed,
        draft=run.draft,
        shape=run.shape,
        num_prompt_tokens=9,
        token_ids=ids,
        finish_reason="length",
        stats=stats,
        prefill_s=0.5,
        decode_s=seconds,
        decode_share_s=seconds,
        identical=same,
    )


def example() -> list[Answer]:
    """A long response with an accept length of 1 and a short one with 5."""
    return [
        answer(PLAIN, "t", 0, "a", [1] * 40, 4.0),
        answer(CHAIN, "t", 0, "a", [1] * 40, 8.0),
        answer(PLAIN, "t", 1, "b", [1] * 10, 1.0),
        answer(CHAIN, "t", 1, "b", [5] * 2, 0.5),
        answer(PLAIN, "u", 0, "c", [1] * 10, 1.0),
        answer(CHAIN, "u", 0, "c", [2] * 5, 1.0),
    ]


def test_accept_length_is_a_ratio_of_sums() -> None:
    summary = summarise(example(), [PLAIN, CHAIN], ["t", "u"])
    row = find_row(summary, "head", "4,1,5", "t")
    assert row["accept_length"] == pytest.approx(50 / 42)  # the mean of ratios would be 3
    assert row["acceptance_per_position"] == pytest.approx([2 / 42] * 4)
    assert row["histogram"] == [0, 40, 0, 0, 0, 2]
    assert find_row(summary, "head", "4,1,5", "t", "b")["accept_length"] == 5.0
    assert find_row(summary, "head", "4,1,5")["accept_length"] == pytest.approx(60 / 47)
    assert find_row(summary, None, "none")["accept_length"] is None


def test_speedup_is_the_median_of_the_same_turns_and_the_ratio_of_totals_stands_beside_it() -> None:
    summary = summarise(example(), [PLAIN, CHAIN], ["t", "u"])
    row = find_row(summary, "head", "4,1,5", "t")
    assert row["speedup_of_totals"] == pytest.approx((50 / 8.5) / (50 / 5))
    assert row["speedup"] == pytest.approx((0.5 + 2.0) / 2)
    assert find_row(summary, "head", "4,1,5")["speedup"] == 1.0, "of 0.5, 2 and 1"
    assert find_row(summary, "head", "4,1,5", "t", "b")["speedup"] == pytest.approx(2.0)
    assert find_row(summary, "head", "4,1,5")["decode_tokens_per_s"] == pytest.approx(60 / 9.5)
    assert find_row(summary, None, "none")["speedup"] == 1.0


def test_categories_are_rows_only_where_a_task_has_several() -> None:
    rows = summarise(example(), [PLAIN, CHAIN], ["t", "u"])["rows"]
    parts = list(dict.fromkeys((row["task"], row["category"]) for row in rows))
    assert parts == [("all", "all"), ("t", "all"), ("t", "a"), ("t", "b"), ("u", "all")]
    with pytest.raises(KeyError):
        find_row({"rows": rows}, "head", "9,1,10")


def test_nothing_decoded_gives_no_figures_and_no_crash() -> None:
    only_first_token = answer(CHAIN, "t", 0, "a", [], 0.0)
    plain = answer(PLAIN, "t", 0, "a", [], 0.0)
    summary = summarise([plain, only_first_token], [PLAIN, CHAIN], ["t"])
    row = find_row(summary, "head", "4,1,5", "t")
    assert row["accept_length"] is None and row["speedup"] is None
    assert table(summary).splitlines()[-1].split() == ["t", "head", "4,1,5", "1", "-", "-", "-", "yes"]


def test_table_is_aligned_and_shows_slow_downs() -> None:
    summary = summarise(example(), [PLAIN, CHAIN], ["t", "u"])
    lines = table(summary).splitlines()
    at = lines[0].index("speed-up") + len("speed-up")
    rows = [line for line in lines[2:] if "head" in line]
    assert [line[:at].split()[-1] for line in rows] == ["1.25", "1.00", "1.00"]
    assert [line[:at][-1].isdigit() for line in rows] == [True] * 3
    assert all(len(line) <= len(lines[1]) for line in lines)
    assert lines[-1].startswith("all tasks")


def test_category_table_has_a_column_for_each_category() -> None:
    lines = category_table(summarise(example(), [PLAIN, CHAIN], ["t", "u"])).splitlines()
    assert lines[0].split() == ["task", "draft", "shape", "a", "b"]
    assert [line.split() for line in lines[2:]] == [["t", "head", "4,1,5", "1.00", "5.00"]]


def test_identity_is_reported_with_the_first_difference() -> None:
    answers = example()
    assert identity_lines(summarise(answers, [PLAIN, CHAIN], ["t", "u"]))[0].startswith(
        "greedy identical: yes (3 "
    )
    answers[1].identical = False
    answers[1].difference = {
        "position": 7,
        "plain_token": 11,
        "token": 12,
        "plain_text": " a",
        "text": " the",
        "logit_gap": 0.00125,
    }
    summary = summarise(answers, [PLAIN, CHAIN], ["t", "u"])
    assert summary["greedy_identical"] is False
    first, second = identity_lines(summary)
    assert first == "greedy identical: no (1 of 3 answers differ from plain decoding)"
    assert second == (
        "  t a0, turn 1, head 4,1,5: token 7 of the response is 12 ' the', plain decoding has 11 ' a' "
        "(logit gap 0.00125)."
    )
    assert "1 differ" in table(summary)
    only_plain = summarise([answers[0]], [PLAIN], ["t"])
    assert only_plain["greedy_identical"] is None and "nothing to compare" in identity_lines(only_plain)[0]


def test_temperatures_have_rows_and_seeds_an_interval() -> None:
    answers = example()
    for seed, length in ((0, 2), (1, 3)):
        answers += [
            answer(PLAIN, "t", 0, "a", [1] * 6, 1.0, temperature=1.0, seed=seed),
            answer(CHAIN, "t", 0, "a", [length] * (6 // length), 1.0, temperature=1.0, seed=seed),
        ]
    summary = summarise(answers, [PLAIN, CHAIN], ["t", "u"])
    assert find_row(summary, "head", "4,1,5")["accept_length"] == pytest.approx(60 / 47)
    assert find_row(summary, "head", "4,1,5")["accept_length_error"] is None, "one seed"
    row = find_row(summary, "head", "4,1,5", temperature=1.0)
    assert row["accept_length"] == pytest.approx(12 / 5)
    # Of 2 and 3 the standard deviation is 1 / sqrt 2, and Student's t of one degree is 12.706.
    assert row["accept_length_error"] == pytest.approx(12.706 / 2)
    assert "2.40 ± 6.35" in table(summary)
    assert [line.split()[0] for line in table(summary).splitlines()[2:3]] == ["0"]
