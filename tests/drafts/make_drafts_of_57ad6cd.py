"""Make `drafts-of-57ad6cd.tar.gz`: a small target, trained drafts of several kinds, and what they answered.

Run with a checkout of commit 57ad6cd, the last one before version 0.2.0, whose code is to be imported:

    git worktree add --detach ../old 57ad6cd
    PYTHONPATH=../old OMP_NUM_THREADS=1 python tests/drafts/make_drafts_of_57ad6cd.py FOLDER

`test_released_drafts.py` loads these drafts with the code of today and compares the answers.
"""

import json
import os
import random
import sys
import tarfile
from pathlib import Path

import yaml

from eagle_kit.cli.app import main
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.llm import LLM

ANIMALS = ("cat", "dog", "hen", "fox", "owl", "bee")
MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
KINDS = {
    "eagle3": {"kind": "eagle3", "draft_vocab_size": 250, "intermediate_size": 48},
    "eagle3.1": {
        "kind": "eagle3",
        "draft_vocab_size": 250,
        "intermediate_size": 48,
        "fc_norm": True,
        "norm_output": True,
    },
    "eagle1": {"kind": "eagle1", "intermediate_size": 48},
    "p-eagle": {"kind": "p-eagle", "draft_vocab_size": 250, "intermediate_size": 48, "num_layers": 2},
    "dflash": {"kind": "dflash", "num_layers": 2, "intermediate_size": 48, "block_size": 4},
    "dspark": {
        "kind": "dspark",
        "num_layers": 2,
        "intermediate_size": 48,
        "block_size": 3,
        "markov_rank": 8,
    },
}
REGRESSION = {"regression": {"topk_weight": 1.0, "topk": 10}}
PROMPTS = ("Tell me of a cat and a dog.", "Tell me of a bee and a hen.", "Tell me of an owl.")
SHAPES = ("3,1,4", "2,2,5")
MAX_TOKENS = 32


def run(*words: str | Path) -> None:
    """Run a command of the old code."""
    code = main([str(word) for word in words])
    if code:
        raise SystemExit(f"{' '.join(map(str, words))} ended with {code}")


def write_chats(path: Path) -> None:
    """Conversations that a small model learns."""
    rng = random.Random(7)
    lines = []
    for _ in range(160):
        one, other = rng.sample(ANIMALS, 2)
        told = f"The {one} sees the {other}. " * 3 + f"Then the {one} sleeps."
        messages = [
            {"role": "user", "content": f"Tell me of a {one} and a {other}."},
            {"role": "assistant", "content": told},
        ]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")


def make_target(folder: Path, chats: Path) -> Path:
    """Train the target from nothing."""
    config = {
        "model": MODEL,
        "output_dir": str(folder / "target"),
        "text": {"source": str(chats), "vocab_size": 300},
        "training": {"length": 64, "steps": 240, "learning_rate": 5e-3, "warmup_steps": 20},
    }
    file = folder / "target.yaml"
    file.write_text(yaml.safe_dump(config))
    run("pretrain", file)
    return folder / "target"


def make_draft(name: str, folder: Path, target: Path, chats: Path) -> Path:
    """Train a head and export it in this project's layout."""
    head = KINDS[name]
    training = {
        "ttt_length": 3,
        "learning_rate": 5e-3,
        "max_steps": 80,
        "sequences_per_step": 2,
        "warmup_steps": 8,
        "save_every": 80,
        "precision": "float32",
    }
    if name == "eagle1":
        training |= REGRESSION
    config = {
        "target": str(target),
        "output_dir": str(folder / f"run-{name}"),
        "data": {
            "source": str(chats),
            "max_length": 160,
            "eval_conversations": 6,
            "cache_dir": str(folder / "cache"),
            "preview": False,
        },
        "head": head,
        "training": training,
        "judge": {"every": 0},
        "tracking": {"report": False},
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config))
    run("train", file)
    run("export", folder / f"run-{name}", "--out", folder / name, "--target", target, "--dtype", "float32")
    return folder / name


def answers_of(target: Path, draft: Path) -> dict[str, list[dict[str, object]]]:
    """Greedy responses and acceptance of a draft in every shape."""
    found = {}
    for shape in SHAPES:
        llm = LLM(str(target), draft=str(draft), shape=shape, max_context=256)
        params = SamplingParams(max_tokens=MAX_TOKENS)
        prompts = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        responses = llm.generate(prompts, params)
        found[shape] = [
            {
                "prompt": prompt,
                "token_ids": list(response.token_ids),
                "text": response.text,
                "histogram": response.stats.histogram,
                "num_accepted_at": response.stats.num_accepted_at,
            }
            for prompt, response in zip(PROMPTS, responses, strict=True)
        ]
        llm.close()
    return found


def pack(folder: Path, names: list[str]) -> Path:
    """Put target, drafts and answers into one file, without what a test does not read."""
    archive = folder / "drafts-of-57ad6cd.tar.gz"

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if member.name.startswith("target/training"):
            return None
        member.uname = member.gname = ""
        return member

    with tarfile.open(archive, "w:gz") as file:
        for name in (*names, "target", "answers.json"):
            file.add(folder / name, arcname=name, filter=kept)
    return archive


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True)
    os.chdir(place)  # so that what is written names no folder of this machine
    folder = Path()
    chats = folder / "chats.jsonl"
    write_chats(chats)
    target = make_target(folder, chats)
    answers = {}
    for name in KINDS:
        draft = make_draft(name, folder, target, chats)
        answers[name] = answers_of(target, draft)
        lengths = [sum(each["histogram"]) for each in answers[name]["3,1,4"]]
        print(name, lengths)
    (folder / "answers.json").write_text(json.dumps(answers, indent=1))
    print(pack(folder, list(KINDS)))
