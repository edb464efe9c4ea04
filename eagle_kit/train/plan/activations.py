"""Bytes that the head's forward pass keeps for its backward pass, and what the loss needs beside them.

Counted tensor by tensor for the code of ``ttt.py`` and of the heads; a test compares the sum with what
autograd really saves. On a GPU attention, SwiGLU, norms and rotations are kernels.

Legend: T tokens, R rows with loss at step 0 (anchors, of heads that draft blocks), K steps, H hidden, I inner
size of the MLP, Vd draft vocabulary.
"""

from typing import NamedTuple

from eagle_kit.drafts.registry import kind_of
from eagle_kit.models.config import DecoderConfig, HeadArchitecture
from eagle_kit.ops.soft_cross_entropy.reference import GROUP_ROWS

FP32 = 4
GPU_LOGIT_ROWS = 4096
"""Rows of logits that the loss holds at once in the Triton form (``soft_cross_entropy/triton.py``)."""


class Numerics(NamedTuple):
    """Precision and device, which decide the bytes of a saved value.

    Attributes:
        operand: bytes of what matmuls read: 2 under bfloat16 autocast, else 4.
        is_gpu: attention, SwiGLU, norms and rotations are the Triton kernels.
    """

    operand: int
    is_gpu: bool

    @property
    def attention(self) -> int:
        """Bytes of a query, key or value that attention saves; on a CPU it computes in fp32."""
        return self.operand if self.is_gpu else FP32


class RowBytes(NamedTuple):
    """Bytes that one row of a layer saves: ``before`` its attention, ``behind`` it, and for each ``key`` with
    its value."""

    before: float
    behind: float
    key: float


def saved_bytes(draft: HeadArchitecture, tokens: int, rows: int, steps: int, numerics: Numerics) -> float:
    """Bytes saved by the head's K steps; weights and the target's states are not counted.

    Args:
        tokens: T.
        rows: R; later steps have a few less, which is not counted.
        steps: K.
    """
    if size := draft.block_rows(steps):
        return _saved_by_blocks(draft, tokens, rows * size, size, numerics)
    row = _row_bytes(draft, numerics)
    layer = draft.layer
    if draft.num_modules > 1:
        return steps * tokens * (row.before + row.behind + row.key)
    if (layers := draft.cache.num_layers) > 1:
        everywhere = tokens + (steps - 1) * rows
        own = rows * row.key * steps * (steps - 1) / 2
        return layers * (everywhere * (row.before + row.behind + row.key) + own)
    shares = numerics.operand == FP32 and not numerics.is_gpu
    if shares and layer.mla is None:  # keys and values are views of the tensors they were made in
        prefix = tokens * (2 * layer.num_heads * layer.head_dim * FP32 + 1.5 * row.key)
    elif shares:  # values are padded to the width of keys in every step, keys are not
        prefix = tokens * row.key * (steps + 1) / 2
    else:  # every step makes a copy in the dtype of its attention
        prefix = tokens * row.key * steps
    own = rows * row.key * steps * (steps - 1) / 2
    return (
        tokens * row.before
        + rows * row.behind
        + prefix
        + own
        + (steps - 1) * rows * (row.before + row.behind)
    )


def _saved_by_blocks(draft: HeadArchitecture, tokens: int, rows: int, size: int, numerics: Numerics) -> float:
    """:func:`saved_bytes` of ``rows`` in blocks of ``size`` behind anchors. Of the text only its context is
    there, and every layer's keys and values of it."""
    width, hidden = numerics.operand, draft.hidden_size
    copies = 3 if width < FP32 and not numerics.is_gpu else 2  # what fc gives, and its norm
    tables = 2 * draft.layer.head_dim * FP32
    per_layer = tokens * _keys_bytes(draft, numerics) + rows * _block_row_bytes(draft, size, numerics)
    once = tokens * (copies * hidden * width + tables) + rows * (hidden * width + tables)
    return draft.cache.num_layers * per_layer + once


def _keys_bytes(draft: HeadArchitecture, numerics: Numerics) -> float:
    """Bytes of a row's queries, keys and values, whose queries and keys are normed, before attention."""
    layer, width = draft.layer, numerics.operand
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    if numerics.is_gpu:  # inputs of the two norms, and what attention reads of keys and values
        return float((queries + 3 * keys) * width)
    read = 2 * keys * FP32 if width < FP32 else (queries + keys) * FP32  # copies, or rotated in one tensor
    return float((queries + 2 * keys) * width + read)


