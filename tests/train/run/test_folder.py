"""The run folder: settings that a resumed run may change, checkpoints that stay, notes in ``run.yaml``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from eagle_kit.config.drafts import HEADS
from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.train.run.folder import RunFolder, flatten

MINIMAL: dict[str, Any] = {"target": "t", "output_dir": "o", "data": {"source": "a"}}
CHANGES: dict[str, Any] = {
    "target": "other",
    "seed": 1,
    "data.source": "b",
    "data.mix": [{"source": "b"}],
    "data.limit": 5,
    "data.max_length": 512,
    "data.eval_conversations": 7,
    "data.chat_template": "other.jinja",
    "data.chat_template_kwargs": {"enable_thinking": True},
    "data.chat_template_seed": 1,
    "head.kind": "eagle1",
    "head.draft_vocab_size": 4096,
    "head.vocab_map": "words",
    "head.aux_layer_ids": [1, 2, 3],
    "head.fc_norm": True,
    "head.norm_output": True,
    "head.norm_before_residual": True,
    "head.lm_head_init": "random",
    "head.intermediate_size": 80,
    "head.sliding_window": 64,
    "head.norm_before_fc": True,
    "head.qk_norm": True,
    "head.own_embedding": True,
    "head.fc_bias": False,
    "head.start_from": "a draft",
    "head.num_layers": 2,
    "head.mask_token_id": 5,
    "head.block_size": 4,
    "head.markov_rank": 8,
    "head.markov_head_type": "rnn",
    "head.confidence_head": False,
    "head.num_modules": 2,
    "head.init": "random",
    "training.ttt_length": 3,
    "training.ttt_curriculum": {"start": 2},
    "training.step_decay": 0.5,
    "training.step_weights": [1, 1, 1, 1, 1, 1, 0],
    "training.dpace_alpha": 0.5,
    "training.down_sample_ratio": 0.5,
    "training.down_sample_ratio_min": 0.5,
    "training.num_anchors": 8,
    "training.confidence_weight": 2.0,
    "training.detach_steps": True,
    "training.regression": {"token_weight": 0.2},
    "training.loss": "tv",
    "training.lk_eta": 2.0,
    "training.loss_rows": "published",
    "training.loss_normalisation": "sequence",
    "training.feature_noise": {"kind": "gaussian", "amount": 0.1},
    "training.optimizer": "muon",
    "training.learning_rate": 1e-3,
    "training.betas": [0.8, 0.9],
    "training.eps": 1e-6,
    "training.weight_decay": 0.1,
    "training.muon_learning_rate_ratio": 2.0,
    "training.muon_momentum": 0.9,
    "training.ema_decay": 0.9,
    "training.schedule": "linear",
    "training.decay_ratio": 0.5,
    "training.warmup": "log",
    "training.warmup_steps": 4,
    "training.warmup_ratio": 0.1,
    "training.min_learning_rate_ratio": 0.1,
    "training.epochs": 2.0,
    "training.max_steps": 9,
    "training.sequences_per_step": 8,
    "training.gradient_accumulation": 2,
    "training.clip_norm": None,
    "training.precision": "bfloat16",
    "training.state_format": "fp8",
}
"""A value other than the default for every setting that decides what is learned."""
FREE: dict[str, Any] = {
    "output_dir": "elsewhere",
    "data.store": "states",
    "data.decontaminate": ["ours"],
    "data.cache_dir": "cache",
    "data.preview": False,
    "data.num_workers": 2,
    "data.max_broken_lines": 5,
    "training.gradient_checkpointing": "steps",
    "training.target_placement": "cpu",
    "training.cache_hidden_states": "disk",
    "training.cpu_threads": 1,
    "training.peer_timeout_s": 9.0,
    "training.save_every": 7,
    "training.keep_last": 7,
    "training.log_every": 7,
    "validation.every": 7,
    "validation.prompts": 7,
    "validation.max_tokens": 7,
    "validation.shapes": ["2,1,3"],
    "validation.batch_size": 7,
    "validation.patience": 7,
    "tracking.wandb": "offline",
    "tracking.project": "mine",
    "tracking.entity": "us",
    "tracking.group": "heads",
    "tracking.name": "first",
    "tracking.tags": ["a"],
    "tracking.tensorboard": True,
    "tracking.report": False,
}
"""The same for every setting that a resumed run may change (docs/how-to/resume-and-debug.md); those of
validation before the first one."""
NEEDED: dict[str, dict[str, Any]] = {
    "training.lk_eta": {"training.loss": "lk-hybrid"},
    "training.muon_momentum": {"training.optimizer": "muon"},
    "training.muon_learning_rate_ratio": {"training.optimizer": "muon"},
    "training.decay_ratio": {"training.schedule": "wsd"},
    "training.down_sample_ratio_min": {"training.down_sample_ratio": 0.5},
    "training.regression": {"head.kind": "eagle1"},
    "training.num_anchors": {"head.kind": "dflash"},
    "training.confidence_weight": {"head.kind": "dspark"},
    "head.fc_bias": {"head.kind": "eagle1"},
    "head.num_layers": {"head.kind": "p-eagle"},
    "head.mask_token_id": {"head.kind": "p-eagle"},
    "head.block_size": {"head.kind": "dflash"},
    "head.markov_rank": {"head.kind": "dspark"},
    "head.markov_head_type": {"head.kind": "dspark"},
    "head.confidence_head": {"head.kind": "dspark"},
    "head.num_modules": {"head.kind": "mtp"},
}
"""Settings without which another one is refused, before the change and behind it."""


def config_with(settings: dict[str, Any]) -> TrainConfig:
    """The minimal config with dotted ``settings``."""
    raw = {**MINIMAL, "data": dict(MINIMAL["data"])}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        if section:
            raw[section] = {**raw.get(section, {}), name: value}
        else:
            raw[name] = value
    if "data.mix" in settings:
        del raw["data"]["source"]
    return TrainConfig.model_validate(raw)


def settings_of(schema: type[BaseModel]) -> Iterator[str]:
    """Dotted settings of the sections of ``schema``, each section's own fields not opened further."""
    yield from sorted({f"head.{name}" for head in HEADS.values() for name in head.model_fields})
    of_kinds = [head.training_schema.model_fields for head in HEADS.values()]
    yield from sorted({f"training.{name}" for names in of_kinds for name in names})
    for name, field in schema.model_fields.items():
        if name in ("head", "training"):
            continue
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from (f"{name}.{inner}" for inner in section.model_fields)
        else:
            yield name


