"""`eagle-kit data capture`, and training from what it leaves: to the bit, anywhere, or refused by name."""

import json
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file

from eagle_kit.cli.app import main
from eagle_kit.config.loading.loader import load_config
from eagle_kit.config.loading.yaml_file import parse_value
from eagle_kit.config.train import TrainConfig
from eagle_kit.data.hidden_states import store as store_module
from eagle_kit.data.hidden_states.store import StateStore
from eagle_kit.datagen.hidden_states.capture import CaptureOptions, capture
from eagle_kit.models.loading.loader import target_fingerprint
from eagle_kit.models.loading.source import target_revision
from eagle_kit.objective.align import supervised_rows, teacher_of
from eagle_kit.objective.batch import make_micro_batch

REPOSITORY = Path(__file__).parents[3]
HERE = torch.device("cpu")
STEPS = ("--max-steps", "4")


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
    assert target_revision(other) is None
    commit = "0a1b" * 10
    assert target_revision(other / "snapshots" / commit) == commit


def test_which_positions_need_a_teacher_does_not_depend_on_the_number_of_steps() -> None:
    """So a store serves every ``ttt_length``."""
    response = torch.tensor([-1, -1, 0, 0, 0, 0, -1, -1, 1, 1, -1, 2, -1, -1, 3, 3, 3])
    needed = [
        sorted({int(t) for k, rows in enumerate(supervised_rows(response, K)) for t in teacher_of(rows, k)})
        for K in (1, 2, 5, 16)
    ]
    assert needed[0] and needed.count(needed[0]) == len(needed)


def test_float32_and_tf32_states_are_kept_apart_and_steps_of_training_time_test_are_not(
    make_run: Callable,
) -> None:
    run = make_run(training={"cache_hidden_states": "disk"})
    assert run("--max-steps", "1") == 0
    assert run("--max-steps", "1", "training.precision=tf32", f"output_dir={run.folder / 'b'}") == 0
    assert len(list((run.folder / "cache" / "states").iterdir())) == 2
    assert run("--max-steps", "1", "training.ttt_length=5", f"output_dir={run.folder / 'c'}") == 0
    assert len(list((run.folder / "cache" / "states").iterdir())) == 2


class Store:
    """``eagle-kit data capture`` of a run's config into ``run.folder / name``."""

    def __init__(self, run: Callable, name: str = "store") -> None:
        self.run, self.path = run, run.folder / name  # type: ignore[attr-defined]

    def capture(self, *arguments: str) -> int:
        try:
            command = ["data", "capture", str(self.run.config), "--out", str(self.path)]  # type: ignore[attr-defined]
            return main([*command, *arguments])
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)

    def manifest(self) -> dict:
        return json.loads((self.path / "manifest.json").read_text())


