"""What transformers takes for the same shapes: a static cache with a compiled forward, plain decoding and
windows with a tree as mask, by SDPA and by FlexAttention."""

from collections.abc import Callable
from typing import Any

import torch

from eagle_kit.bench.engine.load import mark, seconds_between
from eagle_kit.bench.engine.models import as_transformers
from eagle_kit.kernels.timing import Timing
from eagle_kit.kernels.window_attention import ancestor_bits
from eagle_kit.models.config import TargetConfig

ROOM = 64


class Transformers:
    """A random Llama of transformers over a random static cache.

    Args:
        compiled: compile the forward into CUDA graphs, as its documentation does; else it runs eagerly.
    """

    def __init__(
        self, config: TargetConfig, device: torch.device, dtype: torch.dtype, *, compiled: bool
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.config, self.device, self.dtype, self.compiled = config, device, dtype, compiled
        self._config = as_transformers(config)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(self._config, dtype=dtype)
        self.model = model.eval().requires_grad_(False)

    def cache(self, batch: int, context: int) -> Any:
        """A static cache of random keys."""
        from transformers import StaticCache

        cache: Any = StaticCache(config=self._config, max_cache_len=context + ROOM)
        heads, size = self.config.num_kv_heads, self.config.head_dim
        cache.early_initialization(batch, heads, size, self.dtype, self.device)
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        return cache

    @torch.no_grad()
    def time(self, attention: str, batch: int, context: int, nodes: int, repeats: int) -> Timing:
        """Seconds of one forward over ``nodes`` tokens of each request behind ``context`` cached ones.

        Args:
            attention: ``"sdpa"`` or ``"flex_attention"``.
            nodes: 1 is decoding; more are a random tree, whose mask is given.
        """
        self.model.set_attn_implementation(attention)
        cache = self.cache(batch, context)
        ids = torch.randint(self.config.vocab_size, (batch, nodes), device=self.device)
        options: dict[str, Any] = {}
        if nodes > 1:
            limits = torch.arange(nodes, device=self.device).clamp(min=1).expand(batch, nodes)
            parents = (torch.rand(batch, nodes, device=self.device) * limits).long()
            bits = ancestor_bits(parents, nodes)
            depths = torch.stack([(bits >> j) & 1 for j in range(nodes)]).sum(0) - 1
            options["position_ids"] = context + depths
            options["attention_mask"] = self._mask(attention, bits, context)
        forward: Callable[..., Any] = self.model.forward
        if self.compiled:
            torch._dynamo.reset()
            forward = torch.compile(forward, mode="reduce-overhead", fullgraph=True, dynamic=False)
        marks: list[Any] = []
        warmup = 5
        for _ in range(warmup + repeats):
            for layer in cache.layers:
                layer.cumulative_length.fill_(context)
            marks.append(mark(self.device))
            forward(input_ids=ids, past_key_values=cache, use_cache=True, **options)
            marks.append(mark(self.device))
        seconds = seconds_between(marks, self.device)[::2]
        return Timing.of(seconds[warmup:], "compiled" if self.compiled else "eager")

    def _mask(self, attention: str, bits: torch.Tensor, context: int) -> Any:
        """The tree ``bits [B, N]`` behind a prefix: an additive mask, or a block mask for FlexAttention."""
        (b, n), width = bits.shape, context + ROOM
        if attention == "flex_attention":
            from torch.nn.attention.flex_attention import create_block_mask

            def seen(batch: Any, head: Any, node: Any, column: Any) -> Any:
                key = (column - context).clamp(0, n - 1)
                in_tree = (column < context + n) & (((bits[batch, node] >> key) & 1) == 1)
                return (column < context) | in_tree

            return create_block_mask(seen, b, None, n, width, device=str(self.device))
        column = torch.arange(width, device=self.device)
        key = (column - context).clamp(0, n - 1)
        in_tree = (column < context + n) & (((bits[:, :, None] >> key) & 1) == 1)
        visible = (column < context) | in_tree
        mask = torch.zeros(b, n, width, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~visible, float("-inf"))[:, None]
