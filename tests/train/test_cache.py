"""Captured states belong to the weights, the config and the precision that they were captured with."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_kit.core.errors import UserError
from eagle_kit.train.cache import StateStore, target_fingerprint

HERE = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"rope_theta": 10000.0}))
    generator = torch.Generator().manual_seed(0)
    weights = {f"layer.{i}": torch.randn(61, 53, generator=generator) for i in range(4)}
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("name", ["layer.0", "layer.2", "layer.3"])
def test_a_fine_tuned_copy_of_the_same_sizes_is_another_target(folder: Path, name: str) -> None:
    before, size = target_fingerprint(folder), (folder / "model.safetensors").stat().st_size
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, name: weights[name] * 1.001}, folder / "model.safetensors")
    assert (folder / "model.safetensors").stat().st_size == size
    assert target_fingerprint(folder) != before


def test_the_same_files_elsewhere_are_the_same_target_and_another_config_is_not(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("copy")
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    assert target_fingerprint(other) == target_fingerprint(folder)
    (other / "config.json").write_text(json.dumps({"rope_theta": 20000.0}))
    assert target_fingerprint(other) != target_fingerprint(folder)


def test_float32_and_tf32_states_are_kept_apart(make_run: Callable) -> None:
    run = make_run(training={"cache_hidden_states": "disk"})
    assert run("--max-steps", "1") == 0
    assert run("--max-steps", "1", "training.precision=tf32", f"output_dir={run.folder / 'b'}") == 0
    assert len(list((run.folder / "cache" / "states").iterdir())) == 2


def test_a_store_makes_nothing_before_it_is_given_something(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "states", {"target": "t"})
    assert store.load([3], HERE) is None and store.rows() == set() and not (tmp_path / "states").exists()
    tensors = {"hidden": torch.arange(10.0).reshape(5, 2)}
    store.save([3, 8], [2, 3], tensors)
    assert store.rows() == {3, 8}
    kept = store.load([8, 3], HERE)
    assert kept is not None and kept["hidden"].tolist() == [[4, 5], [6, 7], [8, 9], [0, 1], [2, 3]]
    assert json.loads((store.folder / "manifest.json").read_text()) == {"target": "t"}


def test_a_store_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cache_hidden_states"):
        StateStore(tmp_path / "file", {}).save([0], [2], {"hidden": torch.zeros(2, 1)})
