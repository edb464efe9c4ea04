"""Choice of the paged store for a model."""

from collections.abc import Sequence
from typing import Any

from eagle_kit.distributed.collectives import Share
from eagle_kit.kv.dp_latents import DataParallelLatents
from eagle_kit.kv.keys_values import PagedKV
from eagle_kit.kv.latents import PagedLatents
from eagle_kit.kv.store import PagedStore, PoolLayout
from eagle_kit.models.config_parts import CacheSpec, LatentSpec
from eagle_kit.ops.attention.variant import AttentionVariant


def open_store(
    spec: CacheSpec,
    layout: PoolLayout,
    variants: Sequence[AttentionVariant],
    *,
    share: Share | None = None,
    **options: Any,
) -> PagedStore:
    """Open the store of a model that keeps ``spec`` of a token and whose layers attend as ``variants`` say;
    ``options`` are those of :class:`PagedStore`. With a ``share``
    it is that of a rank of data-parallel attention."""
    if share is not None:
        assert isinstance(spec, LatentSpec)
        return DataParallelLatents(spec, layout, share, **options)
    if isinstance(spec, LatentSpec):
        return PagedLatents(spec, layout, **options)
    sizes = spec.num_layers, spec.num_heads, spec.head_dim
    return PagedKV(*sizes, layout, variants=variants, heads=spec.heads, **options)
