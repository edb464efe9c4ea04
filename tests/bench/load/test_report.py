"""Figures, exact, from scripted replies."""

import json

import pytest

from eagle_kit.bench.load.acceptance import Snapshot, from_metrics, from_responses, parse_metrics
from eagle_kit.bench.load.client import ClientSettings
from eagle_kit.bench.load.endpoint import Endpoint
from eagle_kit.bench.load.plot import plot
from eagle_kit.bench.load.reply import RequestResult, TextEvent
from eagle_kit.bench.load.report import (
    compare_measurements,
    output_over_time,
    peak_concurrency,
    reply_rows,
    statistics,
    summarize,
)
from eagle_kit.bench.load.runner import Measurement, Phase
from eagle_kit.bench.load.text import format_comparison, format_summary

METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a b"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a b"} 20.0
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 45.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 28.0
vllm:spec_decode_num_draft_tokens_total 1.2e2
"""


def reply(number, sent, events, ended, tokens, outcome="ok", **more):
    """Events are (second, tokens so far)."""
    seen = tuple(TextEvent(at, 1, so_far) for at, so_far in events)
    return RequestResult(
        number, outcome, more.pop("reason", None), sent, sent, ended, seen, usage_tokens=tokens, **more
    )


def measurement(*phases, server="script"):
    endpoint = Endpoint(ClientSettings("http://a:1", "tiny"), server)
    return Measurement(endpoint, sum(len(phase.replies) for phase in phases), list(phases))


@pytest.fixture
def measured():
    """Two good replies, a failed one that ends last, an interrupted one; 4 s of load in two rounds."""
    first = (
        reply(
            0,
            10.0,
            [(10.5, 1), (11.1, 4), (11.3, 6)],
            11.5,
            6,
            prompt_tokens=7,
            text="x",
            finish_reason="stop",
        ),
        reply(
            1, 10.2, [(11.2, 2)], 11.2, 2, prompt_tokens=3, cached_tokens=2, text="y", finish_reason="length"
        ),
        reply(2, 11.2, [(11.4, 1)], 13.0, None, "failed", reason="HTTP 500: no"),
    )
    second = (reply(3, 20.0, [], 21.0, None, "interrupted"),)
    return measurement(Phase(10.0, first), Phase(20.0, second))


def test_the_summary_counts_everything_and_measures_good_replies(measured):
    s = summarize(measured)
    requests, tokens = s["requests"], s["tokens"]
    assert (requests["sent"], requests["ok"], requests["failed"], requests["interrupted"]) == (4, 2, 1, 1)
    assert requests["failures"] == {"HTTP 500: no": 1}
    assert requests["peak_concurrency"] == 2
    assert requests["mean_concurrency"] == pytest.approx((1.5 + 1.0 + 1.8 + 1.0) / 4)
    assert (tokens["input"], tokens["cached_input"], tokens["output"]) == (10, 2, 8)
    assert tokens["output_of_failed"] == 1 and tokens["per_chunk"] == 2
    assert s["duration_s"] == pytest.approx(4.0)
    rates = [s[f"{kind}_throughput"] for kind in ("request", "output", "input", "total")]
    assert rates == pytest.approx([0.5, 2.0, 2.5, 4.5])
    assert s["ttft_ms"]["mean"] == pytest.approx(750) and s["ttft_ms"]["p90"] == pytest.approx(950)
    assert s["tpot_ms"]["mean"] == pytest.approx((1000 / 5 + 0) / 2)
    assert s["itl_ms"]["num"] == 5 and s["itl_ms"]["mean"] == pytest.approx((3 * 200 + 2 * 100) / 5)
    assert s["itl_ms"]["p50"] == pytest.approx(200)
    assert s["chunk_gap_ms"]["mean"] == pytest.approx(400)
    assert s["warnings"] == []
    json.dumps(s)


def test_statistics_interpolate_replies_and_rank_tokens():
    plain = statistics([1.0, 2.0, 3.0, 4.0])
    assert plain["p50"] == 2.5 and plain["p99"] == pytest.approx(3.97)
    weighted = statistics([1.0, 2.0, 9.0], [6.0, 3.0, 1.0])
    assert weighted["mean"] == pytest.approx(2.1) and weighted["num"] == 10
    assert [weighted[f"p{q}"] for q in (50, 90, 95)] == [1.0, 2.0, 9.0]
    assert statistics([]) is None


def test_a_request_that_starts_when_another_ends_does_not_meet_it():
    spans = [(0, 1), (1, 2), (1.5, 3), (1.6, 1.7)]
    replies = tuple(reply(i, a, [], b, 1) for i, (a, b) in enumerate(spans))
    assert peak_concurrency(Phase(0, replies)) == 3


def test_tokens_over_time_add_up_without_the_pause_between_rounds(measured):
    over_time = output_over_time(measured, num_bins=8)
    assert over_time["bin_s"] == 0.5
    # 11.1 and 11.2 fall into the third half second, 11.3 and 11.4 too; 10.5 into the second.
    assert over_time["tokens_per_s"] == pytest.approx([0, 2, 2 * (3 + 2 + 2 + 1), 0, 0, 0, 0, 0])


def test_a_run_without_any_reply_is_reported(measured):
    empty = summarize(measurement())
    assert empty["output_throughput"] is None and empty["ttft_ms"] is None
    assert "0 of 0 sent" in format_summary(empty)
    assert output_over_time(measurement()) == {"bin_s": 0.0, "tokens_per_s": []}


def test_missing_usage_guessed_tokens_lateness_and_failed_warm_up_are_warned_of():
    silent = reply(0, 1.0, [(1.5, None), (2.0, None)], 2.0, None, finish_reason="stop")
    guessed = reply(1, 1.0, [(1.5, None), (2.0, None)], 2.0, 9, finish_reason="stop")
    late = RequestResult(2, "ok", None, 1.0, 1.7, 2.0, finish_reason="stop", usage_tokens=1)
    measured = measurement(Phase(1.0, (silent, guessed, late)))
    measured.warmup = (reply(0, 0, [], 1, None, "failed", reason="HTTP 503: full"),)
    s = summarize(measured)
    for words in ("1 of 3 replies came without usage", "in 1 of 3 replies ITL", "0.70 s late"):
        assert sum(words in warning for warning in s["warnings"]) == 1, words
    assert "1 warm-up requests failed: HTTP 503: full" in s["warnings"]
    assert s["tokens"]["input"] is None and s["total_throughput"] is None
    assert s["tokens"]["replies_by_event_count"] == {"events": 2, "characters": 1}
    assert s["tokens"]["output"] == 2 + 9 + 1


def test_comparison_gives_ratios_and_equal_texts(measured):
    twice = tuple(
        reply(i, 10.0, [(11.0, 1), (13.0, 4)], 13.0, 4, prompt_tokens=7, text=t, finish_reason="stop")
        for i, t in enumerate("xz")
    )
    other = measurement(Phase(10.0, twice))
    c = compare_measurements(measured, other)
    assert (c["replies_of_both"], c["replies_identical"]) == (2, 1)
    assert c["first_over_second"]["output_throughput"] == pytest.approx(2.0 / (8 / 3))
    assert c["first_over_second"]["ttft_ms.mean"] == pytest.approx(0.75)
    shown = format_comparison([summarize(measured), summarize(other)], c)
    assert "0.750" in shown and "same text: 1 of 2" in shown
    # 2 of 10 prompt tokens were cached here, and nobody knows how many there.
    assert c["warnings"] == [] and "warning" not in shown


def test_a_comparison_of_a_warm_cache_with_a_cold_one_is_warned_of():
    def cached(count):
        told = {"prompt_tokens": 100, "cached_tokens": count, "finish_reason": "stop"}
        return measurement(Phase(0.0, (reply(0, 0.0, [(1.0, 1)], 2.0, 2, **told),)))

    (warning,) = compare_measurements(cached(96), cached(15))["warnings"]
    assert "96 %" in warning and "15 %" in warning
    assert compare_measurements(cached(17), cached(15))["warnings"] == []


def test_the_text_shows_failures_and_latencies(measured):
    shown = format_summary(summarize(measured))
    assert "1 x HTTP 500: no" in shown and "750.00" in shown and "accept length  not offered" in shown
    assert "2.00 output tokens/s" in shown


def test_rows_have_every_request(measured):
    rows = reply_rows(measured)
    assert [(row["number"], row["round"], row["outcome"]) for row in rows] == [
        (0, 0, "ok"), (1, 0, "ok"), (2, 0, "failed"), (3, 1, "interrupted")
    ]  # fmt: skip
    assert rows[1]["sent_s"] == pytest.approx(0.2) and rows[1]["ttft_s"] == pytest.approx(1.0)


@pytest.mark.parametrize("prefix", ["vllm:", "eagle_kit:"])
@pytest.mark.parametrize("suffix", ["_total", ""])
def test_counters_are_read_under_both_prefixes_with_and_without_total(prefix, suffix):
    text = METRICS.replace("vllm:", prefix).replace("_total", suffix)
    assert parse_metrics(text).counters == {
        "num_drafts": 30, "num_draft_tokens": 120, "num_accepted_tokens": 45
    }  # fmt: skip


def test_accept_length_by_counters_is_of_the_run_alone():
    before = parse_metrics(METRICS)
    after = Snapshot({"num_drafts": 50.0, "num_draft_tokens": 200.0, "num_accepted_tokens": 75.0})
    found = from_metrics([(before, after), (after, after)])
    assert found["accept_length"] == 1 + 30 / 20 and found["acceptance_rate"] == 30 / 80
    assert from_metrics([(after, before)]) is None, "a counter that fell"
    assert from_metrics([(before, before)]) is None, "no draft"
    assert from_metrics([(None, after)]) is None


def test_the_gauge_of_sglang_is_shown_as_what_it_is(measured):
    after = parse_metrics(
        'sglang:spec_accept_length{tp_rank="0"} 3.0\nsglang:spec_accept_length{tp_rank="1"} 2.0\n'
    )
    measured = measurement(Phase(0.0, (), after, after))
    assert "2.500 by SGLang's gauge" in format_summary(summarize(measured))


def test_accept_length_by_responses_weighs_verifies():
    told = [{"histogram": [0, 1, 3]}, {"histogram": [0, 4]}, {"histogram": "no"}, None]
    found = from_responses([reply(i, 0, [], 1, 1, speculation=s) for i, s in enumerate(told)])
    assert found["accept_length"] == pytest.approx(11 / 8)
    assert (found["num_verifies"], found["num_responses"], found["histogram"]) == (8, 2, [0, 5, 3])


def test_the_picture_is_a_png_even_of_a_run_without_replies(measured, tmp_path):
    for number, each in enumerate((measured, measurement())):
        path = tmp_path / "new" / f"{number}.png"
        plot([each, measured], ["first", "second"], path)
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
