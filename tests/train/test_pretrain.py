"""A small target from nothing: stopped, gone on with, and refused where it would be mixed up."""

import json
import signal

import numpy as np
import torch
import yaml

from eagle_kit.cli import main


def test_a_run_is_stopped_by_a_signal_and_gone_on_with(tmp_path, capsys, monkeypatch):
    import transformers

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
    words = ["pretrain", str(tmp_path / "config.yaml")]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
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
