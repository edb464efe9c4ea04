"""A tiny target, its tokenizer, and engines that say what they are told."""

from typing import Any

import pytest
from tiny import tiny_head
from tiny_run import make_target

from eagle_kit.engine.llm import LLM
from eagle_kit.models.loading.source import load_tokenizer
from tests.server.api.scripted import ScriptedEngine, scripted_llm
from tests.server.api.serving import serving, wait_until


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def tokenizer(target_folder):
    return load_tokenizer(target_folder)


@pytest.fixture
def scripted(tokenizer):
    """``scripted(text, ...)`` makes (llm, engine) whose response to every request is that text."""

    def make(
        response: str, *, slots: int = 4, max_context: int = 400, **options: Any
    ) -> tuple[LLM, ScriptedEngine]:
        ids = tokenizer(response, add_special_tokens=False)["input_ids"]
        llm = scripted_llm(tokenizer, max_batch_size=slots, max_context=max_context)
        return llm, ScriptedEngine(llm, lambda request: ids, **options)

    return make


@pytest.fixture(scope="session")
def real_server(target_folder):
    """A random target with a random head, whose drafts are sometimes right; the pool is small enough to run
    full."""
    plain = LLM(str(target_folder), max_context=128)
    head = tiny_head(plain.target, draft_vocab_size=67)
    sizes = {"max_batch_size": 4, "max_context": 128, "kv_tokens": 512, "page_size": 4}
    llm = LLM(str(target_folder), head, shape="3,1,4", **sizes)
    with serving(llm, llm.engine(), max_queued=300) as running:
        running.llm = llm
        yield running


@pytest.fixture
def pool_is_conserved(real_server):
    """After the test nothing runs and no page is lost."""
    yield
    wait_until(lambda: not real_server.engine.has_work and real_server.service.engine.num_live == 0)
    real_server.engine.check()
    assert real_server.engine.kv_usage == 0.0
