"""Tiny trained tokenizers of the two great families: SentencePiece's decoders, and byte-level BPE."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = "the cat sat on the mat. the dogs see cats, naïve café é € and \n\n  two blanks"
SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _sentencepiece_vocab() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges as a SentencePiece model has them: special tokens, bytes, pieces."""
    letters = sorted(set(TEXT.replace(" ", "▁")) - set("\n€ï"))
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=len(letters) + 60, show_progress=False)
    trained.train_from_iterator([TEXT] * 4, trainer)
    pieces = [piece for piece, _ in sorted(trained.get_vocab().items(), key=lambda pair: pair[1])]
    pieces = [piece for piece in pieces if not set(piece) & set("\n€ï")]
    names = dict.fromkeys((*SPECIAL, *BYTES, "▁▁", *pieces, *letters))
    vocab = {name: i for i, name in enumerate(names)}
    merges = [("▁", "▁")]
    for name in vocab:
        for cut in range(1, len(name)):
            parts = name[:cut], name[cut:]
            if name not in (*SPECIAL, *BYTES, "▁▁") and parts[0] in vocab and parts[1] in vocab:
                merges.append(parts)
                break
    return vocab, merges


def _wrapped(tokenizer: Tokenizer, bos: bool = True) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(list(SPECIAL))
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@cache
def llama2_like() -> PreTrainedTokenizerFast:
    """As Llama 2, Mistral 0.1 and Phi-3 have it: the normalizer writes a blank in front, the decoder takes it
    away."""
    vocab, merges = _sentencepiece_vocab()
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return _wrapped(tokenizer)


@cache
def gemma_like() -> PreTrainedTokenizerFast:
    """SentencePiece's pieces and byte tokens without a blank in front; the decoder takes nothing away."""
    vocab, merges = _sentencepiece_vocab()
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _wrapped(tokenizer)


@cache
def metaspace_like() -> PreTrainedTokenizerFast:
    """As converted T5 and older Mistral files have it: Metaspace decodes, and takes the first blank away."""
    vocab, merges = _sentencepiece_vocab()
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _wrapped(tokenizer)


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE as of GPT-2, SmolLM2, Llama 3 and Qwen, which treats no token in a special way."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return _wrapped(tokenizer, bos=False)


FAMILIES = {
    "llama2": llama2_like,
    "gemma": gemma_like,
    "metaspace": metaspace_like,
    "byte-level": byte_level,
}
