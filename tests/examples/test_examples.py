"""The programs of ``examples`` run, with a tiny target in place of theirs."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny import randomise
from tiny_run import make_target

from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.drafts.files.draft import save_draft
from eagle_kit.models.loading.loader import read_target_config

FOLDER = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(FOLDER.glob("*.py"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_target(tmp_path_factory.mktemp("examples") / "target"))


@pytest.fixture(scope="module")
def draft(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    config = read_target_config(Path(target))
    head = randomise(Eagle3Head(Eagle3Config.for_target(config, config.vocab_size)), 1, 0.2)
    head.t2d.fill_(True)
    folder = tmp_path_factory.mktemp("examples") / "draft"
    save_draft(head, folder, metadata={})
    return str(folder)


def load(path: Path) -> ModuleType:
    """Import a program, whose name begins with a number."""
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, capsys: pytest.CaptureFixture[str], **given: str) -> list[str]:
    """Lines that a program prints."""
    (path,) = FOLDER.glob(f"*_{name}.py")
    load(path).main(**given)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_says_what_it_shows(path: Path) -> None:
    program = load(path)
    assert program.__doc__
    assert getattr(program, "TARGET", "smollm2-135m-instruct") == "smollm2-135m-instruct"


def test_the_shipped_head_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = FOLDER.glob("*_draft_head.py")
    monkeypatch.chdir(tmp_path)
    assert (Path(load(path).DRAFT) / "config.json").is_file()


def test_texts_are_completed(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run("complete_a_text", capsys, target=target)
    assert len(lines) == 3
    assert all(line.rpartition(" ")[2] in ("stop", "length") for line in lines)


def test_a_chat_goes_on_and_finds_its_beginning_in_the_cache(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "\n".join(run("chat", capsys, target=target))
    counts = [int(count) for count in re.findall(r"(\d+) tokens were cached", text)]
    assert len(counts) == 2 and min(counts) > 0


def test_responses_are_streamed(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(run("stream", capsys, target=target))
    assert re.search(r"^0 (stop|length) ", text, re.MULTILINE)
    assert re.search(r"^1 (stop|length) ", text, re.MULTILINE)


def test_responses_match_their_constraints(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llguidance")
    *before, choice, number, sentence = run("structured_output", capsys, target=target)
    assert choice in ("red", "green", "blue") and re.fullmatch("[0-9]{2}", number)
    assert sentence == "yes" or sentence.startswith("no, ")
    assert len(before) <= 1


def test_several_responses_have_log_probabilities(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run("several_responses", capsys, target=target)
    numbers = [line.split(" ", 2)[:2] for line in lines[:3]]
    assert [number for number, _ in numbers] == ["0", "1", "2"]
    assert all(float(logprob) < 0 for _, logprob in numbers) and len(lines) > 3


def test_a_draft_is_measured(target: str, draft: str, capsys: pytest.CaptureFixture[str]) -> None:
    chain, positions, tree = run("draft_head", capsys, target=target, draft=draft)
    found = re.fullmatch(r"accept length ([\d.]+) in (\d+) verifies", chain)
    assert found is not None and 1.0 <= float(found[1]) <= 9.0 and int(found[2]) > 0
    assert positions.startswith("by position [") and float(tree.removeprefix("tree ")) >= 1.0


def test_ngram_drafts_what_repeats(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    last = run("ngram", capsys, target=target)[-1]
    assert re.fullmatch(r"\d+ verifies, accept length [\d.]+", last)


def test_a_loaded_model_says_what_it_says_by_itself(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(run("own_model", capsys, target=target)) == 1


def test_hidden_states_have_their_shapes(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run("hidden_states", capsys, target=target)
    assert "  input of layer 2 (16, 64)" in lines[2] and lines[3] == "  behind the final norm (16, 64)"


def test_a_client_is_answered(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    pytest.importorskip("fastapi")
    lines = run("openai_client", capsys, target=target)
    assert any(line.strip() for line in lines)


def test_texts_are_scored(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run("score_texts", capsys, target=target)
    assert len(lines) == 3 and all(float(line.rpartition(" ")[2]) < 0 for line in lines)


def test_mla_attention_of_a_tree_is_a_softmax_over_prefix_and_ancestors() -> None:
    (path,) = FOLDER.glob("*_mla_paged_attention.py")
    out = load(path).main().double()

    # The program's own inputs, drawn again.
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(6, 4, 40, generator=generator).double()
    queries = torch.randn(8, 4, 40, generator=generator).double()
    for request, (pages, prefix) in enumerate([([2, 0, 5], 5), ([4, 1], 3)]):
        keys = cache[pages].flatten(0, 1)[: prefix + 4]
        for node, seen in enumerate([[0], [0, 1], [0, 2], [0, 1, 3]]):
            visible = keys[[*range(prefix), *(prefix + each for each in seen)]]
            query = queries[4 * request + node]
            weights = torch.softmax(query @ visible.T / 40**0.5, dim=-1)
            expected = weights @ visible[:, :32]
            torch.testing.assert_close(out[4 * request + node], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.real
@pytest.mark.parametrize("name", ["complete_a_text", "own_model"])
def test_a_program_runs_as_it_stands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Paris" in run(name, capsys)[0], "which the target says, not the prompt"


@pytest.mark.real
def test_the_true_answer_scores_best(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run("score_texts", capsys)
    scores = [float(line.rpartition(" ")[2]) for line in lines]
    assert "Paris" in lines[0] and scores[0] == max(scores) and scores.count(scores[0]) == 1


def test_the_page_on_python_runs_block_by_block(
    target: str, draft: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llguidance")
    path = FOLDER.parent / "docs" / "how-to" / "use-from-python.md"
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks
    names = {"smollm2-135m-instruct": target, "checkpoints/smollm2-135m-eagle3": draft}
    scope: dict[str, Any] = {}
    for block in blocks:
        for name, place in names.items():
            block = block.replace(json.dumps(name), json.dumps(place))
        exec(compile(block, str(path), "exec"), scope)
    assert scope["states"].layers[1].shape[0] == len(scope["states"].token_ids)
    capsys.readouterr()
