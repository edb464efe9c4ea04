"""Python code that lies in a model's folder is never run, whatever the folder's files ask for."""

import ast
import json
from pathlib import Path

import pytest
import torch

import eagle_kit
from benchmarks.peers import transformers_model
from eagle_kit.core.errors import UserError
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.source import load_tokenizer

PACKAGE = Path(eagle_kit.__file__).parent
CODE = "import pathlib\npathlib.Path({made!r}).touch()\nclass Own:\n    pass\n"


@pytest.fixture(params=["y on a terminal", "no terminal"])
def answers(request, monkeypatch):
    """What the prompt of transformers would get; returns the prompts that were shown."""
    prompts = []

    def answer(prompt=""):
        prompts.append(prompt)
        if request.param == "no terminal":
            raise EOFError
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    return prompts


@pytest.fixture
def folder(tmp_path):
    """Model folder in which config, tokenizer and model name a class of code that makes a file ``made``."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "own.py").write_text(CODE.format(made=str(tmp_path / "made")))
    classes = {name: "own.Own" for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM")}
    config = {"model_type": "own", "architectures": ["Own"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def was_run(folder):
    return (folder.parent / "made").exists()


@pytest.mark.parametrize("named", [["own.Own", None], [None, "own.Own"], "list alone"])
@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_tokenizer_of_the_folders_own_code_is_refused_by_name(folder, answers, named, has_tokens):
    table = ["own.Own", None] if named == "list alone" else {"AutoTokenizer": named}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Own", "auto_map": table}))
    if has_tokens:
        (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError) as caught:
        load_tokenizer(folder)
    assert "own.Own" in caught.value.cause and "never run" in caught.value.cause
    assert "tokenizer.json" in caught.value.remedy
    assert not answers and not was_run(folder)


def test_a_tiktoken_file_is_refused_since_it_lacks_the_rules(folder, answers):
    """transformers would read it by rules of another model, of those types that it knows."""
    (folder / "config.json").write_text('{"model_type": "deepseek_v3", "architectures": ["X"]}')
    (folder / "tiktoken.model").write_text("YQ== 0\nYg== 1\n")
    with pytest.raises(UserError, match=r"tiktoken\.model.*rules.*tokenizer\.json"):
        load_tokenizer(folder)
    assert not answers and not was_run(folder)


@pytest.mark.parametrize("load", [load_target, lambda name: transformers_model(name, torch.zeros(1))])
@pytest.mark.parametrize("kind", ["own", "olmo2"])
def test_a_model_of_the_folders_own_code_is_an_error(folder, answers, load, kind):
    config = json.loads((folder / "config.json").read_text()) | {"model_type": kind}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises((ValueError, OSError)):
        load(str(folder))
    assert not answers and not was_run(folder)


def test_every_call_of_transformers_says_that_code_is_not_run():
    """Without it transformers asks on the terminal, and a ``y`` runs the code."""
    found = 0
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        for call in ast.walk(ast.parse(text)) if "transformers" in text else ():
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            owner = ast.unparse(call.func.value)
            if "Auto" in owner and call.func.attr in ("from_pretrained", "from_config"):
                said = {word.arg: ast.unparse(word.value) for word in call.keywords}
                assert said.get("trust_remote_code") == "False", f"{path}:{call.lineno}"
                found += 1
    assert found >= 6
