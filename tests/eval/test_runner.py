import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_llm import VOCABULARY, FakeLLM

from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.eval import EvalConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import sole_writer
from eagle_kit.core.output import RequestOutput
from eagle_kit.eval.decoder import batch_decode_seconds
from eagle_kit.eval.engines import NamedSetting
from eagle_kit.eval.identity import first_difference
from eagle_kit.eval.report import identity_lines
from eagle_kit.eval.runner import name_drafts, run_eval
from eagle_kit.eval.summary import find_row
from eagle_kit.report.environment import command_line

SHAPES = ["2,1,3", "3,2,6"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Five prompts of two categories, the second one with two turns."""
    path = tmp_path / "mini.jsonl"
    turns = [["red"], ["green", "and then"], ["blue"], ["yellow"], ["white"]]
    records = [{"id": f"p{i}", "category": "ab"[i % 2], "turns": turn} for i, turn in enumerate(turns)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


class Fakes:
    """Makes engines and remembers every call to any of them, in order."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.calls: list[tuple[str | None, str, list[Any]]] = []
        self.loads = 0

    def __call__(self, target: str, settings: Sequence[NamedSetting]) -> list[Any]:
        self.loads += 1
        self.settings = settings
        wrong = self.options.get("wrong", {})
        others = {key: value for key, value in self.options.items() if key != "wrong"}
        made = self.engines = [FakeLLM(None, calls=self.calls, **others)]
        for setting in settings:
            draft = str(setting.draft or setting.name)
            made.append(FakeLLM(draft, int(draft[-1]), wrong.get(draft), calls=self.calls, **others))
        return made

    @property
    def measured(self) -> list[tuple[str | None, str, list[Any]]]:
        """The calls after the warm-up, which takes one call a setting."""
        settings = len({(draft, shape) for draft, shape, _ in self.calls})
        return self.calls[settings:]


def evaluate(prompts: Path, out: Path, fakes: Fakes, **options: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "drafts": ["head1"],
        "shapes": SHAPES,
        "max_tokens": 13,
        "plots": False,
    }
    given = {**defaults, **options}
    drafts = name_drafts(given.pop("drafts"), given.pop("draft_names", None))
    command, quiet = given.pop("command", None), given.pop("quiet", True)
    target = given.pop("target", "a-target")
    settings = given.pop("settings", ())
    engine = EngineConfig(
        **{name: given.pop(name) for name in EngineConfig.model_fields if name in given},
        max_batch_size=given.pop("batch_size", 1),
    )
    config = EvalConfig(tasks=(str(prompts),), engine=engine, **given)
    return run_eval(
        target, drafts, config, out=out, quiet=quiet, command=command, engines=fakes, settings=settings
    )


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]


def test_every_prompt_is_decoded_by_every_setting_and_written_down(prompts: Path, tmp_path: Path) -> None:
    summary = evaluate(prompts, tmp_path / "out", Fakes(), drafts=["head0", "head2"])
    found = records(tmp_path / "out")
    assert len(found) == 6 * 5 and summary["num_prompts"] == 6
    assert {(r["draft"], r["shape"]) for r in found} == {
        (None, "none"),
        *((draft, shape) for draft in ("head0", "head2") for shape in SHAPES),
    }
    one = next(r for r in found if (r["id"], r["draft"], r["shape"]) == ("p0", "head2", "2,1,3"))
    assert one["num_tokens"] == len(one["token_ids"]) == 13
    assert one["num_verifies"] == 4 and one["accept_length"] == 3.0 and one["histogram"] == [0, 0, 0, 4]
    assert one["decode_tokens_per_s"] == 12 / (4 * 0.5) and one["identical"] is True
    assert (one["turn"], one["category"], one["finish_reason"]) == (0, "a", "length")
    assert one["num_prompt_tokens"] == len("user:red") and one["text"].split()[0] == f"w{one['token_ids'][0]}"
    assert (one["prefill_s"], one["decode_s"], one["decode_share_s"]) == (0.25, 4 * 0.5, 4 * 0.5)
    row = find_row(summary, "head2", "2,1,3")
    assert (row["prefill_s"], row["decode_s"]) == (0.25, 6 * 4 * 0.5)
    assert (row["num_answers"], row["num_tokens"], row["num_verifies"]) == (6, 6 * 13, 6 * 4)
    assert find_row(summary, "head0", "2,1,3")["accept_length"] == 1.0
    assert find_row(summary, "head2", "3,2,6")["speedup"] == pytest.approx(3.0)
    assert summary["greedy_identical"] is True and summary["num_compared"] == 24


