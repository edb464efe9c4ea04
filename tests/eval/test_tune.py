"""`tune` as its user runs it: measured, resumed, shipped, and then used."""

import json
import random

import pytest
from tiny import tiny_head
from tiny_run import make_target

from eagle_kit.autotune import files
from eagle_kit.autotune.acceptance import Acceptance, AcceptanceTable
from eagle_kit.cli.app import main
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.data.tasks.sets import load_tasks
from eagle_kit.drafts.files.draft import save_draft
from eagle_kit.engine.llm import LLM
from eagle_kit.eval import tune as measuring
from eagle_kit.eval import tune_check
from eagle_kit.eval.tune_check import SHAPES, tokens_a_cycle
from eagle_kit.models.loading.loader import load_target


def test_responses_that_end_cut_their_last_cycle():
    shape, reach = SpecShape(3, 1, 4), (0.6, 0.4, 0.25)
    rng, table, num_cycles = random.Random(0), AcceptanceTable.of({shape: Acceptance(2.25, reach)}), 0
    for _ in range(20_000):
        left = 30
        while left > 0:
            drawn = rng.random()
            left -= 1 + sum(drawn < share for share in reach)
            num_cycles += 1
    expected = 20_000 * 30 / num_cycles
    assert tokens_a_cycle(table, shape, [30] * 10) == pytest.approx(expected, rel=0.003)
    assert expected < 2.2


