"""A store: nothing before the first shard, whole shards only, every kind of damage noticed and named."""

import json
import os
import socket
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from hostile import with_one_other_value

from eagle_kit.core.errors import UserError
from eagle_kit.data.hidden_states.manifest import DATA_FILES, IDENTITY
from eagle_kit.data.hidden_states.shards import write_shard
from eagle_kit.data.hidden_states.store import StateStore
from eagle_kit.datagen.hidden_states.capture import summary

HERE = torch.device("cpu")
H = 8
LENGTHS = [5, 3, 7, 4, 6, 2]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "prepared"
    folder.mkdir()
    for name in DATA_FILES:
        (folder / name).write_bytes(name.encode() * 3)
    return folder


def manifest(**changes: object) -> dict:
    return {
        "version": 1,
        "target": {"name": "t", "revision": None, "weights": "w0"},
        "tokenizer": "k",
        "template": "c",
        "layer_ids": [1, 2, 3],
        "layer_ids_are": "inputs of layers",
        "last_hidden_state": "after the final norm",
        "precision": "float32",
        "format": "computed",
        "hidden_size": H,
        "data": {
            "fingerprint": "d",
            "source": "chats.jsonl",
            "max_length": 16,
            "supervised_tokens": 9,
            "rows": len(LENGTHS),
            "tokens": sum(LENGTHS),
        },
        **changes,
    }


def row_states(row: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(row)
    return {
        "aux": torch.randn(LENGTHS[row], 3 * H, generator=generator),
        "hidden": torch.randn(LENGTHS[row], H, generator=generator),
        "argmax": torch.randint(-1, 90, (LENGTHS[row],), generator=generator),
    }


def fill(store: StateStore, *rows: int) -> None:
    for row in rows:
        store.add([row], [LENGTHS[row]], row_states(row))


def whole_store(folder: Path, data: Path, **options) -> StateStore:
    store = StateStore(folder, manifest(), data, shard_bytes=1500, **options)
    fill(store, *range(len(LENGTHS)))
    store.flush()
    store.finish()
    return store


def equal(kept: dict[str, torch.Tensor] | None, rows: list[int]) -> bool:
    assert kept is not None
    expected = [row_states(row) for row in rows]
    return all(kept[name].equal(torch.cat([one[name] for one in expected])) for name in expected[0])


def test_a_store_makes_nothing_before_its_first_shard_and_keeps_rows_in_any_order(
    tmp_path: Path, data: Path
) -> None:
    store = StateStore(tmp_path / "states", manifest(), data)
    assert store.load([3], HERE) is None and store.rows() == set()
    both = {name: torch.cat((row_states(3)[name], row_states(1)[name])) for name in row_states(1)}
    store.add([3, 1], [4, 3], both)
    assert not (tmp_path / "states").exists() and store.rows() == {1, 3}
    assert equal(store.load([1, 3], HERE), [1, 3]), "rows that wait can be read"
    store.flush()
    assert equal(store.load([1, 3], HERE), [1, 3]) and store.load([1, 2], HERE) is None
    again = StateStore(tmp_path / "states", manifest(), data)
    assert again.rows() == {1, 3} and equal(again.load([3, 1], HERE), [3, 1])
    assert (tmp_path / "states" / "data" / "ids.npy").read_bytes() == b"ids.npy" * 3


def test_a_row_that_is_there_is_not_taken_in_again(tmp_path: Path, data: Path) -> None:
    """Whether it waits or was written: a run that goes on computes some rows once more."""
    store = StateStore(tmp_path / "states", manifest(), data)
    fill(store, 0)
    other = {name: torch.zeros_like(tensor) for name, tensor in row_states(0).items()}
    store.add([0], [LENGTHS[0]], other)
    assert equal(store.load([0], HERE), [0])
    store.flush()
    store.add([0], [LENGTHS[0]], other)
    store.flush()
    assert equal(store.load([0], HERE), [0]) and len(store.shards()) == 1
    assert store.num_bytes == store.shards()[0].path.stat().st_size
    assert store.missing() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("form", "precision", "exact"),
    [
        ("computed", "float32", True),
        ("bf16", "bfloat16", True),
        ("bf16", "float32", False),
        ("fp8", "bfloat16", False),
    ],
)
def test_a_store_says_whether_states_come_back_to_the_bit(
    tmp_path: Path, data: Path, form: str, precision: str, exact: bool
) -> None:
    assert StateStore(tmp_path, manifest(format=form, precision=precision), data).is_exact is exact