def run_of(folder: Path, settings: dict[str, Any]) -> RunFolder:
    run = RunFolder(folder / "run")
    run.start(config_with(settings), "eagle-kit train c.yaml")
    return run


def test_every_setting_may_be_changed_on_resume_or_may_not() -> None:
    assert sorted([*CHANGES, *FREE]) == sorted(settings_of(TrainConfig))


@pytest.mark.parametrize("key", CHANGES)
def test_a_setting_that_decides_what_is_learned_cannot_be_changed_on_resume(tmp_path: Path, key: str) -> None:
    needed = NEEDED.get(key, {})
    run = run_of(tmp_path, needed)
    run.check_resumable(config_with(needed))
    with pytest.raises(UserError, match="cannot be resumed with other settings") as error:
        run.check_resumable(config_with({**needed, key: CHANGES[key]}))
    assert key in error.value.cause


def test_keys_of_other_kinds_that_a_run_once_wrote_are_left_out(tmp_path: Path) -> None:
    run = run_of(tmp_path, {})
    saved = yaml.safe_load((run.path / "run.yaml").read_text())
    saved["config"]["head"] |= {"block_size": 8, "fc_bias": True}
    saved["config"]["training"] |= {"num_anchors": 512, "regression": None}
    (run.path / "run.yaml").write_text(yaml.safe_dump(saved))
    run.check_resumable(config_with({}))
    with pytest.raises(UserError, match="seed"):
        run.check_resumable(config_with({"seed": 3}))


@pytest.mark.parametrize("key", FREE)
def test_a_setting_that_decides_nothing_of_it_can_be_changed_on_resume(tmp_path: Path, key: str) -> None:
    changed = config_with({key: FREE[key]})
    assert flatten(changed.model_dump(mode="json")) != flatten(config_with({}).model_dump(mode="json"))
    run_of(tmp_path, {}).check_resumable(changed)


def test_a_default_that_was_written_out_before_is_the_null_of_now(tmp_path: Path) -> None:
    """Runs of before ``head.draft_vocab_size`` could be null have 8192 there."""
    run_of(tmp_path, {"head.draft_vocab_size": 8192}).check_resumable(config_with({}))
    with pytest.raises(UserError, match="draft_vocab_size"):
        run_of(tmp_path / "other", {"head.draft_vocab_size": 4096}).check_resumable(config_with({}))


def test_the_last_checkpoints_stay_by_their_number_and_half_ones_are_none(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in (2, 9, 10, 100, 20):
        (tmp_path / f"step-{step}" / "trainer").mkdir(parents=True)
        (tmp_path / f"step-{step}" / "trainer" / "state.json").write_text("{}")
    (tmp_path / "step-300" / "trainer").mkdir(parents=True)
    (tmp_path / "step-x" / "trainer").mkdir(parents=True)
    assert [step for step, _ in run.checkpoints()] == [2, 9, 10, 20, 100]
    run.rotate(2)
    assert [step for step, _ in run.checkpoints()] == [20, 100]
    assert {path.name for path in tmp_path.iterdir()} == {"step-20", "step-100", "step-300", "step-x"}


def test_run_yaml_notes_every_resume_and_has_the_newest_settings(tmp_path: Path) -> None:
    run = run_of(tmp_path, {})
    for step in (3, 5):
        for row in range(1, 8):
            run.metrics.append({"step": row})
            run.validations.append({"step": row})
        run.resume(config_with({"training.save_every": step}), f"command {step}", step)
        rows = [row["step"] for row in run.metrics.rows()]
        assert rows == [row["step"] for row in run.validations.rows()] and max(rows) == step
    saved = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert saved["command"] == "eagle-kit train c.yaml" and saved["config"]["training"]["save_every"] == 5
    assert [(each["step"], each["command"]) for each in saved["resumed"]] == [
        (3, "command 3"),
        (5, "command 5"),
    ]
    assert all("torch" in each["versions"] for each in (saved, *saved["resumed"]))