@pytest.fixture
def folders(tmp_path, monkeypatch):
    whole_plan = measuring.whole_plan
    monkeypatch.setattr(measuring, "whole_plan", lambda engine: whole_plan(engine)._replace(num_passes=2))
    monkeypatch.setattr(tune_check, "NUM_PASSES", 1)
    monkeypatch.setattr(files, "folder", lambda: tmp_path / "tuning")
    target = make_target(tmp_path / "target")
    save_draft(tiny_head(load_target(target), draft_vocab_size=90), tmp_path / "head", metadata={})
    lines = [
        {"id": str(i), "category": "x", "turns": [f"The cat number {i} sees the dog."]} for i in range(10)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def command(folders, *more):
    words = ["tune", str(folders / "head"), "--target", str(folders / "target")]
    words += ["--tasks", str(folders / "chat.jsonl"), "--max-tokens", "12", "--batch-size", "2"]
    return main([*words, "--max-context", "128", "--graph-mode", "off", *more])


def test_costs_are_timed_in_as_many_passes_as_asked(folders, capsys, monkeypatch):
    plans, time_cycles = [], measuring.time_cycles
    monkeypatch.setattr(
        measuring, "time_cycles", lambda *args, **more: plans.append(args[1]) or time_cycles(*args, **more)
    )
    assert command(folders, "--passes", "1") == 0
    assert {plan.num_passes for plan in plans} == {1}
    assert command(folders, "--passes", "0") == 2 and "--passes is 0" in capsys.readouterr().err


def test_a_draft_is_measured_and_the_measurement_is_used(folders, capsys, monkeypatch):
    assert command(folders, "--ship") == 0
    out = capsys.readouterr().out
    assert "batch 1: " in out and "batch 2: " in out and "in the mean" in out
    assert not list((folders / "tuning").glob("work-*"))
    shipped = json.loads((folders / "head" / "tuning.json").read_text(encoding="utf-8"))
    assert shipped["acceptance"]["about"]["tasks"] == {"chat": 10}
    assert len(shipped["costs"]) == 1 and shipped["costs"][0]["tuned_to"] == 2
    options = {"max_batch_size": 2, "max_context": 128, "graph_mode": "off"}
    for _ in range(2):
        llm = LLM(str(folders / "target"), str(folders / "head"), **options)
        assert "the draft's acceptance" in llm.engine().reasons()[-1]
        for file in (folders / "tuning").glob("*.json"):
            file.unlink()  # then from what was shipped


def test_a_measurement_goes_on_where_it_was_stopped(folders, capsys, monkeypatch):
    time_cycles = measuring.time_cycles
    record_drafts = LLM.record_drafts
    recorded = []
    visits = []

    def count(llm, requests, shape, on_finish):
        recorded.append(len(requests))
        return record_drafts(llm, requests, shape, on_finish)

    def stop_at_second(engine, plan, done, on_visit):
        def keep(visit, timings):
            if visits:
                raise KeyboardInterrupt
            visits.append(visit)
            on_visit(visit, timings)

        return time_cycles(engine, plan, done=done, on_visit=keep)

    monkeypatch.setattr(LLM, "record_drafts", count)
    monkeypatch.setattr(measuring, "time_cycles", stop_at_second)
    assert command(folders) == 130
    assert recorded == [8, 2]
    assert "goes on from there" in capsys.readouterr().err
    todo = []
    monkeypatch.setattr(
        measuring,
        "time_cycles",
        lambda engine, plan, done, on_visit: (
            todo.extend(visit for visit in plan.visits if visit not in done)
            or time_cycles(engine, plan, done=done, on_visit=on_visit)
        ),
    )
    assert command(folders) == 0
    assert recorded == [8, 2]
    assert todo and visits[0] not in todo


def test_drafts_that_cannot_change_are_refused(folders, capsys):
    assert main(["tune", str(folders / "target"), "--tasks", str(folders / "chat.jsonl")]) == 2
    assert "none" in capsys.readouterr().err


@pytest.mark.usefixtures("measured_costs")
def test_what_was_recorded_covers_every_shape(folders):
    llm = LLM(
        str(folders / "target"), str(folders / "head"), max_batch_size=2, max_context=128, graph_mode="off"
    )
    from eagle_kit.engine.calibrate.cycle_timing import Plan, Point

    plan = Plan([Point(1, 16)], [SpecShape(2, 1, 3)], 1, 2)
    options = measuring.TuneOptions(load_tasks([str(folders / "chat.jsonl")]), 12, plan, show_progress=False)
    tuned = measuring.tune(llm, options)
    assert all(each.seconds > 0 for each in tuned.costs.timings)
    table = tuned.acceptance.table
    assert {shape.topk for shape in table.shapes} == {1, 2, 3, 4, 8}
    for shape in table.shapes:
        assert table.shares[shape].sum() == pytest.approx(1)
        assert 1 <= table.length(shape) <= shape.steps + 1
        assert (table.reach[shape][:, 1:] <= table.reach[shape][:, :-1] + 1e-9).all()


def test_predictions_are_held_against_what_was_not_measured(folders, capsys):
    out = folders / "check.json"
    assert command(folders, "--limit", "6", "--check", "--out", str(out)) == 0
    printed = capsys.readouterr().out
    data = json.loads(out.read_text(encoding="utf-8"))
    assert data["prompts"] == 5 and "5 prompts that were not recorded" in printed
    found = data["compared"]
    lengths = [each for each in found if each["unit"] == "tokens a cycle"]
    assert [each["what"] for each in lengths] == [str(shape) for shape in SHAPES]
    llm = LLM(str(folders / "target"), str(folders / "head"), max_context=128, graph_mode="off")
    recorded, others = load_tasks([folders / "chat.jsonl"])[0].limited(5, 0).prompts, []  # half of ten
    for prompt in load_tasks([folders / "chat.jsonl"])[0].prompts:
        if prompt not in recorded:
            others.append(prompt.messages([]))
    for each in lengths:
        outputs = llm.chat(others, SamplingParams(max_tokens=12), shape=SpecShape.parse(each["what"]))
        emitted = sum(output.stats.num_emitted_tokens for output in outputs)
        assert each["measured"] == pytest.approx(emitted / sum(o.stats.num_verifies for o in outputs))
    cycles = [each for each in found if each["unit"] == "ms a cycle"]
    assert cycles and all(each["predicted"] > 0 and each["measured"] > 0 for each in cycles)
    assert {each["what"].split(",")[0] for each in cycles} == {"batch 1"}
