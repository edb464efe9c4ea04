"""Stores of states that another engine has computed: the same as our own, or refused with a sentence."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_kit.cli.app import main
from eagle_kit.models.loading.loader import load_target
from eagle_kit.train.algorithm.target_features import positions_of

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
        found = dict(zip(numbers, out.aux.split(self.target.config.hidden_size, -1), strict=True))
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
        from accelerate.state import AcceleratorState

        command = ["data", "import-states", str(self.run.config), "--from", str(place)]
        try:
            return main([*command, "--out", str(self.run.folder / "imported"), *arguments])
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def engine(make_run, tmp_path_factory):
    return Engine(make_run(), tmp_path_factory.mktemp("engine"))


def ids_of(run):
    from eagle_kit.models.loading.loader import read_target_config

    return sorted(set(read_target_config(run.folder / "target").default_aux_layer_ids))


def capture(run):
    from accelerate.state import AcceleratorState

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


def test_what_is_missing_or_wrong_is_one_sentence(engine, capsys):
    layers = [*ids_of(engine.run), L]
    place = engine.write(layers, texts=engine.texts[:3])
    assert engine.import_states(place) == 2
    assert "has 3 texts" in capsys.readouterr().err
    assert engine.import_states(place, "--layers", "1", "2") == 2
    assert "the head needs" in capsys.readouterr().err
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
