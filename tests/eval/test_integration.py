"""The evaluator with the real engine: a tiny random target and head, from the disk."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import tiny_head
from tiny_run import make_target

from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.eval import EvalConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.drafts.files.draft import save_draft
from eagle_kit.engine.llm import LLM
from eagle_kit.eval.identity import compare_outputs
from eagle_kit.eval.runner import run_eval
from eagle_kit.eval.summary import find_row
from eagle_kit.models.loading.loader import load_target

TASK = [
    {"id": "a", "category": "x", "turns": ["The cat sees the dog.", "And then?"]},
    {"id": "b", "category": "y", "turns": ["A river."]},
    {"id": "c", "category": "y", "turns": ["Stone, cloud and house: which one is heavy?"]},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Target, draft and task on the disk."""
    root = tmp_path_factory.mktemp("eval")
    target = make_target(root / "target")
    save_draft(tiny_head(load_target(target), draft_vocab_size=90), root / "head", metadata={})
    (root / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in TASK))
    return target, root / "head", root / "chat.jsonl"


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_a_draft_from_the_disk_is_measured_and_its_answers_are_plain(
    folders: tuple[Path, Path, Path], tmp_path: Path, batch_size: int
) -> None:
    target, head, task = folders
    summary = run_eval(
        target,
        {"head": head},
        EvalConfig(
            tasks=(str(task),),
            shapes=("3,1,4", "3,2,6"),
            max_tokens=19,
            engine=EngineConfig(max_batch_size=batch_size),
        ),
        out=tmp_path,
        quiet=True,
    )
    assert summary["greedy_identical"] is True and summary["num_compared"] == 2 * 4
    for shape in ("3,1,4", "3,2,6"):
        row = find_row(summary, "head", shape)
        assert 1.0 <= row["accept_length"] <= 4.0 and row["speedup"] > 0
        assert sum(n * count for n, count in enumerate(row["histogram"])) == row["num_tokens"] - 4
    assert find_row(summary, None, "none")["accept_length"] is None, "plain cycles are no verifies"
    records = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    llm = LLM(target)
    plain = {r["id"]: r["token_ids"] for r in records if r["draft"] is None and r["turn"] == 0}
    for line in TASK:
        [output] = llm.chat(line["turns"][0], SamplingParams(max_tokens=19))
        assert plain[line["id"]] == output.token_ids


def test_a_changed_token_is_found_with_the_gap_of_its_logits(folders: tuple[Path, Path, Path]) -> None:
    llm = LLM(folders[0])
    [plain] = llm.generate(["The dog finds the river."], SamplingParams(max_tokens=9, ignore_eos=True))
    changed = replace(plain, token_ids=[*plain.token_ids[:5], (plain.token_ids[5] + 1) % 200, 7, 7, 7])
    found = compare_outputs(llm, plain, changed)
    assert found is not None and found.position == 5
    assert (found.plain_token, found.token) == (plain.token_ids[5], changed.token_ids[5])
    logits = llm.logits(plain.prompt_ids + plain.token_ids)[len(plain.prompt_ids) + 4]
    assert found.logit_gap is not None and found.logit_gap > 0
    assert found.logit_gap == pytest.approx(float(logits[found.plain_token] - logits[found.token]), abs=1e-4)
    assert compare_outputs(llm, plain, replace(plain)) is None
    short = replace(plain, token_ids=plain.token_ids[:5])
    for one, other in ((plain, short), (short, plain)):  # one of them ends before the other
        found = compare_outputs(llm, one, other)
        assert found is not None and (found.position, found.logit_gap) == (5, None)
        assert (found.plain_token is None, found.token is None) == (one is short, other is short)
        assert (found.plain_text == "", found.text == "") == (one is short, other is short)


def test_a_draft_of_another_target_is_refused_before_anything_is_written(
    folders: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    target, _, task = folders
    other = load_target(target)
    head = tiny_head(other, draft_vocab_size=90, target_hidden_size=80)
    save_draft(head, tmp_path / "other", metadata={})
    with pytest.raises(UserError, match="80"):
        run_eval(
            target,
            {"other": tmp_path / "other"},
            EvalConfig(tasks=(str(task),), shapes=("3,1,4",), plots=False),
            out=tmp_path / "out",
            quiet=True,
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.real
def test_prompts_of_both_shipped_tasks_fit_the_real_target() -> None:
    from eagle_kit.data.chat.renderer import ChatRenderer
    from eagle_kit.data.tasks.sets import load_task
    from eagle_kit.models.loading.source import load_tokenizer, resolve_target

    tokenizer = load_tokenizer(resolve_target("smollm2-135m-instruct"))
    for name in ("human_eval", "ours"):
        lengths = [
            len(ChatRenderer(tokenizer).prompt_token_ids(p.messages([]))) for p in load_task(name).prompts
        ]
        assert min(lengths) > 20 and max(lengths) < 1000
