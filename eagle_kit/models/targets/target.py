"""Interface of targets, for capture, training, serving and evaluation.

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
    """Hidden states of a forward.

    Attributes:
        hidden: final hidden states ``[T, H]``, after the last norm.
        aux_hidden_states: inputs of the captured layers, side by side, ``[T, len(capture) * H]``.
    """

    hidden: torch.Tensor
    aux_hidden_states: torch.Tensor


class LogitForm(NamedTuple):
    """Function from the outputs x of the output layer to logits: ``soft_cap * tanh(scale * x / soft_cap)``.

    Attributes:
        scale: factor of the outputs.
        soft_cap: largest absolute value of a logit; None for logits ``scale * x``.
    """

    scale: float = 1.0
    soft_cap: float | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of the shape of ``x``."""
        if self.scale != 1.0:
            x = x * self.scale
        if self.soft_cap is None:
            return x
        return self.soft_cap * torch.tanh(x / self.soft_cap)


class Target(nn.Module, ABC):
    """Causal language model. Caches, windows and batches are the business of ``attend``.

    Attributes:
        config: architecture.
        embed_tokens: embedding ``[V, H]``. Draft heads read its unscaled rows, as in other engines, also of a
            target whose first layer reads scaled ones.
        lm_head: output layer.
        layers: decoder layers; empty if the target was loaded without them.
        working_bytes: bytes of memory that a forward needs besides hidden states.
        logit_form: function from the outputs of the output layer to logits.
        ranks: processes that share the target (tensor parallelism, :mod:`eagle_kit.models.sharding`); None
            without others.
        has_whole_embedding: False if the ranks share the embedding by tokens.
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
        """Variant of attention of each layer that has attention."""

    @abstractmethod
    def place_layers(self, devices: Sequence[torch.device] | None) -> None:
        """Set the devices between which a forward moves hidden states. Weights are not moved.

        Args:
            devices: device of each of the L layers, then that of everything else, which is the device of the
                inputs and of the first layer. None for a target on one device.

        Raises:
            UserError: the target cannot be split.
        """

    @abstractmethod
    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend, capture: tuple[int, ...] = ()
    ) -> TargetOutput:
        """Run the decoder.

        Args:
            ids: int64 ``[T]``.
            positions: int64 ``[T]``, RoPE positions.
            attend: attention of every layer; with recurrent layers a
                :class:`~eagle_kit.models.blocks.recurrence.HybridAttend`.
            capture: layers whose *inputs* are returned; ``num_layers`` is the last layer's output before the
                final norm.
        """

    @abstractmethod
    def final_norm(self, states: torch.Tensor) -> torch.Tensor:
        """Final norm of the last layer's output ``[T, H]``."""

    def host_read(self) -> str | None:
        """Error of the first operation of a forward that reads a tensor on the host, so that the forward
        cannot be captured in a graph; None if no operation does."""
        return None

    def layer_state(self, index: int) -> dict[str, torch.Tensor]:
        """State of a layer with whole weights. Processes that share it as shards of FSDP2 call this together,
        and it is gathered."""
        from torch.distributed.tensor import DTensor

        state = {}
        for name, value in self.layers[index].state_dict().items():
            if isinstance(value, DTensor):
                value = value.full_tensor()
            state[name] = value
        return state

    @property
    def norm_weight(self) -> torch.Tensor:
        """Weight ``[H]`` of the final norm, which models store in different ways.

        It is read off the norm's outputs for hidden states of alternating 1 and -1, whose mean is 0 and whose
        root mean square is 1.
        """
        embedding = self.embed_tokens.weight
        signs = torch.ones(self.config.hidden_size, dtype=embedding.dtype, device=embedding.device)
        signs[1::2] = -1.0
        plus, minus = self.final_norm(torch.stack((signs, -signs)))
        return (plus - minus) / 2 * signs

    @property
    def head_weight(self) -> torch.Tensor:
        """Output matrix ``[V, H]``, tied to the embedding or not."""
        return self.lm_head.weight

    @property
    def fp8_layers(self) -> list[FP8Linear | FP8Experts]:
        """Linear layers and routed experts with fp8 weights."""
        return [module for module in self.modules() if isinstance(module, FP8Linear | FP8Experts)]

    @property
    def weight_format(self) -> str:
        """Dtype of the weights, for people."""
        dtype = str(self.embed_tokens.weight.dtype).removeprefix("torch.")
        if self.fp8_layers:
            return f"{dtype} with fp8 layers"
        return dtype

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings ``[T, H]`` of ``ids`` int64 ``[T]``."""
        if self.ranks is None or self.has_whole_embedding:
            return F.embedding(ids, self.embed_tokens.weight)

        # Rows of this rank's tokens, zeros for others, summed over the ranks.
        tokens = self.ranks.share.of(self.config.vocab_size)
        local_ids = ids - tokens.start
        is_local = (local_ids >= 0) & (local_ids < len(tokens))
        rows = F.embedding(local_ids.clamp(0, len(tokens) - 1), self.embed_tokens.weight)
        return self.ranks.sum(rows * is_local[:, None])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[T, V]`` of final hidden states ``[T, H]``."""
        return self.whole_logits(self.local_logits(hidden))

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of final hidden states ``[T, H]``: ``[T, V]``, or with ranks the columns of this rank's
        tokens."""
        return self.logit_form(self.lm_head(hidden))

    def whole_logits(self, local: torch.Tensor) -> torch.Tensor:
        """Gather the logits ``[..., V]`` from the :meth:`local_logits` of every rank."""
        if self.ranks is None:
            return local
        return self.ranks.join(local, self.config.vocab_size)

    def with_whole_ends(self) -> Self:
        """Copy of this target with the embedding and the output layer of all ranks, for drafts that read
        them.

        The layers are shared. Without ranks, returns this target. All ranks call it together.
        """
        if self.ranks is None:
            return self
        whole = copy(self)
        whole._modules = dict(self._modules)

        # The embedding.
        if not self.has_whole_embedding:
            whole.embed_tokens = nn.Embedding.from_pretrained(self._gathered(self.embed_tokens.weight))
        whole.has_whole_embedding = True

        # The output layer, perhaps with the weight of the embedding.
        with torch.device("meta"):
            whole.lm_head = Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        if self.config.tie_word_embeddings:
            weight = whole.embed_tokens.weight.data
        else:
            weight = self._gathered(self.lm_head.weight)
        whole.lm_head.weight = nn.Parameter(weight, requires_grad=False)
        return whole

    def take_embedding(self, whole: nn.Embedding) -> None:
        """Replace this rank's part of the embedding by the whole one, which a draft reads anyway."""
        assert self.ranks is not None
        self.embed_tokens = whole
        self.has_whole_embedding = True
        if self.config.tie_word_embeddings:
            tokens = self.ranks.share.of(self.config.vocab_size)
            rows = whole.weight[tokens.start : tokens.stop]
            self.lm_head.weight = nn.Parameter(rows, requires_grad=False)

    def _gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather the rows of all ranks to a matrix ``[V, H]``."""
        assert self.ranks is not None
        return self.ranks.join(rows, self.config.vocab_size, dim=0)

    def causal(self) -> Attend:
        """Attention of a forward over one whole text."""
        variants = self.variants

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return prefill_attention(q, k, v, variants[layer])

        return self._with_recurrence(attend)

    def packed(self, spans: list[tuple[int, int]], starts: torch.Tensor | None = None) -> Attend:
        """Attention of a forward over several whole texts, packed into one row.

        Args:
            spans: (start, stop) of each text.
            starts: int32 ``[T]``, first token of each token's text; None to copy it to the device when it is
                needed.
        """
        variants = self.variants

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return packed_attention(q, k, v, spans, variants[layer], starts=starts)

        return self._with_recurrence(attend, spans)

    def _with_recurrence(self, attend: Attend, spans: list[tuple[int, int]] | None = None) -> Attend:
        """Combine the attention of whole texts with their recurrence, for targets with recurrent layers."""
        if self.config.states is None:
            return attend
        return Hybrid(attend, TextRecur(spans))
