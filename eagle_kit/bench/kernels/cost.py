"""What an operation must do, from its shapes: bytes to and from memory, each tensor once, and multiplications
and additions. Small tables (page tables, row numbers of attention) are left out where they are thousandths.

Legend: B requests, N nodes, C columns (prefix and window), T tokens or rows, Hq / Hkv heads, D head size, H
hidden, I intermediate, V / Vd vocabularies, S steps, K top-k, J own keys, L layers, e bytes of an element.
"""

from typing import NamedTuple

CHUNK = 4096
"""Logits of a row that decide a draw, once the sums of the row's chunks are known."""


class Cost(NamedTuple):
    """Bytes that must be moved, and floating-point operations."""

    bytes: int
    flops: int = 0

    def seconds(self, copy_bytes_per_s: float, flops_per_s: float) -> float:
        """The floor: the larger of what the bytes and what the arithmetic take at the ceilings."""
        return max(self.bytes / copy_bytes_per_s, self.flops / flops_per_s)


def window_attention(
    b: int, n: int, c: int, hq: int, hkv: int, d: int, e: int = 2, store_e: int | None = None
) -> Cost:
    """Keys and values of every column once, queries and results: ``B (2 Hkv C D e_store + 2 N Hq D e)``."""
    store = e if store_e is None else store_e
    return Cost(b * (2 * hkv * c * d * store + 2 * n * hq * d * e), 4 * b * n * hq * c * d)


def prefill_attention(b: int, prefix: int, rows: int, hq: int, hkv: int, d: int, e: int = 2) -> Cost:
    """``rows`` new rows of each request behind ``prefix`` cached ones; row i sees ``prefix + i + 1`` keys."""
    pairs = rows * prefix + rows * (rows + 1) // 2
    return Cost(b * e * d * (2 * hkv * (prefix + rows) + 2 * rows * hq), 4 * b * hq * d * pairs)


def mla_attention(b: int, n: int, c: int, h: int, latent: int, rope: int, e: int = 2) -> Cost:
    """One key of ``latent + rope`` values a token for all heads, the value is the latent again."""
    size = latent + rope
    return Cost(b * e * (c * size + n * h * (size + latent)), 2 * b * n * h * c * (size + latent))


def rope_store(t: int, hq: int, hkv: int, d: int, e: int = 2, *, norms: bool = False) -> Cost:
    """All heads read and written once, one half of the tables of cosines and sines (fp32; the other is the
    same), the row numbers, the norms."""
    heads = hq + 2 * hkv
    return Cost(2 * t * heads * d * e + 4 * t * d + 8 * t + (2 * d * e if norms else 0), 3 * t * heads * d)


def rms_norm(t: int, h: int, e: int = 2, *, adds: bool = True) -> Cost:
    """Two tensors in and two out with the residual, one and one without it, and the weight."""
    return Cost(((4 if adds else 2) * t * h + h) * e, (5 if adds else 4) * t * h)


def swiglu(t: int, i: int, e: int = 2) -> Cost:
    """Gate and up in, their product out."""
    return Cost(3 * t * i * e, 5 * t * i)


def draft_head(t: int, h: int, vd: int, k: int, e: int = 2) -> Cost:
    """The weight, the rows, and K ids and log-probabilities a row."""
    return Cost((vd * h + t * h) * e + 12 * t * k, 2 * t * vd * h)


def tree_build(b: int, candidates: int, nodes: int) -> Cost:
    """Token, score and parent of every candidate and the root in; four numbers of every node out."""
    return Cost(b * (20 * candidates + 8 + 32 * nodes))


def grow_beam(b: int, k: int) -> Cost:
    """Token and score of K^2 children, and the beam's scores, numbers and ancestors in; the children's record
    and the next beam out."""
    return Cost(b * (12 * k * k + 20 * k + 20 * k * k + 36 * k))


def accept_greedy(b: int, n: int, s: int, v: int, e: int = 2) -> Cost:
    """All logits and the window in; the path, its tokens and their number out."""
    return Cost(b * (n * v * e + 16 * n + 16 * (s + 1) + 8), b * n * v)


def accept_sampled(verifier: str, b: int, s: int, v: int, e: int = 2) -> Cost:
    """What a verifier reads of the distributions, of which the chunks' sums are known. ``target_only``: a
    chunk at every node of a full path; ``rejection``: p and q (fp32) of one refusal a request; ``block``:
    those of every node of a chain; ``relaxed``: p once."""
    per_request = {
        "target_only": (s + 1) * min(CHUNK, v) * e,
        "rejection": (e + 4) * v,
        "block": (e + 4) * v * s,
        "relaxed": e * v,
    }
    return Cost(b * per_request[verifier])


def commit(layers: int, hkv: int, d: int, rows: int, e: int = 2) -> Cost:
    """``rows`` rows of keys and values of all layers, read and written."""
    return Cost(4 * layers * hkv * d * rows * e)


def sampling(rows: int, v: int, e: int = 2) -> Cost:
    """Every logit once, and the sampled token."""
    return Cost(rows * (v * e + 8), 4 * rows * v)


def small_linear(m: int, n: int, k: int, e: int = 2, *, fp8: bool = False) -> Cost:
    """The weight (one byte each and a scale a row in fp8), the rows, the result."""
    weight = n * k + 4 * n if fp8 else n * k * e
    return Cost(weight + (m * k + m * n) * e, 2 * m * n * k)


def ttt_attention(
    rows: int, t: int, j: int, pairs: int, hq: int, hkv: int, d: int, e: int = 2, *, backward: bool = False
) -> Cost:
    """R query rows over T step-0 keys, ``pairs`` of which are seen, and J own keys a row. Forward: every
    tensor once. Both directions: the inputs once more with result and its gradient, and all gradients; five
    matmuls a pair beside the forward's two."""
    keys = 2 * hkv * (t + rows * j)
    forward, work = e * d * (2 * rows * hq + keys), 4 * hq * d * (pairs + rows * j)
    if not backward:
        return Cost(forward, work)
    return Cost(forward + e * d * (4 * rows * hq + 2 * keys), work * 7 // 2)


def soft_cross_entropy(m: int, h: int, vd: int, p: int, e: int = 2) -> Cost:
    """Features, weight and teacher (fp32) in, with an index and a weight a row; both gradients, and loss and
    best token of each row out. Three matmuls."""
    return Cost(2 * e * (m * h + vd * h) + 4 * p * vd + 12 * m + 12 * m, 6 * m * h * vd)
