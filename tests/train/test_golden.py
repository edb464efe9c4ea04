"""Golden loss curves: twenty optimiser steps of a tiny run of every kind of draft, in float32 on the CPU.

Each file in ``golden/`` has the loss and the gradient norm of every step. A change of what is trained (rows,
teachers, weights, schedules, optimisers, initialisation) fails here. Where it is meant, write the files again
and say why in the commit; the command prints how much each file has changed:

    REFRESH_GOLDEN=1 python -m pytest -s tests/train/test_golden.py
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_mtp import save_target
from tiny_run import make_config, make_conversations, make_target

from eagle_kit.config.drafts import HEADS
from eagle_kit.drafts.registry import head_kinds
from eagle_kit.train.__main__ import main

GOLDEN = Path(__file__).with_name("golden")
REFRESH = "REFRESH_GOLDEN"
NUM_STEPS = 20
RTOL = 1e-4
"""Relative tolerance. One thread or two, and AVX-512, AVX2 or no vector instructions in torch and oneDNN,
change no figure by more than 2.2e-6 in twenty steps. Other processors may order sums in other ways."""
RTOL_OF_MUON = 1e-3
"""Muon makes its updates in bfloat16: the same choices change its figures by up to 7e-5."""


class Recipe(NamedTuple):
    """Sections of the config that a golden run adds to :data:`COMMON`.

    Attributes:
        head, training: the sections.
        mix: ``data.mix`` in place of one source.
        target: ``llama`` or ``deepseek``.
        resume_at: stop after this step and resume from its checkpoint; None runs without a stop.
    """

    head: dict[str, Any]
    training: dict[str, Any]
    mix: tuple[dict[str, Any], ...] = ()
    target: str = "llama"
    resume_at: int | None = None


COMMON = {
    "ttt_length": 3,
    "learning_rate": 2e-3,
    "max_steps": NUM_STEPS,
    "warmup_steps": 3,
    "sequences_per_step": 2,
    "save_every": 99,
    "precision": "float32",
}
BLOCK = {"kind": "dflash", "num_layers": 2, "block_size": 4}
MIXTURE = (
    {"source": "chats.jsonl", "max_repeats": 4},
    {"source": "own.jsonl", "weight": 2.0, "phase": [0.3, 1.0]},
)
RECIPES = {
    "eagle3": Recipe(
        {
            "draft_vocab_size": 200,
            "intermediate_size": 80,
            "aux_layer_ids": [0, 1, 3],
            "norm_before_residual": True,
            "sliding_window": 40,
        },
        {
            "step_weights": [1.0, 0.5, 0.25],
            "warmup_steps": None,
            "warmup_ratio": 0.2,
            "betas": [0.85, 0.97],
            "eps": 1e-3,
            "clip_norm": 0.1,
            "weight_decay": 0.5,
        },
    ),
    "eagle3-published": Recipe(
        {
            "draft_vocab_size": 200,
            "fc_norm": True,
            "norm_output": True,
            "norm_before_fc": True,
            "qk_norm": True,
            "own_embedding": True,
            "lm_head_init": "random",
        },
        {
            "loss_rows": "published",
            "loss_normalisation": "published",
            "schedule": "linear",
            "warmup": "log",
            "min_learning_rate_ratio": 0.0,
            "loss": {"ce": 0.5, "hard-ce": 0.5},
        },
    ),
    "eagle3-resumed": Recipe(
        {"draft_vocab_size": 200, "intermediate_size": 80},
        {
            "optimizer": "muon",
            "ema_decay": 0.9,
            "feature_noise": {"kind": "uniform", "amount": 0.2, "unit": "rms"},
            "ttt_curriculum": {"start": 1, "share": 0.5},
            "loss": "lk-hybrid",
            "lk_eta": 1.5,
            "schedule": "wsd",
            "decay_ratio": 0.5,
            "down_sample_ratio": 0.7,
            "muon_momentum": 0.8,
            "muon_learning_rate_ratio": 2.0,
        },
        mix=MIXTURE,
        resume_at=9,
    ),
    "eagle3-mla": Recipe(
        {"kind": "eagle3-mla", "draft_vocab_size": 200}, {"gradient_accumulation": 1}, target="deepseek"
    ),
    "eagle1": Recipe(
        {"kind": "eagle1", "intermediate_size": 80},
        {"ttt_length": 1, "feature_noise": {"kind": "uniform", "amount": 0.1, "per_tokens": 64}},
    ),
    "eagle1-hass": Recipe(
        {"kind": "eagle1", "fc_bias": False},
        {
            "step_decay": 0.9,
            "loss_normalisation": "sequence",
            "detach_steps": True,
            "regression": {"feature_weight": 0.5, "token_weight": 0.2, "topk_weight": 1.0, "topk": 3},
            "feature_noise": {"kind": "gaussian", "amount": 0.1},
            "gradient_accumulation": 1,
        },
    ),
    "p-eagle": Recipe(
        {"kind": "p-eagle", "draft_vocab_size": 200, "num_layers": 2},
        {"gradient_accumulation": 1, "down_sample_ratio_min": 0.7, "loss": {"ce": 0.5, "reverse-kl": 0.5}},
    ),
    "dflash": Recipe(
        {**BLOCK, "draft_vocab_size": 200, "mask_token_id": 7},
        {"num_anchors": 24, "loss": {"hard-ce": 0.3, "tv": 0.7}},
    ),
    "dspark": Recipe(
        {**BLOCK, "kind": "dspark", "block_size": 3, "markov_rank": 8, "markov_head_type": "gated"},
        {"num_anchors": 6, "dpace_alpha": 0.5, "gradient_accumulation": 1, "confidence_weight": 2.0},
    ),
    "mtp": Recipe(
        {"kind": "mtp", "num_modules": 1, "init": "last-layer"},
        {"ttt_length": 2, "gradient_accumulation": 1},
        target="deepseek",
    ),
    "mtp-two-modules": Recipe(
        {"kind": "mtp", "num_modules": 2}, {"ttt_length": 2, "gradient_accumulation": 1}, target="deepseek"
    ),
}
ELSEWHERE = {
    "head.vocab_map": "train/run/test_loop.py",
    "head.start_from": "train/run/test_start_from.py",
    "head.confidence_head": "train/run/test_block_loop.py",
    "training.epochs": "train/test_pieces.py",
    "training.gradient_checkpointing": "train/parallel/test_placement.py",
    "training.target_placement": "train/parallel/test_placement.py",
    "training.cache_hidden_states": "train/run/test_loop.py",
    "training.state_format": "datagen/hidden_states/test_capture.py",
    "training.cpu_threads": "train/parallel/test_processes.py",
    "training.peer_timeout_s": "train/parallel/test_processes.py",
    "training.keep_last": "train/run/test_loop.py",
    "training.log_every": "train/run/test_reports.py",
}
"""Settings that no recipe varies, with the file of their test: other beginnings, and settings that change no
figure of a step."""
VARIANTS = ("eagle3-published", "eagle1-hass", "mtp-two-modules")
"""Second recipes of a kind."""


def draw_weights(file: Path) -> None:
    """Replace a saved model's weights by ones that depend on a tensor's place among the sorted names alone,
    so that no library's initialisation decides them."""
    tensors = load_file(file)
    for number, name in enumerate(sorted(tensors)):
        generator = torch.Generator().manual_seed(number)
        noise = torch.randn(tensors[name].shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            tensors[name] = 0.5 * noise.abs()
        elif tensors[name].ndim == 1:
            tensors[name] = 1.0 + 0.2 * noise
        else:
            tensors[name] = 0.25 * noise
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with a target each, the same two files of conversations, and their tokenised rows."""
    made = {}
    for name in ("llama", "deepseek"):
        folder = tmp_path_factory.mktemp(name)
        make_target(folder / "target")
        make_conversations(folder / "chats.jsonl", count=30)
        make_conversations(folder / "own.jsonl", count=12, seed=1)
        made[name] = folder
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    save_target(made["deepseek"] / "target", modules=2, copies=False, vocab_size=300, **experts)
    for folder in made.values():
        draw_weights(folder / "target" / "model.safetensors")
    return made


@pytest.fixture
def curve_of(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Recipe], list[tuple[float, float]]]:
    """Runs ``eagle-kit train`` and returns the loss and the gradient norm of every step."""

    def run(recipe: Recipe) -> list[tuple[float, float]]:
        from accelerate.state import AcceleratorState

        folder = folders[recipe.target]
        monkeypatch.chdir(folder)
        data = {"max_length": 200}
        if recipe.mix:
            data |= {"source": None, "mix": list(recipe.mix)}
        config = make_config(folder, output_dir=str(tmp_path / "run"), data=data, validation={"every": 0})
        replaced = {"head": recipe.head, "training": {**COMMON, **recipe.training}}
        words = [str(config), *(f"{name}={json.dumps(section)}" for name, section in replaced.items())]
        stops = [NUM_STEPS] if recipe.resume_at is None else [recipe.resume_at, NUM_STEPS]
        for stop in stops:
            try:
                assert main([*words, "--resume", "--max-steps", str(stop)]) == 0
            finally:  # accelerate keeps the first run's precision for the whole process
                AcceleratorState._reset_state(reset_partial_state=True)
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return [(row["loss"], row["grad_norm"]) for row in rows]

    return run


def read_curve(path: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step in a golden file."""
    rows = [line.split() for line in path.read_text().splitlines() if not line.startswith("#")]
    return [(float(loss), float(norm)) for _, loss, norm in rows]


def write_curve(path: Path, name: str, curve: list[tuple[float, float]]) -> None:
    """Write a golden file."""
    lines = [f"# {name}: float32 on the CPU, torch {torch.__version__}", "# step loss grad_norm"]
    lines += [f"{step:2d} {loss:.8g} {norm:.8g}" for step, (loss, norm) in enumerate(curve, 1)]
    path.write_text("\n".join(lines) + "\n")


def largest_change(before: list[tuple[float, float]], now: list[tuple[float, float]]) -> float:
    """The largest relative change of a loss or a gradient norm."""
    if len(before) != len(now):
        return float("inf")
    old = torch.tensor(before, dtype=torch.float64)
    new = torch.tensor(now, dtype=torch.float64)
    return float(((new - old) / old).abs().max())


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in VARIANTS else pytest.mark.essential) for name in RECIPES],
)
def test_twenty_steps_have_the_losses_and_gradient_norms_of_the_golden_file(
    curve_of: Callable[[Recipe], list[tuple[float, float]]], name: str
) -> None:
    curve = curve_of(RECIPES[name])
    path = GOLDEN / f"{name}.txt"
    if os.environ.get(REFRESH):
        before = read_curve(path) if path.exists() else []
        write_curve(path, name, curve)
        print(f"{name}: largest relative change {largest_change(before, curve):.2e}")
        return
    expected = read_curve(path)
    rtol = RTOL_OF_MUON if RECIPES[name].training.get("optimizer") == "muon" else RTOL
    assert len(curve) == len(expected) == NUM_STEPS
    for step, (now, golden) in enumerate(zip(curve, expected, strict=True), 1):
        assert now == pytest.approx(golden, rel=rtol), f"loss and gradient norm of step {step}"