@pytest.mark.parametrize(("name", "value"), [("tokens", 9), ("bytes", 9), ("rows", [0]), ("sha256", "a")])
def test_a_shard_that_is_not_the_one_in_the_table_is_refused(
    tmp_path: Path, data: Path, name: str, value: object
) -> None:
    whole_store(tmp_path / "states", data)
    path = tmp_path / "states" / "manifest.json"
    about = json.loads(path.read_text())
    about["shards"][1][name] = value
    path.write_text(json.dumps(about))
    with pytest.raises(UserError, match=r"states-.* is not the one in the manifest"):
        StateStore(tmp_path / "states")


@pytest.mark.parametrize("form", ["computed", "fp8"])
def test_states_that_are_not_finite_are_refused_when_they_are_read(
    tmp_path: Path, data: Path, form: str
) -> None:
    """None are written, but a file may have been made by anything."""
    store = StateStore(tmp_path / "states", manifest(format=form), data)
    fill(store, 0, 1)
    store._buffer[1]["hidden"].view(torch.uint8)[1, :4] = 0x7F  # NaN in fp8
    if form == "computed":
        store._buffer[1]["hidden"][1, 0] = float("nan")
    store.flush()
    again = StateStore(tmp_path / "states", manifest(format=form), data)
    assert again.read([0]) is not None
    with pytest.raises(UserError, match="states of row 1 that are not finite"):
        again.read([1])


@pytest.mark.parametrize("form", ["computed", "fp8"])
def test_a_head_that_reads_fewer_layers_reads_those_alone(tmp_path: Path, data: Path, form: str) -> None:
    store = StateStore(tmp_path / "states", manifest(format=form), data)
    fill(store, 0, 1)
    store.flush()
    store.finish()
    whole = StateStore(tmp_path / "states").load([0, 1], HERE)
    chosen = StateStore(tmp_path / "states", layer_ids=[3, 1]).load([0, 1], HERE)
    assert whole is not None and chosen is not None
    first, second, third = whole["aux"].split(H, 1)
    assert chosen["aux"].equal(torch.cat((third, first), 1))
    reordered = StateStore(tmp_path / "states", layer_ids=[2, 3, 1]).load([0, 1], HERE)
    assert reordered is not None and reordered["aux"].equal(torch.cat((second, third, first), 1))
    assert all(chosen[name].equal(whole[name]) for name in ("hidden", "argmax"))
    with pytest.raises(UserError, match=r"inputs of layers \[1, 2, 3\], but not that of 4"):
        StateStore(tmp_path / "states", layer_ids=[1, 4])


def test_shards_are_bounded_and_the_manifest_counts_them(tmp_path: Path, data: Path) -> None:
    store = whole_store(tmp_path / "states", data)
    about = json.loads((tmp_path / "states" / "manifest.json").read_text())
    assert sorted(row for shard in about["shards"] for row in shard["rows"]) == list(range(len(LENGTHS)))
    assert len(about["shards"]) >= 3
    for shard in about["shards"]:
        size = sum(LENGTHS[row] for row in shard["rows"])
        assert shard["tokens"] == size and (size * 132 <= 1500 or len(shard["rows"]) == 1)
        assert shard["bytes"] == (tmp_path / "states" / shard["path"]).stat().st_size
    assert about["tensors"] == {"aux": "float32", "hidden": "float32", "argmax": "int64"}
    store.verify()
    StateStore(tmp_path / "states").verify()


