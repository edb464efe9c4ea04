"""The text of a response behind its prompt, and names of tokens, against the tokenizer's own decoding."""

import random
from itertools import combinations, pairwise

import pytest
from tiny_tokenizers import FAMILIES, SPECIAL, llama2_like

from eagle_kit.engine.text_stream import TextContext, TextStream, special_tokens, text_context
from eagle_kit.engine.token_names import TokenNames

TEXTS = ("the cat sat the cat", "  two  blanks ", "naïve é\n\n€ \U0001f600 ñandú", "cats.\nthe dogs")


@pytest.fixture(params=FAMILIES)
def tokenizer(request):
    return FAMILIES[request.param]()


def encoded(tokenizer, text):
    return tokenizer(text)["input_ids"]


def read(tokenizer, runs, context, stop=(), special=frozenset()):
    """Text of a response that arrives in ``runs``."""
    stream = TextStream(tokenizer, stop, special, context)
    for run in runs:
        if not stream.stopped:
            stream.push(run)
    stream.finish()
    return stream.text


def cuttings(ids):
    """All ways to cut a list into runs."""
    for count in range(len(ids)):
        for places in combinations(range(1, len(ids)), count):
            yield [ids[start:stop] for start, stop in pairwise((0, *places, len(ids)))]


def text_before(tokenizer, prompt, context):
    """What is shown of a prompt."""
    finished = prompt[: len(prompt) - len(context.unfinished)]
    return tokenizer.backend_tokenizer.decode(finished)


@pytest.mark.parametrize("text", TEXTS)
def test_prompt_and_response_join_to_the_whole_wherever_they_are_cut(tokenizer, text):
    ids = encoded(tokenizer, text)
    whole = tokenizer.backend_tokenizer.decode(ids)
    for at in range(len(ids) + 1):
        context = text_context(tokenizer, ids[:at], is_text=False)
        tail = [*context.token_ids, *context.unfinished]
        assert tail == ids[at - len(tail) : at]
        prompt = text_before(tokenizer, ids[:at], context)
        assert not prompt.endswith("\N{REPLACEMENT CHARACTER}")
        for size in (1, 2, 3, 100):
            runs = [ids[start : start + size] for start in range(at, len(ids), size)]
            assert prompt + read(tokenizer, runs, context) == whole, (at, size)


def test_every_cutting_of_a_response_gives_the_same_text(tokenizer):
    prompt = encoded(tokenizer, "the cat")
    response = encoded(tokenizer, "x sat é the\n€")
    response = [token for token in response if token != tokenizer.bos_token_id][1:]
    context = text_context(tokenizer, prompt, is_text=True)
    decode = tokenizer.backend_tokenizer.decode
    expected = decode(prompt + response).removeprefix(decode(prompt))
    texts = {read(tokenizer, runs, context) for runs in cuttings(response[:11])}
    assert len(texts) == 1 and expected.startswith(texts.pop().rstrip("\N{REPLACEMENT CHARACTER}"))
    assert {read(tokenizer, [response[:at], response[at:]], context) for at in range(len(response))} == {
        expected
    }


