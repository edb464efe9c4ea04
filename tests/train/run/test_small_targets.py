"""The whole way of the how-to pages for DeepSeek and hybrid targets in small: a target from nothing, its own
responses, a head of every kind, an export, an evaluation."""

import json
from functools import cache

import pytest
import yaml

from eagle_kit.cli import main
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.llm import LLM
from recipes.cli import main as make_recipe

ANIMALS = ("cat", "dog", "hen", "fox", "owl", "bee")
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "intermediate_size": 128,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 256,
}
HYBRID = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 256,
}
MODELS = {"deepseek": DEEPSEEK, "hybrid": HYBRID}
PRETRAINING = {
    "deepseek": {"rows": 8, "steps": 120, "learning_rate": 5e-3},
    "hybrid": {"rows": 4, "steps": 80, "learning_rate": 1e-2},
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory):
    """Makes targets that tell of animals, and their responses."""
    return cache(lambda name: make_target(tmp_path_factory.mktemp(name), name))


def make_target(root, name):
    chats = []
    for i in range(120):
        one, other = ANIMALS[i % 6], ANIMALS[i * 7 % 5]
        told = f"The {one} sees the {other}. " * 3 + f"Then the {one} sleeps."
        turns = [{"role": "user", "content": f"Tell me of a {one} and a {other}."}]
        chats.append({"messages": [*turns, {"role": "assistant", "content": told}]})
    (root / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    config = {
        "model": MODELS[name],
        "output_dir": str(root / "target"),
        "text": {"source": str(root / "chats.jsonl"), "vocab_size": 320},
        "training": {"length": 64, "warmup_steps": 10, **PRETRAINING[name]},
    }
    (root / "target.yaml").write_text(yaml.safe_dump(config))
    assert make_recipe(["pretrain", str(root / "target.yaml")]) == 0
    words = ["--target", str(root / "target"), "--source", str(root / "chats.jsonl")]
    words += [
        "--out",
        str(root / "responses.jsonl"),
        "--limit",
        "30",
        "--max-turns",
        "1",
        "--max-tokens",
        "48",
    ]
    assert main(["data", "regenerate", *words]) == 0
    return root


def nightly(*names):
    return pytest.param(*names, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        nightly("deepseek", "mtp"),
        nightly("deepseek", "eagle3"),
        nightly("deepseek", "eagle3-mla"),
        nightly("deepseek", "eagle1"),
        ("hybrid", "eagle3"),
        nightly("hybrid", "mtp"),
        nightly("hybrid", "eagle1"),
    ],
)
def test_a_head_learns_what_a_target_says(targets, name, kind, tmp_path, monkeypatch):
    from accelerate.state import AcceleratorState

    target = targets(name)
    monkeypatch.setenv("EAGLE_KIT_CACHE", str(tmp_path / "cache"))
    head = {"kind": kind, "draft_vocab_size": 128} if "eagle3" in kind else {"kind": kind}
    config = {
        "target": str(target / "target"),
        "output_dir": str(tmp_path / "run"),
        "data": {"source": str(target / "responses.jsonl"), "max_length": 128, "eval_conversations": 4},
        "head": head,
        "training": {
            "ttt_length": 3,
            "learning_rate": 5e-3,
            "warmup_steps": 5,
            "max_steps": 50,
            "cache_hidden_states": "disk" if name == "hybrid" else "off",
            "epochs": 99,
        },
        "validation": {"every": 0},
        "tracking": {"wandb": "off"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    try:
        assert main(["train", str(tmp_path / "run.yaml")]) == 0
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "draft")]) == 0
    assert main(["validate", str(tmp_path / "draft"), "--target", str(target / "target")]) == 0
    llm = LLM(target / "target", tmp_path / "draft", max_batch_size=3)
    prompts = [f"Tell me of a {name} and a cat." for name in ANIMALS]
    params = SamplingParams(max_tokens=40)
    plain = llm.chat(prompts, params, shape="none")
    assert any("sees the" in response.text for response in plain), "the target has learned nothing"
    for shape in ("3,1,4", "4,2,8"):
        drafted = llm.chat(prompts, params, shape=shape)
        assert [response.token_ids for response in drafted] == [response.token_ids for response in plain]
        emitted = sum(response.stats.num_emitted_tokens for response in drafted)
        assert emitted / sum(response.stats.num_verifies for response in drafted) > 2
    if kind in ("eagle3", "eagle1"):
        evaluation = ["--target", str(target / "target"), "--draft", str(tmp_path / "draft"), "--limit", "2"]
        evaluation += ["--tasks", "ours", "--shapes", "3,1,4", "--max-tokens", "16", "--max-context", "200"]
        assert main(["eval", *evaluation, "--no-plots", "--out", str(tmp_path / "eval")]) == 0
        summary = json.loads((tmp_path / "eval" / "summary.json").read_text())
        assert summary["greedy_identical"] is True and summary["num_compared"] > 0
