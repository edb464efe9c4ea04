"""Servers that speak as vLLM and SGLang do, in the table of an evaluation."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_llm import VOCABULARY, FakeLLM, FakeTokenizer, plain_generation
from recorded_engines import RecordedEngine, recorded

from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.eval import EvalConfig
from eagle_kit.core.errors import UserError
from eagle_kit.eval.report import report
from eagle_kit.eval.runner import run_eval
from eagle_kit.eval.servers.naming import name_servers
from eagle_kit.eval.servers.server_checks import served_target
from eagle_kit.eval.summary import find_row

NUM_TOKENS = 13
NUM_TURNS = 6
VERIFIES = 6
"""Of a response of 13 tokens: two by each after the first token."""


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Five prompts of two categories, the second one with two turns."""
    path = tmp_path / "mini.jsonl"
    turns = [["red"], ["green", "and then"], ["blue"], ["yellow"], ["white"]]
    records = [{"id": f"p{i}", "category": "ab"[i % 2], "turns": turn} for i, turn in enumerate(turns)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def fakes(target: str, drafts: Any) -> list[Any]:
    return [FakeLLM(None), *(FakeLLM(str(draft), 1) for draft in drafts)]


def evaluate(
    prompts: Path,
    out: Path,
    *urls: str,
    names: Any = None,
    batch_size: int = 1,
    drafts: Any = (),
    **options: Any,
) -> dict[str, Any]:
    config = EvalConfig(
        tasks=(str(prompts),),
        shapes=("3,1,4",),
        max_tokens=NUM_TOKENS,
        plots=False,
        engine=EngineConfig(max_batch_size=batch_size),
        **options,
    )
    servers = name_servers(urls, names)
    given = {name: name for name in drafts}
    return run_eval("a-target", given, config, out=out, quiet=True, engines=fakes, servers=servers)


def tokens_of(text: str) -> list[int]:
    return FakeTokenizer()(text)["input_ids"]


def changed_at(position: int) -> Any:
    """A server whose responses have another token at a position, and go on with others."""

    def generate(ids: list[int], num_tokens: int) -> tuple[str, list[int]]:
        _, response = plain_generation(ids, num_tokens)
        response = [*response[:position], VOCABULARY - 1, *response[position + 1 :]]
        return FakeTokenizer().decode(response), response

    return generate


@pytest.mark.parametrize("batch_size", [1, 2])
def test_vllms_counters_become_rows_beside_our_drafts(prompts: Path, tmp_path: Path, batch_size: int) -> None:
    engine = RecordedEngine(plain_generation, tokenize=tokens_of)
    with recorded(engine) as url:
        summary = evaluate(
            prompts, tmp_path / "out", url, names=["vllm"], batch_size=batch_size, drafts=["head1"]
        )
    row = find_row(summary, "vllm", "3,1,4")
    assert (row["num_answers"], row["num_tokens"], row["num_different"]) == (NUM_TURNS, NUM_TURNS * 13, 0)
    assert row["num_verifies"] == NUM_TURNS * VERIFIES and row["engine"] == "vLLM"
    assert row["accept_length"] == pytest.approx(12 / VERIFIES)
    assert row["acceptance_per_position"] == pytest.approx([1.0, 0.0, 0.0])
    assert row["decode_tokens_per_s"] > 0 and row["speedup"] is None, "no plain server was given"
    assert find_row(summary, "head1", "3,1,4")["accept_length"] == pytest.approx(12 / VERIFIES)
    assert summary["num_compared"] == NUM_TURNS, "the draft's alone"
    by_category = find_row(summary, "vllm", "3,1,4", "mini", "b")["accept_length"]
    assert by_category == (pytest.approx(2.0) if batch_size == 1 else None), "a batch has both categories"
    text = report(summary)
    assert "vllm: vLLM 0.32.0 at http://127.0.0.1" in text and "shape 3,1,4" in text
    assert "texts: 6 of them equal plain decoding here" in text and "warning" not in text


def test_a_server_gets_the_tokens_of_our_template_and_nothing_of_the_target_s_generation_config(
    prompts: Path, tmp_path: Path
) -> None:
    engine = RecordedEngine(plain_generation)
    with recorded(engine) as url:
        evaluate(prompts, tmp_path / "out", url)
    measured = engine.bodies[1:]  # after the warm-up
    plain_text = plain_generation(tokens_of("user:green"), NUM_TOKENS)[0]
    assert [body["prompt"] for body in measured] == [
        tokens_of("user:red"),
        tokens_of("user:green"),
        tokens_of(f"user:green|assistant:{plain_text}|user:and then"),
        *(tokens_of(f"user:{word}") for word in ("blue", "yellow", "white")),
    ]
    asked = {(body["temperature"], body["max_tokens"], body["repetition_penalty"]) for body in measured}
    assert asked == {(0.0, NUM_TOKENS, 1.0)} and "top_p" not in measured[0]


def test_sglang_counts_verifies_shows_its_shape_and_gives_no_tokens(prompts: Path, tmp_path: Path) -> None:
    info = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
    options: dict[str, Any] = {"style": "sglang", "gives_ids": False}
    engine = RecordedEngine(changed_at(5), server_info=info | {"version": "0.5.23"}, **options)
    with recorded(engine) as url:
        summary = evaluate(prompts, tmp_path / "out", url, names=["sglang"])
    row = find_row(summary, "sglang", "3,2,6")
    assert row["accept_length"] == pytest.approx(2.0) and row["acceptance_per_position"] == []
    assert (row["num_different"], row["num_compared"]) == (NUM_TURNS, NUM_TURNS)
    [server] = summary["servers"]
    assert (server["engine"], server["version"]) == ("SGLang", "0.5.23")
    found = server["differences"][0]["difference"]
    assert found["position"] == 5 and found["logit_gap"] is None, "found in the text"
    changed = plain_generation(tokens_of("user:red"), NUM_TOKENS)[0]
    assert found["plain_text"] == changed[found["character"] :][: len(found["plain_text"])]
    assert found["text"] != found["plain_text"]


def test_a_difference_has_its_token_and_the_gap_of_its_logits_where_the_server_gives_tokens(
    prompts: Path, tmp_path: Path
) -> None:
    with recorded(RecordedEngine(changed_at(4))) as url:
        summary = evaluate(prompts, tmp_path / "out", url)
    found = summary["servers"][0]["differences"]
    assert len(found) == NUM_TURNS and {f["difference"]["position"] for f in found} == {4}
    assert {f["difference"]["logit_gap"] for f in found} == {3.0}
    text = report(summary)
    assert "texts: 6 of 6 differ from plain decoding here" in text and "(logit gap 3)" in text
    assert "... and 3 more" in text
    assert summary["greedy_identical"] is None, "the identity of our drafts is another matter"


def test_a_plain_server_of_the_same_engine_gives_the_others_their_speed_up(
    prompts: Path, tmp_path: Path
) -> None:
    drafting = RecordedEngine(plain_generation)
    plain = RecordedEngine(plain_generation, drafts=False)
    other = RecordedEngine(plain_generation, style="sglang")
    with recorded(drafting) as one, recorded(plain) as two, recorded(other) as three:
        summary = evaluate(prompts, tmp_path / "out", one, two, three, names=["drafting", "plain", "sglang"])
    row = find_row(summary, "drafting", "3,1,4")
    plain_row = find_row(summary, "plain", "none")
    ratio = row["decode_tokens_per_s"] / plain_row["decode_tokens_per_s"]
    assert row["speedup_of_totals"] == pytest.approx(ratio) and row["speedup"] > 0
    assert plain_row["speedup"] is None and plain_row["accept_length"] is None
    assert [row["speedup"] for row in summary["rows"] if row["draft"] == "sglang"] == [None] * 4
    assert "its speed-up is over plain" in report(summary)


def test_a_plain_server_of_sglang_drafts_nothing(prompts: Path, tmp_path: Path) -> None:
    info = {"speculative_num_steps": None, "version": "0.5.23"}
    engine = RecordedEngine(plain_generation, style="sglang", drafts=False, server_info=info)
    with recorded(engine) as url:
        summary = evaluate(prompts, tmp_path / "out", url, names=["sglang"])
    row = find_row(summary, "sglang", "none")
    assert row["accept_length"] is None and row["decode_tokens_per_s"] > 0


def test_tokens_without_a_draft_are_no_tokens_of_a_verify(prompts: Path, tmp_path: Path) -> None:
    with recorded(RecordedEngine(plain_generation, undrafted=6)) as url:
        summary = evaluate(prompts, tmp_path / "out", url, names=["ngram"])
    row = find_row(summary, "ngram", "3,1,4")
    assert row["num_verifies"] == NUM_TURNS * 3
    assert row["accept_length"] == pytest.approx(2.0), "not 12 tokens by 3 verifies"


def test_the_traffic_of_others_is_said(prompts: Path, tmp_path: Path) -> None:
    with recorded(RecordedEngine(plain_generation, others=5)) as url:
        summary = evaluate(prompts, tmp_path / "out", url)
    [server] = summary["servers"]
    assert (server["num_unexplained_tokens"], server["num_batches_with_others"]) == (NUM_TURNS * 5, NUM_TURNS)
    assert "warning: it counted 30 tokens more" in report(summary)


def test_counters_that_are_late_are_waited_for(prompts: Path, tmp_path: Path) -> None:
    with recorded(RecordedEngine(plain_generation, late=3)) as url:
        summary = evaluate(prompts, tmp_path / "out", url, limit=1)
    row = summary["rows"][-1]
    assert row["num_verifies"] == VERIFIES and row["accept_length"] == pytest.approx(2.0)


def test_a_server_that_does_not_know_the_parameter_for_token_ids_is_measured_without(
    prompts: Path, tmp_path: Path
) -> None:
    engine = RecordedEngine(plain_generation, gives_ids=None)
    with recorded(engine) as url:
        summary = evaluate(prompts, tmp_path / "out", url)
    assert not summary["servers"][0]["differences"]
    assert [("return_token_ids" in body) for body in engine.bodies] == [True] + [False] * 7


def test_an_evaluation_goes_on_where_a_server_failed(prompts: Path, tmp_path: Path) -> None:
    whole = RecordedEngine(plain_generation)
    broken = RecordedEngine(plain_generation, fails_at=4)  # the warm-up is the first
    with recorded(whole) as one, recorded(broken) as two:
        with pytest.raises(UserError, match=r"mini p1, turn 2.*it broke"):
            evaluate(prompts, tmp_path / "out", one, two, names=["whole", "broken"])
        before = [len(whole.bodies), len(broken.bodies)]
        summary = evaluate(prompts, tmp_path / "out", one, two, names=["whole", "broken"])
        sent = [len(whole.bodies) - before[0], len(broken.bodies) - before[1]]
    row = find_row(summary, "broken", "3,1,4")
    assert row["num_answers"] == NUM_TURNS and row["num_verifies"] == NUM_TURNS * VERIFIES
    assert sent[1] == 1 + 4, "a warm-up, and the turns that were missing"
    assert find_row(summary, "whole", "3,1,4")["num_answers"] == NUM_TURNS and sent[0] <= 1 + 4


def test_a_whole_evaluation_is_reported_again_without_its_servers_and_a_cut_line_is_left_out(
    prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    engine = RecordedEngine(plain_generation)
    with recorded(engine) as url:
        first = evaluate(prompts, out, url)
        text = (out / "servers.jsonl").read_text()
        (out / "servers.jsonl").write_text(text[:-40])
        num_sent = len(engine.bodies)
        evaluate(prompts, out, url)
        assert len(engine.bodies) - num_sent == 2, "a warm-up and the turn that was cut off"
    again = evaluate(prompts, out, url)  # the server is gone
    counts = [(row["draft"], row["num_verifies"], row["accept_length"]) for row in first["rows"]]
    assert [(row["draft"], row["num_verifies"], row["accept_length"]) for row in again["rows"]] == counts


def test_an_evaluation_does_not_go_on_with_another_server(prompts: Path, tmp_path: Path) -> None:
    engine = RecordedEngine(plain_generation, fails_at=4)
    with recorded(engine) as url:
        with pytest.raises(UserError, match="it broke"):
            evaluate(prompts, tmp_path / "out", url)
        engine.models = [{"id": "another"}]
        with pytest.raises(UserError, match=r"was vLLM 0.32.0 the-model .* is vLLM 0.32.0 another"):
            evaluate(prompts, tmp_path / "out", url)


REFUSALS = [
    ({"tokenize": lambda text: [*tokens_of(text), 1]}, "another model .*tokenizer"),
    ({"models": [{"id": "m", "max_model_len": 20}]}, "prompt p0 of mini has 8 tokens.* 13 .*holds 20"),
    ({"extra_prompt_tokens": 1}, "counts 9 tokens in a prompt of 8"),
    ({"broken": {"error": {"message": "out of memory"}}}, "out of memory"),
    ({"broken": "cut"}, "without a finish reason"),
    ({"broken": ["no event"]}, "not OpenAI's API"),
    ({"models": []}, "not OpenAI's API"),
]


@pytest.mark.parametrize(("options", "said"), REFUSALS)
def test_a_server_that_cannot_be_measured_is_refused(
    prompts: Path, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    engine = RecordedEngine(plain_generation, **options)
    with recorded(engine) as url, pytest.raises(UserError, match=said):
        evaluate(prompts, tmp_path / "out", url)
    assert not (tmp_path / "out" / "servers.jsonl").exists(), "refused before anything is measured"


def test_metrics_without_counters_of_an_engine_are_refused(prompts: Path, tmp_path: Path) -> None:
    engine = RecordedEngine(plain_generation, metrics_text="python_info 1.0\nother:tokens_total 5.0\n")
    with recorded(engine) as url, pytest.raises(UserError, match="no counters of") as raised:
        evaluate(prompts, tmp_path / "out", url)
    assert "--disable-log-stats" in raised.value.remedy and "--enable-metrics" in raised.value.remedy


def test_a_server_without_metrics_is_refused(prompts: Path, tmp_path: Path) -> None:
    engine = RecordedEngine(plain_generation, style="sglang", metrics_text="")
    with recorded(engine) as url, pytest.raises(UserError, match="no metrics at .*404") as raised:
        evaluate(prompts, tmp_path / "out", url)
    assert "--enable-metrics" in raised.value.remedy


def test_a_server_that_is_not_there_is_refused(prompts: Path, tmp_path: Path) -> None:
    with recorded(RecordedEngine(plain_generation)) as url:
        pass
    with pytest.raises(UserError, match="does not answer") as raised:
        evaluate(prompts, tmp_path / "out", url)
    assert "Start the server" in raised.value.remedy


def test_a_server_with_a_key_gets_it(prompts: Path, tmp_path: Path) -> None:
    config = EvalConfig(tasks=(str(prompts),), limit=1, plots=False, engine=EngineConfig(max_batch_size=1))
    with recorded(RecordedEngine(plain_generation, key="secret")) as url:
        with pytest.raises(UserError, match="answers 401") as raised:
            evaluate(prompts, tmp_path / "refused", url)
        assert "key" in raised.value.remedy
        servers = name_servers([url], key="secret")
        out = tmp_path / "out"
        summary = run_eval("a-target", {}, config, out=out, quiet=True, engines=fakes, servers=servers)
    assert summary["servers"][0]["num_compared"] == 1


def test_a_server_without_a_path_for_tokens_is_known_by_its_count(prompts: Path, tmp_path: Path) -> None:
    class Doubling(FakeTokenizer):
        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": 2 * tokens_of(text)}

    with recorded(RecordedEngine(plain_generation)) as url:
        evaluate(prompts, tmp_path / "same", url, limit=1)

        def doubling(target: str, drafts: Any) -> list[Any]:
            llm = FakeLLM(None)
            llm.tokenizer = Doubling()
            return [llm]

        config = EvalConfig(tasks=(str(prompts),), plots=False, engine=EngineConfig(max_batch_size=1))
        with pytest.raises(UserError, match="another model"):
            run_eval(
                "a",
                {},
                config,
                out=tmp_path / "out",
                quiet=True,
                engines=doubling,
                servers=name_servers([url]),
            )


def test_a_server_of_a_model_with_other_sizes_is_refused_by_its_folder(prompts: Path, tmp_path: Path) -> None:
    for name, hidden in (("target", 64), ("other", 96)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"hidden_size": hidden}))
    model = {"id": "a-name", "root": str(tmp_path / "other")}
    engine = RecordedEngine(plain_generation, models=[model])
    config = EvalConfig(tasks=(str(prompts),), plots=False, engine=EngineConfig(max_batch_size=1))
    with recorded(engine) as url:
        servers = name_servers([url])
        with pytest.raises(UserError, match="hidden_size is 96; the target's is 64"):
            run_eval(
                tmp_path / "target",
                {},
                config,
                out=tmp_path / "out",
                quiet=True,
                engines=fakes,
                servers=servers,
            )
        model["root"] = str(tmp_path / "target")
        found = served_target(name_servers([url]))
    assert found.name == str(tmp_path / "target") and "the model of http://" in found.origin


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_the_target_is_the_servers_where_its_name_is_known(name: str) -> None:
    with recorded(RecordedEngine(plain_generation, models=[{"id": name}])) as url:
        assert served_target(name_servers([url])).name == "smollm2-135m-instruct"
    with recorded(RecordedEngine(plain_generation)) as url, pytest.raises(UserError, match="--target"):
        served_target(name_servers([url]))


def test_servers_are_named_by_host_and_port_and_each_once(prompts: Path, tmp_path: Path) -> None:
    [server] = name_servers(["http://localhost:8000/v1"])
    assert (server.name, server.url) == ("localhost:8000", "http://localhost:8000")
    with pytest.raises(UserError, match="twice"):
        name_servers(["http://localhost:8000/v1", "http://localhost:8000"])
    with pytest.raises(UserError, match="names were given"):
        name_servers(["http://localhost:8000"], ["a", "b"])
    with pytest.raises(UserError, match="name of a draft"):
        evaluate(prompts, tmp_path / "out", "http://localhost:9", names=["head1"], drafts=["head1"])