@pytest.mark.parametrize("seed", range(8))
def test_random_words_join_to_the_whole_behind_prompts_of_any_kind(tokenizer, seed):
    """Blanks, special tokens and characters of bytes, in prompts that are longer than a context."""
    rng = random.Random(seed)
    pieces = [[token] for token in range(259, len(tokenizer))] + [[1], [2]] * 3
    pieces += [encoded(tokenizer, "a" + sign)[-len(sign.encode()) :] for sign in "ñ\U0001f600ж"] * 4
    decode = tokenizer.backend_tokenizer.decode
    for _ in range(12):
        count = rng.choice((1, 3, 12, 60))
        ids = [token for _ in range(count) for token in rng.choice(pieces)]
        for at in {0, 1, len(ids) // 2, max(0, len(ids) - 3)}:
            if decode(ids).count("\N{REPLACEMENT CHARACTER}"):  # letters of byte-level BPE that are half ones
                continue
            context = text_context(tokenizer, ids[:at], is_text=False)
            runs = [[token] for token in ids[at:]]
            assert text_before(tokenizer, ids[:at], context) + read(tokenizer, runs, context) == decode(ids)


def test_a_stop_text_begins_with_the_blank_behind_the_prompt():
    tokenizer = llama2_like()
    ids = encoded(tokenizer, "the cat sat")
    context = text_context(tokenizer, ids[:3], is_text=True)
    assert read(tokenizer, [ids[3:]], context) == " sat"
    assert read(tokenizer, [ids[3:], ids[1:3]], context, stop=(" sat",)) == ""
    assert read(tokenizer, [ids[3:]], TextContext()) == "sat"


def test_special_tokens_at_the_end_of_a_prompt_hide_its_text_from_nobody():
    tokenizer = llama2_like()
    ids = encoded(tokenizer, "the cat")
    sat = tokenizer.convert_tokens_to_ids("▁sat")
    context = text_context(tokenizer, ids + [2] * 100, is_text=False)
    assert read(tokenizer, [[sat]], context) == " sat"
    context = text_context(tokenizer, [1] * 100, is_text=False)
    assert read(tokenizer, [[sat]], context) == tokenizer.backend_tokenizer.decode([1, sat]) == "sat"


def test_shown_special_tokens_are_text_in_the_prompt_too(tokenizer):
    shown = special_tokens(tokenizer)
    assert shown == frozenset(tokenizer.convert_tokens_to_ids(SPECIAL))
    ids = [*encoded(tokenizer, "the cat"), 2, *encoded(tokenizer, "the cat")[-1:], 2, 1, 70]
    whole = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
    for at in range(len(ids)):
        context = text_context(tokenizer, ids[:at], is_text=False, skip_special_tokens=False)
        assert not context.unfinished
        before = tokenizer.backend_tokenizer.decode(ids[:at], skip_special_tokens=False)
        assert before + read(tokenizer, [[token] for token in ids[at:]], context, special=shown) == whole


def test_the_context_of_a_long_prompt_is_short_and_found_with_few_decodings(tokenizer):
    """Also where the prompt is ill-formed bytes throughout."""

    class Counting:
        num_ids = 0

        def decode(self, ids, skip_special_tokens):
            self.num_ids += len(ids)
            return tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    half = encoded(tokenizer, "añ")[-1]
    for prompt in (encoded(tokenizer, "the cat sat. " * 500), [half] * 5000):
        counting = Counting()
        context = text_context(counting, prompt, is_text=False)
        assert len(context.token_ids) <= 70 and counting.num_ids < 4000
        counting.num_ids = 0
        text_context(counting, prompt, is_text=True)
        assert counting.num_ids < 1000


def test_ill_formed_bytes_behind_a_prompt_are_shown(tokenizer):
    half = encoded(tokenizer, "añ")[-1]
    prompt = encoded(tokenizer, "the cat")
    context = text_context(tokenizer, prompt, is_text=True)
    assert read(tokenizer, [[half]] * 3, context) == "\N{REPLACEMENT CHARACTER}" * 3
    context = text_context(tokenizer, prompt + [half] * 20, is_text=False)
    assert "\N{REPLACEMENT CHARACTER}" in read(tokenizer, [[half]] * 3, context)


def test_names_of_tokens_differ_and_join_to_the_text(tokenizer):
    names = TokenNames(tokenizer)
    written = [names.written(token) for token in range(len(tokenizer))]
    assert len(set(written)) == len(written) and "" not in written
    for text in TEXTS:
        ids = [token for token in encoded(tokenizer, text) if token != tokenizer.bos_token_id]
        whole = b"".join(names.of(token)[1] for token in ids).decode()
        blank = "" if whole.startswith(text) else " "  # the one that the tokenizer writes in front
        assert whole == blank + text
    if tokenizer.convert_tokens_to_ids("▁the") != tokenizer.unk_token_id:
        assert names.of(tokenizer.convert_tokens_to_ids("▁the")) == (" the", b" the")


def test_byte_tokens_are_named_as_bytes_where_their_character_has_a_token():
    tokenizer = llama2_like()
    names = TokenNames(tokenizer)
    for name, expected in {
        "<0x61>": r"bytes:\x61",
        "a": "a",
        "<0x20>": r"bytes:\x20",
        "▁": " ",
        "▁▁": "  ",
        "<0x0A>": "\n",
        "<0xE2>": r"bytes:\xe2",
        "</s>": "</s>",
    }.items():
        assert names.written(tokenizer.convert_tokens_to_ids(name)) == expected
    assert names.of(tokenizer.convert_tokens_to_ids("<0x61>")) == ("a", b"a")
