"""Bytes and arithmetic of a cycle: every forward reads its weights and its prefix once.

A cycle of S steps is one target forward over the window, S - 1 draft steps (the first candidates are left by
the cycle before) and one draft-extend. Rows of embeddings, states and logits are left out: thousandths.

Legend: B requests, N window nodes, S steps, K top-k.
"""

from torch import nn

from benchmarks.case import Cost
from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.base.draft_model import HeadDraftModel
from eagle_kit.drafts.eagle3.head import Eagle3Head
from eagle_kit.models.count import layer_weights
from eagle_kit.models.targets.target import Target


def cycle_forwards(
    target: Target, draft: HeadDraftModel, shape: SpecShape, batch: int, context: int
) -> list[Cost]:
    """The forwards of one cycle with their bytes and floating-point operations."""
    config = target.config
    heads = config.num_heads * config.head_dim
    table = target.embed_tokens.weight
    rows = batch * shape.tokens
    held = _parameters(target) - (0 if config.tie_word_embeddings else table.numel())
    all_experts, one_token = (layer_weights(config, active=active) for active in (False, True))
    experts = all_experts - one_token
    if config.moe is not None:  # of E experts, rows that choose K each at random wake 1 - (1 - K / E)^rows
        share = config.moe.num_experts_per_token / config.moe.num_experts
        experts = round(experts * ((1 - (1 - share) ** rows) - share) / (1 - share))
    read, used = held - (all_experts - one_token) + experts, held - (all_experts - one_token)
    size = table.element_size()
    keys = batch * context
    forwards = [
        Cost(
            (read + keys * config.cache.values_per_token) * size,
            2 * used * rows + 4 * config.num_attention_layers * heads * keys * shape.tokens,
        )
    ]
    if not shape.steps:
        return forwards
    head = draft.head
    assert isinstance(head, Eagle3Head)
    fuse = 0 if head.fc is None else head.fc.weight.numel()
    output = head.lm_head.weight.numel()
    layer = _parameters(head) - fuse - output
    draft_kv = draft.cache.values_per_token * size
    draft_heads = head.config.num_heads * head.config.head_dim
    beam = batch * shape.topk
    step = Cost(
        (layer + output) * size + keys * draft_kv,
        2 * (layer + output) * beam + 4 * draft_heads * keys * shape.topk,
    )
    emitted = shape.steps + 1
    extend = Cost(
        (layer + output + fuse) * size + keys * draft_kv,
        2 * ((layer + fuse) * emitted + output) * batch + 4 * draft_heads * keys * emitted,
    )
    return [*forwards, *[step] * (shape.steps - 1), extend]


def _parameters(model: nn.Module) -> int:
    """Elements of all parameters, each once."""
    return sum(parameter.numel() for parameter in model.parameters())
