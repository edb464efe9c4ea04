"""Configs that ship are found by name from any folder, and only where no file of the user has the name."""

from pathlib import Path

import pytest

from eagle_kit.config import load_config
from eagle_kit.config.loading import shipped
from eagle_kit.config.loading.shipped import config_files, find_config, shipped_configs
from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.train.__main__ import main as train

CONFIGS = Path(__file__).parents[2] / "configs"
NAME = "smollm2-135m-eagle3"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """The tests run in a folder without configs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("form", ["configs/{}.yaml", "{}.yaml", "{}", "./{}", "configs/{}"])
@pytest.mark.parametrize("name", [NAME, "qwen3.5-27b-eagle3"])
def test_a_shipped_config_has_several_names(form, name):
    assert find_config(Path(form.format(name))) == CONFIGS / f"{name}.yaml"


def test_a_shipped_config_is_loaded_with_overrides():
    config = load_config(TrainConfig, f"configs/{NAME}.yaml", ["training.max_steps=7"])
    assert config.training.max_steps == 7 and config.target == "smollm2-135m-instruct"


def test_a_file_of_the_user_comes_first(elsewhere):
    (elsewhere / "configs").mkdir()
    own = elsewhere / "configs" / f"{NAME}.yaml"
    own.write_text("target: mine\n")
    assert find_config(Path(f"configs/{NAME}.yaml")) == Path(f"configs/{NAME}.yaml")


@pytest.mark.parametrize("path", [f"other/{NAME}.yaml", f"/configs/{NAME}.yaml", "configs/nope.yaml", "nope"])
def test_other_paths_stand_for_themselves(path):
    assert find_config(Path(path)) == Path(path)
    with pytest.raises(UserError, match="cannot be read"):
        load_config(TrainConfig, path)


def test_a_pattern_that_the_shell_left_stands_for_the_shipped_configs(elsewhere):
    assert config_files("configs/*.yaml") == [str(path) for path in sorted(CONFIGS.glob("*.yaml"))]
    assert config_files("configs/phi-?-eagle3.yaml") == [str(CONFIGS / "phi-4-eagle3.yaml")]
    for word in ("configs/none-*.yaml", "*.yaml", "mine.yaml"):
        assert config_files(word) == [word]


def test_plans_of_all_shipped_configs_are_printed_from_another_folder(capsys):
    assert train(["--plan", "configs/phi-*.yaml"]) == 0
    assert "phi-4" in capsys.readouterr().out


def test_a_wheel_keeps_its_configs_inside_the_package(elsewhere, monkeypatch):
    inside = elsewhere / "site-packages" / "eagle_kit" / "configs"
    inside.mkdir(parents=True)
    (inside / "a.yaml").write_text("target: t\n")
    monkeypatch.setattr(shipped, "PLACES", (inside, CONFIGS))
    assert shipped_configs() == {"a.yaml": inside / "a.yaml"}