def test_summary_says_what_it_ran_on(prompts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "somewhere" / "a-target"
    folder.mkdir(parents=True)
    options = {"seeds": [5], "command": "eagle-kit eval something"}
    evaluate(prompts, tmp_path / "out", Fakes(), target=str(folder), **options)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["command"] == "eagle-kit eval something" and summary["seed"] == 5
    assert summary["target"] == {"name": "a-target", "device": "cpu", "dtype": "float32"}
    assert {"torch", "transformers", "eagle_kit", "python"} <= set(summary["versions"])
    assert (
        summary["machine"]["threads"] >= 1 and summary["machine"]["cpu"] and summary["date"].startswith("20")
    )


def test_a_second_turn_follows_the_plain_response_for_every_setting(prompts: Path, tmp_path: Path) -> None:
    fakes = Fakes(wrong={"head1": {0: 3}})
    evaluate(prompts, tmp_path / "out", fakes)
    plain = next(
        r for r in records(tmp_path / "out") if r["id"] == "p1" and r["draft"] is None and r["turn"] == 0
    )
    second = [call[2][0] for call in fakes.measured if isinstance(call[2][0], list)]
    assert len(second) == 3
    assert all(
        [m["content"] for m in messages] == ["green", plain["text"], "and then"] for messages in second
    )


def test_settings_take_turns_in_going_first_after_a_warm_up(prompts: Path, tmp_path: Path) -> None:
    fakes = Fakes()
    evaluate(prompts, tmp_path / "out", fakes)
    assert len(fakes.calls) - len(fakes.measured) == 3
    firsts = [fakes.measured[i][1] for i in range(0, len(fakes.measured), 3)]
    assert firsts == ["none", "2,1,3", "3,2,6", "none", "2,1,3", "3,2,6"]


def test_a_difference_is_named_with_both_tokens_and_the_logit_gap(prompts: Path, tmp_path: Path) -> None:
    fakes = Fakes(wrong={"head1": {4: VOCABULARY - 1}})
    summary = evaluate(prompts, tmp_path / "out", fakes, shapes=["2,1,3"])
    assert summary["greedy_identical"] is False and len(summary["differences"]) == 6
    plain = next(r for r in records(tmp_path / "out") if r["id"] == "p0" and r["draft"] is None)
    first = summary["differences"][0]
    assert (first["task"], first["id"], first["turn"], first["draft"]) == ("mini", "p0", 0, "head1")
    assert first["difference"] == {
        "position": 4,
        "plain_token": plain["token_ids"][4],
        "token": VOCABULARY - 1,
        "plain_text": f"w{plain['token_ids'][4]}",
        "text": f"w{VOCABULARY - 1}",
        "logit_gap": 3.0,
    }
    lines = identity_lines(summary)
    assert len(lines) == 7 and lines[0].startswith("greedy identical: no (6 of 6") and "1 more" in lines[-1]


@pytest.mark.parametrize(
    ("plain", "other", "position"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1], 1),
        ([1, 2], [3, 2], 0),
        ([], [], None),
    ],
)
def test_first_difference(plain: list[int], other: list[int], position: int | None) -> None:
    assert first_difference(plain, other) == position


