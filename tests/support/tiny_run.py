"""A tiny target, its tokenizer, a few conversations and a config: everything a run needs, made in a test."""

import json
import random
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END_TOKEN = 2
"""``<|im_end|>``, which ends the responses of :func:`make_target`."""
NOUNS = ("cat", "dog", "house", "river", "stone", "cloud")
VERBS = ("sees", "likes", "finds", "makes")


def make_target(folder: Path, *, seed: int = 0) -> Path:
    """Save a four-layer Llama (hidden 64, byte vocabulary) as a Hugging Face folder."""
    shutil.copytree(_saved_target(seed).name, folder, dirs_exist_ok=True)
    torch.manual_seed(seed)  # whether the model was made just now or before
    return folder


@cache
def _saved_target(seed: int) -> "TemporaryDirectory[str]":
    """The folder that the others are copies of, made once a process and removed with it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(specials + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    saved = TemporaryDirectory()
    fast.save_pretrained(saved.name)

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=2,
        bos_token_id=1,
        initializer_range=0.25,
    )
    LlamaForCausalLM(config).save_pretrained(saved.name)
    return saved


def tokens_of(text: str) -> list[int]:
    """Tokens of a text in the vocabulary of :func:`make_target`: one a byte."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(f"{_saved_target(0).name}/tokenizer.json").encode(text).ids


def make_conversations(path: Path, *, count: int = 40, seed: int = 0) -> Path:
    """Write ``count`` short conversations of one or two turns as JSONL."""
    rng = random.Random(seed)

    def sentence() -> str:
        return f"The {rng.choice(NOUNS)} {rng.choice(VERBS)} the {rng.choice(NOUNS)}."

    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            messages = []
            for _ in range(rng.choice((1, 2))):
                messages.append({"role": "user", "content": sentence()})
                messages.append({"role": "assistant", "content": f"{sentence()} {sentence()}"})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def make_config(folder: Path, **sections: dict[str, Any]) -> Path:
    """Write target, data and a YAML config below ``folder``; ``sections`` are merged into the config."""
    target = folder / "target"
    if not target.exists():
        make_target(target)
        make_conversations(folder / "chats.jsonl")
    config: dict[str, Any] = {
        "target": str(target),
        "output_dir": str(folder / "run"),
        "seed": 3,
        "data": {
            "source": str(folder / "chats.jsonl"),
            "max_length": 160,
            "eval_conversations": 6,
            "cache_dir": str(folder / "cache"),
            "preview": False,
        },
        "head": {"draft_vocab_size": 250, "intermediate_size": 80},
        "training": {
            "ttt_length": 3,
            "learning_rate": 0.005,
            "epochs": 20,
            "sequences_per_step": 2,
            "warmup_steps": 2,
            "save_every": 4,
        },
        "validation": {"every": 0, "prompts": 4, "max_tokens": 12, "shapes": ["3,1,4"]},
        "tracking": {"report": False},
    }
    for name, values in sections.items():
        if isinstance(values, dict):
            config[name] = {**config[name], **values} if name in config else values
        else:
            config[name] = values
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


@dataclass
class PackedRows:
    """Packed sequences in memory, as a training step reads them."""

    rows: list[SimpleNamespace]
    groups: tuple[str, ...] = ("all",)

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, number: int) -> SimpleNamespace:
        return self.rows[number]


def packed_row_of(prompt: list[int], response: list[int]) -> SimpleNamespace:
    """A packed sequence of one document: a prompt and the response to it."""
    ids = np.array(prompt + response, dtype=np.int32)
    is_response = np.arange(len(ids)) >= len(prompt)
    return SimpleNamespace(
        ids=ids,
        response=np.where(is_response, 0, -1).astype(np.int32),
        doc_start=np.zeros_like(ids),
        group=np.zeros_like(ids),
    )
