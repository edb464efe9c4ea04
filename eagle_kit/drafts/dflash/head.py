"""DFlash draft head (arXiv 2602.06036): a block of tokens in one pass, over the target's states as keys.

Legend: T tokens of a text, B rows of a block, A blocks, R requests, M context rows, H hidden, Ht target's
hidden, m captured layers.

The *context* of a token is its captured states, joined by ``fc`` and a norm, once. Every layer makes keys and
values of it by its own projections; it has no queries and no MLP. A *block* has the anchor, which is the last
sampled token, and masks after it, at the positions from the anchor's on. Its rows attend to the context of
all tokens before the anchor and to each other in both directions; in layers with a sliding window, unless
they are ``sliding_both``, to those of the block up to themselves. Row k predicts the token of its own
position, so the anchor's row predicts nothing; or, with ``predicts_next``, the token after it.

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

from eagle_kit.drafts.base.captured_states import (
    CapturedStatesArchitecture,
    CapturedStatesHead,
    default_sizes,
)
from eagle_kit.drafts.eagle3.head import AfterAttention
from eagle_kit.models.blocks.layers import MLP, Attend, Attention, KVRows, RMSNorm, kv_rows_of
from eagle_kit.models.blocks.mla import LatentAttention
from eagle_kit.models.cache_specs import CacheSpec
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.draft_chain import ChainRows, RowAttention
from eagle_kit.models.draft_head import Block, StepForm
from eagle_kit.objective.align import token_of
from eagle_kit.objective.loss import TTTBatch
from eagle_kit.objective.step_parts import run_maybe_recomputed
from eagle_kit.objective.target_features import positions_of
from eagle_kit.ops.attention.ttt.anchored import anchored_attention
from eagle_kit.ops.attention.variant import AttentionVariant, Limits
from eagle_kit.ops.linear import Linear


@dataclass(frozen=True)
class DFlashConfig(CapturedStatesArchitecture):
    """Architecture of a DFlash head. The sizes are those of its base class.

    Attributes:
        num_layers: decoder layers.
        block_size: B that it was trained for, the anchor included.
        mask_token_id: token whose embedding is the mask's.
        predicts_next: row k predicts the token at k + 1 (DSpark's rows), and not the one at its own place.
        sliding_layers: layers with the sliding window.
        sliding_both: these attend to all of a block, as the others do; else they are causal within it.
    """

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
        """Default head for a target: the target's sizes, all of its tokens, and spread captured layers.

        Args:
            model: architecture of the target.
            changes: fields that differ from the default.
        """
        fields = default_sizes(model, model.vocab_size)
        fields["aux_layer_ids"] = spread_layers(model.num_layers)
        fields["mask_token_id"] = model.vocab_size - 1
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
        """The block's first row that predicts a token after the anchor."""
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
    first = min(2, num_layers)
    last = max(num_layers - 2, min(2, num_layers))
    places = (round(first + i * (last - first) / (count - 1)) for i in range(count))
    return tuple(dict.fromkeys(places))


class DFlashLayer(AfterAttention):
    """Qwen3 layer."""

    self_attn: Attention

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        size = config.hidden_size
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = Attention(config, size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, config.intermediate_size)


class DFlashHead(CapturedStatesHead):
    """DFlash head."""

    config: DFlashConfig
    step_form = StepForm.BLOCK
    first_position = 0

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        eps = config.rms_norm_eps
        self.fc = Linear(len(config.aux_layer_ids) * config.target_hidden_size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(size, eps)
        self.lm_head = Linear(size, config.draft_vocab_size, bias=False) if config.owns_output else None

    def bind(self, output: Linear) -> Self:
        """See :class:`DraftHead`; without registering it as a submodule."""
        self.__dict__["bound"] = output
        return self

    @property
    def blocks(self) -> list[Block]:
        """None."""
        return []

    @property
    def extra_layers(self) -> Sequence[DFlashLayer]:
        """All layers."""
        return list(self.layers)  # type: ignore[arg-type]

    @property
    def attentions(self) -> list[Attention | LatentAttention]:
        """See :class:`DraftHead`."""
        return [layer.self_attn for layer in self.extra_layers]

    @property
    def output(self) -> Linear:
        """The head's own output layer, or the target's."""
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
        """Embed the rows of blocks: the anchor, then masks.

        Args:
            anchors: int64 ``[A]``, first token of each block.
            embedding: the target's, ``[V, H]``.
            size: rows of a block, S.

        Returns:
            ``[A, S, H]``.
        """
        tokens = torch.full((len(anchors), size), self.config.mask_token_id, device=anchors.device)
        return F.embedding(torch.cat((anchors[:, None], tokens[:, 1:]), 1), embedding)

    def context_entries(
        self, context: torch.Tensor, positions: torch.Tensor, kv_rows: Callable[[int], KVRows]
    ) -> None:
        """Write keys and values of context rows into every layer of a store.

        Queries, which nobody needs, are a part of the same matmul.

        Args:
            context: ``[T, H]``.
            positions: int64 ``[T]``.
            kv_rows: rows of the store, by layer.
        """
        rotation = self.rope.at(positions)
        for i, layer in enumerate(self.extra_layers):
            layer.self_attn.qkv(context, rotation, kv_rows(i))

    def draft(
        self,
        context: torch.Tensor,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        attends: Sequence[Attend],
    ) -> torch.Tensor:
        """Run a block of each request after its context rows.

        Args:
            context: ``[R, M, H]``, M may be 0.
            inputs: ``[R, B, H]``, of :meth:`block_inputs`.
            positions: int64 ``[R * (M + B)]``, of both.
            attends: attention of each layer, which gives outputs of the rows of blocks alone.

        Returns:
            Input of the output layer, ``[R * B, H]``.
        """
        rotation = self.rope.at(positions)
        size = inputs.shape[1]
        h = inputs.flatten(0, 1)
        normed = self.extra_layers[0].input_layernorm(h)
        for i, (layer, attend) in enumerate(zip(self.extra_layers, attends, strict=True)):
            rows = torch.cat((context, normed.unflatten(0, (-1, size))), 1).flatten(0, 1)
            attended = attend(i, *layer.self_attn.qkv(rows, rotation, kv_rows_of(attend, i)))
            normed, h = self.end_layer(i, h, attended)
        return normed

    def end_layer(
        self, layer: int, residual: torch.Tensor, attended: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the part of a layer after its attention, and the norm that follows.

        Args:
            layer: index of the layer.
            residual: ``[T, H]``.
            attended: output of its attention ``[T, Hq, D]``.

        Returns:
            The layer's output after the next layer's first norm (after the last layer, the norm in front of
            the output layer), and the output itself, ``[T, H]`` each.
        """
        after_attention, mlp_output = self.extra_layers[layer].residual_and_mlp(residual, attended)
        norms = [*(each.input_layernorm for each in self.extra_layers[1:]), self.norm]
        return norms[layer].add(mlp_output, after_attention)

    def corrected(self, blocks: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Input of the output layer from the rows that draft; here the rows themselves.

        Args:
            blocks: normed rows that draft ``[A, S, H]``.
            before: int64 ``[A, S]``, the token before the one that each row drafts.
        """
        return blocks

    def chain(self, given: ChainRows, steps: int) -> list[torch.Tensor]:
        """See :class:`DraftHead`: a block of as many rows as ``steps`` need after every row."""
        rows = given.rows
        size = steps + self.config.first_drafted

        # Inputs of the blocks, and positions of text and blocks.
        anchors = given.embeds(rows, 0)[:, None]
        masks = given.mask(self.config.mask_token_id).expand(len(rows), size - 1, -1)
        h = torch.cat((anchors, masks), 1).flatten(0, 1)
        offsets = torch.arange(size, device=rows.device)
        block_rotation = self.rope.at((given.positions[rows, None] + 1 + offsets).flatten())
        context_rotation = self.rope.at(given.positions)

        # The layers: the text is keys and values only.
        normed = self.extra_layers[0].input_layernorm(h)
        for i, layer in enumerate(self.extra_layers):
            _, k, v = layer.self_attn.qkv(given.features, context_rotation)
            q, own_k, own_v = (
                part.unflatten(0, (-1, size)) for part in layer.self_attn.qkv(normed, block_rotation)
            )
            attention = RowAttention(self.config.variants[i], given)
            attended = attention.block(k, v, q, own_k, own_v, is_causal=self.config.causal[i])
            normed, h = self.end_layer(i, h, attended.flatten(0, 1))

        # The rows that draft, corrected by the text's own token before each (DSpark).
        drafted = normed.unflatten(0, (-1, size))[:, self.config.first_drafted :]
        tokens = torch.stack([given.tokens(rows, step) for step in range(steps)], 1)
        return list(self.corrected(drafted, tokens).unbind(1))

    def training_steps(self, batch: TTTBatch, *, recompute: bool) -> list[torch.Tensor]:
        """See :class:`DraftHead`. The token after each supervised row of step 0 is an anchor; row k of its
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
            attention = self.extra_layers[i].self_attn
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

        hidden = features.hidden[: plan.length]
        aux_hidden_states = features.aux_hidden_states[: plan.length]
        context = run_maybe_recomputed(recompute, self.features, hidden, aux_hidden_states)
        anchors = batch.ids[token_of(rows, 0)]
        h = self.block_inputs(anchors, self.embedding(batch.embed_weight), size).flatten(0, 1)
        normed = self.extra_layers[0].input_layernorm(h)
        for i in range(self.config.num_layers):
            normed, h = run_maybe_recomputed(recompute, partial(one_layer, i), context, normed, h)

        # Rows that draft, corrected by the text's own token before each (DSpark).
        drafted = normed.unflatten(0, (-1, size))[:, self.config.first_drafted :]
        before = rows[:, None] + token_of(offsets[: len(plan.rows)], 0)
        blocks = self.corrected(drafted, batch.ids[before.clamp(max=len(batch.ids) - 1)])
        return [blocks[torch.searchsorted(rows, each), step] for step, each in enumerate(plan.rows)]
