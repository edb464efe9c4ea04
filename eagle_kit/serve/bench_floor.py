"""What a cycle takes at best on a machine: every forward reads its weights and its prefix once, or computes.

A cycle of S steps is one target forward over the window, S - 1 draft steps (the first candidates are left by
the cycle before) and one draft-extend. Rows of embeddings, states and logits are left out: thousandths.

Legend: B requests, N window nodes, S steps, K top-k.
"""

from typing import NamedTuple

from torch import nn

from eagle_kit.core.shape import SpecShape
from eagle_kit.kernels.bench.cost import Cost
from eagle_kit.models.llama import LlamaModel
from eagle_kit.speculation.draft_model import Eagle3Draft


class Floor(NamedTuple):
    """``bytes`` of a cycle and the seconds that they take alone; ``seconds``, each forward taking the larger
    of what its bytes and its arithmetic take."""

    bytes: int
    byte_seconds: float
    seconds: float


def cycle_forwards(
    target: LlamaModel, draft: Eagle3Draft, shape: SpecShape, batch: int, context: int
) -> list[Cost]:
    """The forwards of one cycle with their bytes and floating-point operations."""
    config = target.config
    heads = config.num_heads * config.head_dim
    table = target.embed_tokens.weight
    read = _parameters(target) - (0 if config.tie_word_embeddings else table.numel())
    size = table.element_size()
    target_kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * size
    keys = batch * context
    forwards = [
        Cost(
            read * size + keys * target_kv,
            2 * read * batch * shape.tokens + 4 * config.num_layers * heads * keys * shape.tokens,
        )
    ]
    if not shape.steps:
        return forwards
    head = draft.head
    fuse, output = head.fc.weight.numel(), head.lm_head.weight.numel()
    layer = _parameters(head) - fuse - output
    draft_kv = 2 * draft.num_layers * draft.num_kv_heads * draft.head_dim * size
    draft_heads = head.config.num_heads * draft.head_dim
    rows = batch * shape.topk
    step = Cost(
        (layer + output) * size + keys * draft_kv,
        2 * (layer + output) * rows + 4 * draft_heads * keys * shape.topk,
    )
    emitted = shape.steps + 1
    extend = Cost(
        (layer + output + fuse) * size + keys * draft_kv,
        2 * ((layer + fuse) * emitted + output) * batch + 4 * draft_heads * keys * emitted,
    )
    return [*forwards, *[step] * (shape.steps - 1), extend]


def floor_of(forwards: list[Cost], copy_bytes_per_s: float, flops_per_s: float) -> Floor:
    """The floor of forwards that follow one another."""
    total = sum(cost.bytes for cost in forwards)
    slow = sum(cost.seconds(copy_bytes_per_s, flops_per_s) for cost in forwards)
    return Floor(total, total / copy_bytes_per_s, slow)


def _parameters(model: nn.Module) -> int:
    """Elements of all parameters, each once."""
    return sum(parameter.numel() for parameter in model.parameters())
