"""Choice of the paged store for a model."""

from typing import Any

from eagle_kit.kv.keys_values import PagedKV
from eagle_kit.kv.latents import PagedLatents
from eagle_kit.kv.store import PagedStore, PoolLayout
from eagle_kit.models.config_parts import CacheSpec, LatentSpec


def open_store(spec: CacheSpec, layout: PoolLayout, *, gathers: bool = False, **options: Any) -> PagedStore:
    """Open the store of a model that keeps ``spec`` of a token; ``options`` are those of :class:`PagedStore`,
    and ``gathers`` that of :class:`PagedKV`."""
    if isinstance(spec, LatentSpec):
        return PagedLatents(spec, layout, **options)
    return PagedKV(spec.num_layers, spec.num_heads, spec.head_dim, layout, gathers=gathers, **options)
