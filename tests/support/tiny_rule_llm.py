"""Engines with the target and the head that have learned a rule, and a tokenizer for them."""

import copy

from tiny_rule import VOCABULARY, learned_target

from eagle_kit.engine.llm import LLM


def word_tokenizer():
    """Tokens ``w0`` to ``w40``, and a template that is the messages' words alone."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return tokenizer


def trained_llm(head=None, shape=None) -> LLM:
    """An engine with the target of a rule; without a head it decodes plainly."""
    target, tokenizer = copy.deepcopy(learned_target()), word_tokenizer()
    sizes = {"max_batch_size": 4, "graph_mode": "off"}
    return LLM(target, draft=head, tokenizer=tokenizer, shape=shape, **sizes)
