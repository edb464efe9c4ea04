"""A difference from plain decoding names the tokens."""

from types import SimpleNamespace

import torch
from tiny_tokenizers import llama2_like

from eagle_kit.core.output import RequestOutput
from eagle_kit.core.stats import SpecStats
from eagle_kit.eval.identity import compare_outputs


def test_tokens_keep_their_blanks() -> None:
    tokenizer = llama2_like()
    the, other = tokenizer.convert_tokens_to_ids(["▁the", "▁"])
    engine = SimpleNamespace(tokenizer=tokenizer, logits=lambda ids: torch.zeros(1, len(tokenizer)))
    outputs = [
        RequestOutput(prompt_ids=[1], token_ids=[token], text="", finish_reason="stop", stats=SpecStats())
        for token in (the, other)
    ]
    difference = compare_outputs(engine, *outputs)
    assert difference is not None
    assert (difference.plain_text, difference.text) == (" the", " ")
