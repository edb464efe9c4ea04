"""DFlash draft head (arXiv 2602.06036): a block of tokens in one pass, over the target's states as keys.

Legend: T tokens of a text, B rows of a block, A blocks, R requests, M context rows, H hidden, Ht target's
hidden, m captured layers.

The *context* of a token is its captured states, joined by ``fc`` and a norm, once. Every layer makes keys and
values of it by its own projections; it has no queries and no MLP. A *block* has the anchor, which is the last
sampled token, and masks behind it, at the positions from the anchor's on. Its rows attend to the context of
all tokens before the anchor and to each other in both directions; in layers with a sliding window, unless
they are ``sliding_both``, to those of the block up to themselves. Row k predicts the token of its own
position, so the anchor's row predicts nothing; or, with ``predicts_next``, the token behind it.

The layers are Qwen3's. Embedding and output layer are the target's; the mask is the row ``mask_token_id`` of
that embedding. A head may have an output layer of its own over fewer tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional as F

from eagle_kit.drafts.eagle3.head import AfterAttention, Eagle3Config
from eagle_kit.models.blocks.layers import MLP, Attend, Attention, KVSlots, RMSNorm, kv_slots_of
from eagle_kit.models.blocks.mla import LatentAttention
from eagle_kit.models.cache_specs import CacheSpec
from eagle_kit.models.config import DecoderConfig, HeadArchitecture, TargetConfig
from eagle_kit.models.draft_chain import ChainRows, RowAttention
from eagle_kit.models.draft_head import Block, DraftHead, StepForm
from eagle_kit.objective.align import token_of
from eagle_kit.objective.loss import TTTBatch
from eagle_kit.objective.step_parts import call
from eagle_kit.objective.target_features import positions_of
from eagle_kit.ops.attention.ttt.anchored import anchored_attention
from eagle_kit.ops.attention.variant import AttentionVariant, Limits
from eagle_kit.ops.linear import Linear


@dataclass(frozen=True)
class DFlashConfig(DecoderConfig, HeadArchitecture):
    """Architecture of a DFlash head.

    Attributes:
        num_layers: decoder layers.
        block_size: B that it was trained for, the anchor included.
        mask_token_id: token whose embedding is the mask's.
        predicts_next: row k predicts the token at k + 1 (DSpark's rows), and not the one at its own place.
        sliding_layers: layers with the sliding window.
        sliding_both: these attend to all of a block, as the others do; else they are causal within it.
    """

    hidden_size: int
    target_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    aux_layer_ids: tuple[int, ...]
    mask_token_id: int
    num_layers: int = 5
    block_size: int = 16
    predicts_next: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    qk_norm: bool = True
    rotary_dim: int | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    sliding_both: bool = False
    target: str = ""
    template_hash: str = ""

    @classmethod
    def for_target(cls, model: TargetConfig, **changes: Any) -> Self:
        """Default head for a target: the sizes of an EAGLE-3 head's Llama layer, and spread captured
        layers."""
        like = Eagle3Config.for_target(model, model.vocab_size)
        shared = set(cls.__dataclass_fields__) & set(Eagle3Config.__dataclass_fields__)
        fields = {name: getattr(like, name) for name in shared - {"target", "template_hash", "qk_norm"}}
        fields |= {"aux_layer_ids": spread_layers(model.num_layers), "mask_token_id": model.vocab_size - 1}
        return cls(**{**fields, **changes})

    @property
    def owns_output(self) -> bool:
        """True for an output layer over fewer tokens than the target's."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def cache(self) -> CacheSpec:
        """Entry of a token in the cache of all layers."""
        return self.layer.cache_of(self.num_layers)

    @property
    def first_drafted(self) -> int:
        """The block's first row that predicts a token behind the anchor."""
        return 0 if self.predicts_next else 1

    @property
    def most_steps(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size - self.first_drafted

    def block_rows(self, steps: int) -> int:
        """See :class:`~eagle_kit.models.config.HeadArchitecture`."""
        return steps + self.first_drafted

    @property
    def windows(self) -> list[int | None]:
        """Sliding window of each layer, None for none."""
        slides = set(self.sliding_layers)
        return [self.sliding_window if i in slides else None for i in range(self.num_layers)]

    @property
    def causal(self) -> list[bool]:
        """Whether rows of a block attend to those up to themselves only, of each layer."""
        return [window is not None and not self.sliding_both for window in self.windows]

    @property
    def variants(self) -> list[AttentionVariant]:
        """How each layer attends."""
        scale = self.layer.attention_scale
        return [AttentionVariant(scale, Limits(window=window or 0)) for window in self.windows]


def spread_layers(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """Inputs of ``count`` layers spread evenly from layer 2 to the last but two, as published heads have
    them (outputs of layers 1 to L - 3); fewer where the target has fewer."""
    first, last = min(2, num_layers), max(num_layers - 2, min(2, num_layers))
    places = (round(first + i * (last - first) / (count - 1)) for i in range(count))
    return tuple(dict.fromkeys(places))


class DFlashLayer(AfterAttention):
    """Qwen3 layer."""

    self_attn: Attention

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = Attention(config, size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, config.intermediate_size)


class DFlashHead(DraftHead):
    """DFlash head.

    Buffers: ``d2t`` and ``t2d`` as an EAGLE-3 head's.
    """

    config: DFlashConfig
    step_form = StepForm.BLOCK
    first_slot = 0
    d2t: torch.Tensor

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = Linear(len(config.aux_layer_ids) * config.target_hidden_size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(size, eps)
        self.lm_head = Linear(size, config.draft_vocab_size, bias=False) if config.owns_output else None

    def make_buffers(self) -> None:
        """See :class:`DraftHead`; the map is that of the first Vd tokens."""
        super().make_buffers()
        drafted, every = self.config.draft_vocab_size, self.config.vocab_size
        self.register_buffer("d2t", torch.zeros(drafted, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(every) < drafted)

    def set_vocab_map(self, d2t: torch.Tensor, t2d: torch.Tensor) -> None:
        """Copy in the draft vocabulary: ``d2t`` int64 ``[Vd]`` of offsets, ``t2d`` bool ``[V]``."""
        self.d2t.copy_(d2t)
        self.t2d.copy_(t2d)

    def bind(self, output: Linear) -> Self:
        """See :class:`DraftHead`; without registering it as a submodule."""
        self.__dict__["bound"] = output
        return self

    @property
    def blocks(self) -> list[Block]:
        """None."""
        return []

    @property
    def plain(self) -> Sequence[DFlashLayer]:
        """All layers."""
        return list(self.layers)  # type: ignore[arg-type]

    @property
    def attentions(self) -> list[Attention | LatentAttention]:
        """See :class:`DraftHead`."""
        return [layer.self_attn for layer in self.plain]

    @property
    def output(self) -> Linear:
        """Weight of its own output layer, or of the target's."""
        layer = self.bound if self.lm_head is None else self.lm_head
        assert layer is not None, "the head was not bound to a target"
        return layer

    @property
    def token_map(self) -> torch.Tensor | None:
        """See :class:`DraftHead`."""
        if self.lm_head is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def features(self, hidden: torch.Tensor, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """Context ``[T, H]`` of the captured states ``[T, m * Ht]``."""
        return self.hidden_norm(self.fc(aux_hidden_states))

    def block_inputs(self, anchors: torch.Tensor, embedding: torch.Tensor, size: int) -> torch.Tensor:
        """Embeddings ``[A, size, H]`` of blocks behind the tokens ``anchors`` int64 ``[A]``, by the target's
        ``embedding [V, H]``."""
        tokens = torch.full((len(anchors), size), self.config.mask_token_id, device=anchors.device)
        return F.embedding(torch.cat((anchors[:, None], tokens[:, 1:]), 1), embedding)

    def context_entries(
        self, context: torch.Tensor, positions: torch.Tensor, slots: Callable[[int], KVSlots]
    ) -> None:
        """Write keys and values of ``context [T, H]`` at ``positions`` int64 ``[T]`` into the ``slots`` of
        every layer. Queries, which nobody needs, are a part of the same matmul."""
        rotation = self.rope.at(positions)
        for i, layer in enumerate(self.plain):
            layer.self_attn.qkv(context, rotation, slots(i))

    def draft(
        self,
        context: torch.Tensor,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        attends: Sequence[Attend],
    ) -> torch.Tensor:
        """Run a block of each request behind its context rows.

        Args:
            context: ``[R, M, H]``, M may be 0.
            inputs: ``[R, B, H]``, of :meth:`block_inputs`.
            positions: int64 ``[R * (M + B)]``, of both.
            attends: attention of each layer, which gives outputs of the rows of blocks alone.

        Returns:
            ``[R * B, H]``, what the output layer reads.
        """
        rotation, size = self.rope.at(positions), inputs.shape[1]
        h = inputs.flatten(0, 1)
        normed = self.plain[0].input_layernorm(h)
        for i, (layer, attend) in enumerate(zip(self.plain, attends, strict=True)):
            rows = torch.cat((context, normed.unflatten(0, (-1, size))), 1).flatten(0, 1)
            attended = attend(i, *layer.self_attn.qkv(rows, rotation, kv_slots_of(attend, i)))
            normed, h = self.end_layer(i, h, attended)
        return normed

    def end_layer(
        self, layer: int, residual: torch.Tensor, attended: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """End ``layer`` from what its attention gave -> its output normed for the next one, and itself, ``[T,
        H]`` each; behind the last layer the norm is that of the output layer."""
        h, added = self.plain[layer].parts(residual, attended)
        norms = [*(plain.input_layernorm for plain in self.plain[1:]), self.norm]
        return norms[layer].add(added, h)

    def corrected(self, blocks: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """What the output layer reads, from the normed rows that draft ``[A, S, H]`` and the tokens
        ``before`` those that they draft int64 ``[A, S]``: here the rows alone."""
        return blocks

    def chain(self, given: ChainRows, steps: int) -> list[torch.Tensor]:
        """See :class:`DraftHead`: a block of as many rows as ``steps`` need behind every row."""
        rows, size = given.rows, steps + self.config.first_drafted
        numbers = torch.arange(size, device=rows.device)
        h = torch.cat(
            (
                given.embeds(rows, 0)[:, None],
                given.mask(self.config.mask_token_id).expand(len(rows), size - 1, -1),
            ),
            1,
        ).flatten(0, 1)
        own = self.rope.at((given.positions[rows, None] + 1 + numbers).flatten())
        before = self.rope.at(given.positions)
        normed = self.plain[0].input_layernorm(h)
        ways = zip(self.plain, self.config.variants, self.config.causal, strict=True)
        for i, (layer, variant, is_causal) in enumerate(ways):
            _, k, v = layer.self_attn.qkv(given.features, before)
            mine = [part.unflatten(0, (-1, size)) for part in layer.self_attn.qkv(normed, own)]
            attended = RowAttention(variant, given).block(k, v, *mine, is_causal=is_causal)
            normed, h = self.end_layer(i, h, attended.flatten(0, 1))
        drafted = normed.unflatten(0, (-1, size))[:, self.config.first_drafted :]
        tokens = torch.stack([given.tokens(rows, step) for step in range(steps)], 1)
        return list(self.corrected(drafted, tokens).unbind(1))

    def training_steps(self, batch: TTTBatch, *, recompute: bool) -> list[torch.Tensor]:
        """See :class:`DraftHead`. The token behind each row with loss of step 0 is an anchor; row k of its
        block drafts what step k drafts."""
        plan = batch.plan
        features = batch.inputs or batch.features
        rows = plan.computed[0]
        size = len(plan.rows) + self.config.first_drafted
        offsets = torch.arange(size, device=rows.device)
        positions = positions_of(plan.doc_start)
        context_rotation = self.rope.at(positions[: plan.length])
        block_rotation = self.rope.at((positions[rows, None] + 1 + offsets).flatten())

        def one_layer(i: int, context: torch.Tensor, normed: torch.Tensor, h: torch.Tensor) -> Any:
            attention = self.plain[i].self_attn
            _, k, v = attention.qkv(context, context_rotation)
            q, own_k, own_v = (
                part.unflatten(0, (-1, size)) for part in attention.qkv(normed, block_rotation)
            )
            attended = anchored_attention(
                q,
                k,
                v,
                own_k,
                own_v,
                plan.attention[0],
                self.config.attention_scale,
                self.config.windows[i],
                is_causal=self.config.causal[i],
            )
            return self.end_layer(i, h, attended.flatten(0, 1))

        context = call(
            recompute,
            self.features,
            features.hidden[: plan.length],
            features.aux_hidden_states[: plan.length],
        )
        anchors = batch.ids[token_of(rows, 0)]
        h = self.block_inputs(anchors, self.embedding(batch.embed_weight), size).flatten(0, 1)
        normed = self.plain[0].input_layernorm(h)
        for i in range(self.config.num_layers):
            normed, h = call(recompute, partial(one_layer, i), context, normed, h)

        # Rows that draft, corrected by the text's own token before each (DSpark).
        drafted = normed.unflatten(0, (-1, size))[:, self.config.first_drafted :]
        before = rows[:, None] + token_of(offsets[: len(plan.rows)], 0)
        blocks = self.corrected(drafted, batch.ids[before.clamp(max=len(batch.ids) - 1)])
        return [blocks[torch.searchsorted(rows, each), step] for step, each in enumerate(plan.rows)]
