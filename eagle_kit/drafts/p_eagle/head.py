"""P-EAGLE draft head (arXiv 2602.01469): EAGLE-3 with several layers, which drafts all steps in one pass.

Legend: T packed tokens, H hidden, Ht target's hidden.

Step 0 of a row reads what EAGLE-3 reads. At every later step a *mask* stands in for both inputs: a learned
embedding, and a learned state in place of the captured ones, which passes through ``fc``. The first layer
joins embedding and feature, as EAGLE-3's does; the others are Llama layers, or with norms of queries and keys
Qwen3 layers.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn.functional import embedding

from eagle_kit.drafts.eagle3.head import AfterAttention, Eagle3Config, Eagle3Head
from eagle_kit.models.blocks.layers import MLP, Attend, Attention, RMSNorm
from eagle_kit.models.blocks.mla import LatentAttention, make_attention
from eagle_kit.models.cache_specs import CacheSpec
from eagle_kit.models.draft_chain import ChainRows, RowAttention
from eagle_kit.models.draft_head import StepForm, StepOutput
from eagle_kit.objective.align import token_of
from eagle_kit.objective.loss import TTTBatch
from eagle_kit.objective.step_parts import run_maybe_recomputed, step_attention, supervised_outputs
from eagle_kit.objective.target_features import positions_of
from eagle_kit.ops.attention.ttt import QueryPlan, plan_queries
from eagle_kit.ops.attention.variant import AttentionVariant, Limits


@dataclass(frozen=True)
class PEagleConfig(Eagle3Config):
    """Architecture of a P-EAGLE head.

    Attributes:
        num_layers: decoder layers, the first included.
        mask_token_id: token whose row holds the mask's embedding in layouts that have a whole embedding.
        sliding_layers: layers with the sliding window.
    """

    num_layers: int = 4
    mask_token_id: int = 0
    sliding_layers: tuple[int, ...] = ()

    @property
    def cache(self) -> CacheSpec:
        """Entry of a token in the cache of all layers."""
        return self.layer.cache_of(self.num_layers)

    @property
    def windows(self) -> list[int | None]:
        """Sliding window of each layer, None for none."""
        slides = set(self.sliding_layers)
        return [self.sliding_window if i in slides else None for i in range(self.num_layers)]

    @property
    def variants(self) -> list[AttentionVariant]:
        """How each layer attends."""
        scale = self.layer.attention_scale
        return [AttentionVariant(scale, Limits(window=window or 0)) for window in self.windows]


class PlainLayer(AfterAttention):
    """Llama layer over the states of the layer before."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size = config.hidden_size
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = make_attention(config, size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, config.intermediate_size)


