"""Options of vLLM and SGLang in Python: who writes one is told what to write here."""

import inspect
import re

import pytest

from eagle_kit import LLM
from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.other_engines import keyword_remedy, other_flags
from eagle_kit.core.errors import UserError
from eagle_kit.train.__main__ import main as train

KEYWORD = re.compile(r"\b([a-z_]+)=")
FLAGS = other_flags().flags
KEYWORDS = sorted({each.name.replace("-", "_") for each in FLAGS if "." not in each.name})
THEIRS = [name for name in KEYWORDS if name not in {*EngineConfig.model_fields, "model", "draft"}]
SAMPLE = [name for number, name in enumerate(THEIRS) if number % 40 == 0]


def test_every_keyword_of_theirs_has_a_remedy_that_exists():
    known = {*EngineConfig.model_fields, *inspect.signature(LLM.__init__).parameters}
    for name in THEIRS:
        remedy = keyword_remedy(name, EngineConfig.model_fields)
        assert remedy is not None and remedy.endswith(".") and len(remedy) > 5, name
        keywords = set(KEYWORD.findall(remedy.replace("EAGLE_KIT_DISABLE=", "")))
        assert keywords <= known | {"num_speculative_tokens"}, name
        given = re.match(r"Give (\w+)[.,=]", remedy)
        assert given is None or given[1] in known, name


@pytest.mark.parametrize("name", SAMPLE)
def test_a_keyword_of_theirs_is_refused_with_ours(name):
    with pytest.raises(UserError, match=f"no option {name}") as error:
        LLM("no-such-target", **{name: 1})
    assert error.value.remedy == keyword_remedy(name, EngineConfig.model_fields)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("max_model_len", "Give max_context."),
        ("context_length", "Give max_context."),
        ("enforce_eager", "Give graph_mode='off'."),
        ("disable_radix_cache", "Give prefix_cache=False."),
        ("no_enable_prefix_caching", "Leave it out: prefixes are cached, unless with prefix_cache=False."),
        ("disable_overlap_schedule", "Give lag=0."),
        ("tp_size", "Give tensor_parallel."),
        ("tp", "Give tensor_parallel."),
        ("speculative_draft_model_path", "Give draft=DRAFT."),
        ("num_speculative_tokens", "Give shape, steps,topk,tokens: 4,1,5 drafts"),
        ("speculative_num_steps", "Give shape, steps,topk,tokens: 4,1,5 drafts"),
        ("trust_remote_code", "Code in a model's folder is never run"),
        ("enable_lora", "Adapters are not applied. Merge the adapter"),
        ("served_model_name", "Leave it out: it is an option of eagle-kit serve."),
    ],
)
def test_what_a_user_of_other_engines_writes(name, remedy):
    with pytest.raises(UserError, match=f"no option {name}") as error:
        LLM("no-such-target", **{name: 1})
    assert error.value.remedy.startswith(remedy)


def test_keywords_of_theirs_are_refused_together():
    with pytest.raises(UserError, match="no options max_model_len, block_size") as error:
        LLM("no-such-target", max_model_len=1024, page_size=16, block_size=16)
    assert error.value.remedy == "max_model_len: Give max_context. block_size: Give page_size."


def test_a_name_of_no_engine_has_the_nearest_option():
    with pytest.raises(UserError, match="no option max_contex") as error:
        LLM("no-such-target", max_contex=1024)
    assert error.value.remedy == "Did you mean max_context?"


def test_no_target_is_refused_with_the_call():
    for options in ({}, {"model": "x"}):
        with pytest.raises(UserError, match=r"LLM\(TARGET"):
            LLM(**options)


def test_a_setting_of_a_training_given_as_a_flag_is_told_its_form(capsys):
    assert train(["smollm2-135m-eagle3", "--learning-rate", "1e-4"]) == 2
    assert "training.learning_rate=" in capsys.readouterr().err
