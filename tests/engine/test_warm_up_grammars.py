"""The compiler of grammars is made while the server warms up, and its absence stops nothing."""

import pytest
from tiny_run import make_target

from eagle_kit.core.errors import UserError
from eagle_kit.engine.graphs.warm_up import warm_up
from eagle_kit.engine.llm import LLM
from eagle_kit.models.loading.loader import load_target


def test_the_compiler_of_grammars_is_made_before_the_first_request(tmp_path):
    pytest.importorskip("llguidance")
    folder = make_target(tmp_path / "target")
    llm = LLM(folder, max_context=64)
    assert "compiler of grammars" not in str(llm.warm_up("usual")) and llm.engine().num_grammars == 0
    assert "compiler of grammars" in str(llm.warm_up()) and llm.engine().num_grammars == 1
    bare = LLM(load_target(folder), max_context=64)
    assert not str(bare.warm_up())


def test_a_tokenizer_without_grammars_does_not_stop_the_server(tmp_path, caplog):
    pytest.importorskip("llguidance")
    llm = LLM(make_target(tmp_path / "target"), max_context=64)
    engine = llm.engine()

    def refuse():
        raise UserError("Structured output cannot be had.", "Leave the grammar out.")

    engine._make_grammars = refuse
    assert not str(warm_up(engine)) and "cannot be had" in caplog.text
