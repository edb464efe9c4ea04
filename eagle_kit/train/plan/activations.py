"""Bytes that the head's forward pass keeps for its backward pass, and what the loss needs beside them.

The tensors of ``ttt.py`` and of the heads are counted one by one, and a test compares the sum with what
autograd saves. On a GPU, attention, SwiGLU, norms and rotary embeddings are kernels.

Legend: T tokens, R supervised rows at step 0 (for heads that draft blocks: anchors), K steps, H hidden, I
inner size of the MLP, Vd draft vocabulary.
"""

from typing import NamedTuple

from eagle_kit.drafts.registry import kind_of
from eagle_kit.models.config import DecoderConfig, HeadArchitecture
from eagle_kit.ops.soft_cross_entropy.reference import GROUP_ROWS

FP32 = 4
"""Bytes of a value in fp32."""
GPU_LOGIT_ROWS = 4096
"""Rows of logits that the loss holds at once in the Triton form (``soft_cross_entropy/triton.py``)."""


class Numerics(NamedTuple):
    """Precision and device, which decide the bytes of a saved value.

    Attributes:
        operand: bytes of a matmul's operand: 2 under bfloat16 autocast, else 4.
        is_gpu: attention, SwiGLU, norms and rotary embeddings are the Triton kernels.
    """

    operand: int
    is_gpu: bool

    @property
    def attention(self) -> int:
        """Bytes of a query, key or value that attention saves; on a CPU it computes in fp32."""
        return self.operand if self.is_gpu else FP32

    @property
    def casts_on_cpu(self) -> bool:
        """True if torch's operations on a CPU save copies in half precision."""
        return self.operand < FP32 and not self.is_gpu


class RowBytes(NamedTuple):
    """Bytes that one row of a layer saves.

    Attributes:
        before: of tensors before attention.
        after: of tensors of and after attention.
        key: of a key and its value.
    """

    before: float
    after: float
    key: float

    @property
    def total(self) -> float:
        """All bytes of a row that has its own key and value."""
        return self.before + self.after + self.key


class TrainingBytes(NamedTuple):
    """Bytes that are alive at the peak of one forward and backward.

    Attributes:
        layers: activations of the layers, and gradients with respect to them.
        loss: teachers, logits and gradients of the loss.
    """

    layers: float
    loss: float


def saved_bytes(draft: HeadArchitecture, tokens: int, rows: int, steps: int, numerics: Numerics) -> float:
    """Bytes saved by the head's K steps; weights and the target's features are not counted.

    Args:
        tokens: T.
        rows: R; later steps have a few less, which is not counted.
        steps: K.
    """
    # Blocks behind anchors (DFlash).
    block_size = draft.block_rows(steps)
    if block_size:
        return _saved_by_blocks(draft, tokens, rows * block_size, block_size, numerics)

    # A module for each step, over all tokens.
    row = _row_bytes(draft, numerics)
    if draft.num_modules > 1:
        return steps * tokens * row.total

    # Keys and values of the rows of later steps: k of them at step k.
    own_keys = rows * row.key * steps * (steps - 1) / 2

    # Several layers, each over the rows of all steps at once.
    num_layers = draft.cache.num_layers
    if num_layers > 1:
        num_rows = tokens + (steps - 1) * rows
        return num_layers * (num_rows * row.total + own_keys)

    # One layer that runs K times. All steps attend to the keys and values of step 0.
    layer = draft.layer
    if numerics.is_gpu or numerics.casts_on_cpu:
        # Every step copies them to the dtype of its attention.
        text_keys = tokens * row.key * steps
    elif layer.mla is None:
        # They are views of the tensors in which they were computed.
        text_keys = tokens * (2 * layer.num_heads * layer.head_dim * FP32 + 1.5 * row.key)
    else:
        # Every step pads the values to the width of the keys.
        text_keys = tokens * row.key * (steps + 1) / 2
    first_step = tokens * row.before + rows * row.after
    later_steps = (steps - 1) * rows * (row.before + row.after)
    return first_step + text_keys + own_keys + later_steps


def _saved_by_blocks(
    draft: HeadArchitecture, tokens: int, rows: int, block_size: int, numerics: Numerics
) -> float:
    """:func:`saved_bytes` of a head that drafts blocks behind anchors.

    The text is there as the input of the layers, and as keys and values of each layer.

    Args:
        rows: rows of all blocks.
    """
    width = numerics.operand
    hidden_size = draft.hidden_size
    rotary = 2 * draft.layer.head_dim * FP32

    # Outputs of the fusion and of its norm, once for all layers.
    copies = 3 if numerics.casts_on_cpu else 2
    text = tokens * (copies * hidden_size * width + rotary)
    blocks = rows * (hidden_size * width + rotary)

    # What each layer saves.
    keys = tokens * _qkv_bytes(draft, numerics)
    per_layer = keys + rows * _block_row_bytes(draft, block_size, numerics)
    return draft.cache.num_layers * per_layer + (text + blocks)


def _qkv_bytes(draft: HeadArchitecture, numerics: Numerics) -> float:
    """Bytes of one row's query, key and value before attention, of a head that norms queries and keys."""
    layer = draft.layer
    width = numerics.operand
    query = layer.num_heads * layer.head_dim
    key = layer.num_kv_heads * layer.head_dim

    # The inputs of the two norms, and the key and value that the attention kernel reads.
    if numerics.is_gpu:
        return float((query + 3 * key) * width)

    # On a CPU attention reads fp32: copies of key and value, or query and key rotated in one tensor.
    read = (query + key) * FP32
    if numerics.casts_on_cpu:
        read = 2 * key * FP32
    return float((query + 2 * key) * width + read)


