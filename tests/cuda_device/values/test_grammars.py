"""Grammars, forbidden words and stop texts on the device have the texts of the CPU, beside free text."""

import copy
import json
import re
from typing import Any

import pytest
import torch
from conformance import Texts
from tiny import tiny_head
from tiny_run import make_target

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.structured_outputs import Grammar
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.load_draft import copy_head
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.source import load_tokenizer
from tests.cuda_device.device import phase

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PAIRS = "(ab|cd|ef|gh){8}"
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Tell me.", {"grammar": Grammar("json_schema", json.dumps(SCHEMA))}),
    ("Hi.", {"grammar": Grammar("regex", PAIRS)}),
    ("Yes?", {"grammar": Grammar("regex", PAIRS), "temperature": 1.0, "seed": 5, "logprobs": 2}),
    ("Tell me.", {"bad_words": ("a", "be", "\x03"), "max_tokens": 16}),
    ("Hi.", {"bad_words": ("ab",), "grammar": Grammar("regex", "[a-h]{12}"), "temperature": 0.8, "seed": 2}),
    ("Tell me. Tell me.", {"stop": ("e", "Q"), "temperature": 1.0, "seed": 3}),
    ("No.", {"max_tokens": 20, "logit_bias": {80: 3.0}, "frequency_penalty": 0.5}),
    ("Tell me.", {"grammar": Grammar("json_object"), "max_tokens": 1}),
)
"""Some of them end by their grammar, some by their length, one by a stop text."""
OPTIONS = {"max_batch_size": 3, "max_context": 128, "kv_tokens": 1024}


def parameters() -> list[SamplingParams]:
    """Sampling parameters of the requests."""
    return [SamplingParams(**{"max_tokens": 40, **sampling}) for _, sampling in REQUESTS]


class Bytes:
    """A target with a vocabulary of bytes, its tokenizer, and a head that has learned its texts."""

    def __init__(self, folder: Any) -> None:
        self.target = load_target(make_target(folder))
        self.tokenizer = load_tokenizer(folder)
        prompts = [prompt for prompt, _ in REQUESTS]
        plain = LLM(
            copy.deepcopy(self.target), tokenizer=self.tokenizer, shape="none", graph_mode="off", **OPTIONS
        )
        self.plain = plain.generate(prompts, parameters())
        texts = Texts(self.target, [each.prompt_ids + each.token_ids for each in self.plain])
        self.head = texts.teach_head(tiny_head(self.target, draft_vocab_size=250), 30)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Bytes(tmp_path_factory.mktemp("bytes") / "target")


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("3,1,4", {}),
        ("4,4,12", {}),
        ("4,2,6", {"algorithm": "NGRAM"}),
        ("none", {}),
    ],
    ids=["chain", "tree", "n-grams", "no drafts"],
)
def test_texts_of_grammars_are_those_of_plain_decoding_on_the_cpu(made, shape, options):
    head = None if options or shape == "none" else copy_head(made.head).to("cuda")
    target = copy.deepcopy(made.target).to("cuda")
    llm = LLM(target, head, tokenizer=made.tokenizer, shape=shape, batch_sizes=(1, 3), **OPTIONS, **options)
    with phase() as found:
        responses = llm.generate([prompt for prompt, _ in REQUESTS], parameters())
    llm.engine().check()

    for mine, theirs in zip(responses, made.plain, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert (mine.text, mine.finish_reason) == (theirs.text, theirs.finish_reason)
        for one, other in zip(mine.logprobs, theirs.logprobs, strict=True):
            torch.testing.assert_close(one.logprob, other.logprob, rtol=0, atol=1e-4)
    assert set(json.loads(responses[0].text)) == {"name", "age"}
    assert re.fullmatch(PAIRS, responses[1].text) and re.fullmatch(PAIRS, responses[2].text)
    assert {response.finish_reason for response in responses} == {"stop", "length"}
    if head is not None:
        assert llm.engine().totals.spec.accept_length > 1
    assert found.counts["captures"] > 0 and found.counts["graph_launches"] > 0
    assert found.counts["uncomputed_launches"] == 0
