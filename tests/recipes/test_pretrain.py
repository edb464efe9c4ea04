"""A small model from nothing or from layers of a target: stopped, gone on with, and refused where it would be
mixed up."""

import json
import shutil
import signal

import numpy as np
import pytest
import torch
import yaml

from eagle_kit.core.files import sole_writer
from recipes.cli import main


@pytest.fixture
def words(tmp_path):
    """A command that trains for 8 steps and saves at the fifth."""
    chats = [{"messages": [{"role": "user", "content": f"Count {i}."}]} for i in range(99)]
    for i, chat in enumerate(chats):
        chat["messages"].append({"role": "assistant", "content": f"{i} and {i + 1}. " * 4})
    foreign = [{"role": "user", "content": "写一首诗"}, {"role": "assistant", "content": "春天来了。" * 9}]
    chats.insert(3, {"messages": foreign})
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = {
        "model": {"model_type": "llama", **sizes},
        "output_dir": str(tmp_path / "target"),
        "text": {"source": str(tmp_path / "chats.jsonl"), "vocab_size": 300, "max_tokens": 1500},
        "training": {
            "length": 16,
            "rows": 2,
            "steps": 8,
            "learning_rate": 2e-3,
            "warmup_steps": 3,
            "save_every": 5,
        },
        "seed": 7,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    return ["pretrain", str(tmp_path / "config.yaml")]


def test_a_run_is_stopped_by_a_signal_and_gone_on_with(tmp_path, words, capsys, monkeypatch):
    import transformers

    step, taken = transformers.Trainer.training_step, []

    def stopped_at_three(self, *given, **named):
        taken.append(self.state.global_step)
        if len(taken) == 3:
            signal.raise_signal(signal.SIGTERM)
        return step(self, *given, **named)

    monkeypatch.setattr(transformers.Trainer, "training_step", stopped_at_three)
    assert main([*words, "--resume"]) == 2
    assert main(words) == 130
    assert "Stopped at step 3 of 8" in capsys.readouterr().out
    assert main(words) == 2
    assert "--resume" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0
    assert taken == list(range(8))
    target = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "target")
    assert target.config.vocab_size == len(tokenizer) <= 300
    assert json.loads((tmp_path / "target" / "training.json").read_text())["config"]["seed"] == 7

    # What was set is what it was trained with.
    run = tmp_path / "target" / "training"
    given = torch.load(run / "checkpoint-8" / "training_args.bin", weights_only=False)
    assert (given.learning_rate, given.warmup_steps, given.max_steps) == (2e-3, 3, 8)
    assert (given.per_device_train_batch_size, given.save_steps) == (2, 5)
    assert (given.seed, given.data_seed) == (7, 7)
    tokens = np.load(run / "tokens.npy")
    assert len(tokens) == 1500, "no more than max_tokens"
    text = tokenizer.decode(tokens)
    assert text.startswith("<|im_start|>user\nCount 0.<|im_end|>\n<|im_start|>assistant\n0 and 1.")
    assert text.isascii(), "a conversation of another script is left out"


class Killed(BaseException):
    """Ends a command in the middle of what it writes."""


def killed(*args, **named):
    raise Killed


@pytest.mark.parametrize("place", ["numpy.concatenate", "transformers.Trainer._save_rng_state"])
def test_a_run_that_was_killed_before_its_first_save_begins_anew(tmp_path, words, monkeypatch, capsys, place):
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(place, killed)
        main(words)
    if place != "numpy.concatenate":
        np.save(tmp_path / "target" / "training" / "tokens.npy", np.zeros(40, dtype=np.uint16))
    assert main([*words, "--resume"]) == 2
    assert "no saved run" in capsys.readouterr().err
    assert main(words) == 0
    assert len(np.load(tmp_path / "target" / "training" / "tokens.npy")) == 1500


