"""Counters of a server: what is read from the metrics of ours, vLLM's and SGLang's."""

import pytest

from eagle_kit.core.errors import UserError
from eagle_kit.eval.counters import Snapshot, difference, parse_metrics, root_of

TEXT = """
# HELP eagle_kit:spec_decode_num_drafts_total Windows.
eagle_kit:spec_decode_num_drafts_total{model_name="a b"} 10.0
eagle_kit:spec_decode_num_draft_tokens_total{model_name="m"} 40.0
eagle_kit:spec_decode_num_accepted_tokens_total{model_name="m"} 15.0
eagle_kit:spec_decode_num_accepted_tokens_created{model_name="m"} 1.7e9
eagle_kit:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 9.0
eagle_kit:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"} 6.0
eagle_kit:generation_tokens_total{model_name="m"} 25.0
eagle_kit:num_requests_running{model_name="m"} 3.0
eagle_kit:spec_decode_num_cycles_total{model_name="m",shape="4,1,5"} 7.0
eagle_kit:spec_decode_num_cycles_total{model_name="m",shape="none"} 2.0
other:spec_decode_num_drafts_total 99.0
"""


def test_counters_are_read_whoever_writes_them():
    ours = parse_metrics(TEXT)
    assert ours.counters["spec_decode_num_drafts"] == 10 and ours.counters["generation_tokens"] == 25
    assert ours.counters["spec_decode_num_accepted_tokens"] == 15 and ours.accepted_at == {0: 9.0, 1: 6.0}
    assert len(ours.counters) == 4 and ours.cycles == {"4,1,5": 7.0, "none": 2.0}
    theirs = parse_metrics(TEXT.replace("eagle_kit:", "vllm:"))
    assert (theirs.counters, theirs.accepted_at) == (ours.counters, ours.accepted_at)
    assert (ours.engine, theirs.engine) == ("eagle-kit", "vLLM")
    two = TEXT + TEXT.replace('"m"', '"other engine"')
    both = parse_metrics(two)
    assert both.counters["generation_tokens"] == 50, "engines of one server are added up"
    assert both.accepted_at == {0: 18.0, 1: 12.0}
    assert both.cycles == {"4,1,5": 14.0, "none": 4.0}


def test_the_difference_is_of_the_time_between():
    before = parse_metrics(TEXT)
    later = (
        TEXT.replace(" 10.0", " 14.0")
        .replace(" 15.0", " 21.0")
        .replace(" 9.0", " 12.0")
        .replace(" 25.0", " 36.0")
    )
    figures = difference(before, parse_metrics(later))
    assert figures["verifies"] == 4 and figures["accepted tokens"] == 6 and figures["generation_tokens"] == 11
    assert figures["accept length"] == pytest.approx(2.5)
    assert (figures["accepted at depth 1"], figures["accepted at depth 2"]) == (0.75, 0.0)
    assert "accept length" not in difference(before, before)
    assert difference(Snapshot(), before)["accept length"] == pytest.approx(2.5)
    with pytest.raises(UserError, match="fell"):
        difference(parse_metrics(later), before)


SGLANG = """
sglang:spec_accept_length{engine_type="unified",model_name="m",tp_rank="0"} 1.55
sglang:spec_accept_length{engine_type="unified",model_name="m",tp_rank="1"} 0.0
sglang:spec_accept_rate{model_name="m",tp_rank="0"} 0.55
sglang:spec_verify_calls_total{model_name="m"} 40.0
sglang:num_requests_total{model_name="m"} 3.0
sglang:generation_tokens_total{model_name="m"} 83.0
sglang:prompt_tokens_total{model_name="m"} 70.0
"""


def test_sglang_counts_verifies_and_tokens_only():
    now = parse_metrics(SGLANG)
    assert now.engine == "SGLang" and now.gauge == 1.55
    figures = difference(Snapshot(), now)
    assert figures["verifies"] == 40 and figures["accept length"] == pytest.approx(2.0), "3 first tokens"
    older = parse_metrics("\n".join(line for line in SGLANG.splitlines() if "verify_calls" not in line))
    figures = difference(Snapshot(), older)
    assert "accept length" not in figures and figures["accept length of the last interval"] == 1.55
    several = SGLANG.replace('tp_rank="1"} 0.0', 'tp_rank="1"} 2.45')
    assert parse_metrics(several).gauge == pytest.approx(2.0)


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_a_server_s_url_may_name_its_api(path):
    assert root_of(f"http://localhost:8000{path}") == "http://localhost:8000"


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host", "http://", "http://host:port", "http://host:0"]
)
def test_what_is_no_url_is_refused(url):
    with pytest.raises(UserError, match="is not a URL"):
        root_of(url)