@pytest.mark.parametrize("name", [name for name in IDENTITY if name != "version"])
def test_a_store_of_other_states_is_refused_with_the_field_and_both_values(
    tmp_path: Path, data: Path, name: str
) -> None:
    whole_store(tmp_path / "states", data)
    other = manifest()
    section, _, inner = name.rpartition(".")
    (other[section] if section else other)[inner] = "other"
    with pytest.raises(UserError) as caught:
        StateStore(tmp_path / "states", other, data)
    before = manifest()[section][inner] if section else manifest()[inner]
    shown = before if isinstance(before, str) else json.dumps(before)
    assert f" {name} {shown}, " in caught.value.cause and "it is other" in caught.value.cause


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def damage(folder: Path, kind: str) -> str:
    """Damage a store; returns the name of the file."""
    shard = sorted(folder.glob("states-*"))[1]
    if kind == "gone":
        shard.unlink()
    elif kind == "short":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif kind == "empty":
        shard.write_bytes(b"")
    elif kind == "header":
        flip(shard, shard.read_bytes().index(b"data_offsets") + 15)
    elif kind == "swapped":
        shard.write_bytes(sorted(folder.glob("states-*"))[0].read_bytes())
    elif kind == "rows":
        shard = folder / "data" / "ids.npy"
        shard.write_bytes(b"short")
    return shard.name


@pytest.mark.parametrize("kind", ["gone", "short", "empty", "header", "swapped", "rows"])
def test_damage_is_noticed_on_opening(tmp_path: Path, data: Path, kind: str) -> None:
    whole_store(tmp_path / "states", data)
    name = damage(tmp_path / "states", kind)
    with pytest.raises(UserError, match=name):
        StateStore(tmp_path / "states")


def test_a_single_bit_anywhere_is_found_by_reading_everything(tmp_path: Path) -> None:
    about = manifest()
    about["data"] |= {"rows": 1, "files": {}}
    store = StateStore(tmp_path / "states", about)
    store.add([0], [3000], {"hidden": torch.randn(3000, H), "argmax": torch.zeros(3000, dtype=torch.int64)})
    store.flush()
    store.finish()
    shard = next((tmp_path / "states").glob("states-*"))
    flip(shard, shard.stat().st_size - 20)
    opened = StateStore(tmp_path / "states")
    with pytest.raises(UserError, match=shard.name):
        opened.verify()


