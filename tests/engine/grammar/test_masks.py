"""Bits of allowed tokens, where the tokenizer knows more tokens than the target."""

import pytest
import torch
from tiny_run import make_target

from eagle_kit.core.structured_outputs import Grammar
from eagle_kit.engine.grammar.compiler import GrammarCompiler
from eagle_kit.engine.grammar.masks import allowed_bits, unpacked
from eagle_kit.models.loading.source import load_tokenizer
from eagle_kit.ops.attention.window import chain_bits
from eagle_kit.ops.tree_build import Tree


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(make_target(tmp_path_factory.mktemp("masks") / "target"))


def allowed(match, vocab_size) -> torch.Tensor:
    """Tokens of the target that a match allows next, bool ``[V]``."""
    root = torch.zeros(1, 1, dtype=torch.int64)
    tree = Tree(root, root, root, chain_bits(1, torch.device("cpu"))[None])
    return unpacked(allowed_bits([match], tree, vocab_size), vocab_size)[0, 0]


def test_a_token_of_the_tokenizer_alone_leaves_something_to_choose_from(tokenizer):
    """The only token that may follow is the first behind the vocabulary of the target, in its last word."""
    (space,) = tokenizer.convert_tokens_to_ids(["Ġ"])
    assert space % 32, "it must not begin a word"
    outside = GrammarCompiler(tokenizer, space, [2]).start(Grammar("regex", " "))
    assert allowed(outside, space).all(), "a choice among no tokens would not be a number"
    inside = GrammarCompiler(tokenizer, space + 1, [2]).start(Grammar("regex", " "))
    assert allowed(inside, space + 1).nonzero().tolist() == [[space]]
