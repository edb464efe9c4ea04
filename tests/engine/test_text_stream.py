"""Incremental text equals the text decoded at once, whatever the tokens and wherever a stop text falls."""

import json
import random

import pytest
from chat_templates import tokenizer_for
from tiny_tokenizers import BYTES, FAMILIES, gemma_like
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from eagle_kit.engine.text_stream import Detokenizer, TextStream

TEXTS = (
    "The cat sees the dog.\n\nÜber den Wolken, 雲の上 — naïve café 👩‍👩‍👧‍👦 end.",
    "def f(x):\n    return x ** 2  # ∑ ∞ €\n```\n",
    "<|im_end|> User: Привет, мир! \U0001f600\U0001f600 �� done",
)


@pytest.fixture(scope="module")
def byte_level():
    """Byte-level BPE with merges, so that tokens cut characters anywhere; id 0 is special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=340, special_tokens=["<eos>"], initial_alphabet=alphabet)
    )
    return tokenizer


@pytest.fixture(scope="module")
def byte_fallback():
    """SentencePiece manners: a leading space is dropped, unknown characters are byte tokens, 0 is special."""
    words = ["<eos>", "▁the", "▁cat", "▁", "s", "a", "▁sees", "."]
    vocab = {word: i for i, word in enumerate(words + [f"<0x{byte:02X}>" for byte in range(256)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return tokenizer


def cut(text: str, stops: tuple[str, ...]) -> str:
    """The definition: up to the stop text that is complete first, the earlier beginning among equals."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(ends)[1]] if ends else text


def runs(ids: list[int], rng: random.Random) -> list[list[int]]:
    """Cut into runs of 1 to 6 tokens, as speculation emits them."""
    out = []
    while ids:
        n = rng.randint(1, 6)
        out.append(ids[:n])
        ids = ids[n:]
    return out


def stream_all(tokenizer, ids, stops, rng) -> tuple[str, int]:
    """Push everything, checking that the text only grows -> (text, tokens kept)."""
    stream = TextStream(tokenizer, stops)
    deltas, shown, kept = [], 0, 0
    for run in runs(ids, rng):
        count = stream.push(run)
        deltas.append(stream.text[shown:])
        shown = len(stream.text)
        kept += len(run) if count is None else count
        if count is not None:
            break
    stream.finish()
    deltas.append(stream.text[shown:])
    assert "".join(deltas) == stream.text
    return stream.text, kept


@pytest.mark.parametrize("seed", range(60))
def test_deltas_join_to_the_text_decoded_at_once_cut_before_the_first_stop(byte_level, seed):
    rng = random.Random(seed)
    for _ in range(12):
        if rng.random() < 0.5:
            ids = byte_level.encode(rng.choice(TEXTS)).ids
            for _ in range(rng.randint(0, 4)):
                ids.insert(rng.randrange(len(ids)), rng.randrange(byte_level.get_vocab_size()))
        else:
            ids = [rng.randrange(byte_level.get_vocab_size()) for _ in range(rng.randint(1, 120))]
        text = byte_level.decode(ids, skip_special_tokens=True)
        stops = []
        for _ in range(rng.randint(0, 3)):
            at, length = rng.randrange(len(text) + 1), rng.randint(1, 9)
            stops.append(text[at : at + length] or "\n")
            if rng.random() < 0.4:
                stops[-1] += rng.choice("xyz")
        shown, kept = stream_all(byte_level, ids, tuple(stops), rng)
        assert shown == cut(text, tuple(stops))
        if shown == text:
            assert kept == len(ids)


def test_a_character_cut_into_bytes_is_shown_when_it_is_whole(byte_level):
    ids = [byte_level.token_to_id(c) for c in "ðŁĺĢ"]
    assert None not in ids and byte_level.decode(ids) == "\U0001f600"
    stream = TextStream(byte_level)
    for token in ids[:-1]:
        assert stream.push([token]) is None and stream.text == ""
    stream.push(ids[-1:])
    assert stream.text == "\U0001f600"


def test_an_unfinished_character_is_released_at_the_end(byte_level):
    ids = byte_level.encode("ok").ids + [byte_level.token_to_id("ð")]
    stream = TextStream(byte_level)
    stream.push(ids)
    assert stream.text == "ok"
    stream.finish()
    stream.finish()
    assert stream.text == "ok�"