def test_a_stopped_run_goes_on_where_it_stopped(prompts: Path, tmp_path: Path, capsys: Any) -> None:
    whole = Fakes()
    expected = evaluate(prompts, tmp_path / "whole", whole)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        evaluate(prompts, out, Fakes(stop_after=3 + 7))  # in the middle of the third user turn
    begun = json.loads((out / "settings.json").read_text())
    assert begun["about"]["command"] == command_line()
    assert "6 answers are kept" in capsys.readouterr().err
    assert len(records(out)) == 6
    rest = Fakes()
    summary = evaluate(prompts, out, rest, command="another")
    assert rest.measured == whole.measured[6:]
    assert summary["rows"] == expected["rows"]
    assert records(out) == records(tmp_path / "whole")
    about = ("command", "date", "machine", "versions", "target")
    assert {name: summary[name] for name in about} == begun["about"], "what is said is of the first start"


def test_two_processes_do_not_write_one_evaluation(prompts: Path, tmp_path: Path) -> None:
    """The later one would begin with the answers that it found, and drop those that came meanwhile."""
    out = tmp_path / "out"
    with sole_writer(out, out / ".lock"), pytest.raises(UserError, match="Another process is writing"):
        evaluate(prompts, out, Fakes())
    evaluate(prompts, out, Fakes())
    assert not (out / ".lock").exists()


def test_a_finished_run_is_summed_up_again_without_loading_a_model(prompts: Path, tmp_path: Path) -> None:
    first = evaluate(prompts, tmp_path / "out", Fakes())
    again = Fakes()
    assert evaluate(prompts, tmp_path / "out", again) == first
    assert again.loads == 0


