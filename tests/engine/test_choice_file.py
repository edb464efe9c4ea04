"""Measured choices in a file: a restart makes the same ones, and what others may have written is not read."""

import json
import os
import stat

import pytest
import torch

from eagle_kit.engine.measured import choice_file
from eagle_kit.engine.measured.choice import BackendChoice
from eagle_kit.engine.measured.choice_file import ChoiceFile, hash_of_sources
from eagle_kit.engine.measured.linear_backends import LinearBackends
from eagle_kit.ops.linear.backends import Size

CPU = torch.device("cpu")
SIZE = Size(4, 64, 32, torch.bfloat16)
SIZES = [SIZE, SIZE._replace(rows=8), SIZE._replace(dtype=torch.float16)]
KEY = {"device": "a GPU", "torch": "2.13.0"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Folder of the files, which nobody has made yet."""
    place = tmp_path / "cache" / "choices"
    monkeypatch.setattr(choice_file, "folder", lambda: place)
    return place


class FakeTimer:
    """Timer by which Triton takes ``ratio`` of torch's time."""

    def __init__(self, ratio):
        self.ratio = ratio
        self.num_calls = 0

    def __call__(self, backend, size, device):
        self.num_calls += 1
        return 1e-5 * (self.ratio if backend == "triton" else 1.0)


def engine(ratio, key=KEY, sizes=SIZES):
    """Backends of an engine that has met these sizes in its warm-up, and the timer."""
    timer = FakeTimer(ratio)
    backends = LinearBackends(CPU, timer, file=ChoiceFile("linear", key))
    with backends.measuring():
        for size in sizes:
            backends.backend(size)
    return backends, timer


def chosen(backends):
    return [choice.backend for choice in backends.table.values()]


def test_a_restart_with_other_times_makes_the_same_choices(folder):
    first, timer = engine(0.5)
    assert timer.num_calls == 6 and chosen(first) == ["triton"] * 3
    assert first.origin() == [f"0 of 3 sizes read from {first.file.path}, where all are kept"]
    again, timer = engine(2.0)
    assert timer.num_calls == 0 and again.table == first.table
    assert again.origin() == [f"3 of 3 sizes read from {again.file.path}, where all are kept"]
    assert [path.name for path in folder.iterdir()] == [first.file.path.name]


def test_a_known_size_is_torchs_until_the_call_that_would_measure_it():
    """As it was in the engine that has measured it."""
    engine(0.5)
    backends = LinearBackends(CPU, FakeTimer(2.0), file=ChoiceFile("linear", KEY))
    assert backends.backend(SIZE) == "torch"
    with backends.measuring():
        assert backends.backend(SIZE) == "triton"
    assert backends.backend(SIZE) == "triton"


def test_new_sizes_are_measured_and_added():
    engine(0.5, sizes=SIZES[:1])
    more, timer = engine(2.0)
    assert timer.num_calls == 4 and chosen(more) == ["triton", "torch", "torch"]
    again, timer = engine(0.5)
    assert timer.num_calls == 0 and again.table == more.table


@pytest.mark.parametrize("field", ["device", "torch"])
def test_another_device_or_version_has_another_file(field):
    first, _ = engine(0.5)
    other, timer = engine(2.0, {**KEY, field: "another"})
    assert other.file.path != first.file.path and timer.num_calls == 6


def test_of_two_engines_that_measure_at_once_the_first_decides():
    """Both have read the file before either of them writes."""
    backends = [LinearBackends(CPU, FakeTimer(r), file=ChoiceFile("linear", KEY)) for r in (0.5, 2.0)]
    for each in backends:
        with each.measuring():
            assert each.backend(SIZE) == "triton"
    assert backends[0].table == backends[1].table


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        "\0\0",
        '{"format": 1}',
        '{"format": 2, "key": {}, "choices": {}}',
        '{"format": 1, "key": {}, "choices": {}}',
        "KEYED {}, 7",
        'KEYED {"a": 5}',
        'KEYED {"a": {"backend": 3, "seconds": {}}}',
        'KEYED {"a": {"backend": "torch", "seconds": {"torch": -1}}}',
        'KEYED {"a": {"backend": "torch", "seconds": {"torch": NaN}}}',
        'KEYED {"a": {"backend": "torch", "seconds": {"torch": "x"}}}',
        'KEYED {"a": {"backend": "torch", "seconds": 4}}',
        'KEYED {"a": {"backend": "torch", "seconds": {"torch": 1' + "0" * 400 + "}}}",
    ],
)
def test_a_corrupt_file_is_measured_again_with_a_note(text, caplog):
    path = engine(0.5)[0].file.path
    if text.startswith("KEYED"):
        text = json.dumps({"format": 1, "key": KEY})[:-1] + f', "choices": {text[6:]}}}'
    path.write_text(text)
    again, timer = engine(2.0)
    assert timer.num_calls == 6 and chosen(again) == ["torch"] * 3
    assert caplog.text.count("measured again") == 1 and str(path) in caplog.text
    assert engine(0.5)[1].num_calls == 0, "the file has been replaced"


