"""A run that begins with a head that is there: its weights, its vocabulary, and what is refused."""

import json
import shutil

import pytest
import torch
from tiny_run import make_config, make_conversations

from eagle_kit.drafts.files.draft import load_draft
from eagle_kit.drafts.files.export import export_draft
from eagle_kit.models.loading.loader import load_target
from eagle_kit.train.__main__ import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A config, and the exported head of a run of it."""
    folder = tmp_path_factory.mktemp("first")
    config = make_config(folder)
    assert main([str(config), "training.max_steps=30"]) == 0
    export_draft(folder / "run", folder / "head")
    return folder


def rows(run, name="metrics.jsonl"):
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def test_it_goes_on_from_the_weights_with_their_vocabulary(trained, tmp_path):
    other = make_conversations(tmp_path / "others.jsonl", count=30, seed=7)  # their frequent tokens differ
    settings = [
        *(
            f"data.source={other}",
            f"output_dir={tmp_path / 'run'}",
            f"head={{start_from: {trained / 'head'}}}",
        ),
        *(
            "training.warmup_steps=1",
            "training.max_steps=4",
            "training.learning_rate=1.0e-4",
            "judge.every=2",
        ),
    ]
    config = trained / "config.yaml"
    assert main([str(config), *settings, "--max-steps", "2"]) == 0
    assert main([str(config), *settings, "--resume"]) == 0
    old, new = load_draft(trained / "head"), load_draft(tmp_path / "run" / "step-4")
    assert torch.equal(new.token_map, old.token_map)
    assert new.config.intermediate_size == old.config.intermediate_size == 80
    largest = max((p - q).abs().max().item() for p, q in zip(new.parameters(), old.parameters(), strict=True))
    assert 0 < largest < 1e-3, "four small steps away"
    new_head = [f"data.source={other}", f"output_dir={tmp_path / 'fresh'}", "training.max_steps=1"]
    assert main([str(config), *new_head, "judge.every=0"]) == 0
    first = rows(tmp_path / "run")[0]
    fresh = rows(tmp_path / "fresh")[0]
    assert first["loss"] < fresh["loss"] - 0.1
    about = json.loads((tmp_path / "run" / "step-4" / "eagle_kit.json").read_text())
    assert 0.5 < about["data"]["vocab_coverage"] <= 1.0
    assert about["config"]["head"]["start_from"].endswith("head")
    before = json.loads((trained / "head" / "eagle_kit.json").read_text())
    assert about["tokens_before"] == before["tokens_seen"] > 0 and "tokens_before" not in before
    judged = rows(tmp_path / "run", "judge.jsonl")
    assert about["judged"] == [
        {"tokens_seen": row["tokens"], "accept_length": row["accept_length"]} for row in judged
    ]
    assert about["judged"] and about["judged"][-1]["tokens_seen"] == about["tokens_seen"]
    third = [f"head={{start_from: {tmp_path / 'run' / 'step-4'}}}", f"output_dir={tmp_path / 'third'}"]
    assert main([str(config), *settings, *third, "judge.every=0", "--max-steps", "1"]) == 0
    last = json.loads((tmp_path / "third" / "step-1" / "eagle_kit.json").read_text())
    assert last["tokens_before"] == about["tokens_seen"] + about["tokens_before"]


def test_judgements_of_old_runs_have_no_tokens_and_are_left_out(trained, tmp_path):
    run = tmp_path / "run"
    words = [str(trained / "config.yaml"), f"output_dir={run}", "training.max_steps=4", "judge.every=2"]
    assert main([*words, "--max-steps", "2"]) == 0
    (old,) = rows(run, "judge.jsonl")
    del old["tokens"]
    (run / "judge.jsonl").write_text(json.dumps(old) + "\n")
    assert main([*words, "--resume"]) == 0
    about = json.loads((run / "step-4" / "eagle_kit.json").read_text())
    assert [row["tokens_seen"] for row in about["judged"]] == [about["tokens_seen"]]


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ("{start_from: HEAD, draft_vocab_size: 100}", "draft_vocab_size is that of the head"),
        ("{start_from: HEAD, kind: mtp}", "start_from has no meaning"),
        ("{start_from: HEAD, kind: eagle3-mla}", "has the kind eagle3, and this run needs eagle3-mla"),
        ("{start_from: nowhere}", "The draft 'nowhere' is neither a folder here nor a hub id"),
    ],
)
def test_what_does_not_fit_is_refused(trained, tmp_path, capsys, head, said):
    head = head.replace("HEAD", str(trained / "head"))
    assert main([str(trained / "config.yaml"), f"head={head}", f"output_dir={tmp_path / 'run'}"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_head_that_can_say_more_than_the_tokenizer_has_is_a_beginning(trained, tmp_path, capsys):
    """A target's vocabulary is often padded: a head over all of it names rows that no token has."""
    from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
    from eagle_kit.drafts.files.draft import save_draft
    from eagle_kit.models.loading.loader import read_target_config

    target = read_target_config(trained / "target")
    head = Eagle3Head(Eagle3Config.for_target(target, target.vocab_size))
    head.t2d.fill_(True)
    save_draft(head, tmp_path / "full", metadata={})
    words = [str(trained / "config.yaml"), f"head={{start_from: {tmp_path / 'full'}}}"]
    assert main([*words, f"output_dir={tmp_path / 'run'}", "training.max_steps=1"]) == 0
    assert "vocab   300 of 300 cover 100.00%" in capsys.readouterr().out