def test_a_save_that_was_killed_is_passed_over(tmp_path, words, monkeypatch, capsys):
    """The whole one before it is gone on with, and what half of the later one is there is removed."""
    run = tmp_path / "target" / "training"
    assert main(words) == 0
    whole = (tmp_path / "target" / "model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "target")
    import transformers

    save = transformers.Trainer._save_rng_state
    with monkeypatch.context() as patched, pytest.raises(Killed):

        def second_is_killed(trainer, place):
            if trainer.state.global_step == 8:
                raise Killed
            save(trainer, place)

        patched.setattr(transformers.Trainer, "_save_rng_state", second_is_killed)
        main(words)
    assert (run / "checkpoint-8" / "model.safetensors").is_file()
    assert main([*words, "--resume"]) == 0
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-8"]
    assert (tmp_path / "target" / "model.safetensors").read_bytes() == whole


def test_a_folder_of_something_else_is_not_touched(tmp_path, words, capsys):
    notes = tmp_path / "target" / "training" / "checkpoint-1" / "notes"
    notes.parent.mkdir(parents=True)
    notes.touch()
    assert main(words) == 2
    assert "something else than a run" in capsys.readouterr().err
    assert notes.exists()


def test_a_full_disk_is_a_sentence(words, monkeypatch, capsys):
    import transformers

    def full(*args, **named):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    monkeypatch.setattr(transformers.Trainer, "_save_optimizer_and_scheduler", full)
    assert main(words) == 2
    assert "could not be written whole" in capsys.readouterr().err


def test_two_runs_do_not_write_to_one_folder(tmp_path, words, capsys):
    with sole_writer(tmp_path, tmp_path / "target" / ".lock"):
        assert main(words) == 2
    assert "Another process is writing" in capsys.readouterr().err


@pytest.fixture
def from_layers(tmp_path, words):
    """A command that trains layers 0 and 2 of a target of three layers."""
    config = tmp_path / "config.yaml"
    raw = yaml.safe_load(config.read_text())
    raw["model"]["num_hidden_layers"] = 3
    config.write_text(yaml.safe_dump(raw))
    assert main(words) == 0
    chats = raw["text"].pop("source")
    del raw["model"]
    del raw["text"]["vocab_size"]
    raw["text"]["source"] = [chats, chats]
    raw["start_from"] = {"target": raw["output_dir"], "layers": [0, 2]}
    raw["output_dir"] = str(tmp_path / "draft")
    (tmp_path / "draft.yaml").write_text(yaml.safe_dump(raw))
    return ["pretrain", str(tmp_path / "draft.yaml")]


def test_layers_of_a_target_are_trained_under_its_embedding_and_output(tmp_path, from_layers):
    import transformers

    assert main([*from_layers, "training.steps=1", "training.warmup_steps=0"]) == 0
    target = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    draft = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert draft.config.num_hidden_layers == 2
    before = target.state_dict()
    after = draft.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(after[name], before[name]), "not trained"

    # A step moves each weight by at most about the learning rate, and layers differ by far more.
    for place, layer in enumerate((0, 2)):
        name = "self_attn.q_proj.weight"
        moved = after[f"model.layers.{place}.{name}"] - before[f"model.layers.{layer}.{name}"]
        assert 0 < moved.abs().max() < 4e-3
        others = before[f"model.layers.1.{name}"] - before[f"model.layers.{layer}.{name}"]
        assert others.abs().max() > 2e-2

    # Both sources are read, by the target's tokenizer and template.
    run = tmp_path / "draft" / "training"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "draft")
    text = tokenizer.decode(np.load(run / "tokens.npy"))
    assert text.startswith("<|im_start|>user\nCount 0.<|im_end|>\n<|im_start|>assistant\n0 and 1.")
    assert (
        tokenizer.get_vocab() == transformers.AutoTokenizer.from_pretrained(tmp_path / "target").get_vocab()
    )


def test_what_layers_were_trained_into_drafts_for_their_target(tmp_path, from_layers):
    from eagle_kit import LLM, SamplingParams

    training = ["training.steps=60", "training.learning_rate=1e-2", "training.warmup_steps=5"]
    assert main([*from_layers, *training]) == 0
    log = json.loads((tmp_path / "draft" / "training.json").read_text())["log"]
    losses = [row["loss"] for row in log if "loss" in row]
    assert losses[-1] < losses[0]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    plain = LLM(str(tmp_path / "target")).generate("Count 7.", params)
    drafted = LLM(str(tmp_path / "target"), draft=str(tmp_path / "draft"), shape="2,1,3").generate(
        "Count 7.", params
    )
    assert drafted[0].token_ids == plain[0].token_ids


@pytest.mark.parametrize(
    ("setting", "cause"),
    [
        ("start_from.layers=[0,3]", "names layer 3"),
        ("start_from.layers=[2,0]", "increasing"),
        ("text.vocab_size=400", "text.vocab_size"),
        ("start_from=null", "either model or start_from"),
    ],
)
def test_layers_that_cannot_be_begun_with_are_refused(tmp_path, from_layers, setting, cause, capsys):
    assert main([*from_layers, setting]) == 2
    assert cause in capsys.readouterr().err
    assert not (tmp_path / "draft" / "config.json").exists()
