"""Ancestor bits of window nodes in Triton: bit j % 64 of word j // 64 of a node is set if window key j is its
ancestor, or the node itself.

The words of some nodes are a tuple of WORDS tensors, whose shape broadcasts with the keys that they are
compared with. With one word, that of windows of up to 64 keys, nothing is selected among words.
"""

import triton
import triton.language as tl


@triton.jit
def count_bits(bits):
    """Number of set bits of int64 words."""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    bits += bits >> 8
    bits += bits >> 16
    bits += bits >> 32
    return (bits & 0x7F).to(tl.int32)


@triton.jit
def load_words(first, is_row, AXIS: tl.constexpr, WORDS: tl.constexpr):
    """Load the words of nodes: ``first [M]`` points to the first of each. They get a dimension ``AXIS``."""
    words = ()
    for w in tl.static_range(WORDS):
        word = tl.expand_dims(tl.load(first + w, is_row, 0), AXIS)
        words = words + (word,)  # type: ignore[assignment]
    return words


@triton.jit
def has_key(words, key, WORDS: tl.constexpr):
    """Whether window keys ``key``, int64 from 0 to 64 WORDS - 1, are ancestors."""
    word = words[0]
    if WORDS > 1:
        for w in tl.static_range(1, WORDS):
            word = tl.where(key >= 64 * w, words[w], word)
        key = key % 64
    return ((word >> key) & 1) != 0


@triton.jit
def count_up_to(words, key, WORDS: tl.constexpr):
    """Number of ancestors that are window key ``key``, int64 from 0 to 64 WORDS - 1, or before it."""
    if WORDS == 1:
        return count_bits(words[0] << (63 - key))
    count = (key * 0).to(tl.int32)
    for w in tl.static_range(WORDS):
        bit = tl.minimum(tl.maximum(key - 64 * w, 0), 63)
        up_to = tl.where(key < 64 * w, 0, words[w] << (63 - bit))
        count += count_bits(up_to)
    return count
