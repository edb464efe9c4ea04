"""Drafts by name, from a hub on this machine: every command, layouts, refusals, and the way back."""

import json
import multiprocessing
import os
import pickle
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from local_hub import TOKEN, environment
from safetensors.torch import load_file
from sweep import sweep
from tiny import tiny_dflash, tiny_dspark, tiny_head, tiny_target
from tiny_run import make_config, make_target

from eagle_kit.cli.app import main
from eagle_kit.core.errors import UserError
from eagle_kit.drafts.eagle3.kind import EAGLE3
from eagle_kit.drafts.files.draft import DraftFolder, load_draft, save_draft, write_draft
from eagle_kit.drafts.files.draft_files import open_draft
from eagle_kit.drafts.files.export import import_draft
from eagle_kit.drafts.files.publish import Repository
from eagle_kit.engine.llm import LLM
from eagle_kit.models.loading.loader import load_target, read_target_config
from eagle_kit.models.loading.source import resolve_target

NAME = "org/head"
SPECFORGE = {"eagle_aux_hidden_state_layer_ids": [1, 5, 8], "use_aux_hidden_state": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    folder = make_target(tmp_path_factory.mktemp("targets") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return folder


@pytest.fixture(scope="module")
def eagles(target, tmp_path_factory) -> Path:
    """A head for ``target`` as EAGLE's repository publishes them: a pickle, and no layer ids."""
    folder = tmp_path_factory.mktemp("eagle") / "head"
    folder.mkdir()
    files = EAGLE3.write(tiny_head(load_target(target), draft_vocab_size=250), torch.float32)
    config = {key: value for key, value in files.config.items() if key not in ("eagle_kit", "eagle_config")}
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(dict(files.tensors), folder / "pytorch_model.bin")
    (folder / "README.md").write_text("A head.")
    (folder / "logs").mkdir()
    (folder / "logs" / "run.json").write_text("{}")
    return folder


def specforges(folder: Path) -> Path:
    """A head for a target of twelve layers, whose layer ids are those of outputs."""
    head = tiny_head(tiny_target(num_layers=12), aux_layer_ids=(2, 6, 9))
    files = EAGLE3.write(head, torch.float32)
    config = {key: value for key, value in files.config.items() if key != "eagle_kit"}
    write_draft(folder, files.tensors, config | {"eagle_config": SPECFORGE}, metadata={})
    (folder / "eagle_kit.json").unlink()
    return folder


def spoken(capsys) -> str:
    """What was printed, but for the hub's progress bars."""
    said = capsys.readouterr()
    return said.out + said.err


COMMANDS = {
    "generate": f"generate --target TARGET --draft {NAME} --prompt Hi --max-tokens 4 --shape 2,1,3",
    "validate": f"validate {NAME} --target TARGET",
    "import": f"import {NAME} --out OUT --target TARGET",
    "export": f"export {NAME} --out OUT --target TARGET",
    "serve --draft": f"serve TARGET --draft {NAME} --port 0",
    "serve --target": f"serve {NAME} --target TARGET --port 0",
    "eval": (
        f"eval --target TARGET --draft {NAME} --tasks TASK --max-tokens 4 --shapes 2,1,3 --no-plots --out OUT"
    ),
    "regenerate": (
        "data regenerate --target TARGET --source CHATS --out OUT.jsonl "
        f"--draft {NAME} --max-tokens 4 --limit 1"
    ),
    "bench": (
        f"bench --target TARGET --draft {NAME} --tasks TASK --shapes 1,1,2 "
        "--batches 1 --rounds 1 --max-tokens 2"
    ),
    "train": f"train CONFIG 'head={{start_from: {NAME}}}' training.max_steps=1",
}


SLOW = {"serve --draft", "regenerate", "bench"}


@pytest.mark.parametrize("command", sweep(COMMANDS, fast=set(COMMANDS) - SLOW))
def test_every_command_takes_a_draft_by_its_name(command, hub, target, eagles, tmp_path, monkeypatch, capsys):
    hub.add(NAME, eagles)
    (tmp_path / "task.jsonl").write_text('{"prompt": "Hi"}\n')
    chats = tmp_path / "chats.jsonl"
    chats.write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    monkeypatch.setattr("eagle_kit.server.api.server.run_forever", lambda app, sock: sock.close() or 0)
    places = {"TARGET": target, "OUT": tmp_path / "out", "TASK": tmp_path / "task.jsonl", "CHATS": chats}
    places |= {"OUT.jsonl": tmp_path / "out.jsonl", "CONFIG": tmp_path / "config.yaml"}
    if command == "train":
        make_config(tmp_path)
    code = main([str(places.get(word, word)) for word in shlex.split(COMMANDS[command])])
    assert code == 0, spoken(capsys)
    assert hub.downloads == ["config.json", "pytorch_model.bin"]


def test_an_evaluation_is_not_continued_with_a_newer_commit(hub, target, eagles, tmp_path, capsys):
    hub.add(NAME, eagles)
    (tmp_path / "task.jsonl").write_text('{"prompt": "Hi"}\n')
    places = {"TARGET": target, "OUT": tmp_path / "out", "TASK": tmp_path / "task.jsonl"}
    words = [str(places.get(word, word)) for word in shlex.split(COMMANDS["eval"])]
    assert main(words) == 0 and main(words) == 0
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["drafts"][0]["path"] == NAME
    save_draft(tiny_head(load_target(target), seed=9), tmp_path / "newer", metadata={})
    hub.add(NAME, tmp_path / "newer")
    assert main(words) == 2
    assert "drafts" in spoken(capsys)


def test_a_second_start_downloads_and_converts_nothing(hub, target, eagles, capsys, monkeypatch):
    commit = hub.add(NAME, eagles)
    config = read_target_config(target)
    folder = DraftFolder.open(NAME, config).path
    assert "Converting the draft org/head" in spoken(capsys)
    written, asked = (folder / "model.safetensors").stat().st_mtime_ns, len(hub.downloads)
    for name in (NAME, f"{NAME}@{commit}"):
        assert DraftFolder.open(name, config).path == folder
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    num_requests = len(hub.requests)
    assert DraftFolder.open(NAME, config).path == folder
    assert len(hub.requests) == num_requests and len(hub.downloads) == asked
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert "Converting" not in spoken(capsys)


def test_a_pickled_head_is_the_one_that_import_makes(hub, target, eagles, tmp_path):
    hub.add(NAME, eagles)
    import_draft(eagles, tmp_path / "imported", target=target)
    ours = DraftFolder.open(NAME, read_target_config(target)).path
    found, wanted = (load_file(folder / "model.safetensors") for folder in (ours, tmp_path / "imported"))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert open_draft(ours).config == open_draft(tmp_path / "imported").config
    here, there = LLM(target, tmp_path / "imported"), LLM(target, NAME)
    assert there.head.config == here.head.config
    prompt = [[5, 6, 7]]
    one, other = here.generate(prompt, shape="2,1,3")[0], there.generate(prompt, shape="2,1,3")[0]
    assert (one.token_ids, one.stats) == (other.token_ids, other.stats)


def test_a_head_that_names_no_layers_is_converted_for_each_depth_of_target(hub, target, eagles):
    """Since it takes its target's usual ones."""
    hub.add(NAME, eagles)
    few = read_target_config(target)
    for config in (few, replace(few, num_layers=30), few):
        assert DraftFolder.open(NAME, config).load().config.aux_layer_ids == config.default_aux_layer_ids


def test_layers_numbered_as_outputs_are_converted(hub, tmp_path):
    hub.add(NAME, specforges(tmp_path / "forge"))
    llm = LLM(tiny_target(num_layers=12), NAME)
    assert llm.head.config.aux_layer_ids == (2, 6, 9)


def test_a_head_of_ours_is_used_as_it_lies_in_the_hubs_cache(hub, target, tmp_path):
    save_draft(tiny_head(load_target(target)), tmp_path / "ours", metadata={})
    commit = hub.add(NAME, tmp_path / "ours")
    assert DraftFolder.open(NAME).path.name == commit
    assert not (tmp_path / "cache" / "drafts").exists()


def test_weights_under_names_that_nothing_reads_are_not_fetched(hub, target, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(target, copy)
    (copy / "consolidated.safetensors").write_bytes(b"the same weights under other names")
    hub.add("org/model", copy)
    assert (resolve_target("org/model") / "model.safetensors").is_file()
    assert "model.safetensors" in hub.downloads and "consolidated.safetensors" not in hub.downloads


def test_a_branch_or_a_commit_is_named_behind_the_id(hub, target, tmp_path):
    commits = []
    for seed, branch in ((1, "old"), (2, "main")):
        save_draft(tiny_head(load_target(target), seed=seed), tmp_path / branch, metadata={})
        commits.append(hub.add(NAME, tmp_path / branch, branch))
    for name, folder in ((NAME, "main"), (f"{NAME}@old", "old"), (f"{NAME}@{commits[0]}", "old")):
        assert torch.equal(load_draft(name).fc.weight, load_draft(tmp_path / folder).fc.weight)


def test_whole_models_draft_by_name_and_targets_have_revisions_too(hub, target):
    hub.add("org/small", target)
    assert resolve_target("org/small@main") == DraftFolder.open("org/small").path
    llm = LLM("org/small", "org/small", algorithm="STANDALONE")
    assert llm.draft.is_whole_model
    assert llm.generate([[5, 6, 7]], shape="2,1,3")[0].stats.accept_length > 2


@pytest.mark.nightly
@pytest.mark.real
def test_a_packaged_target_drafts_by_name():
    assert DraftFolder.open("smollm2-135m-instruct").path == resolve_target("smollm2-135m-instruct")


class TestDraftsInTheirTargetsFolder:
    """As ``poolside/Laguna-S-2.1-NVFP4/DFlash`` lies in its target's repository."""

    def bundle(self, target: Path, folder: Path) -> Path:
        """A copy of the target with a DFlash, a DSpark and an EAGLE-3 draft in it."""
        shutil.copytree(target, folder)
        model = load_target(target)
        save_draft(tiny_dflash(model), folder / "DFlash", metadata={})
        save_draft(tiny_dspark(model), folder / "DSpark", metadata={})
        save_draft(tiny_head(model), folder / "eagle3", metadata={})
        return folder

    @pytest.mark.parametrize(
        ("algorithm", "name"), [("DFLASH", "DFlash"), ("DSPARK", "DSpark"), ("EAGLE3", "eagle3")]
    )
    def test_are_found_by_their_algorithm(self, target, tmp_path, algorithm, name):
        folder = self.bundle(target, tmp_path / "bundle")
        llm = LLM(str(folder), algorithm=algorithm, max_context=64, max_batch_size=1)
        assert llm.head.config == load_draft(folder / name).config
        plain = llm.generate([[5, 6, 7]], shape="none")[0].token_ids
        assert llm.generate([[5, 6, 7]], shape="2,1,3")[0].token_ids == plain

    def test_of_one_kind_are_named_where_there_are_two(self, target, tmp_path):
        folder = self.bundle(target, tmp_path / "bundle")
        shutil.copytree(folder / "DFlash", folder / "DFlash-long")
        with pytest.raises(UserError, match=r"several drafts for DFLASH \(DFlash, DFlash-long\)"):
            LLM(str(folder), algorithm="DFLASH")
        with pytest.raises(UserError, match="P-EAGLE needs a draft"):
            LLM(str(folder), algorithm="P-EAGLE")

    def test_have_names_of_the_hub(self, hub, target, tmp_path):
        commit = hub.add("org/model", self.bundle(target, tmp_path / "bundle"))
        assert load_draft("org/model/DFlash").config == load_draft(tmp_path / "bundle" / "DFlash").config
        assert hub.downloads == ["DFlash/config.json", "DFlash/eagle_kit.json", "DFlash/model.safetensors"]
        assert load_draft(f"org/model/DSpark@{commit}").config.markov_rank == 5
        with pytest.raises(UserError, match="org/model/Medusa has no config.json"):
            DraftFolder.open("org/model/Medusa")

    def test_in_another_layout_are_converted_once(self, hub, tmp_path):
        specforges(tmp_path / "bundle" / "eagle3")
        hub.add("org/model", tmp_path / "bundle")
        folder = DraftFolder.open("org/model/eagle3").path
        assert folder.parent.name == "models--org--model--eagle3"
        assert load_draft(folder).config.aux_layer_ids == (2, 6, 9)
        assert DraftFolder.open("org/model/eagle3").path == folder


def test_a_target_where_a_head_is_needed_is_refused(hub, target, tmp_path, capsys):
    hub.add("org/small", target)
    make_config(tmp_path)
    train = ["train", str(tmp_path / "config.yaml"), "head={start_from: org/small}"]
    for words, said in (
        (["import", "org/small", "--out", str(tmp_path / "out")], "is a whole model, not a draft head"),
        (train, "LlamaForCausalLM"),
    ):
        assert main(words) == 2
        assert said in spoken(capsys)
    assert not (tmp_path / "out").exists() and not (tmp_path / "run").exists()


def test_what_cannot_be_had_is_said(hub, eagles, monkeypatch):
    hub.add("org/gated", eagles, gated=True)
    hub.add("org/secret", eagles, private=True)
    hub.add(NAME, eagles)

    def refused(name: str) -> str:
        with pytest.raises(UserError) as error:
            DraftFolder.open(name)
        return str(error.value)

    assert "no repository that the hub shows you" in refused("org/nothing")
    assert "no repository that the hub shows you" in refused("org/secret")
    assert "gated" in refused("org/gated") and "HF_TOKEN" in refused("org/gated")
    assert "org/head has no revision v9" in refused(f"{NAME}@v9")
    monkeypatch.setenv("HF_TOKEN", "hf_read")
    assert "no repository that the hub shows you" in refused("org/nothing")
    assert "gated" in refused("org/gated")
    monkeypatch.setenv("HF_TOKEN", "expired")
    assert "the hub refuses your access, HTTP 401" in refused(NAME)
    monkeypatch.delenv("HF_TOKEN")
    hub.is_down = True
    assert "could not be fetched (HTTP 503)" in refused(NAME)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused(NAME)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert "ConnectError" in refused(NAME) and "Check the name and the network" in refused(NAME)


def test_a_repository_of_something_else_is_refused(hub, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "chats.json").write_text("[]")
    hub.add("org/data", tmp_path / "data")
    with pytest.raises(UserError, match="The draft org/data has no config.json"):
        DraftFolder.open("org/data")


class Malicious:
    def __reduce__(self):
        return os.mkdir, (os.environ["EAGLE_KIT_CACHE"] + ".hacked",)


def test_a_pickle_is_never_executed(hub, target, eagles, tmp_path):
    hub.add(NAME, eagles)
    files = next(iter(hub.repos[NAME].commits.values()))
    hub.repos[NAME].commit({**files, "pytorch_model.bin": pickle.dumps({"fc.weight": Malicious()})})
    with pytest.raises(UserError, match="pytorch_model.bin"):
        LLM(target, NAME)
    assert not (tmp_path / "cache.hacked").exists()
    assert not any((tmp_path / "cache").rglob("*.safetensors"))


def convert(name: str, target: Path, gate) -> None:
    gate.wait()
    DraftFolder.open(name, read_target_config(target))


def test_two_processes_convert_once(hub, target, eagles, tmp_path, capfd):
    """Both have the files and begin together; the second waits and takes what the first has made."""
    hub.add(NAME, eagles)
    resolve_target(NAME)
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(2)
    both = [context.Process(target=convert, args=(NAME, target, gate)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert capfd.readouterr().err.count("Converting the draft") == 1
    (made,) = (path for path in (tmp_path / "cache" / "drafts").glob("*/*") if path.is_dir())
    assert load_draft(made).config.target_hidden_size == 64


def test_an_exported_draft_is_pushed_and_comes_back(hub, target, tmp_path, monkeypatch, capsys):
    save_draft(tiny_head(load_target(target)), tmp_path / "step", metadata={"step": 3})
    words = ["export", str(tmp_path / "step"), "--out", str(tmp_path / "out"), "--target", str(target)]
    push = ["--push", "me/draft"]
    assert main([*words, *push]) == 2
    assert "No token of the hub was found" in spoken(capsys)
    monkeypatch.setenv("HF_TOKEN", "expired")
    assert main([*words, *push]) == 2
    assert "HTTP 401" in spoken(capsys) and not (tmp_path / "out").exists()
    monkeypatch.setenv("HF_TOKEN", "hf_read")
    assert main([*words, *push]) == 2
    assert "could not be uploaded to me/draft (the hub refuses your access, HTTP 403)" in spoken(capsys)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert main([*words, *push, "--private"]) == 0
    assert f"me/draft: {hub.url}/me/draft" in spoken(capsys)
    assert hub.repos["me/draft"].private
    here = DraftFolder.open(tmp_path / "out").files
    there = DraftFolder.open("me/draft").files
    assert (there.config, there.metadata) == (here.config, here.metadata)
    assert there.names == here.names and all(
        torch.equal(there.tensors[n], here.tensors[n]) for n in here.names
    )
    assert "--draft me/draft" in (tmp_path / "out" / "README.md").read_text()
    assert str(tmp_path) not in (tmp_path / "out" / "README.md").read_text()
    assert main([*words, *push]) == 0, "again, to the repository that is there"


def test_a_push_that_would_mix_or_publish_is_refused(hub, target, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    save_draft(tiny_head(load_target(target)), tmp_path / "step", metadata={})
    words = ["export", str(tmp_path / "step"), "--out", str(tmp_path / "out"), "--target", str(target)]
    assert main([*words, "--private"]) == 2
    assert "--private was given without --push" in spoken(capsys)
    assert main([*words, "--push", "draft"]) == 2
    assert "is not the name of a repository" in spoken(capsys)
    hub.add("me/public", tmp_path / "step")
    assert main([*words, "--push", "me/public", "--private"]) == 2
    assert "exists and is public" in spoken(capsys)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "pytorch_model.bin").write_bytes(b"x")
    hub.add("me/old", tmp_path / "old")
    assert main([*words, "--push", "me/old"]) == 2
    assert "holds other weights than a draft's (pytorch_model.bin)" in spoken(capsys)
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "model.safetensors").write_bytes(b"x")
    hub.add("me/whole", tmp_path / "whole")
    assert main([*words, "--push", "me/whole"]) == 2
    assert "holds a model of another making" in spoken(capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "file",
    [
        "model-1.safetensors",
        "model.safetensors.index.json",
        "model.Q4.gguf",
        "original/consolidated.00.pth",
        "pytorch_model.bin.index.json",
        "head.pt",
        "last.ckpt",
        "tf_model.h5",
        "flax_model.msgpack",
        "onnx/model.onnx",
    ],
)
def test_a_repository_with_weights_of_any_sort_is_not_mixed_with_a_draft(hub, tmp_path, monkeypatch, file):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in (file, "eagle_kit.json"):
        (tmp_path / "whole" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "whole" / name).write_bytes(b"x")
    hub.add("me/whole", tmp_path / "whole")
    with pytest.raises(UserError, match="holds other weights than a draft's"):
        Repository("me/whole")


def test_all_that_a_model_needs_is_fetched_and_nothing_else(hub, target, tmp_path):
    folder = shutil.copytree(target, tmp_path / "model")
    needed = {path.name for path in folder.iterdir()}
    needed |= {"merges.txt", "tokenizer.model", "chat_template.jinja"}
    for name in (
        *needed - {path.name for path in folder.iterdir()},
        "README.md",
        "model.onnx",
        "flax.msgpack",
    ):
        (folder / name).write_text(name)
    hub.add("org/model", folder)
    resolve_target("org/model")
    assert set(hub.downloads) == needed


def test_another_process_finds_the_hub_by_its_environment(hub, eagles, tmp_path):
    """HF_ENDPOINT as a user sets it."""
    commit = hub.add(NAME, eagles)
    program = "from eagle_kit.models.loading.source import *; print(resolve_model('org/head', 'draft'))"
    variables = {**os.environ, **environment(hub, tmp_path / "own")}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).name == commit
    assert hub.downloads == ["config.json", "pytorch_model.bin"]