def test_training_from_a_store_alone_is_training_online_to_the_bit(
    make_run: Callable, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The store is moved, its source, its cache and its first place are gone."""
    run = make_run()
    assert run(*STEPS) == 0
    store = Store(run)
    assert store.capture("--verify", "training.ttt_length=2") == 0
    about = store.manifest()
    assert (
        about["made"]["command"].startswith("eagle-kit data capture ")
        and "torch" in about["made"]["versions"]
    )
    assert sum(shard["tokens"] for shard in about["shards"]) == about["data"]["tokens"]
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "kept"
    shutil.move(store.path, elsewhere)
    shutil.rmtree(run.folder / "cache")
    (run.folder / "chats.jsonl").unlink()
    offline = str(run.folder / "offline")
    assert run(*STEPS, f"output_dir={offline}", f"data.store={elsewhere}", "data.source=null") == 0
    assert run.metrics("offline") == run.metrics()
    about, offline_about = (
        json.loads((Path(place) / "step-4" / "eagle_kit.json").read_text())["data"]
        for place in (run.output, offline)
    )
    assert about == offline_about and about["source"] == str(run.folder / "chats.jsonl")
    assert not (run.folder / "cache" / "states").exists()
    first, second = (
        load_file(Path(place) / "step-4" / "model.safetensors") for place in (run.output, offline)
    )
    assert all(first[name].equal(second[name]) for name in first)
    assert run("--resume", "--max-steps", "6", f"data.store={elsewhere}") == 0, (
        "an online run goes on with it"
    )


@pytest.mark.parametrize("kind", ["fp8", pytest.param("bf16", marks=pytest.mark.nightly)])
def test_a_smaller_store_is_smaller_on_disk_and_teaches_nearly_the_same(
    make_run: Callable, kind: str
) -> None:
    run = make_run()
    sizes = {}
    for form in ("computed", kind):
        store = Store(run, form)
        assert store.capture(f"training.state_format={form}") == 0
        sizes[form] = sum(path.stat().st_size for path in store.path.glob("states-*"))
        where = f"output_dir={run.folder / ('run-' + form)}"
        assert run(*STEPS, where, f"data.store={store.path}") == 0
    assert sizes[kind] <= (0.30 if kind == "fp8" else 0.52) * sizes["computed"]
    rows = {form: run.metrics(f"run-{form}") for form in sizes}
    assert rows[kind] != rows["computed"]
    for exact, near in zip(rows["computed"], rows[kind], strict=True):
        assert near["loss"] == pytest.approx(exact["loss"], rel=0.02)
        assert near["supervised_tokens"] == exact["supervised_tokens"]


def test_a_lossy_cache_teaches_the_same_when_it_is_filled_and_when_it_is_read(make_run: Callable) -> None:
    run = make_run(training={"cache_hidden_states": "disk", "state_format": "fp8"})
    assert run(*STEPS) == 0
    assert run(*STEPS, f"output_dir={run.folder / 'again'}") == 0
    assert run.metrics() == run.metrics("again")


@pytest.mark.parametrize(
    "name", ["states", "my states", "a #2", "2026", "a: b", "it's", '"a"', "ü🙂 #1", "null"]
)
def test_the_printed_training_reads_the_store_whatever_its_name(name: str) -> None:
    command = CaptureOptions(Path(name), arguments=("c.yaml", "data.source=x y.jsonl")).training_command
    program, action, config, *overrides = shlex.split(command)
    assert [program, action, config] == ["eagle-kit", "train", "c.yaml"]
    raw: dict[str, Any] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        raw[key] = parse_value(value)
    assert raw == {"data.source": "x y.jsonl", "data.store": name}


def test_a_run_cannot_go_on_with_states_of_another_format(
    make_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run, lossy = make_run(), Store(make_run(), "lossy")
    assert lossy.capture("training.state_format=fp8") == 0

    # The command that the capture prints is a training from this store.
    printed = capsys.readouterr().out.split("eagle-kit train ")[1]
    config, *overrides = shlex.split(printed)
    assert Path(config).is_file() and overrides == ["training.state_format=fp8", f"data.store={lossy.path}"]
    assert run("--max-steps", "2", overrides[-1]) == 0
    assert run("--resume", "--max-steps", "4") == 2
    assert "learned from states in the format fp8, and these are computed" in capsys.readouterr().err
    assert run("--resume", "--max-steps", "4", f"data.store={lossy.path}") == 0


def test_heads_of_fewer_layers_learn_the_same_from_a_store_of_more(make_run: Callable) -> None:
    run = make_run()
    store, settings = Store(run, "more"), ("--max-steps", "2", "head.aux_layer_ids=[2, 0, 1]")
    assert store.capture("head.aux_layer_ids=[0, 1, 2, 2]") == 0
    assert run(*settings) == 0
    online = load_file(run.output / "step-2" / "model.safetensors")
    shutil.rmtree(run.output)
    assert run(*settings, f"data.store={store.path}") == 0
    kept = load_file(run.output / "step-2" / "model.safetensors")
    assert online.keys() == kept.keys() and all(online[name].equal(kept[name]) for name in online)


def test_a_store_that_does_not_fit_is_refused_with_the_field_and_both_values(
    make_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    store = Store(run)
    assert store.capture() == 0
    other = run.folder / "other-target"
    shutil.copytree(run.folder / "target", other)
    weights = load_file(other / "model.safetensors")
    save_file(
        {name: weight * 1.5 for name, weight in weights.items()},
        other / "model.safetensors",
        {"format": "pt"},
    )
    for override, field, found, wanted in (
        ("training.precision=bfloat16", "precision", "float32", "bfloat16"),
        ("training.state_format=fp8", "format", "computed", "fp8"),
        ("data.max_length=128", "data.max_length", "160", "128"),
        ("data.eval_conversations=3", "data.eval_conversations", "6", "3"),
        ("data.limit=20", "data.limit", "null", "20"),
        ("data.source=other.jsonl", "data.source", str(run.folder / "chats.jsonl"), "other.jsonl"),
        (
            f"target={other}",
            "target.weights",
            target_fingerprint(run.folder / "target"),
            target_fingerprint(other),
        ),
    ):
        assert run("--max-steps", "1", f"data.store={store.path}", override) == 2
        message = capsys.readouterr().err
        assert f" {field} {found[:77]}" in message  # long values are cut: a temporary folder's path
        assert f"it is {wanted}." in message
        assert not run.output.exists()
    assert run("--max-steps", "1", f"data.store={store.path}", "head.aux_layer_ids=[1, 2, 0]") == 2
    assert "has the inputs of layers [2, 2, 1], but not that of 0" in capsys.readouterr().err
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["!!"] = 299
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert run("--max-steps", "1", f"data.store={store.path}", f"target={other}") == 2
    assert " tokenizer " in capsys.readouterr().err
    assert store.capture("training.state_format=fp8") == 2, "neither can it be gone on with"
    assert "format computed, but of this run it is fp8" in capsys.readouterr().err


def test_a_store_is_used_only_without_the_evaluation_sets_that_are_asked_for(
    make_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    task = run.folder / "task.jsonl"
    task.write_text(json.dumps({"prompt": "Count from one to thirteen, and tell me which numbers are prime"}))
    apart, store = f"data.decontaminate=[{task}]", Store(run)
    assert store.capture(apart) == 0
    used = f"data.store={store.path}"
    assert (
        run("--max-steps", "1", used)
        == run("--max-steps", "1", used, apart, f"output_dir={run.folder / 'again'}")
        == 0
    )
    for file in run.output.rglob("eagle_kit.json"):
        assert json.loads(file.read_text())["data"]["decontaminated"] == [str(task)]
    assert (
        run("--max-steps", "1", used, "data.decontaminate=[ours]", f"output_dir={run.folder / 'other'}") == 2
    )
    assert (
        f"decontaminate is ours, but the store {store.path} was captured without" in capsys.readouterr().err
    )
    task.write_text(json.dumps({"prompt": "Another one"}))
    assert run("--max-steps", "1", used, apart, f"output_dir={run.folder / 'other'}") == 2
    assert f"without the prompts of {task}, which were others then." in capsys.readouterr().err


def test_a_format_for_states_that_nobody_keeps_is_refused(
    make_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    assert run("--max-steps", "1", "training.state_format=fp8") == 2
    assert "no states are kept" in capsys.readouterr().err
    assert run("--max-steps", "1", "training.cache_hidden_states=disk", "data.store=x") == 2
    assert "asks for others" in capsys.readouterr().err
    assert run("--max-steps", "1", f"data.store={run.folder}") == 2
    assert "not a store of captured states" in capsys.readouterr().err
    assert run("--max-steps", "1", "data.source=null") == 2
    assert "no conversations are named" in capsys.readouterr().err


def test_parts_of_the_rows_make_one_store_that_is_used_only_when_it_is_whole(
    make_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    whole, parts = Store(run, "whole"), Store(run, "parts")
    assert whole.capture() == 0
    assert parts.capture("--shard", "1/3") == 0
    assert "waits for" in capsys.readouterr().out
    assert run("--max-steps", "1", f"data.store={parts.path}") == 2
    error = capsys.readouterr().err
    assert "lacks" in error and "--shard 1/3" in error
    assert parts.capture("--shard", "0/3") == parts.capture("--shard", "2/3") == 0
    one, three = StateStore(whole.path), StateStore(parts.path)
    assert one.rows() == three.rows() and len(three.shards()) == 3
    for row in one.rows():
        a, b = one.read([row]), three.read([row])
        assert a is not None and b is not None and all(a[name].equal(b[name]) for name in a)


def test_a_store_has_what_the_target_says_of_every_row(make_run: Callable) -> None:
    """Against transformers' own forward of each conversation alone."""
    from transformers import AutoModelForCausalLM

    from eagle_kit.data.packed_data import load_packed_data
    from eagle_kit.models.loading.source import load_tokenizer

    run = make_run()
    store = Store(run)
    assert store.capture() == 0
    config = load_config(TrainConfig, run.config, [f"data.store={store.path}"])
    data = load_packed_data(config.data, load_tokenizer(run.folder / "target"), 250)
    model = AutoModelForCausalLM.from_pretrained(str(run.folder / "target"), dtype=torch.float32)
    ids = store.manifest()["layer_ids"]
    kept = StateStore(store.path)
    for row in (0, len(data) - 1):
        states, forward = kept.load([row], HERE), make_micro_batch(data, [row], 1, HERE)
        assert states is not None
        starts = forward.doc_start.unique().tolist()
        for start, stop in zip(starts, [*starts[1:], len(forward.ids)], strict=True):
            with torch.no_grad():
                out = model(forward.ids[None, start:stop], output_hidden_states=True)
            expected = torch.cat([out.hidden_states[i][0] for i in ids], -1)
            torch.testing.assert_close(states["aux"][start:stop], expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(
                states["hidden"][start:stop], out.hidden_states[-1][0], rtol=1e-4, atol=1e-4
            )
            needed = forward.plan.is_teacher[start:stop]
            assert states["argmax"][start:stop][needed].equal(out.logits[0].argmax(-1)[needed])
            assert states["argmax"][start:stop][~needed].eq(-1).all() and needed.any()


def test_a_dry_run_estimates_the_bytes_that_are_written_and_writes_none(
    make_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    store = Store(run)
    for form in ("computed", "fp8"):
        assert store.capture("--dry-run", f"training.state_format={form}") == 0
        out = capsys.readouterr().out
        assert "time    0m" in out and "0 found" in out and not store.path.exists()
        expected = float(out.partition("disk    ")[2].split()[0])
        kept = Store(run, form)
        assert kept.capture(f"training.state_format={form}") == 0
        written = sum(path.stat().st_size for path in kept.path.rglob("*") if path.is_file())
        assert expected == pytest.approx(written / 1e9, abs=0.0006)
        capsys.readouterr()


def test_a_disk_without_room_is_refused_before_the_first_byte(
    make_run: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    store = Store(run)
    assert store.capture("--dry-run") == 0
    usage = shutil.disk_usage(run.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2 * 10**8))
    assert store.capture() == 2
    assert "200 MB free" in capsys.readouterr().err and not store.path.exists()


def test_a_folder_of_something_else_is_refused(
    make_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    store = Store(run, "target")
    assert store.capture() == 2
    assert "something else" in capsys.readouterr().err


def test_a_store_is_described_and_checked(make_run: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run()
    store = Store(run)
    assert store.capture() == 0
    capsys.readouterr()
    assert main(["data", "store", str(store.path), "--verify"]) == 0
    out = capsys.readouterr().out
    assert "inputs of layers [2, 2, 1]" in out and "Every byte is what was captured" in out
    about = store.manifest()
    data = about["data"]
    size = sum(path.stat().st_size for path in store.path.glob("states-*"))
    assert (
        f"{data['rows']} of {data['rows']} rows, {data['tokens']} tokens, {size / 1e6:.1f} MB in 1 shards"
        in out
    )
    assert f"rows of at most 160 tokens, {data['supervised_tokens']} supervised" in out
    assert f"weights {about['target']['weights']}" in out and "float32, format computed" in out
    shard = next(store.path.glob("states-*"))
    content = bytearray(shard.read_bytes())
    content[-3000] ^= 4
    shard.write_bytes(content)
    assert main(["data", "store", str(store.path), "--verify"]) == 2
    assert shard.name in capsys.readouterr().err
    shard.write_bytes(content[:-1])
    with pytest.warns(UserWarning, match="set aside"):
        assert store.capture("--verify") == 0, "capturing again repairs it"
    assert main(["data", "store", str(store.path), "--verify"]) == 0


def many_rows(run: Callable) -> None:
    from tiny_run import make_conversations

    make_conversations(run.folder / "chats.jsonl", count=50)  # type: ignore[attr-defined]


def capture_in_small_shards(run: Callable, out: Path) -> int:
    """Capture into ``out`` with shards of three rows."""
    config = load_config(TrainConfig, run.config)  # type: ignore[attr-defined]
    try:
        return capture(config, CaptureOptions(out, shard_bytes=500_000, arguments=("c.yaml",)))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def check_that_it_goes_on(run: Callable, out: Path) -> None:
    """Finish the store in ``out``, which has some of its rows, and compare it with one made in one go."""
    # What was done is not redone.
    total = json.loads((out / "manifest.json").read_text())["data"]["rows"]
    assert 0 < len(StateStore(out).rows()) < total
    before = {path: path.stat().st_mtime_ns for path in out.glob("states-*")}
    store = Store(run, out.name)
    assert store.capture("--verify") == 0
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())

    # The rows are those of a capture without a stop.
    straight = Store(run, "straight")
    assert straight.capture() == 0
    one, two = StateStore(store.path), StateStore(straight.path)
    assert one.rows() == two.rows() == set(range(total))
    a, b = one.read(list(range(total))), two.read(list(range(total)))
    assert a is not None and b is not None and all(a[name].equal(b[name]) for name in a)


@pytest.mark.parametrize("is_after", [False, True])
def test_a_capture_that_was_killed_goes_on_and_gives_the_same(
    make_run: Callable, run_until_killed: Callable, is_after: bool
) -> None:
    run = make_run()
    many_rows(run)
    out = run.folder / "store"
    run_until_killed(partial(capture_in_small_shards, run, out), store_module, "write_shard", 3, is_after)
    check_that_it_goes_on(run, out)


def test_a_capture_that_got_a_signal_finishes_its_row_and_says_how_to_go_on(
    make_run: Callable, signalled: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    many_rows(run)
    out = run.folder / "store"
    with signalled(lambda: len(list(out.glob("states-*"))) >= 2, signal.SIGINT):
        assert capture_in_small_shards(run, out) == 130
    said = capsys.readouterr().out
    total = json.loads((out / "manifest.json").read_text())["data"]["rows"]
    assert f"{len(StateStore(out).rows())} of {total} rows" in said
    assert "Go on with: eagle-kit data capture c.yaml" in said
    check_that_it_goes_on(run, out)


@pytest.mark.nightly
def test_two_processes_share_the_rows(make_run: Callable) -> None:
    run = make_run()
    alone, both = Store(run), run.folder / "both"
    assert alone.capture() == 0
    launched = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"),
            *("-m", "eagle_kit.cli", "data", "capture", str(run.config), "--out", str(both)),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert launched.returncode == 0, launched.stderr
    one, two = StateStore(alone.path), StateStore(both)
    assert len(two.shards()) == 2 and two.rows() == one.rows()
    assert {row % 2 for row in two.shards()[0].rows} == {0}
    rows = sorted(one.rows())
    a, b = one.read(rows), two.read(rows)
    assert a is not None and b is not None and all(a[name].equal(b[name]) for name in a)


@pytest.mark.nightly
def test_a_sharded_target_is_captured_by_processes_with_unequal_shares(make_run: Callable) -> None:
    """Every row needs all processes, and one of them has a row more to do."""
    run = make_run()
    alone, both = Store(run), run.folder / "both"
    assert alone.capture() == 0
    placed = "training.target_placement=fsdp"
    assert Store(run, "one").capture(placed) == 2, "one process has nobody to share with"
    script = (
        "import sys\n"
        "from eagle_kit.train.parallel import placement\n"
        "load = placement.load_sharded\n"
        "placement.load_sharded = lambda *words: (print('SHARDED'), load(*words))[1]\n"
        "from eagle_kit.cli.app import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    (run.folder / "watched.py").write_text(script)
    launched = subprocess.run(
        [
            *(sys.executable, "-m", "accelerate.commands.launch", "--config_file"),
            *("train/accelerate/multi-gpu.yaml", "--num_processes", "3", "--main_process_port", "0"),
            *(str(run.folder / "watched.py"), "data", "capture", str(run.config), "--out", str(both)),
            placed,
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert launched.returncode == 0, launched.stderr
    assert launched.stdout.count("SHARDED") == 3
    one, two = StateStore(alone.path), StateStore(both)
    rows = sorted(one.rows())
    assert two.rows() == one.rows() and len(rows) % 3 == 1
    a, b = one.read(rows), two.read(rows)
    assert a is not None and b is not None and a["argmax"].equal(b["argmax"])
    torch.testing.assert_close(b["aux"], a["aux"], rtol=1e-4, atol=1e-5)


def test_a_target_is_spread_before_it_is_captured(
    make_run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle_kit.train.parallel import placement

    asked: list[list[torch.device]] = []
    spread = placement.load_spread

    def watched(folder: Path, dtype: torch.dtype, devices: list[torch.device], choose: Any) -> Any:
        asked.append(devices)
        return spread(folder, dtype, devices, choose)

    monkeypatch.setattr(placement, "load_spread", watched)
    assert Store(make_run(validation={"every": 5})).capture("training.target_placement=auto") == 0
    assert asked == [[HERE]]


def test_waiting_for_the_disk_is_a_number(make_run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle_kit.train.run import loop

    waits = []
    close = loop.Stepper.close
    monkeypatch.setattr(
        loop.Stepper,
        "close",
        lambda self: (waits.append((self.features.wait_s, self.features.capture_s)), close(self))[1],
    )
    run = make_run()
    store = Store(run)
    assert store.capture() == 0
    assert run(*STEPS, f"data.store={store.path}") == 0
    assert run(*STEPS, f"output_dir={run.folder / 'online'}") == 0
    (kept_wait, kept_capture), (online_wait, online_capture) = waits
    assert kept_wait > 0 and kept_capture == 0 and online_wait == 0 and online_capture > 0


def test_a_shard_lost_while_training_ends_the_run_with_its_name(
    make_run: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from eagle_kit.train.run import loop

    run = make_run()
    store = Store(run)
    assert store.capture() == 0
    record = loop.Trainer._record

    def lose(self, result, line):
        for path in store.path.glob("states-*"):
            path.unlink()
        record(self, result, line)

    monkeypatch.setattr(loop.Trainer, "_record", lose)
    assert run("--max-steps", "20", f"data.store={store.path}") == 2
    assert "cannot be read any more" in capsys.readouterr().err


def test_a_part_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "capture", "run.yaml", "--out", "x", "--shard", "2/2"]) == 2
    assert "from 0/n to (n-1)/n" in capsys.readouterr().err
