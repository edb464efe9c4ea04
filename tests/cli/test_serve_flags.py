"""The flags of `serve` read by a function, for settings of an evaluation."""

import argparse

import pytest

from eagle_kit.cli.serve_flags import add_engine_flags, engine_values, parse_serve_flags
from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import ShapeTable


def test_words_become_options_of_an_engine():
    options = parse_serve_flags(["a-target", "--draft", "a-draft", "--shape", "3,1,4", "--page-size", "32"])
    assert options.flags.model == "a-target" and options.flags.draft == "a-draft"
    assert options.engine.shape == ShapeTable.parse("3,1,4") and options.engine.page_size == 32


def test_flags_of_a_setting_go_before_those_of_all_settings():
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    common = engine_values(parser.parse_args(["--page-size", "32", "--kv-dtype", "fp8_e4m3"]))
    assert common == {"page_size": 32, "kv_dtype": "fp8_e4m3"}
    engine = parse_serve_flags(["a-target", "--page-size", "8"], **common).engine
    assert engine.page_size == 8 and engine.kv_dtype == "fp8_e4m3"


def test_a_wrong_setting_is_a_users_error():
    for words in (["a-target", "--no-such-flag"], [], ["a-target", "--page-size", "0"]):
        with pytest.raises(UserError):
            parse_serve_flags(words)