class PEagleHead(Eagle3Head):
    """P-EAGLE head."""

    config: PEagleConfig
    step_form = StepForm.MASKED

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        # Published names count the first layer, midlayer, as 0.
        extra_layers = {str(i): PlainLayer(config) for i in range(1, config.num_layers)}
        self.layers = nn.ModuleDict(extra_layers)
        fused = len(config.aux_layer_ids) * config.target_hidden_size
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, fused))
        self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size))

    @property
    def stack(self) -> list[AfterAttention]:
        """All decoder layers, in order."""
        return [self.midlayer, *self.extra_layers]

    @property
    def extra_layers(self) -> list[PlainLayer]:
        """The layers after the first."""
        return list(self.layers.values())  # type: ignore[arg-type]

    @property
    def attentions(self) -> list[Attention | LatentAttention]:
        """See :class:`~eagle_kit.models.draft_head.DraftHead`."""
        return [layer.self_attn for layer in self.stack]

    def mask_feature(self) -> torch.Tensor:
        """Feature of a mask, ``[1, H]``."""
        return self.fuse(self.mask_hidden[0])

    def mask_inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first layer's input of attention of a mask, ``[1, 2H]``, and its residual ``[1, H]``."""
        return self.midlayer.inputs(self.mask_feature(), self.mask_embedding[None])

    def next_inputs(
        self, layer: int, residual: torch.Tensor, attended: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the part of a layer after its attention, and the norm that follows.

        Args:
            layer: index in :attr:`stack`.
            residual: ``[T, H]``.
            attended: output of its attention ``[T, Hq, D]``.

        Returns:
            Input of the next layer's attention (after the last layer, of the output layer), and the residual,
            ``[T, H]`` each.
        """
        after_attention, mlp_output = self.stack[layer].residual_and_mlp(residual, attended)
        norms = [*(each.input_layernorm for each in self.extra_layers), self.norm]
        return norms[layer].add(mlp_output, after_attention)

    def chain(self, given: ChainRows, steps: int) -> list[torch.Tensor]:
        """See :class:`~eagle_kit.models.draft_head.DraftHead`: step 0 at all rows, and masks after
        those that draft."""
        rows = given.rows
        positions = given.positions

        # Inputs of attention and residuals of each step: step 0 at all rows, then masks.
        mask_x, mask_residual = (part.expand(len(rows), -1) for part in self.mask_inputs())
        states = [self.midlayer.inputs(given.features, given.embeds(given.all_rows, 0))]
        rotations = [self.rope.at(positions)]
        for step in range(1, steps):
            states.append((mask_x, mask_residual))
            rotations.append(self.rope.at(positions[rows] + step))

        # The layers, each over all steps in turn.
        for i, layer in enumerate(self.stack):
            attention = RowAttention(self.config.variants[i], given)
            for step, (x, residual) in enumerate(states):
                attend = attention.later if step else attention.first
                attended = layer.self_attn.attended(x, rotations[step], 0, attend)
                states[step] = self.next_inputs(i, residual, attended)
        outputs = [residual for _, residual in states]
        return [outputs[0][rows], *outputs[1:]]

    def step(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        attend: Attend,
        block: int = 0,
        output_rows: torch.Tensor | None = None,
    ) -> StepOutput:
        """See :class:`~eagle_kit.models.draft_head.DraftHead`: all layers over rows of any step."""
        x, residual = inputs
        rotation = self.rope.at(positions)
        for i, layer in enumerate(self.stack):
            attended = layer.self_attn.attended(x, rotation, i, attend)
            if output_rows is not None and i + 1 == self.config.num_layers:
                attended = attended.index_select(0, output_rows)
                residual = residual.index_select(0, output_rows)
            x, residual = self.next_inputs(i, residual, attended)
        return StepOutput(residual, x)

    def training_steps(self, batch: TTTBatch, *, recompute: bool) -> list[torch.Tensor]:
        """See :class:`~eagle_kit.models.draft_head.DraftHead`.

        No state is handed from step to step: rows of step k >= 1 are masks at position i + k, which attend to
        the rows of step 0 up to row i and to their own row's masks. So each layer runs once, over the rows of
        all steps.
        """
        plan = batch.plan
        features = batch.inputs or batch.features
        length = plan.length
        masked = plan.computed[1:]
        num_masks = sum(map(len, masked))
        all_rows = torch.arange(length, device=batch.ids.device)
        causal = plan_queries(all_rows, plan.doc_start)

        # Positions of the rows of all steps, step after step.
        positions = positions_of(plan.doc_start)
        depths = [positions[:length]]
        depths += [positions[rows] + step for step, rows in enumerate(masked, start=1)]
        rotation = self.rope.at(torch.cat(depths))

        def first_inputs(hidden: torch.Tensor, aux: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            embeds = embedding(batch.ids[token_of(all_rows, 0)], self.embedding(batch.embed_weight))
            x, residual = self.midlayer.inputs(self.features(hidden, aux), embeds)
            mask_x, mask_residual = self.mask_inputs()
            x = torch.cat((x, mask_x.expand(num_masks, -1)))
            residual = torch.cat((residual, mask_residual.expand(num_masks, -1)))
            return x, residual

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: QueryPlan
        ) -> torch.Tensor:
            """Attention of the rows ``first`` of step 0 and of all rows of later steps."""
            scale = self.config.attention_scale
            window = self.config.windows[layer]

            # Keys and values of each step; step 0 has all rows, but only some of them as queries.
            sizes = [length, *map(len, masked)]
            keys = k.split(sizes)
            values = v.split(sizes)
            queries = q.split([len(first.rows), *map(len, masked)])
            first_queries = first.with_window(window, 0)
            out = [step_attention(queries[0], keys[0], values[0], None, None, first_queries, scale)]

            # A mask attends to step 0 and to the masks of its own row up to its step.
            own_keys: list[torch.Tensor] = []
            own_values: list[torch.Tensor] = []
            for step in range(1, len(queries)):
                if not len(queries[step]):
                    break
                if step > 1:
                    own_keys = [part[plan.index_in_previous[step]] for part in own_keys]
                    own_values = [part[plan.index_in_previous[step]] for part in own_values]
                own_keys.append(keys[step])
                own_values.append(values[step])
                attended = step_attention(
                    queries[step],
                    keys[0],
                    values[0],
                    torch.stack(own_keys, 2),
                    torch.stack(own_values, 2),
                    plan.attention[step].with_window(window, step),
                    scale,
                )
                out.append(attended)
            return torch.cat(out)

        def one_layer(
            layer: int, x: torch.Tensor, residual: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            attention = self.stack[layer].self_attn
            q, k, v = attention.qkv(x, rotation)
            return self.next_inputs(layer, residual, attention.gated(attend(layer, q, k, v, causal), x))

        def last_layer(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            layer = self.stack[-1]
            q, k, v = layer.self_attn.qkv(x, rotation)

            # Of step 0 only the supervised rows are needed from here on.
            rows = plan.computed[0]
            q = torch.cat((q[rows], q[length:]))
            x = torch.cat((x[rows], x[length:]))
            residual = torch.cat((residual[rows], residual[length:]))
            attended = attend(len(self.stack) - 1, q, k, v, plan.attention[0])
            return layer.finish(residual, layer.self_attn.gated(attended, x))

        x, residual = run_maybe_recomputed(
            recompute, first_inputs, features.hidden[:length], features.aux_hidden_states[:length]
        )
        for layer in range(len(self.stack) - 1):
            x, residual = run_maybe_recomputed(recompute, partial(one_layer, layer), x, residual)
        out = run_maybe_recomputed(recompute, last_layer, x, residual).split(
            [len(rows) for rows in plan.computed]
        )
        return [supervised_outputs(part, plan, step) for step, part in enumerate(out)]