def _block_row_bytes(draft: HeadArchitecture, block_size: int, numerics: Numerics) -> float:
    """Bytes that a layer saves for one row of a block."""
    layer = draft.layer
    width = numerics.operand
    query = layer.num_heads * layer.head_dim

    # The log-sum-exp of each head, and on a CPU its scores for the keys of the block.
    num_scores = 1 if numerics.is_gpu else 1 + block_size
    scores = layer.num_heads * FP32 * num_scores
    attention = 2 * query * numerics.attention + query * width + scores
    states = 4 * draft.hidden_size * width
    return _qkv_bytes(draft, numerics) + attention + states + _mlp_bytes(layer, numerics)


def _row_bytes(draft: HeadArchitecture, numerics: Numerics) -> RowBytes:
    """Bytes that one row saves in a layer of a head that does not draft blocks."""
    layer = draft.layer
    mla = layer.mla
    width = numerics.operand
    query = layer.num_heads * layer.head_dim

    # States of the layer, and cosines and sines.
    states = kind_of(draft).saved_activation_bytes(draft, width, is_gpu=numerics.is_gpu)
    before = float(draft.hidden_size) * states[0]
    after = float(draft.hidden_size) * states[1]
    rotary_dim = layer.head_dim if mla is None else mla.qk_rope_head_dim
    before += 2 * rotary_dim * FP32

    # Attention: query, output, and log-sum-exp, on a CPU twice, of the text and of the row's own keys.
    num_sums = 1 if numerics.is_gpu else 2
    after += 2 * query * numerics.attention + layer.num_heads * FP32 * num_sums
    if mla is not None:
        latents = (mla.q_lora_rank or 0) + mla.kv_lora_rank
        before += latents * 2 * width
        after += layer.num_heads * mla.v_head_dim * width
    elif width < numerics.attention:
        after += query * width

    after += _mlp_bytes(layer, numerics)
    return RowBytes(before, after, 2 * layer.num_kv_heads * layer.head_dim * numerics.attention)


def _mlp_bytes(layer: DecoderConfig, numerics: Numerics) -> float:
    """Bytes that the MLP saves for one row: gate, up, and their product for the next matmul."""
    per_value = 3 * numerics.operand
    moe = layer.moe
    if moe is None:
        return float(per_value * layer.intermediate_size)
    states = layer.hidden_size * (2 * numerics.operand + FP32)
    routed = moe.num_experts_per_token * (per_value * moe.intermediate_size + states)
    return float(routed + per_value * moe.shared_intermediate_size + 3 * FP32 * moe.num_experts)


def loss_bytes(
    draft: HeadArchitecture, tokens: int, rows: int, steps: int, block: int, numerics: Numerics
) -> float:
    """Bytes of the loss: teachers and logits of a block of rows, gradients of states and output layer.

    Args:
        tokens: T.
        rows: R.
        steps: K.
        block: rows of step 0 whose teachers exist at the same time.
    """
    vocab_size = draft.draft_vocab_size
    hidden_size = draft.hidden_size
    width = numerics.operand
    block_rows = min(rows, block)

    # Teachers. Adjacent rows share positions; the rows of an anchor share none with those of another.
    num_positions = block_rows + steps
    if draft.block_rows(steps):
        num_positions = min(block_rows * steps, tokens)
    teachers = num_positions * vocab_size * FP32

    # Logits that exist at the same time.
    most_logits = GPU_LOGIT_ROWS if numerics.is_gpu else GROUP_ROWS
    logits = min(most_logits, block_rows * steps) * vocab_size * width

    # The output layer. A trained one has a gradient and the product that is added to it. Both a trained
    # layer and one in half precision are copied.
    gradients = 0
    if draft.owns_output:
        gradients = 2 * vocab_size * hidden_size * FP32
    num_copies = int(draft.owns_output)
    if width < FP32:
        num_copies = 2
    copies = num_copies * vocab_size * hidden_size * width

    # Inputs of the output layer, and their gradients.
    states = steps * hidden_size * (2 * FP32 * rows + (FP32 + width) * block_rows)
    return float(teachers + logits + gradients + copies + states)


def training_bytes(
    draft: HeadArchitecture, tokens: int, rows: int, steps: int, block: int, numerics: Numerics
) -> TrainingBytes:
    """Peak of one forward and backward, without weights, their gradients and the target's features.

    The backward pass begins with the gradients of one step. On a GPU the blocks of the loss are large, and by
    then only the gradients of states and output layer are left of them: the larger of the two moments counts.
    On a CPU the blocks are small, and both moments are added.

    Args:
        tokens, rows, steps, block: see :func:`loss_bytes`.
    """
    saved = saved_bytes(draft, tokens, rows, steps, numerics)
    loss = loss_bytes(draft, tokens, rows, steps, block, numerics)

    # Gradients of one step.
    block_size = draft.block_rows(steps)
    if block_size:
        gradients = rows * block_size * _block_row_bytes(draft, block_size, numerics)
    else:
        row = _row_bytes(draft, numerics)
        gradients = rows * (row.before + row.after)
    if not numerics.is_gpu:
        return TrainingBytes(saved + gradients, loss)

    # What is left of the loss when the backward pass of the layers begins.
    output_rows = draft.draft_vocab_size if draft.owns_output else 0
    left = FP32 * draft.hidden_size * (steps * rows + output_rows)
    return TrainingBytes(saved + max(0.0, gradients + left - loss), loss)
