"""Training configs by `head.kind`: each kind's keys, and sentences for keys of others."""

from pathlib import Path

import pytest

from eagle_kit.config.drafts import HEADS
from eagle_kit.config.drafts.blocks import DSparkHeadConfig, DSparkTrainingConfig
from eagle_kit.config.drafts.eagle1 import Eagle1TrainingConfig
from eagle_kit.config.drafts.fused_states import Eagle3HeadConfig, Eagle3TrainingConfig
from eagle_kit.config.loading.keys import SYNONYMS, known_keys
from eagle_kit.config.loading.loader import load_config
from eagle_kit.config.train import TrainConfig
from eagle_kit.config.training import TrainingConfig
from eagle_kit.core.errors import UserError

MINIMAL = "target: t\noutput_dir: o\ndata: {source: chats.jsonl}\n"
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that leaves head and training out."""
    found = tmp_path / "config.yaml"
    found.write_text(MINIMAL)
    return found


def refusal(path: Path, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        load_config(TrainConfig, path, overrides)
    return caught.value


def test_without_a_kind_a_head_is_eagle3(path: Path) -> None:
    for overrides in ([], ["head.draft_vocab_size=64"], ["training.loss=kl"]):
        config = load_config(TrainConfig, path, overrides)
        assert type(config.head) is Eagle3HeadConfig
        assert type(config.training) is Eagle3TrainingConfig


@pytest.mark.parametrize("kind", HEADS)
def test_the_kind_chooses_the_models_of_both_sections(path: Path, kind: str) -> None:
    config = load_config(TrainConfig, path, [f"head.kind={kind}", "training.betas=[0.8, 0.9]"])
    assert type(config.head) is HEADS[kind]
    assert type(config.training) is HEADS[kind].training_schema
    assert config.training.betas == (0.8, 0.9)


def test_a_key_of_another_kind_is_refused_with_the_keys_of_this_one(path: Path) -> None:
    error = refusal(path, "head.kind=mtp", "head.block_size=4")
    assert "head.block_size has no meaning for a head of the kind mtp" in error.cause
    assert error.remedy.endswith("are kind, num_modules, init.")
    config = load_config(TrainConfig, path, ["head.block_size=4", "head={kind: mtp}"])
    assert "head={kind: mtp}" in error.remedy and config.head.kind == "mtp"
    error = refusal(path, "head.kind=mtp", "training.num_anchors=4")
    assert "training.num_anchors has no meaning for a head of the kind mtp" in error.cause
    assert "loss" in error.remedy and "detach_steps" in error.remedy and "ttt_length" not in error.remedy


def test_a_misspelled_key_is_refused_with_the_nearest_of_its_section(path: Path) -> None:
    error = refusal(path, "head={kind: eagle1, fc_bais: false}")
    assert error.remedy == "Did you mean head.fc_bias?"
    error = refusal(path, "training.learningrate=1.0")
    assert error.remedy == "Did you mean training.learning_rate?"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("training.lr", "training.learning_rate?"),
        ("training.num_epochs", "training.epochs?"),
        ("training.batch_size", "training.sequences_per_step?"),
        ("num_train_epochs", "`training.epochs`?"),
        ("train_data_path", "`data.source`?"),
        ("target_model_path", "`target`?"),
        ("judge", "`validation`?"),
        ("judge.every", "`validation`?"),
    ],
)
def test_a_key_of_another_training_is_refused_with_ours(path: Path, key: str, meant: str) -> None:
    assert refusal(path, f"{key}=1").remedy == f"Did you mean {meant}"


def test_every_synonym_is_a_key_of_ours() -> None:
    leaves = {key.rpartition(".")[2] for key in known_keys(TrainConfig)}
    assert set(SYNONYMS.values()) <= leaves


@pytest.mark.parametrize("kind", ["standalone", "5", "null", "[eagle3]"])
def test_an_unknown_kind_is_refused_with_the_known_ones(path: Path, kind: str) -> None:
    error = refusal(path, f"head.kind={kind}")
    assert "head.kind is" in error.cause
    assert error.remedy == f"Use one of {', '.join(HEADS)}."


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("head.fc_norm=3", "`head.fc_norm`"),
        ("head=3", "`head`"),
        ("training=3", "`training`"),
        ("training.learning_rate='1'", "`training.learning_rate`"),
        ("training.ttt_length=2.5", "`training.ttt_length`"),
        ("training.ttt_curriculum.share=2", "`training.ttt_curriculum.share`"),
        ("head={kind: p-eagle, aux_layer_ids: []}", "`head.aux_layer_ids`"),
    ],
)
def test_a_wrong_value_is_named_by_its_own_key(path: Path, override: str, named: str) -> None:
    assert named in refusal(path, override).cause


def test_what_a_config_holds_is_read_back(path: Path) -> None:
    overrides = ["head={kind: dspark, markov_rank: 8}", "training={loss: tv, confidence_weight: 0.5}"]
    config = load_config(TrainConfig, path, overrides)
    saved = config.model_dump(mode="json")
    assert saved["training"]["confidence_weight"] == 0.5 and saved["head"]["markov_rank"] == 8
    assert "regression" not in saved["training"] and "fc_bias" not in saved["head"]
    assert TrainConfig.model_validate(saved) == config


def test_common_settings_become_those_of_the_kind() -> None:
    data = {"source": "a"}
    config = TrainConfig(
        target="t",
        output_dir="o",
        data=data,
        head={"kind": "eagle1"},
        training=TrainingConfig(ttt_length=3),
    )
    assert type(config.training) is Eagle1TrainingConfig
    assert config.training.ttt_length == 3 and "ttt_length" in config.training.model_fields_set
    of_another = DSparkTrainingConfig(confidence_weight=0.5)
    with pytest.raises(ValueError, match="training.confidence_weight has no meaning"):
        TrainConfig(target="t", output_dir="o", data=data, training=of_another)


def test_a_head_without_confidence_has_no_weight_for_it(path: Path) -> None:
    error = refusal(path, "head={kind: dspark, confidence_head: false}", "training.confidence_weight=2")
    assert "head.confidence_head is false" in error.cause


def test_a_head_begun_from_another_one_takes_all_from_it(path: Path) -> None:
    config = load_config(TrainConfig, path, ["head={kind: dspark, start_from: org/draft}"])
    assert isinstance(config.head, DSparkHeadConfig)
    assert config.head.first_draft == "org/draft" and config.head.num_counted_tokens is None
    error = refusal(path, "head={kind: dspark, start_from: org/draft, markov_rank: 8}")
    assert "markov_rank is that of the head that start_from names" in error.cause


TRAINING_CONFIGS = [file for file in sorted(CONFIGS.rglob("*.yaml")) if "\nhead:" in file.read_text()]


@pytest.mark.parametrize("file", TRAINING_CONFIGS, ids=lambda file: file.stem)
def test_shipped_configs_are_read(file: Path) -> None:
    config = load_config(TrainConfig, file)
    assert type(config.head) is HEADS[config.head.kind]


def test_parts_of_a_regression_are_checked(path: Path) -> None:
    error = refusal(path, "head.kind=eagle1", "training.regression.topk=5")
    assert "topk has no meaning unless topk_weight is above 0" in error.cause
