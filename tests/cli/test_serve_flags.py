"""The flags of `serve` read by a function, for settings of an evaluation."""

import argparse
import logging

import pytest

from eagle_kit.cli.serve import show_log, show_stats_log
from eagle_kit.cli.serve_flags import add_engine_flags, engine_values, parse_serve_flags
from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import ShapeTable
from eagle_kit.server.stats_log import LOGGER_NAME


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


@pytest.mark.parametrize("given", ["ngram", "NGRAM", "Ngram"])
def test_an_algorithm_is_known_in_any_case(given):
    options = parse_serve_flags(["a-target", "--speculative-algorithm", given])
    assert options.engine.algorithm == options.flags.speculative_algorithm == "NGRAM"
    assert EngineConfig(algorithm=given).algorithm == "NGRAM"


@pytest.fixture
def restored_loggers():
    loggers = [logging.getLogger(name) for name in ("eagle_kit", LOGGER_NAME)]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers = handlers


@pytest.mark.usefixtures("restored_loggers")
def test_the_log_has_the_lines_of_its_level_and_no_line_twice(capsys):
    show_stats_log()
    show_log("info")
    logging.getLogger("eagle_kit.engine.options").info("a fact of the engine")
    logging.getLogger("eagle_kit.engine.options").debug("a detail")
    logging.getLogger(LOGGER_NAME).info("a line about traffic")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" ")[2].partition(" ")[2] for line in lines] == [
        "INFO eagle_kit.engine.options: a fact of the engine",
        "a line about traffic",
    ]
    show_log("error")
    logging.getLogger("eagle_kit.engine.options").warning("a warning")
    assert not capsys.readouterr().err