def _block_row_bytes(draft: HeadArchitecture, size: int, numerics: Numerics) -> float:
    """Bytes that a layer saves of one row of a block of ``size``."""
    layer, width = draft.layer, numerics.operand
    queries = layer.num_heads * layer.head_dim
    scores = layer.num_heads * FP32 * (1 if numerics.is_gpu else 1 + size)  # on a CPU those of own keys
    attended = 2 * queries * numerics.attention + queries * width + scores
    return (
        _keys_bytes(draft, numerics) + attended + 4 * draft.hidden_size * width + _mlp_bytes(layer, numerics)
    )


def _row_bytes(draft: HeadArchitecture, numerics: Numerics) -> RowBytes:
    layer, width = draft.layer, numerics.operand
    size, queries, keys = draft.hidden_size, layer.num_heads * layer.head_dim, layer.num_kv_heads
    mla = layer.mla
    states = kind_of(draft).saved_activation_bytes(draft, width, is_gpu=numerics.is_gpu)
    before, behind = (float(size) * values for values in states)
    before += 2 * (mla.qk_rope_head_dim if mla else layer.head_dim) * FP32
    behind += 2 * queries * numerics.attention + layer.num_heads * FP32 * (1 if numerics.is_gpu else 2)
    if mla is not None:
        latents = (mla.q_lora_rank or 0) + mla.kv_lora_rank
        before += latents * 2 * width
        behind += layer.num_heads * mla.v_head_dim * width
    elif width < numerics.attention:
        behind += queries * width
    behind += _mlp_bytes(layer, numerics)
    return RowBytes(before, behind, 2 * keys * layer.head_dim * numerics.attention)


def _mlp_bytes(layer: DecoderConfig, numerics: Numerics) -> float:
    """SwiGLU keeps gate and up, and its product for the next matmul."""
    inner = 3 * numerics.operand
    moe = layer.moe
    if moe is None:
        return float(inner * layer.intermediate_size)
    states = layer.hidden_size * (2 * numerics.operand + FP32)
    routed = moe.num_experts_per_token * (inner * moe.intermediate_size + states)
    return float(routed + inner * moe.shared_intermediate_size + 3 * FP32 * moe.num_experts)


def loss_bytes(
    draft: HeadArchitecture, tokens: int, rows: int, steps: int, block: int, numerics: Numerics
) -> float:
    """Bytes of the loss: teachers and logits of a block of rows, gradients of states and output layer.

    Args:
        block: rows of step 0 whose teachers exist together; anchors have gaps between them, and so have
            their teachers up to ``steps`` positions each.
    """
    vocab, size, width = draft.draft_vocab_size, draft.hidden_size, numerics.operand
    mine = min(rows, block)
    positions = min(mine * steps, tokens) if draft.block_rows(steps) else mine + steps
    teachers = positions * vocab * FP32
    logits = min(GPU_LOGIT_ROWS if numerics.is_gpu else GROUP_ROWS, mine * steps) * vocab * width
    is_trained = draft.owns_output
    weight = vocab * size * (FP32 if is_trained else width)
    gradients = 2 * weight if is_trained else 0  # what has been gathered, and the product that is added
    copies = vocab * size * width * (2 if width < FP32 else int(is_trained))  # a frozen one is read as it is
    states = steps * size * (2 * FP32 * rows + (FP32 + width) * mine)
    return float(teachers + logits + gradients + copies + states)


def training_bytes(
    draft: HeadArchitecture, tokens: int, rows: int, steps: int, block: int, numerics: Numerics
) -> tuple[float, float]:
    """Peak of one forward and backward beyond weights, their gradients and the target's states: what the
    layers hold, and what the loss holds at the same time.

    The backward pass begins with one step's worth of gradients. On a GPU blocks of the loss are large, and
    they are gone then but for the gradients of states and output layer, so the larger of both moments counts.
    On a CPU they are small, and both are added.
    """
    saved = saved_bytes(draft, tokens, rows, steps, numerics)
    loss = loss_bytes(draft, tokens, rows, steps, block, numerics)
    if size := draft.block_rows(steps):
        gradients = rows * size * _block_row_bytes(draft, size, numerics)
    else:
        row = _row_bytes(draft, numerics)
        gradients = rows * (row.before + row.behind)
    if not numerics.is_gpu:
        return saved + gradients, loss
    left = FP32 * draft.hidden_size * (steps * rows + draft.owns_output * draft.draft_vocab_size)
    return saved + max(0.0, gradients + left - loss), loss
