"""Stores of states that another engine has computed: the same as our own, or refused with a sentence."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file

from eagle_kit.cli.app import main
from eagle_kit.models.loading.loader import load_target, read_target_config
from eagle_kit.objective.target_features import positions_of

L = 4


class Engine:
    """Another engine: it computes texts one by one and writes files as vLLM or SGLang's clients do."""

    def __init__(self, run, folder):
        self.run, self.folder = run, folder
        texts = folder / "texts.jsonl"
        assert main(["data", "texts", str(run.config), "--out", str(texts)]) == 0
        self.texts = [json.loads(line)["input_ids"] for line in texts.read_text().splitlines()]
        self.target = load_target(run.folder / "target")

    def states(self, ids, layers):
        """States ``[T, n, H]`` of a text; ``final`` after the norm."""
        ids = torch.tensor(ids)
        numbers = tuple(layer for layer in layers if layer != "final")
        out = self.target(ids, positions_of(torch.zeros_like(ids)), self.target.causal(), numbers)
        found = dict(
            zip(numbers, out.aux_hidden_states.split(self.target.config.hidden_size, -1), strict=True)
        )
        return torch.stack([{**found, "final": out.hidden}[layer] for layer in layers], 1)

    def write(self, layers, *, kind="vllm", texts=None, change=lambda states: states):
        place = self.folder / "states"
        place.mkdir()
        for number, ids in enumerate(self.texts if texts is None else texts):
            states = change(self.states(ids, layers).contiguous())
            if kind == "vllm":
                tensors = {"hidden_states": states, "token_ids": torch.tensor(ids)}
                save_file(tensors, place / f"{number}.safetensors")
            else:
                line = {"input_ids": ids, "hidden_states": states.flatten(1).tolist()}
                with (place / "all.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
        return place

    def import_states(self, place, *arguments):
        command = ["data", "import-states", str(self.run.config), "--from", str(place)]
        try:
            return main([*command, "--out", str(self.run.folder / "imported"), *arguments])
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def engine(make_run, tmp_path_factory):
    return Engine(make_run(), tmp_path_factory.mktemp("engine"))


def ids_of(run):
    return sorted(set(read_target_config(run.folder / "target").default_aux_layer_ids))


def capture(run):
    try:
        return main(["data", "capture", str(run.config), "--out", str(run.folder / "store")])
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def shards(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize(
    ("kind", "last", "arguments"),
    [
        ("vllm", L, ()),
        ("sglang", "final", ("--layers", "*", "final")),
        ("vllm", L, ("--convention", "outputs", "--layers", "-", "3")),
    ],
    ids=["vllm", "sglang, normed", "outputs"],
)
def test_imported_states_are_those_captured_here_and_train_the_same_head(engine, kind, last, arguments):
    run, layers = engine.run, ids_of(engine.run)
    place = engine.write([*layers, last], kind=kind)
    names = {"*": [str(layer) for layer in layers], "-": [str(layer - 1) for layer in layers]}
    words = [word for each in arguments for word in names.get(each, [each])]
    assert engine.import_states(place, "--verify", *words) == 0
    assert capture(run) == 0
    mine, theirs = shards(run.folder / "store"), shards(run.folder / "imported")
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-4, atol=1e-4)
    about = json.loads((run.folder / "imported" / "manifest.json").read_text())
    assert about["made"]["engine"] == "unknown" and "import-states" in about["made"]["command"]
    assert (
        run("--max-steps", "4", f"data.store={run.folder / 'store'}", f"output_dir={run.folder / 'a'}") == 0
    )
    assert (
        run("--max-steps", "4", f"data.store={run.folder / 'imported'}", f"output_dir={run.folder / 'b'}")
        == 0
    )
    losses = [[row["loss"] for row in run.metrics(name) if "loss" in row] for name in "ab"]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


def test_another_convention_is_named(engine, capsys):
    layers = ids_of(engine.run)
    shifted = [layer + 1 for layer in layers]
    place = engine.write([*shifted[:-1], shifted[-1], L] if L not in shifted else [*shifted, "final"])
    assert engine.import_states(place) == 2
    error = capsys.readouterr().err
    found = re.search(r"input of layer (\d) are the input of layer (\d)", error)
    assert found is not None and int(found[2]) == int(found[1]) + 1


def test_a_last_state_that_is_another_is_named(engine, capsys):
    """Of the last but one layer, and that of the last one taken for normed."""
    layers = ids_of(engine.run)
    place = engine.write([*layers, L])
    assert engine.import_states(place, "--layers", *map(str, layers), "final") == 2
    assert re.search(r"The last states are \d+% off those of the target here", capsys.readouterr().err)
    unchecked = ("--layers", *map(str, layers), "final", "--no-check")
    assert engine.import_states(place, *unchecked) == 0, "where nobody looks"


def test_states_of_one_engine_are_not_added_to_those_of_another(engine, capsys):
    layers = [*ids_of(engine.run), L]
    place = engine.write(layers)
    named = ("--layers", *map(str, layers))
    assert engine.import_states(place, *named) == 0
    capsys.readouterr()
    words = ["data", "capture", str(engine.run.config), "--out", str(engine.run.folder / "imported")]
    assert main(words) == 2
    assert "were made with engine unknown, and now it is eagle-kit" in capsys.readouterr().err
    assert engine.import_states(place) == 2
    assert f"were made with layers {layers}, and now it is None" in capsys.readouterr().err
    assert engine.import_states(place, *named, "--convention", "outputs") == 2
    assert "were made with convention inputs, and now it is outputs" in capsys.readouterr().err
    assert engine.import_states(place, *named) == 0, "as it was"


FAKE = """#!{python}
import hashlib, json, os, sys
import numpy as np
from safetensors.numpy import save_file
assert os.path.dirname(sys.argv[1]) in os.environ["PYTHONPATH"].split(os.pathsep)
spec = json.load(open(sys.argv[2]))
with open("{log}", "a") as log:
    log.write(json.dumps(spec) + "\\n")
os.makedirs(spec["out"], exist_ok=True)
for line in open(spec["texts"]):
    ids = np.array(json.loads(line)["input_ids"], dtype=np.int64)
    name = hashlib.sha256(ids.tobytes()).hexdigest()[:24]
    if os.path.exists(f"{{spec['out']}}/{{name}}.safetensors"):
        continue
    states = np.full((len(ids), len(spec["layers"]), 64), 1 + ids[0] % 7, dtype=np.float32)
    states *= np.arange(1, 1 + len(spec["layers"]), dtype=np.float32)[:, None]
    save_file({{"hidden_states": states, "token_ids": ids}}, f"{{spec['out']}}/{{name}}.safetensors")
    print("done", name, flush=True)
    if spec["engine_args"].get("dies"):
        print("out of memory", flush=True)
        sys.exit(3)
"""
"""Stands for the Python of vLLM's environment: states of a text are a number of its first token's."""


def test_an_engine_is_driven_and_goes_on_where_it_died(engine, capfd):
    run = engine.run
    fake = run.folder / "python"
    log = run.folder / "log"
    fake.write_text(FAKE.format(python=sys.executable, log=log))
    fake.chmod(0o755)
    layers = sorted({*ids_of(run), L})
    command = ["data", "capture", str(run.config), "--engine", "vllm", "--no-check", "--shard", "1/2"]
    command += ["--out", str(run.folder / "driven"), "training.precision=float32", "--engine-python"]
    # One that is not there, and one that dies behind its first text.
    assert main([*command, str(run.folder / "nowhere")]) == 2
    assert "Name the python of an environment with vLLM" in capfd.readouterr().err
    died = [*command, str(fake), "--engine-args", '{"dies": 1}']
    assert main(died) == 2
    said = capfd.readouterr().err
    assert "vLLM ended with the exit code 3" in said and "out of memory" in said

    # What is there is kept by the next call, and another store is made by other arguments.
    AcceleratorState._reset_state(reset_partial_state=True)
    assert main([*command, str(fake)]) == 0
    specs = [json.loads(line) for line in log.read_text().splitlines()]
    assert [spec["engine_args"] for spec in specs] == [{"dies": 1}, {}]
    assert specs[0]["out"] != specs[1]["out"]
    for spec in specs:
        assert spec["model"] == str(run.folder / "target") and spec["dtype"] == "float32"
        assert spec["layers"] == layers
        texts = [json.loads(line)["input_ids"] for line in Path(spec["texts"]).read_text().splitlines()]
        assert spec["max_length"] == max(map(len, texts)) and 0 < len(texts) < len(engine.texts)
        assert all(text in engine.texts for text in texts)

    # The store says how it was made, and has the states of the head's layers.
    found = json.loads((run.folder / "driven" / "manifest.json").read_text())
    assert found["made"]["engine"] == "vLLM"
    again = "--shard 1/2 --engine vllm --engine-python"
    assert again in found["made"]["command"] and "--no-check" in found["made"]["command"]
    aux = next(tensor for name, tensor in shards(run.folder / "driven").items() if "aux" in name)
    ratio = aux.float().unflatten(-1, (-1, 64)).mean(-1)
    head_layers = read_target_config(run.folder / "target").default_aux_layer_ids
    places = [1 + layers.index(layer) for layer in head_layers]
    torch.testing.assert_close(ratio / ratio[:, :1], torch.tensor(places).expand_as(ratio) / places[0])


def test_what_is_missing_or_wrong_is_one_sentence(engine, capsys):
    layers = [*ids_of(engine.run), L]
    place = engine.write(layers, texts=engine.texts[:3])
    assert engine.import_states(place) == 2
    assert "has 3 texts" in capsys.readouterr().err
    assert engine.import_states(place, "--layers", "1", "2") == 2
    assert "the head needs" in capsys.readouterr().err
    assert engine.import_states(place, "--layers", "1", "1", "4") == 2
    assert "named twice" in capsys.readouterr().err
    assert engine.import_states(engine.folder / "nothing") == 2
    assert "no folder" in capsys.readouterr().err


def test_states_that_are_not_finite_or_of_another_size(engine, capsys):
    def spoil(states):
        states[0, 0, 0] = float("nan")
        return states

    layers = [*ids_of(engine.run), L]
    place = engine.write(layers, change=spoil)
    assert engine.import_states(place) == 2
    assert "not finite" in capsys.readouterr().err
    for path in place.iterdir():
        path.unlink()
    place.rmdir()
    place = engine.write(layers[:-1])
    assert engine.import_states(place) == 2
    assert "are expected" in capsys.readouterr().err


def test_texts_without_usable_states_are_left_out_up_to_a_limit(engine, capsys):
    layers = [*ids_of(engine.run), L]
    number = iter(range(100))

    def spoil(states):
        if next(number) == 0:
            states[0, 0, 0] = float("nan")
        return states

    place = engine.write(layers, texts=engine.texts[1:], change=spoil)
    (place / "broken.safetensors").write_bytes(b"no states")
    assert engine.import_states(place, "--max-missing", "1") == 2
    assert "states of 2 texts cannot be used, and --max-missing is 1" in capsys.readouterr().err
    assert engine.import_states(place, "--max-missing", "2") == 0
    assert "2 texts are left out" in capsys.readouterr().out

    folder = engine.run.folder / "imported"
    data = engine.run.folder / "imported" / "data"
    rows = json.loads((data / "rows.json").read_text())
    summary = json.loads((data / "summary.json").read_text())
    assert sum(map(len, rows)) == len(engine.texts) - 2 == summary["parts"][0]["num_documents"]
    assert "their states are missing or unusable: 2 texts" in summary["notes"]
    assert shards(folder)


def test_states_that_prefix_caching_shortened_have_a_remedy(engine, capsys):
    place = engine.write([*ids_of(engine.run), L], change=lambda states: states[4:].contiguous())
    assert engine.import_states(place) == 2
    assert "prefix caching off" in capsys.readouterr().err
