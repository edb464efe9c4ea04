"""Choice of the paged store for a model: keys and values, latents, or latents of one rank."""

from collections.abc import Sequence
from typing import Any

from eagle_kit.distributed.collectives import Share
from eagle_kit.kv.dp_latents import DataParallelLatents
from eagle_kit.kv.keys_values import PagedKV
from eagle_kit.kv.latents import PagedLatents
from eagle_kit.kv.store import PagedStore, PoolLayout
from eagle_kit.models.cache_specs import CacheSpec, LatentSpec
from eagle_kit.ops.attention.variant import AttentionVariant


def open_store(
    spec: CacheSpec,
    layout: PoolLayout,
    variants: Sequence[AttentionVariant],
    *,
    share: Share | None = None,
    **options: Any,
) -> PagedStore:
    """Make the store for a model.

    Args:
        spec: what the model stores for a token: keys and values, or latents.
        layout: sizes of the store, of all ranks together with ``share``.
        variants: variant of attention of each layer; stores of latents do not use them.
        share: this rank, for data-parallel attention (latents only); None otherwise.
        options: further arguments of :class:`PagedStore`.
    """
    if share is not None:
        assert isinstance(spec, LatentSpec), "data-parallel attention is for latents"
        return DataParallelLatents(spec, layout, share, **options)
    if isinstance(spec, LatentSpec):
        return PagedLatents(spec, layout, **options)
    return PagedKV(
        spec.num_layers,
        spec.num_heads,
        spec.head_dim,
        layout,
        variants=variants,
        heads=spec.heads,
        **options,
    )