def test_a_backend_that_is_not_there_any_more_is_measured_again():
    file = ChoiceFile("linear", KEY)
    name = "Linear 4 x 32 -> 64 bfloat16"
    file.add(name, BackendChoice("cutlass", {"cutlass": 1e-6}), ("cutlass",))
    backends, timer = engine(0.5, sizes=[SIZE])
    assert timer.num_calls == 2 and chosen(backends) == ["triton"]
    assert engine(2.0, sizes=[SIZE])[1].num_calls == 0


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_file_that_others_can_write_is_not_read(mode, caplog):
    path = engine(0.5)[0].file.path
    path.chmod(mode)
    again, timer = engine(2.0)
    assert timer.num_calls == 6 and chosen(again) == ["torch"] * 3
    assert "other users can write to it" in caplog.text
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert engine(0.5)[1].num_calls == 0, "what was written since is ours"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_another_user_wrote_is_not_read(folder, kind, caplog):
    path = engine(0.5)[0].file.path
    os.chown(path if kind == "file" else folder, 65534, 65534)
    again, timer = engine(2.0)
    assert timer.num_calls == 6 and chosen(again) == ["torch"] * 3
    assert "belongs to another user" in caplog.text
    assert again.file.is_used == (kind == "file")


def test_a_folder_that_others_can_write_is_not_used(folder, caplog):
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    for _ in range(2):
        backends, timer = engine(0.5)
        assert timer.num_calls == 6 and chosen(backends) == ["triton"] * 3
        assert backends.origin() == ["3 sizes measured, and not kept"]
    assert not list(folder.iterdir())
    assert caplog.text.count("other users can write to it") == 2, "once for each engine"


def test_new_files_and_folders_are_the_users_alone(folder):
    before = os.umask(0o002)
    try:
        path = engine(0.5)[0].file.path
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert engine(2.0)[1].num_calls == 0


def test_what_cannot_be_written_is_measured_at_each_start(folder, caplog):
    folder.parent.mkdir(parents=True)
    folder.write_text("a file")
    backends, timer = engine(0.5)
    assert timer.num_calls == 6 and chosen(backends) == ["triton"] * 3
    assert caplog.text.count("cannot be kept") == 1 and "EAGLE_KIT_CACHE" in caplog.text


def test_a_folder_that_cannot_be_entered_costs_a_measurement_and_a_warning(folder, monkeypatch, caplog):
    engine(0.5)
    usual = os.stat

    def refused(path, *args, **kwargs):
        if str(path).startswith(str(folder)):
            raise PermissionError(13, "Permission denied", str(path))
        return usual(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refused)
        again, timer = engine(2.0)
    assert timer.num_calls == 6 and not again.file.is_used
    assert caplog.text.count("cannot be kept") == 1


def test_a_choice_for_want_of_memory_is_not_kept():
    class Full(FakeTimer):
        def __call__(self, backend, size, device):
            if backend == "triton":
                raise torch.OutOfMemoryError
            return super().__call__(backend, size, device)

    backends = LinearBackends(CPU, Full(1.0), file=ChoiceFile("linear", KEY))
    with backends.measuring():
        assert backends.backend(SIZE) == "torch"
    assert chosen(engine(0.5, sizes=[SIZE])[0]) == ["triton"]


def test_a_backend_that_fails_otherwise_stays_out():
    class Broken(FakeTimer):
        def __call__(self, backend, size, device):
            if backend == "triton":
                raise RuntimeError("no kernel image")
            return super().__call__(backend, size, device)

    backends = LinearBackends(CPU, Broken(1.0), file=ChoiceFile("linear", KEY))
    with backends.measuring():
        assert backends.backend(SIZE) == "torch"
    assert chosen(engine(0.5, sizes=[SIZE])[0]) == ["torch"]


def test_the_hash_of_sources_changes_with_each_of_them(tmp_path):
    (tmp_path / "kernel").mkdir()
    inner = tmp_path / "kernel" / "a.py"
    outer = tmp_path / "b.py"
    inner.write_text("1")
    outer.write_text("2")
    found = {hash_of_sources([tmp_path / "kernel", outer])}
    inner.write_text("3")
    found.add(hash_of_sources([tmp_path / "kernel", outer]))
    outer.write_text("4")
    found.add(hash_of_sources([tmp_path / "kernel", outer]))
    assert len(found) == 3
