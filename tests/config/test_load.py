"""Loading a config: YAML, then overrides, then strict validation; a mistake is one cause and one remedy."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import Field, field_validator

from eagle_kit.config import load_config
from eagle_kit.config.loading.keys import known_keys
from eagle_kit.config.loading.yaml_file import dump_mapping, read_mapping
from eagle_kit.config.options import Section
from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from recipes.pretrain_config import PretrainConfig
from recipes.study_config import StudyConfig


class Data(Section):
    source: str
    limit: int | None = None
    shapes: tuple[str, ...] = ()


class Training(Section):
    learning_rate: float = Field(default=1.0e-3, gt=0.0)
    max_steps: int = 10
    tracker: Literal["off", "offline"] = "off"

    @field_validator("max_steps")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise UserError(f"max_steps is {value}, an odd number.", "Use an even one.")
        return value


class Config(Section):
    target: str
    data: Data
    training: Training = Training()
    extra: Training | None = None


GOOD = "target: tiny\ndata:\n  source: chats.json\ntraining:\n  learning_rate: 3.0e-4\n"


def _write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def _refusal(folder: Path, text: str, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        load_config(Config, _write(folder, text), overrides)
    return caught.value


def test_yaml_gives_the_values_and_defaults_fill_the_rest(tmp_path):
    config = load_config(Config, _write(tmp_path, GOOD))
    assert (config.target, config.data.source, config.training.learning_rate) == (
        "tiny",
        "chats.json",
        3.0e-4,
    )
    assert config.training.max_steps == 10


def test_command_line_wins_over_yaml_and_the_last_override_wins(tmp_path):
    overrides = [
        "training.max_steps=4",
        "training.max_steps=6",
        "data.shapes=['4,1,5', '5,4,16']",
        "data.limit=null",
    ]
    config = load_config(Config, _write(tmp_path, GOOD), overrides)
    assert config.training.max_steps == 6
    assert config.data.shapes == ("4,1,5", "5,4,16")
    assert config.data.limit is None


def test_an_override_opens_a_section_that_the_file_leaves_out(tmp_path):
    text = "target: tiny\ndata: {source: a.json}\n"
    assert load_config(Config, _write(tmp_path, text), ["extra.max_steps=2"]).extra.max_steps == 2


@pytest.mark.parametrize("written", ["3e-4", "3.0e-4", "0.0003", ".3E-3", "30e-5", "+3e-04"])
def test_a_number_is_read_as_in_yaml_1_2(tmp_path, written):
    config = load_config(Config, _write(tmp_path, GOOD.replace("3.0e-4", written)))
    assert config.training.learning_rate == 3e-4
    assert load_config(Config, _write(tmp_path, GOOD), [f"training.learning_rate={written}"]) == config


def test_a_quoted_number_is_refused_where_a_number_belongs(tmp_path):
    error = _refusal(tmp_path, GOOD.replace("3.0e-4", "'0.5'"))
    assert "`training.learning_rate`" in error.cause and "is '0.5'" in error.cause and "number" in error.cause


def test_a_quoted_number_in_a_text_field_stays_text(tmp_path):
    assert load_config(Config, _write(tmp_path, GOOD.replace("tiny", "'3e-4'"))).target == "3e-4"


@pytest.mark.parametrize(
    ("override", "unknown", "nearest"),
    [
        ("training.learning_rat=1.0", "training.learning_rat", "training.learning_rate"),
        ("trainng.max_steps=2", "trainng", "training"),
        ("learning_rate=1.0", "learning_rate", "training.learning_rate"),
        ("data.max_stesp=2", "data.max_stesp", "training.max_steps"),
        ("extra.max_step=2", "extra.max_step", "extra.max_steps"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(tmp_path, override, unknown, nearest):
    error = _refusal(tmp_path, GOOD, override)
    assert f"unknown key `{unknown}`" in error.cause
    assert error.remedy == f"Did you mean `{nearest}`?"


def test_an_unknown_key_like_no_other_lists_its_section(tmp_path):
    error = _refusal(tmp_path, GOOD, "data.zzz=1")
    assert error.remedy == "Use one of: data.source, data.limit, data.shapes."


def test_off_is_text_as_in_yaml_1_2(tmp_path):
    config = load_config(Config, _write(tmp_path, GOOD + "  tracker: off\n"), ["extra.tracker=off"])
    assert config.training.tracker == config.extra.tracker == "off"


def test_a_missing_key_is_named(tmp_path):
    error = _refusal(tmp_path, "target: tiny\ndata: {limit: 3}\n")
    assert "lacks the key `data.source`" in error.cause
    assert error.remedy == "Add `data.source` to it."


def test_a_fraction_is_no_whole_number(tmp_path):
    assert "`training.max_steps`" in _refusal(tmp_path, GOOD, "training.max_steps=2.5").cause


def test_a_value_out_of_range_says_the_limit(tmp_path):
    error = _refusal(tmp_path, GOOD, "training.learning_rate=0.0")
    assert "greater than 0" in error.cause


@pytest.mark.parametrize(
    ("override", "key", "problem"),
    [
        (
            "data.chat_template_kwargs=[{kwargs: {}, weight: 0}]",
            "data.chat_template_kwargs.0.weight",
            "is 0: ",
        ),
        ("data.chat_template_kwargs=[{weight: 1}]", "data.chat_template_kwargs.0.kwargs", "lacks the key"),
        ("data.chat_template_kwargs=5", "data.chat_template_kwargs", "is 5: "),
        ("training.loss={ce: .inf}", "training.loss.ce", "is inf: input should be a finite number"),
        ("data.mix=[{source: []}]", "data.mix.0.source", "at least 1 item"),
        ("data.mix=[{source: [a, 1]}]", "data.mix.0.source.1", "is 1: "),
    ],
)
def test_a_value_of_several_forms_is_named_by_its_own_key(tmp_path, override, key, problem):
    with pytest.raises(UserError) as error:
        load_config(
            TrainConfig,
            _write(tmp_path, "target: tiny\noutput_dir: run\ndata: {source: a.jsonl}\n"),
            [override],
        )
    assert f"`{key}`" in error.value.cause and problem in error.value.cause
    assert f"`{key}`" in error.value.remedy


def test_a_refusal_of_a_validator_keeps_its_cause_and_remedy(tmp_path):
    error = _refusal(tmp_path, GOOD, "training.max_steps=3")
    assert "max_steps is 3, an odd number." in error.cause
    assert error.remedy == "Use an even one."


def test_a_key_given_twice_is_refused_with_its_line(tmp_path):
    error = _refusal(tmp_path, GOOD + "target: other\n")
    assert "line 6" in error.cause and 'duplicate key "target"' in error.cause


def test_broken_yaml_is_refused_with_its_line(tmp_path):
    assert "line 3" in _refusal(tmp_path, "target: tiny\ndata: [1, 2\n  - 3: :\n").cause


@pytest.mark.parametrize(("text", "kind"), [("", "empty"), ("- 1\n", "a list"), ("text", "a str")])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text, kind):
    assert f"is {kind}, not a mapping" in _refusal(tmp_path, text).cause


def test_a_missing_file_a_folder_and_a_binary_are_refused(tmp_path):
    binary = tmp_path / "weights.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, cause in (
        (tmp_path / "no.yaml", "No such file"),
        (tmp_path, "Is a directory"),
        (binary, "not UTF-8"),
    ):
        with pytest.raises(UserError, match=cause):
            load_config(Config, path)


@pytest.mark.parametrize(
    "override", ["training.max_steps", "=3", "training.=3", "target.name=x", "data.limit=[1"]
)
def test_a_malformed_override_is_refused_by_name(tmp_path, override):
    assert repr(override) in _refusal(tmp_path, GOOD, override).cause


LEVELS = [f"&l{level} [{', '.join([f'*l{level - 1}'] * 10)}]" for level in range(1, 10)]
HOSTILE = {
    "NUL": ('"a\\0b"', "NUL"),
    "ten to the ninth aliases": (f"[&l0 [x], {', '.join(LEVELS)}]", "aliases"),
    "half a hexadecimal number": ("0x_", "cannot be read"),
    "half an octal number": ("0o", "valid integer"),
    "a date": ("2024-01-01", "valid integer"),
    "an impossible date": ("2024-13-45", "valid integer"),
    "minutes and seconds": ("1:30", "valid integer"),
    "a point": ("._", "cannot be read"),
    "5,000 digits": ("1" * 5000, "4300 digits"),
    "5,000 hexadecimal digits": ("0x" + "f" * 5000, "4300 digits"),
    "400 digits": ("1" * 400, "largest whole number"),
    "infinity": (".inf", "integer"),
    "no number": ("!!int x", "cannot be read"),
    "no boolean": ("!!bool maybe", "cannot be read"),
    "bytes": ("!!binary aGk=", "no config takes"),
    "an object": ("!!python/object/apply:os.system [ls]", "tag"),
    "no character": ('"\\UFFFFFFFF"', "cannot be read"),
    "half a character": ('"\\ud800"', ""),
    "nesting": ("[" * 4000, "too many levels"),
    "closed nesting": ("[" * 4000 + "]" * 4000, "too many levels"),
    "itself": ("&a [*a]", "Circular"),
    "itself by name": ("&a {b: *a}", "Circular"),
    "a list as key": ("{? [1] : 2}", "no config takes"),
    "a merge of a number": ("{<<: 3}", "merging"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_value_is_one_sentence_in_a_file_and_in_an_override(tmp_path, name):
    value, words = HOSTILE[name]
    in_file = _refusal(tmp_path, GOOD + f"extra:\n  max_steps: {value}\n")
    in_override = _refusal(tmp_path, GOOD, f"extra.max_steps={value}")
    for error in (in_file, in_override):
        assert words in error.cause and "\n" not in error.cause and len(error.cause) < 400
        assert error.cause.endswith(".") and error.remedy.endswith(".")


def test_aliases_and_merges_of_a_common_size_are_read(tmp_path):
    text = GOOD + "extra: &e\n  max_steps: 4\n"
    assert load_config(Config, _write(tmp_path, text), ["extra={<<: {max_steps: 6}, learning_rate: 1}"])
    shared = "target: tiny\ndata: {source: a, shapes: &s ['4,1,5']}\n"
    assert load_config(Config, _write(tmp_path, shared)).data.shapes == ("4,1,5",)


def test_a_merged_mapping_may_be_merged_again(tmp_path):
    text = (
        "target: tiny\ndata: {source: a}\ntraining: &t {<<: {max_steps: 2}, max_steps: 4}\nextra: {<<: *t}\n"
    )
    config = load_config(Config, _write(tmp_path, text))
    assert config.training.max_steps == config.extra.max_steps == 4


def test_a_file_without_end_is_not_read_to_its_end():
    with pytest.raises(UserError, match="more than 1 MiB"):
        load_config(Config, "/dev/zero")


@pytest.mark.parametrize("number", [".nan", ".inf", "1e400", "-.inf"])
def test_numbers_are_finite(tmp_path, number):
    assert "finite" in _refusal(tmp_path, GOOD, f"training.learning_rate={number}").cause


SHIPPED = {
    "configs/smollm2-135m-eagle3": TrainConfig,
    "recipes/deepseek-15m-target": PretrainConfig,
    "recipes/studies/smollm2-135m": StudyConfig,
}


@pytest.mark.parametrize("name", SHIPPED)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_value_of_any_key_is_taken_or_refused(name, data):
    schema = SHIPPED[name]
    path = Path(__file__).parents[2] / f"{name}.yaml"
    key = data.draw(st.sampled_from(known_keys(schema)))
    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=4,
    )
    texts = st.sampled_from([value for value, _ in HOSTILE.values()]) | json_values.map(json.dumps)
    with contextlib.suppress(UserError):
        load_config(schema, path, [f"{key}={data.draw(texts)}"])


TEXTS = ("3e-4", "off", "0o17", "1e5", "<<", "2024-01-01", "", "null", "~", "1:30", "012", ".inf", "yes", "=")


def test_what_is_written_is_read_back(tmp_path):
    value = {
        "texts": list(TEXTS),
        "numbers": [1e-5, 3, -2.5e300, float("inf")],
        "rest": {"a": None, "b": True},
    }
    assert read_mapping(_write(tmp_path, dump_mapping(value))) == value


@pytest.mark.parametrize("text", ["off", "On", "yes", "NO"])
def test_texts_that_are_written_are_texts_of_yaml_1_1_too(text):
    assert yaml.safe_load(dump_mapping({"key": text})) == {"key": text}


def test_a_date_is_text(tmp_path):
    assert read_mapping(_write(tmp_path, "name: 2024-01-01")) == {"name": "2024-01-01"}


@pytest.mark.parametrize(
    ("text", "number"), [("010", 10), ("0o17", 15), ("0x1F", 31), ("-07", -7), ("+12", 12), ("0", 0)]
)
def test_integers_are_those_of_yaml_1_2(tmp_path, text, number):
    assert read_mapping(_write(tmp_path, f"epochs: {text}")) == {"epochs": number}


def test_config_is_read_without_torch():
    code = "import sys, eagle_kit.config, eagle_kit.config.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
