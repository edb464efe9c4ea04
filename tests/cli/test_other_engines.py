"""Options of vLLM and SGLang: who writes one is told what to write here."""

import inspect
import re

import pytest

from eagle_kit import LLM
from eagle_kit.cli import app, serve
from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.other_engines import OPTIONS, PYTHON_NAMES
from eagle_kit.core.errors import UserError
from eagle_kit.train.__main__ import main as train

FLAG = re.compile(r"(?<![\w-])--[a-z-]+")
PLACEHOLDER = re.compile(r"{(\w+)}")


def refusal(*flags):
    with pytest.raises(UserError) as error:
        app.parse(["serve", "a-target", *flags])
    return error.value


def test_no_option_of_ours_is_called_one_of_theirs():
    assert not set(OPTIONS) & set(EngineConfig.model_fields)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_keyword_of_theirs_is_refused_with_ours(name):
    with pytest.raises(UserError, match=f"no option {name}") as error:
        LLM("no-such-target", **{name: 1})
    assert error.value.remedy == OPTIONS[name].format_map(PYTHON_NAMES)


def test_keywords_of_theirs_are_refused_together():
    with pytest.raises(UserError, match="no options max_model_len, block_size") as error:
        LLM("no-such-target", max_model_len=1024, page_size=16, block_size=16)
    assert error.value.remedy == "max_model_len: Give max_context. block_size: Give page_size."


def test_the_keywords_that_remedies_name_exist():
    known = {*EngineConfig.model_fields, *inspect.signature(LLM.__init__).parameters}
    for placeholder in {each for text in OPTIONS.values() for each in PLACEHOLDER.findall(text)}:
        keyword = PYTHON_NAMES[placeholder].partition("=")[0]
        assert placeholder == "call" or keyword in known


@pytest.mark.parametrize("name", serve.REMEDIES)
def test_a_flag_of_theirs_is_one_of_ours_or_refused_with_it(name):
    flag = f"--{name.replace('_', '-')}"
    help_of_serve = app.parse(["serve", "a-target"]).parser.format_help()
    if not re.search(rf"{flag}[\w-]* ", help_of_serve):  # --tp is an abbreviation of ours
        error = refusal(f"{flag}=1")
        assert flag in error.cause and error.remedy == serve.REMEDIES[name]
    for ours in FLAG.findall(serve.REMEDIES[name]):
        assert f"{ours} " in help_of_serve


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        (("--max-model-len", "1024"), "Give --max-context."),
        (("--max_model_len=1024",), "Give --max-context."),
        (("--mem-fraction-static", "0.7"), "Give --gpu-memory-utilization,"),
        (("--speculative-config", '{"model": "x"}'), "eagle-kit serve TARGET --draft DRAFT"),
        (("--speculative-draft-model-path", "x"), "Give --draft."),
        (("--model", "x"), "eagle-kit serve TARGET"),
        (("--tensor_parallel_size", "2"), "Write --tensor-parallel-size."),
        (("--no-such-flag",), "See eagle-kit serve --help."),
        (
            ("--max-num-seqs", "4", "--no-such-flag", "--block-size", "16"),
            "--max-num-seqs: Give --max-running-requests. --block-size: Give --page-size.",
        ),
    ],
)
def test_what_a_user_of_other_engines_types(flags, remedy):
    error = refusal(*flags)
    assert flags[0] in error.cause and remedy in error.remedy


def test_no_target_is_refused_with_the_call():
    for options in ({}, {"model": "x"}):
        with pytest.raises(UserError, match=r"LLM\(TARGET"):
            LLM(**options)


def test_a_setting_of_a_training_given_as_a_flag_is_told_its_form(capsys):
    assert train(["smollm2-135m-eagle3", "--learning-rate", "1e-4"]) == 2
    assert "training.learning_rate=" in capsys.readouterr().err
