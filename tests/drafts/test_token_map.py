"""Hot-token maps: four kinds of files, and what is refused."""

import json
import os
import time

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from eagle_kit.core.errors import UserError
from eagle_kit.drafts.files.token_map import load_token_map

IDS = [1270, 3, 0, 617]


def write(path, ids=IDS):
    match path.suffix.lower():
        case ".json":
            path.write_text(json.dumps(ids))
        case ".safetensors":
            save_file({"ids": torch.tensor(ids)}, path)
        case _:
            torch.save(ids, path)
    return path


@pytest.mark.parametrize("name", ["freq_4.pt", "map.json", "MAP.JSON", "map.safetensors", "map"])
def test_ids_keep_the_order_of_the_file(tmp_path, name):
    ids = load_token_map(write(tmp_path / name), 1271)
    assert ids.dtype == torch.int64 and ids.tolist() == IDS


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_a_torch_file_may_hold_a_tensor(tmp_path, kind):
    torch.save(torch.tensor(IDS, dtype=kind), tmp_path / "map.pt")
    assert load_token_map(tmp_path / "map.pt", 1271).tolist() == IDS


@pytest.mark.parametrize("suffix", ["pt", "json", "safetensors"])
def test_ids_that_the_target_does_not_have_are_refused(tmp_path, suffix):
    with pytest.raises(UserError, match="has the id 1270, and the target's are 0 to 1269"):
        load_token_map(write(tmp_path / f"map.{suffix}"), 1270)
    with pytest.raises(UserError, match="has the id -1,"):
        load_token_map(write(tmp_path / f"map.{suffix}", [4, -1]), 1271)


@pytest.mark.parametrize("suffix", ["pt", "json", "safetensors"])
def test_an_id_that_is_there_twice_is_refused(tmp_path, suffix):
    with pytest.raises(UserError, match="has the id 3 twice"):
        load_token_map(write(tmp_path / f"map.{suffix}", [5, 3, 7, 3, 5]), 1271)


def test_a_late_duplicate_in_a_map_of_a_whole_vocabulary_is_found_at_once(tmp_path):
    ids = [*range(199_999), 199_998]
    torch.save(torch.tensor(ids), tmp_path / "map.pt")
    start = time.perf_counter()
    with pytest.raises(UserError, match="199998 twice"):
        load_token_map(tmp_path / "map.pt", 200_000)
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    "value",
    [[], {}, {"ids": [1]}, [1.0], [True], ["1"], [[1, 2]], 7, None, torch.tensor([1.5]), torch.tensor(3),
     torch.tensor([[1, 2]]), torch.tensor([True])],
    ids=str,
)  # fmt: skip
def test_what_is_no_list_of_whole_numbers_is_refused(tmp_path, value):
    torch.save(value, tmp_path / "map.pt")
    with pytest.raises(UserError, match="not a list of token ids"):
        load_token_map(tmp_path / "map.pt", 1271)


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(1, dtype=torch.int64).expand(10**10),
        torch.zeros(1, dtype=torch.int64).expand(10**5, 10**5),
        torch.zeros(5, dtype=torch.int64).to_sparse(),
        torch.zeros(5, dtype=torch.int64, device="meta"),
    ],
    ids=["80 GB", "80 GB of lists", "sparse", "meta"],
)
def test_a_tensor_that_is_larger_than_its_file_or_no_list_is_refused(tmp_path, value, monkeypatch):
    torch.save(value, tmp_path / "map.pt")
    monkeypatch.setattr(torch.Tensor, "tolist", lambda ids: pytest.fail("it became a list"))
    with pytest.raises(UserError, match="not a list of token ids|has 10000000000 ids"):
        load_token_map(tmp_path / "map.pt", 1271)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "map.pt")
    with pytest.raises(UserError, match="not a file"):
        load_token_map(tmp_path / "map.pt", 1271)


def test_a_safetensors_file_must_hold_one_tensor(tmp_path):
    save_file({"a": torch.tensor([1]), "b": torch.tensor([2])}, tmp_path / "map.safetensors")
    with pytest.raises(UserError, match="not a list of token ids"):
        load_token_map(tmp_path / "map.safetensors", 1271)


@pytest.mark.parametrize("name", ["map.pt", "map.json", "map.safetensors"])
def test_broken_and_missing_files_are_named(tmp_path, name):
    with pytest.raises(UserError, match=f"{name} does not exist"):
        load_token_map(tmp_path / name, 1271)
    for data in (b"", b"\xff\xfe{ no map", write(tmp_path / name, list(range(400))).read_bytes()[:-9]):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=f"{name} cannot be read"):
            load_token_map(tmp_path / name, 1271)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match="cannot be read"):
        load_token_map(tmp_path / name, 1271)


class Harmful:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_torch_file_cannot_run_code(tmp_path):
    torch.save(Harmful(tmp_path / "harm"), tmp_path / "map.pt")
    with pytest.raises(UserError, match="cannot be read"):
        load_token_map(tmp_path / "map.pt", 1271)
    assert not (tmp_path / "harm").exists()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache as ``huggingface_hub`` lays it out, with one file of the repository of FR-Spec's authors."""
    commit = "0123456789" * 4
    cache = tmp_path / "hub"
    repository = cache / "models--thunlp--LLaMA3-Instruct-8B-FR-Spec"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    write(snapshot / "freq_32768.pt")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return commit


@pytest.mark.parametrize("revision", ["", "@main", "@" + "0123456789" * 4])
def test_a_hub_path_is_one_file_of_the_hub(hub, revision):
    path = f"thunlp/LLaMA3-Instruct-8B-FR-Spec{revision}/freq_32768.pt"
    assert load_token_map(path, 1271).tolist() == IDS


def test_a_hub_path_that_cannot_be_fetched_is_named(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = "thunlp/LLaMA3-Instruct-8B-FR-Spec/freq_8.pt"
    with pytest.raises(UserError, match=f"{path} does not exist here, and could not be fetched"):
        load_token_map(path, 1271)
    # A file here goes before the hub's; a path of fewer parts is no hub path.
    (tmp_path / path).parent.mkdir(parents=True)
    write(tmp_path / path, [5, 6])
    assert load_token_map(path, 1271).tolist() == [5, 6]
    with pytest.raises(UserError, match="maps/freq_8.pt does not exist"):
        load_token_map("maps/freq_8.pt", 1271)


@pytest.mark.parametrize(
    "arrays", [{"ids": np.arange(3)}, {"d2t": np.arange(3)}, {"d2t": np.ones(3), "tokenizer": "a"}]
)
def test_an_npz_file_of_something_else_is_refused(tmp_path, arrays):
    np.savez(tmp_path / "map.npz", **arrays)
    with pytest.raises(UserError, match="map.npz (cannot be read|is not a list)"):
        load_token_map(tmp_path / "map.npz", 1271)