def test_every_kind_that_can_be_trained_has_a_golden_curve() -> None:
    """A new kind has an entry in RECIPES; docs/how-to/add-an-algorithm.md has the command for its curve."""
    trainable = {name for kind in head_kinds() for name in kind.trained_as}
    assert trainable == {recipe.head.get("kind", "eagle3") for recipe in RECIPES.values()}
    assert {path.stem for path in GOLDEN.iterdir()} == set(RECIPES)


def test_every_setting_of_head_and_training_is_varied() -> None:
    """A new setting has a value in one of RECIPES, or the test that varies it in ELSEWHERE."""
    varied = set(ELSEWHERE)
    for recipe in RECIPES.values():
        varied |= {f"head.{name}" for name in recipe.head}
        varied |= {f"training.{name}" for name in {**COMMON, **recipe.training}}
    settings = {f"head.{name}" for head in HEADS.values() for name in head.model_fields}
    settings |= {f"training.{name}" for head in HEADS.values() for name in head.training_schema.model_fields}
    assert varied == settings
    for setting, file in ELSEWHERE.items():
        assert setting.partition(".")[2] in (GOLDEN.parents[1] / file).read_text(), setting


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "eagle3-resumed"])
def test_the_runs_of_the_golden_files_learn(name: str) -> None:
    """So that no file is written of a trainer that does not; a curriculum's losses are of ever more steps."""
    losses = [loss for loss, _ in read_curve(GOLDEN / f"{name}.txt")]
    assert sum(losses[-5:]) < 0.99 * sum(losses[:5])