@pytest.mark.parametrize("path", ["../states/x.safetensors", "/tmp/x", "", 5, None])
def test_a_manifest_with_shards_outside_is_refused(tmp_path: Path, data: Path, path: object) -> None:
    fill(store := StateStore(tmp_path / "states", manifest(), data), 0)
    store.flush()
    store.finish()
    about = json.loads((tmp_path / "states" / "manifest.json").read_text())
    about["shards"][0]["path"] = path
    (tmp_path / "states" / "manifest.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match="not a name of a file|not the manifest of a store"):
        StateStore(tmp_path / "states")


def test_every_field_of_a_manifest_may_hold_anything(tmp_path: Path, data: Path) -> None:
    """What is read of it has another type, or is left out: the manifest is refused by its name, or read."""
    whole_store(tmp_path / "states", data)
    path = tmp_path / "states" / "manifest.json"
    about = json.loads(path.read_text())
    about["shards"][0]["rows"] = [0, 1]
    num_refused = 0
    for key, value, changed in islice(with_one_other_value(about), None, None, 7):
        path.write_text(json.dumps(changed))
        try:
            summary(StateStore(tmp_path / "states"))
        except UserError as error:
            num_refused += "not the manifest of a store" in error.cause
        except Exception as error:
            raise AssertionError(f"{key} = {value!r}") from error
    assert num_refused > 80


def test_a_pipe_in_place_of_a_shard_is_not_waited_for(tmp_path: Path, data: Path) -> None:
    fill(store := StateStore(tmp_path / "states", manifest(), data), 0)
    store.flush()
    store.finish()
    shard = next((tmp_path / "states").glob("*.safetensors"))
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(UserError, match="is not a file"):
        StateStore(tmp_path / "states")


def test_a_store_that_grows_sets_damaged_shards_aside_and_captures_their_rows_again(
    tmp_path: Path, data: Path
) -> None:
    folder = tmp_path / "states"
    store = StateStore(folder, manifest(), data, shard_bytes=1)
    fill(store, 0, 1, 2)
    damage(folder, "short")
    with pytest.warns(UserWarning, match="captured again"):
        again = StateStore(folder, manifest(), data, shard_bytes=1)
    assert len(list(folder.glob("*.damaged"))) == 1
    assert again.rows() == {0, 2} and again.load([1], HERE) is None
    fill(again, 1)
    assert equal(again.load([1], HERE), [1])


def test_two_writers_find_each_other_s_rows(tmp_path: Path, data: Path) -> None:
    stores = [StateStore(tmp_path / "states", manifest(), data, shard_bytes=1) for _ in range(3)]
    fill(stores[0], 0, 2, 4)
    fill(stores[1], 1, 3, 5, 2)  # one of them once more, as two who do not know of each other would
    assert equal(stores[0].load([5, 0], HERE), [5, 0])
    assert equal(stores[2].load([5, 0], HERE), [5, 0]), "who has captured nothing reads too"
    assert all(store.missing() == [] for store in stores)
    for store in stores:
        store.finish()
    assert len(json.loads((tmp_path / "states" / "manifest.json").read_text())["shards"]) == 6
    opened = StateStore(tmp_path / "states")
    opened.verify()
    assert opened.rows() == set(range(6))


def test_leftovers_of_dead_processes_go_and_those_of_living_ones_stay(tmp_path: Path, data: Path) -> None:
    folder = tmp_path / "states"
    whole_store(folder, data)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    dead, alive, elsewhere = (
        folder / f".states-0-{host}.{host}.{pid}.partial"
        for host, pid in (
            (socket.gethostname(), process.pid),
            (socket.gethostname(), os.getpid()),
            ("far", 1),
        )
    )
    for path in (dead, alive, elsewhere):
        path.write_bytes(b"half")
    StateStore(folder)
    assert not dead.exists() and alive.exists() and elsewhere.exists()


def test_a_store_that_cannot_be_written_is_a_user_error(tmp_path: Path, data: Path) -> None:
    (tmp_path / "file").write_text("")
    store = StateStore(tmp_path / "file" / "states", manifest(), data, shard_bytes=1)
    with pytest.raises(UserError, match=r"row 0 could not be written"):
        fill(store, 0)


def test_a_full_disk_is_refused_and_leaves_nothing_half_written(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    store = StateStore(tmp_path / "states", manifest(), data, shard_bytes=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(UserError, match="MB free"):
        fill(store, 0)
    assert not list((tmp_path / "states").glob("*.safetensors")) and not list(
        (tmp_path / "states").glob(".*")
    )


def test_a_folder_without_a_manifest_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a store of captured states"):
        StateStore(tmp_path)
    (tmp_path / "manifest.json").write_text("{]")
    with pytest.raises(UserError, match="is not JSON"):
        StateStore(tmp_path)
    (tmp_path / "manifest.json").write_text('{"version": 1}')
    with pytest.raises(UserError, match="is not the manifest of a store"):
        StateStore(tmp_path)


def test_other_users_read_shards_where_the_umask_lets_them(tmp_path: Path) -> None:
    rows = {0: {"argmax": torch.zeros(3, dtype=torch.int64)}}
    before = os.umask(0o022)
    try:
        shard = write_shard(tmp_path, rows)
    finally:
        os.umask(before)
    assert shard.path.stat().st_mode & 0o777 == 0o644