def test_a_line_cut_off_by_a_crash_is_decoded_again(prompts: Path, tmp_path: Path) -> None:
    expected = evaluate(prompts, tmp_path / "out", Fakes())
    path = tmp_path / "out" / "answers.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2]) + lines[-2][:50])
    fakes = Fakes()
    assert evaluate(prompts, tmp_path / "out", fakes)["rows"] == expected["rows"]
    assert len(fakes.measured) == 3 and len(records(tmp_path / "out")) == len(lines)
    path.write_text("broken\n" + "".join(lines))
    with pytest.raises(UserError, match="Line 1"):
        evaluate(prompts, tmp_path / "out", Fakes())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": 12}, "max_tokens"),
        ({"shapes": ["2,1,3"]}, "shapes"),
        ({"drafts": ["head2"]}, "drafts"),
        ({"max_context": 96}, "max_context"),
        ({"batch_size": 2}, "batch_size"),
        ({"limit": 9}, "limit"),
        ({"seeds": [1]}, "seed"),
        ({"temperatures": [0.0, 1.0]}, "temperatures"),
        ({"settings": [NamedSetting("more2", None, EngineConfig(), ("2,1,3",))]}, "settings"),
        ({"target": "another"}, "target"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"device": "cpu"}, "device"),
        ({"quantization": "fp8"}, "quantization"),
        ({"kv_dtype": "fp8_e4m3"}, "kv_dtype"),
        ({"tensor_parallel": 2}, "tensor_parallel"),
        ({"graph_mode": "off"}, "graph_mode"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused(
    prompts: Path, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    evaluate(prompts, tmp_path / "out", Fakes())
    before = (tmp_path / "out" / "answers.jsonl").read_bytes()
    with pytest.raises(UserError, match=named):
        evaluate(prompts, tmp_path / "out", Fakes(), **change)
    assert (tmp_path / "out" / "answers.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("place", "other", "named"),
    [
        ("eagle_kit.eval.runner.cpu_model", lambda: "another", "cpu"),
        ("torch.get_num_threads", lambda: 77, "threads"),
        ("torch.__version__", "2.0", "torch"),
    ],
)
def test_answers_of_another_machine_are_not_gone_on_with(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, other: Any, named: str
) -> None:
    evaluate(prompts, tmp_path / "out", Fakes())
    monkeypatch.setattr(place, other)
    with pytest.raises(UserError, match=rf"settings \({named} differ\)"):
        evaluate(prompts, tmp_path / "out", Fakes())


def test_answers_without_their_settings_are_refused(prompts: Path, tmp_path: Path) -> None:
    evaluate(prompts, tmp_path / "out", Fakes())
    before = (tmp_path / "out" / "answers.jsonl").read_bytes()
    for damage in (lambda path: path.write_text("{}"), Path.unlink):
        damage(tmp_path / "out" / "settings.json")
        with pytest.raises(UserError, match=r"settings\.json is missing or unreadable"):
            evaluate(prompts, tmp_path / "out", Fakes())
    assert (tmp_path / "out" / "answers.jsonl").read_bytes() == before


def test_the_seed_draws_the_prompts(prompts: Path, tmp_path: Path) -> None:
    drawn = set()
    for seed in range(8):
        evaluate(prompts, tmp_path / str(seed), Fakes(), seeds=[seed], limit=2, drafts=[])
        drawn.add(frozenset(record["id"] for record in records(tmp_path / str(seed))))
    assert len(drawn) > 1 and {len(ids) for ids in drawn} == {2}


def test_arguments_of_the_chat_template_reach_every_setting_and_a_prompts_own_come_first(
    prompts: Path, tmp_path: Path
) -> None:
    own = {"turns": ["black"], "chat_template_kwargs": {"enable_thinking": True}}
    prompts.write_text(prompts.read_text() + json.dumps(own) + "\n")
    fakes, off = Fakes(), {"enable_thinking": False}
    summary = evaluate(prompts, tmp_path / "out", fakes, chat_template_kwargs=off)
    given = [prompt for _, _, asked in fakes.measured for prompt in asked]
    assert summary["settings"]["chat_template_kwargs"] == off
    assert {prompt.chat_template_kwargs["enable_thinking"] for prompt in given} == {False, True}
    assert sum(prompt.chat_template_kwargs["enable_thinking"] for prompt in given) == 1 + len(SHAPES)
    with pytest.raises(UserError, match="tasks differ|chat_template_kwargs"):
        evaluate(prompts, tmp_path / "out", Fakes())


def test_changed_prompts_or_a_changed_draft_are_refused(prompts: Path, tmp_path: Path) -> None:
    draft = tmp_path / "head1"
    draft.mkdir()
    (draft / "config.json").write_text("{}")
    evaluate(prompts, tmp_path / "out", Fakes(), drafts=[str(draft)])
    (draft / "config.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match="drafts differ"):
        evaluate(prompts, tmp_path / "out", Fakes(), drafts=[str(draft)])
    (draft / "config.json").write_text("{}")
    (draft / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(UserError, match="drafts differ"):
        evaluate(prompts, tmp_path / "out", Fakes(), drafts=[str(draft)])
    (draft / "model.safetensors").unlink()
    prompts.write_text(prompts.read_text() + '{"prompt": "more"}\n')
    with pytest.raises(UserError, match="tasks differ"):
        evaluate(prompts, tmp_path / "out", Fakes(), drafts=[str(draft)])


def test_a_target_whose_weights_have_changed_is_refused(prompts: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    evaluate(prompts, tmp_path / "out", Fakes(), target=str(target))
    (target / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(UserError, match="target_fingerprint differ"):
        evaluate(prompts, tmp_path / "out", Fakes(), target=str(target))


def test_batches_share_their_decoding_seconds(prompts: Path, tmp_path: Path) -> None:
    summary = evaluate(prompts, tmp_path / "out", Fakes(), batch_size=2, shapes=["2,1,3"])
    plain = [r for r in records(tmp_path / "out") if r["draft"] is None]
    # Every response takes 12 verifies of 0.5 s; two in a batch share them; p4 and p1's turn two are alone.
    assert [r["decode_share_s"] for r in plain] == [3.0] * 2 + [6.0] + [3.0] * 2 + [6.0]
    assert find_row(summary, None, "none")["decode_tokens_per_s"] == pytest.approx(6 * 12 / 24)
    assert find_row(summary, None, "none")["decode_s"] == 24.0


def test_prefill_of_later_requests_is_not_decoding() -> None:
    def output(prefill: float, decode: float) -> RequestOutput:
        return RequestOutput([1], [1, 2], "", "length", prefill_s=prefill, decode_s=decode)

    # Prefills end at 1, 3, 6 s; all decode together until 10 s.
    assert batch_decode_seconds([output(1, 9), output(2, 7), output(3, 4)]) == pytest.approx(4.0)
    assert batch_decode_seconds([output(1, 9)]) == 9.0
    assert batch_decode_seconds([output(1, 0), output(1, 0)]) == 0.0


def test_plain_decoding_alone_needs_no_draft(prompts: Path, tmp_path: Path) -> None:
    summary = evaluate(prompts, tmp_path / "out", Fakes(), drafts=[], plots=True)
    assert len(records(tmp_path / "out")) == 6 and summary["greedy_identical"] is None
    assert [row["draft"] for row in summary["rows"]] == [None] * len(summary["rows"])


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"shapes": ["4,1,6"]}, "chain"),
        ({"shapes": ["none"]}, "ordinary decoding"),
        ({"shapes": ["2,1,3", "2,1,3"]}, "given twice"),
        ({"shapes": []}, "No shape"),
        ({"batch_size": 0}, "batch_size"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"draft_names": ["a", "b"]}, "2 draft names"),
        ({"drafts": ["x/head1", "x/head1"]}, "given twice"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(
    prompts: Path, tmp_path: Path, options: dict[str, Any], cause: str
) -> None:
    fakes = Fakes()
    with pytest.raises(UserError, match=cause):
        evaluate(prompts, tmp_path / "out", fakes, **options)
    assert fakes.loads == 0 and not (tmp_path / "out").exists()


def test_a_prompt_longer_than_the_context_is_named_before_decoding(prompts: Path, tmp_path: Path) -> None:
    fakes = Fakes(max_context=11)
    with pytest.raises(UserError, match="prompt p3 of mini has 11 tokens"):
        evaluate(prompts, tmp_path / "out", fakes)
    assert fakes.calls == [] and not (tmp_path / "out").exists()


def test_drafts_of_the_same_name_are_told_apart(prompts: Path, tmp_path: Path) -> None:
    drafts = ["runs/a/head1", "runs/b/head1"]
    summary = evaluate(prompts, tmp_path / "one", Fakes(), drafts=drafts)
    assert [draft["name"] for draft in summary["drafts"]] == ["a/head1", "b/head1"]
    summary = evaluate(prompts, tmp_path / "two", Fakes(), drafts=["runs/a/step-1"])
    assert [draft["name"] for draft in summary["drafts"]] == ["a/step-1"]
    assert list(name_drafts(["runs/a/best"])) == ["a/best"]
    summary = evaluate(prompts, tmp_path / "three", Fakes(), drafts=drafts, draft_names=["ours1", "theirs1"])
    assert find_row(summary, "theirs1", "2,1,3")["num_answers"] == 6


def test_the_report_is_printed(prompts: Path, tmp_path: Path, capsys: Any) -> None:
    evaluate(prompts, tmp_path / "out", Fakes(), quiet=False)
    printed = capsys.readouterr().out
    assert "greedy identical: yes (12 answers" in printed and "a-target (float32) on" in printed
    assert str(tmp_path / "out" / "summary.json") in printed


def test_a_plot_is_drawn(prompts: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shapes = [*SHAPES, "auto"]
    summary = evaluate(
        prompts, tmp_path / "out", Fakes(), drafts=["head0", "head2"], shapes=shapes, plots=True
    )
    path = Path(summary["paths"]["plot"])
    assert path == tmp_path / "out" / "summary.png"
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_a_target_without_a_chat_template_continues_single_prompts_and_says_so(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes = Fakes()

    def base(target: str, settings: Sequence[NamedSetting]) -> list[Any]:
        engines = fakes(target, settings)
        for engine in engines:
            engine.tokenizer.chat_template = None
        return engines

    with pytest.raises(UserError, match="p1 of mini has 2 turns"):
        evaluate(prompts, tmp_path / "turns", base)
    assert not fakes.calls

    single = tmp_path / "single.jsonl"
    single.write_text('{"prompt": "Once upon"}\n')
    evaluate(single, tmp_path / "out", base, quiet=False)
    assert "the target has no chat template" in capsys.readouterr().out
    assert all(given == ["Once upon"] for _, _, given in fakes.calls)


def test_a_run_with_another_chat_template_is_not_gone_on_with(prompts: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    evaluate(prompts, tmp_path / "out", Fakes(), chat_template=template)
    template.write_text("{{ messages[0] }}")
    with pytest.raises(UserError, match="chat_template"):
        evaluate(prompts, tmp_path / "out", Fakes(), chat_template=template)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_every_temperature_and_seed_decodes_every_prompt_with_seeds_of_their_own(
    prompts: Path, tmp_path: Path, batch_size: int
) -> None:
    fakes = Fakes()
    summary = evaluate(
        prompts,
        tmp_path / "out",
        fakes,
        temperatures=[0.0, 1.0],
        seeds=[3, 4],
        top_p=0.9,
        shapes=["2,1,3"],
        batch_size=batch_size,
    )
    found = records(tmp_path / "out")
    rounds = {(r["temperature"], r["seed"]) for r in found}
    assert rounds == {(0.0, 3), (1.0, 3), (1.0, 4)} and len(found) == 2 * 6 * 3

    # A sample's seed depends on the prompt and on the seed, and is the same in every setting.
    plain, drafted = ([p for p in each.params if p.cache_salt != "warm-up"] for each in fakes.engines)
    assert [p.seed for p in plain] == [p.seed for p in drafted]
    sampled = [p for p in plain if p.temperature]
    assert len({p.seed for p in sampled}) == len(sampled) == 12
    assert {(p.temperature, p.top_p) for p in sampled} == {(1.0, 0.9)}

    # N-grams and prefixes of one pass are not those of another, nor another setting's.
    assert len({p.cache_salt for p in [*plain, *drafted]}) == 2 * 3
    row = find_row(summary, "head1", "2,1,3", temperature=1.0)
    assert (row["num_answers"], row["promise"]) == (12, "text")
    assert summary["seeded_identical"] is True and summary["greedy_identical"] is True


def test_samples_with_a_seed_that_differ_fail_a_run_by_name(prompts: Path, tmp_path: Path) -> None:
    fakes = Fakes(wrong={"head1": {4: VOCABULARY - 1}})
    summary = evaluate(prompts, tmp_path / "out", fakes, temperatures=[0.5], seeds=[8], shapes=["2,1,3"])
    assert summary["greedy_identical"] is None and summary["seeded_identical"] is False
    assert summary["passed"] is False
    lines = identity_lines(summary)
    assert lines[0].startswith("seeded identical: no (6 of 6")
    assert "T 0.5, seed 8" in lines[1]


def test_a_setting_has_its_own_engine_and_shape_and_lossy_ones_fail_nothing(
    prompts: Path, tmp_path: Path
) -> None:
    fakes = Fakes(wrong={"fp2": {4: VOCABULARY - 1}})
    lossy = EngineConfig(kv_dtype="fp8_e4m3", max_batch_size=4)
    settings = [NamedSetting("fp2", None, lossy, ("none",))]
    summary = evaluate(prompts, tmp_path / "out", fakes, settings=settings, shapes=["2,1,3"])
    ours, given = fakes.settings
    assert (ours.engine.kv_dtype, ours.engine.max_batch_size) == ("auto", 1)
    assert (given.engine.kv_dtype, given.engine.max_batch_size) == ("fp8_e4m3", 4)
    row = find_row(summary, "fp2", "none")
    assert (row["promise"], row["num_different"]) == ("nothing", 6)
    assert summary["passed"] is True and summary["num_compared"] == 6
    assert summary["settings"]["settings"]["fp2"]["kv_dtype"] == "fp8_e4m3"
    with pytest.raises(UserError, match="fp2"):
        evaluate(prompts, tmp_path / "twice", Fakes(), settings=[*settings, *settings])
