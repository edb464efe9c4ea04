"""Layer ids whose convention is not stated are tested against the target."""

import json
from pathlib import Path

import pytest
from tiny import tiny_head
from tiny_rule import learned_head, learned_target, texts
from tiny_run import make_target

from eagle_kit.cli.app import main
from eagle_kit.drafts.files.draft import DraftFolder, save_draft
from eagle_kit.eval.diagnose.numbering import compare_numberings, layers_by_convention, measure_numbering
from eagle_kit.models.loading.loader import load_target


@pytest.mark.parametrize(("ids", "best"), [((2, 2, 1), "input"), ((1, 1, 0), "output")])
def test_the_numbering_that_a_head_was_trained_with_is_found(ids, best):
    head = learned_head()
    assert head.capture == (2, 2, 1)
    found = compare_numberings(head, learned_target(), texts(8), layers_by_convention(ids, 4))
    assert found.best == best and found.layers[best] == head.capture
    other = "output" if best == "input" else "input"
    assert found.shares[best] > found.shares[other] and f"so they are {best}s" in found.words


def test_a_head_that_learned_nothing_decides_nothing():
    head = tiny_head(learned_target(), 39)
    found = compare_numberings(head, learned_target(), texts(8), layers_by_convention((2, 2, 1), 4))
    assert found.best is None and "does not decide" in found.words


def test_readings_that_the_target_has_not_are_none():
    assert layers_by_convention((1, 2, 4), 4) == {"input": (1, 2, 4)}
    assert layers_by_convention((), 4) == {}


def change(folder: Path, **values) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    config.pop("eagle_kit", None)
    path.write_text(json.dumps(config))


def test_import_and_validate_say_which_numbering_fits(tmp_path, capsys):
    target = make_target(tmp_path / "target")
    head = tmp_path / "head"
    save_draft(tiny_head(load_target(target), aux_layer_ids=(0, 1, 3)), head, metadata={})
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    assert measure_numbering(DraftFolder.open(head), target) is None  # ours says it
    change(head, eagle_config=ids)
    assert main(["validate", str(head), "--target", str(target)]) == 0
    out = capsys.readouterr().out
    assert "layer ids: 0." in out and "with the outputs of the layers" in out
    # The head is random: figures decide nothing, and no numbering is taken.
    assert main(["import", str(head), "--target", str(target), "--out", str(tmp_path / "out")]) == 2
    spoken = capsys.readouterr()
    assert "does not decide it" in spoken.out and "inputs or outputs" in spoken.err
    # Where vLLM reads them first they are inputs.
    change(head, eagle_config=None, **ids)
    assert measure_numbering(DraftFolder.open(head), target) is None