def test_a_possible_beginning_of_a_stop_text_is_held_back_and_released(byte_level):
    stream = TextStream(byte_level, ("###",))
    one, other = byte_level.encode("#").ids, byte_level.encode("a").ids
    assert stream.push(other + one) is None and stream.text == "a"
    assert stream.push(one) is None and stream.text == "a"
    assert stream.push(other) is None and stream.text == "a##a"
    assert stream.push(one * 2) is None and stream.text == "a##a"
    stream.finish()
    assert stream.text == "a##a##" and not stream.stopped


def test_the_tokens_up_to_the_one_that_completes_the_stop_are_kept(byte_level):
    ids = [byte_level.token_to_id(c) for c in "abcde"]
    stream = TextStream(byte_level, ("cd",))
    assert stream.push(ids[:3]) is None
    assert stream.push(ids[3:]) == 1
    stream.finish()
    assert (stream.text, stream.stopped) == ("ab", True)


def test_the_stop_text_that_is_complete_first_wins_however_the_text_is_cut(byte_level):
    letters = [byte_level.token_to_id(c) for c in "abcd"]
    for stops, text in ((("abcd", "bc"), "a"), (("bc", "abc"), ""), (("d", "abcd"), "")):
        for sizes in ((1, 1, 1, 1), (4,), (2, 2), (3, 1)):
            stream, at = TextStream(byte_level, stops), 0
            for size in sizes:
                if stream.push(letters[at : at + size]) is not None:
                    break
                at += size
            assert stream.text == text and stream.stopped


def test_ill_formed_bytes_without_end_are_shown_in_time(byte_level):
    token = byte_level.token_to_id("Ģ")  # the byte 0x80, which begins no character
    detokenizer = Detokenizer(byte_level)
    pieces = [detokenizer.push([token]) for _ in range(500)]
    assert len(detokenizer._window) < 50 and any(pieces)
    assert "".join(pieces) + detokenizer.flush() == "�" * 500


def test_a_leading_space_is_dropped_once_even_behind_special_tokens(byte_fallback):
    the, cat, eos = (byte_fallback.token_to_id(word) for word in ("▁the", "▁cat", "<eos>"))
    for ids in ([the, cat, the], [eos, the, eos, eos, cat, the], [the, eos, cat, eos, the, eos]):
        stream = TextStream(byte_fallback)
        for token in ids:
            stream.push([token])
        stream.finish()
        assert stream.text == byte_fallback.decode(ids) == "the cat the"


@pytest.mark.parametrize("seed", range(5))
def test_byte_tokens_of_whole_characters_decode_as_at_once(byte_fallback, seed):
    rng = random.Random(seed)
    for _ in range(20):
        ids = []
        for _ in range(rng.randint(1, 12)):
            if rng.random() < 0.5:
                ids.append(rng.randrange(1, 8))
            else:
                ids += [8 + byte for byte in rng.choice("é€\U0001f600ж").encode()]
        assert stream_all(byte_fallback, ids, (), rng)[0] == byte_fallback.decode(ids)


def test_ill_formed_byte_tokens_neither_raise_nor_take_text_back(byte_fallback):
    rng = random.Random(4)
    for _ in range(50):
        ids = [rng.randrange(byte_fallback.get_vocab_size()) for _ in range(60)]
        text, _ = stream_all(byte_fallback, ids, (), rng)
        assert text


def test_nothing_is_decoded_from_nothing(byte_level):
    stream = TextStream(byte_level, ("x",))
    assert stream.push([]) is None
    stream.finish()
    assert stream.text == "" and not stream.stopped


@pytest.mark.parametrize("size", [1, 2, 5])
def test_special_tokens_that_are_shown_are_text_and_others_are_not(size):
    """gpt-oss's markers between bytes of characters, among tokens that stay hidden."""
    tokenizer = tokenizer_for("harmony")
    text = "<|channel|>final<|message|>にほん <|start|>🙂"
    hidden = [tokenizer.convert_tokens_to_ids("<|return|>"), tokenizer.bos_token_id]
    ids = tokenizer(text)["input_ids"]
    mixed = [token for each in ids for token in (*hidden, each)] + hidden
    names = ("<|channel|>", "<|message|>", "<|start|>")
    shown = frozenset(tokenizer.convert_tokens_to_ids(names))
    stream = TextStream(tokenizer, ("🙂",), included_special_tokens=shown)
    for i in range(0, len(mixed), size):
        if not stream.stopped:
            stream.push(mixed[i : i + size])
    stream.finish()
    assert stream.text == text[:-1] and stream.stopped
    plain = TextStream(tokenizer)
    plain.push(mixed)
    plain.finish()
    assert plain.text == tokenizer.decode(ids, skip_special_tokens=True) == "finalにほん 🙂"


