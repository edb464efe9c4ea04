"""What every target is to the rest of the package, whoever wrote its layers.

Legend: T packed tokens, H hidden, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple, Self

import torch
from torch import nn
from torch.nn import functional as F

from eagle_kit.distributed.collectives import Ranks
from eagle_kit.models.blocks.layers import Attend
from eagle_kit.models.blocks.moe import FP8Experts
from eagle_kit.models.blocks.recurrence import Hybrid, TextRecur
from eagle_kit.models.config import TargetConfig
from eagle_kit.ops.attention.packed import packed_attention
from eagle_kit.ops.attention.prefill import prefill_attention
from eagle_kit.ops.attention.variant import AttentionVariant
from eagle_kit.ops.linear import FP8Linear, Linear


class TargetOutput(NamedTuple):
    """``hidden [T, H]`` after the final norm; ``aux [T, len(capture) * H]``, the captured states
    concatenated."""

    hidden: torch.Tensor
    aux: torch.Tensor


class LogitForm(NamedTuple):
    """Logits ``soft_cap tanh(scale x / soft_cap)`` of what the output layer gives, ``scale x`` without a
    cap."""

    scale: float = 1.0
    soft_cap: float | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of the same shape."""
        scaled = x if self.scale == 1.0 else x * self.scale
        return scaled if self.soft_cap is None else self.soft_cap * torch.tanh(scaled / self.soft_cap)


