"""Drafts that commit 57ad6cd exported, before version 0.2.0, load today and answer the same, token for token.

`make_drafts_of_57ad6cd.py` made the archive with the code of that commit.
"""

import json
import tarfile
from pathlib import Path

import pytest

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.drafts.files.validate import validate_draft
from eagle_kit.engine.llm import LLM

ARCHIVE = Path(__file__).with_name("drafts-of-57ad6cd.tar.gz")
KINDS = ("eagle3", "eagle3.1", "eagle1", "p-eagle", "dflash", "dspark")
MAX_TOKENS = 32


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """The unpacked archive."""
    folder = tmp_path_factory.mktemp("released")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def plain(released):
    """An engine around the target, whose model the others share."""
    return LLM(str(released / "target"), shape="none", max_context=256)


def test_every_kind_is_there(released):
    assert sorted(json.loads((released / "answers.json").read_text())) == sorted(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_released_draft_answers_the_same(released, plain, kind):
    answers = json.loads((released / "answers.json").read_text())[kind]
    num_accepted = 0
    for shape, responses in answers.items():
        llm = LLM(plain.target, str(released / kind), tokenizer=plain.tokenizer, shape=shape, max_context=256)
        turns = [[{"role": "user", "content": response["prompt"]}] for response in responses]
        prompts = [plain.renderer.prompt_token_ids(each) for each in turns]
        found = llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS))
        for response, now in zip(responses, found, strict=True):
            assert (list(now.token_ids), now.text) == (response["token_ids"], response["text"])
            assert now.stats.histogram == response["histogram"]
            assert now.stats.num_accepted_at == response["num_accepted_at"]
            num_accepted += sum(now.stats.num_accepted_at)
    assert num_accepted > 0, "a draft of which nothing is accepted would answer the same, whatever it read"


@pytest.mark.parametrize("kind", KINDS)
def test_a_released_draft_is_valid(released, kind):
    findings = validate_draft(released / kind, str(released / "target"))
    assert len(findings) > 3 and not [each for each in findings if each.level == "error"]