@pytest.mark.parametrize("first", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_characters_of_byte_tokens_are_shown_though_no_run_ends_with_one(byte_fallback, first, size):
    """A run that ends within a character is ill-formed as a whole to the decoder, however long it is."""
    ids = [1, *(8 + byte for byte in ("\U0001f600" * 20 + "ж€" * 10).encode()), 2]
    stream = TextStream(byte_fallback)
    stream.push(ids[:first])
    longest = 0
    for at in range(first, len(ids), size):
        before = len(stream.text)
        stream.push(ids[at : at + size])
        longest = max(longest, len(stream.text) - before)
    stream.finish()
    assert stream.text == byte_fallback.decode(ids) and longest < 10


RUNS = (
    ["<eos>"],
    ["<0xC3>", "<0xA9>", "<0xC3>"],
    ["<0x80>", "<0xC3>", "<0xA9>"],
    ["<0x80>"] + ["<0x41>"] * 10_000,
    ["<0xE2>"],
    ["<0xF0>", "<0x9F>"],
)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: " ".join(run[:3]))
def test_tokens_without_a_character_are_decoded_in_proportion_to_their_number(byte_fallback, run):
    ids = [byte_fallback.token_to_id(name) for name in run]
    assert _work_of(byte_fallback, ids, 400) < 2.5 * _work_of(byte_fallback, ids, 200) + 1


class CountingTokenizer:
    """Tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer):
        self.count = 0
        self._tokenizer = tokenizer

    def decode(self, ids, skip_special_tokens):
        self.count += len(ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


def _work_of(tokenizer, run, num_tokens):
    """Tokens that are decoded for a response of ``num_tokens`` that repeats ``run``."""
    counting = CountingTokenizer(tokenizer)
    ids = [run[i % len(run)] for i in range(num_tokens)]
    detokenizer = Detokenizer(counting)
    pieces = [detokenizer.push([token]) for token in ids]
    pieces.append(detokenizer.flush())
    assert len("".join(pieces)) == len(tokenizer.decode(ids, skip_special_tokens=True))
    return counting.count


def _with_empty_token(tokenizer):
    """Return a copy of a tokenizer in which the last token has an empty name."""
    parts = json.loads(tokenizer.to_str())
    parts["model"]["vocab"][""] = tokenizer.get_vocab_size()
    return Tokenizer.from_str(json.dumps(parts))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("offsets", [(0,), (1,), (0, 1), (0, 0, 1)])
def test_tokens_without_a_text_are_decoded_in_proportion_to_their_number(family, offsets):
    """The empty token, and an id of the target's padding behind it."""
    tokenizer = _with_empty_token(FAMILIES[family]().backend_tokenizer)
    empty = tokenizer.token_to_id("")
    run = [empty + offset for offset in offsets]
    assert _work_of(tokenizer, run, 200) < 2.5 * _work_of(tokenizer, run, 100) + 1


@pytest.mark.parametrize("family", ["llama2", "gemma", "metaspace"])
@pytest.mark.parametrize("size", [3, 1000])
def test_a_response_with_byte_tokens_has_one_text_however_it_arrives(family, size):
    """A character is shown before the next byte makes the run that it belongs to ill-formed."""
    tokenizer = _with_empty_token(FAMILIES[family]().backend_tokenizer)
    empty = tokenizer.token_to_id("")
    names = [f"<0x{byte:02X}>" for byte in (0x45, 0xC3, 0xA9, 0xE2, 0x82, 0xFF)]
    tokens = [tokenizer.token_to_id(name) for name in (*names, "▁the", "s")]
    rng = random.Random(size)
    for _ in range(20):
        ids = rng.choices([*tokens, empty, empty + 1], k=24)
        assert _in_pieces(tokenizer, ids, size) == _in_pieces(tokenizer, ids, 1)


def test_bytes_that_become_ill_formed_at_once_are_shown_as_they_are_one_by_one():
    tokenizer = gemma_like()
    ids = [72, 246, 272]
    assert [tokenizer.convert_ids_to_tokens(token) for token in ids[:2]] == [BYTES[0x45], BYTES[0xF3]]
    texts = {_in_pieces(tokenizer, ids, size) for size in (1, 2, 3)}
    assert len(texts) == 1
    assert texts.pop().startswith("E")


def _in_pieces(tokenizer, ids, size):
    """Text of a response whose tokens arrive ``size`` at a time."""
    stream = TextStream(tokenizer)
    for start in range(0, len(ids), size):
        stream.push(ids[start : start + size])
    stream.finish()
    return stream.text