def test_its_vocabulary_is_not_made_from_the_data(trained, tmp_path, capsys):
    from eagle_kit.cli.app import main as command

    words = [str(trained / "config.yaml"), f"head={{start_from: {trained / 'head'}}}"]
    assert command(["data", "vocab", *words, "--out", str(tmp_path / "map.npz")]) == 2
    assert "brings its vocabulary" in capsys.readouterr().err
    assert command(["data", "prepare", *words]) == 0
    assert f"that of {trained / 'head'}" in capsys.readouterr().out


def test_a_head_whose_layers_are_numbered_otherwise_is_to_be_imported_first(trained, tmp_path, capsys):
    """As SpecForge writes them: outputs of layers 1, L//2 - 1 and L - 4, and nothing says so."""
    shutil.copytree(trained / "head", tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    raw = json.loads(path.read_text())
    del raw["eagle_kit"], raw["eagle_config"]["eagle_aux_hidden_state_convention"]
    raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 15, 28]
    path.write_text(json.dumps(raw))
    words = [str(trained / "config.yaml"), f"head={{start_from: {tmp_path / 'theirs'}}}"]
    assert main([*words, f"output_dir={tmp_path / 'run'}", "training.max_steps=1"]) == 2
    assert "eagle-kit import" in capsys.readouterr().err


@pytest.fixture(scope="module")
def deep_enough(tmp_path_factory):
    """A config whose head is as wide as its target, to begin with the target's last layer."""
    return make_config(tmp_path_factory.mktemp("last"), head={"draft_vocab_size": 64})


def test_it_begins_as_the_last_layer_of_the_target(deep_enough, tmp_path):
    settings = [
        f"output_dir={tmp_path / 'run'}",
        "training.learning_rate=1.0e-12",
        "head.init=last-layer",
        "head.intermediate_size=null",
    ]
    assert main([str(deep_enough), *settings, "--max-steps", "1"]) == 0
    head, target = load_draft(tmp_path / "run" / "step-1"), load_target(deep_enough.parent / "target")
    size, states = target.config.hidden_size, torch.randn(5, 3 * target.config.hidden_size)
    layer, ours = target.layers[-1], head.midlayer
    with torch.no_grad():
        torch.testing.assert_close(head.fc(states), states[:, 2 * size :], atol=1e-5, rtol=0)
        ours.self_attn.qkv_proj.weight[:, :size] = 0  # what reads the embedding
        x, residual = ours.inputs(states[:, 2 * size :], torch.randn(5, size))
        q = ours.self_attn.qkv_proj(x)
        theirs = layer.self_attn.qkv_proj(layer.input_layernorm(residual))
        torch.testing.assert_close(q, theirs, atol=1e-4, rtol=1e-4)
        attended = torch.randn(5, target.config.num_heads, target.config.head_dim)
        after = residual + layer.self_attn.o_proj(attended.flatten(1))
        behind = after + layer.mlp(layer.post_attention_layernorm(after))
        torch.testing.assert_close(ours.finish(residual, attended), behind, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (["head.init=checkpoint"], "input should be 'auto', 'last-layer' or 'random'"),
        (["head.init=last-layer", "head.intermediate_size=16"], "does not have the parts and sizes"),
    ],
)
def test_beginnings_that_cannot_be_had_are_refused(deep_enough, tmp_path, capsys, head, said):
    assert main([str(deep_enough), f"output_dir={tmp_path / 'run'}", *head]) == 2
    assert said in capsys.readouterr().err
