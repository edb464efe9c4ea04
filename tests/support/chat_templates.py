"""Tokenizers of published chat formats: a byte vocabulary, the format's special tokens and its template.

The templates in ``templates/`` are written from the formats' descriptions, with what matters here as
published: which turns are rewritten later on, where thoughts, tools, calls and results stand, what ends a
response.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "templates"
END = {
    "llama3": "<|eot_id|>",
    "deepseek_r1": "<｜end▁of▁sentence｜>",
    "harmony": "<|return|>",
    "gemma": "<end_of_turn>",
}
"""Tokens that end a response, where it is not ``<|im_end|>``."""
SPECIAL = re.compile(r"<[|｜][\w▁]+[|｜]>|<(?:start|end)_of_turn>|<bos>")
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added tokens that are text to a decoder that skips special ones."""


@cache
def tokenizer_for(name: str) -> Any:
    """A tokenizer with the template ``name``, in which some letters and two line ends merge."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("t", "he"), ("Ċ", "Ċ"), ("a", "l"), ("i", "n")]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    lines = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s?\S+|\s+"), "isolated")  # line ends stay together
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [lines, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token=END.get(name, "<|im_end|>")
    )
    fast.add_special_tokens({"additional_special_tokens": sorted({*SPECIAL.findall(template)})})
    fast.add_tokens(list(PLAIN))
    fast.chat_template = template
    return fast