class Target(nn.Module, ABC):
    """Causal language model without caches, windows or batches, which ``attend`` implements.

    Attributes:
        config: its architecture.
        embed_tokens: embedding ``[V, H]``. Heads read its plain rows, as other engines do: a target that
            scales its embeddings does so for itself.
        lm_head: output layer.
        layers: its decoder layers; empty where it was loaded without them.
        working_bytes: memory that a forward needs besides its states.
        logit_form: makes logits of what the output layer gives.
        ranks: processes that each have a part of it (tensor parallelism, :mod:`eagle_kit.models.sharding`);
            None where this one has all.
        has_whole_embedding: False where the embedding is cut by vocabulary among the ranks.
    """

    config: TargetConfig
    embed_tokens: nn.Embedding
    lm_head: Linear
    layers: nn.ModuleList
    logit_form: LogitForm = LogitForm()
    working_bytes: int = 0
    ranks: Ranks | None = None
    has_whole_embedding: bool = True

    @property
    @abstractmethod
    def variants(self) -> Sequence[AttentionVariant]:
        """How each of its attention layers attends."""

    @abstractmethod
    def place_layers(self, devices: Sequence[torch.device] | None) -> None:
        """Place layer i on ``devices[i]`` and everything else on ``devices[L]``, the device of the inputs;
        states are then moved between layers. None: all on one device.

        Raises:
            UserError: a target that cannot be split.
        """

    @abstractmethod
    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend, capture: tuple[int, ...] = ()
    ) -> TargetOutput:
        """Run the decoder.

        Args:
            ids: ``[T]`` int64.
            positions: ``[T]`` int64, RoPE positions.
            attend: attention of every layer; with recurrent layers a
                :class:`~eagle_kit.models.blocks.recurrence.HybridAttend`.
            capture: states to return, each by the layer it is the *input* of; ``num_layers`` is the last
                layer's output before the final norm.
        """

    @abstractmethod
    def final_norm(self, states: torch.Tensor) -> torch.Tensor:
        """Final-normed states ``[T, H]`` from the last layer's output ``[T, H]``."""

    def host_read(self) -> str | None:
        """What of its forward reads numbers on the host, so that it cannot be part of a graph; None where
        nothing does."""
        return None

    @property
    def norm_weight(self) -> torch.Tensor:
        """Weight ``[H]`` of the final norm, whatever it is called and however it is kept: what it makes of
        states of size 1 and mean 0."""
        size = self.config.hidden_size
        ones = torch.ones(size, dtype=self.embed_tokens.weight.dtype, device=self.embed_tokens.weight.device)
        ones[1::2] = -1.0
        both = self.final_norm(torch.stack((ones, -ones)))
        return (both[0] - both[1]) / 2 * ones

    @property
    def head_weight(self) -> torch.Tensor:
        """Output matrix ``[V, H]``, tied to the embedding or not."""
        return self.lm_head.weight

    @property
    def fp8_layers(self) -> list[FP8Linear | FP8Experts]:
        """Linear layers and routed experts that hold fp8 weights."""
        return [module for module in self.modules() if isinstance(module, FP8Linear | FP8Experts)]

    @property
    def weight_format(self) -> str:
        """Dtype of the weights in words."""
        dtype = str(self.embed_tokens.weight.dtype).removeprefix("torch.")
        return f"{dtype} with fp8 layers" if self.fp8_layers else dtype

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings ``[T, H]`` of ``ids [T]`` int64."""
        if self.ranks is None or self.has_whole_embedding:
            return F.embedding(ids, self.embed_tokens.weight)
        mine = self.ranks.share.of(self.config.vocab_size)
        local = ids - mine.start
        is_mine = (local >= 0) & (local < len(mine))
        rows = F.embedding(local.clamp(0, len(mine) - 1), self.embed_tokens.weight)
        return self.ranks.sum(rows * is_mine[:, None])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[T, V]`` of final-normed ``hidden [T, H]``."""
        return self.whole_logits(self.local_logits(hidden))

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[T, V]`` of final-normed ``hidden [T, H]``, or this rank's part of their columns."""
        return self.logit_form(self.lm_head(hidden))

    def whole_logits(self, local: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., V]`` of every rank's :meth:`local_logits`."""
        return local if self.ranks is None else self.ranks.join(local, self.config.vocab_size)

    def with_whole_ends(self) -> Self:
        """The same layers between the whole embedding and output layer, for drafts that read these; itself
        where they are whole. All ranks call it together."""
        if self.ranks is None:
            return self
        whole = copy(self)
        whole._modules = dict(self._modules)
        if not self.has_whole_embedding:
            whole.embed_tokens = nn.Embedding.from_pretrained(self._joined(self.embed_tokens.weight))
        with torch.device("meta"):
            whole.lm_head = Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        is_tied = self.config.tie_word_embeddings
        weight = whole.embed_tokens.weight.data if is_tied else self._joined(self.lm_head.weight)
        whole.lm_head.weight = nn.Parameter(weight, requires_grad=False)
        whole.has_whole_embedding = True
        return whole

    def take_embedding(self, whole: nn.Embedding) -> None:
        """Use the whole embedding, which a draft reads, in place of this rank's part."""
        assert self.ranks is not None
        self.embed_tokens, self.has_whole_embedding = whole, True
        if self.config.tie_word_embeddings:
            mine = self.ranks.share.of(self.config.vocab_size)
            self.lm_head.weight = nn.Parameter(whole.weight[mine.start : mine.stop], requires_grad=False)

    def _joined(self, rows: torch.Tensor) -> torch.Tensor:
        """Every rank's rows of a matrix ``[V, H]``."""
        assert self.ranks is not None
        return self.ranks.join(rows, self.config.vocab_size, dim=0)

    def causal(self) -> Attend:
        """Attention of one text, all of which is in the forward."""
        variants = self.variants
        return self._beside_states(lambda layer, q, k, v: prefill_attention(q, k, v, variants[layer]))

    def packed(self, spans: list[tuple[int, int]], starts: torch.Tensor | None = None) -> Attend:
        """Attention of several texts (start, stop), packed into one row; ``starts`` int32 ``[T]`` is the
        first token of each token's text, for layers that would have to copy it to the device."""
        variants = self.variants
        return self._beside_states(
            lambda layer, q, k, v: packed_attention(q, k, v, spans, variants[layer], starts=starts), spans
        )

    def _beside_states(self, attend: Attend, spans: list[tuple[int, int]] | None = None) -> Attend:
        """Put the recurrence of texts beside their attention, where there are recurrent layers."""
        return attend if self.config.states is None else Hybrid(attend, TextRecur(spans))
