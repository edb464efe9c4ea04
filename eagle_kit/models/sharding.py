"""Tensor parallelism (Megatron-LM, arXiv 1909.08053): which part of every published tensor a rank has.

A rank's model is a smaller model of the same class. It has some of the heads and some of the MLP's inner
values, so that its output projections give one summand each; after attention and after the MLP one all-reduce
adds them. Embedding and output layer are cut by vocabulary.

Ranks have whole groups of query heads with their key-value head, as evenly as these are divisible. Where
there are more ranks than key-value heads, several ranks have a copy of one, and a part of its query heads
each. Latent attention shares query heads over latents that every rank has. Of a mixture every rank has all
experts and a part of each one's inner values, so that ranks have equal work whatever the router chooses.
"""

import re
from dataclasses import replace
from typing import Literal, NamedTuple

from eagle_kit.core.errors import UserError
from eagle_kit.kernels.collectives import Share
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.loading.published import Part


class Cut(NamedTuple):
    """Indices ``start`` to ``stop - 1`` of dimension ``dim``."""

    dim: int
    start: int
    stop: int


class Heads(NamedTuple):
    """Numbers of a rank's query heads, and of the key-value heads that they share."""

    query: range
    kv: range


Unit = Literal["query", "kv", "values", "halves", "first"]
"""What a dimension consists of: heads, or single values, or two halves of such; all of ``first`` is the first
rank's, others have zeros."""

CUTS: tuple[tuple[str, int, Unit], ...] = (
    (r"embed_tokens\.weight", 0, "values"),
    (r"lm_head\.weight", 0, "values"),
    (r"self_attn\.q(_b)?_proj\.(weight|bias)", 0, "query"),
    (r"self_attn\.[kv]_proj\.(weight|bias)", 0, "kv"),
    (r"self_attn\.kv_b_proj\.weight", 0, "query"),
    (r"self_attn\.o_proj\.weight", 1, "query"),
    (r"(mlp|shared_experts)\.(gate|up)_proj\.(weight|bias)", 0, "values"),
    (r"(mlp|shared_experts)\.down_proj\.weight", 1, "values"),
    (r"(self_attn\.o_proj|mlp\.down_proj|shared_experts\.down_proj)\.bias", 0, "first"),
    (r"experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight", 0, "values"),
    (r"experts\.\d+\.(down_proj|w2)\.weight", 1, "values"),
    (r"experts\.gate_up_proj", 1, "halves"),
    (r"experts\.down_proj", 2, "values"),
)
"""Published names as they end, the dimension that is cut, and its unit; every rank has the others whole."""


def share_heads(num_heads: int, num_kv_heads: int, share: Share) -> Heads:
    """The heads of a rank.

    Raises:
        UserError: there are more ranks than query heads for them.
    """
    group = num_heads // num_kv_heads
    if share.size <= num_kv_heads:
        kv = share.of(num_kv_heads)
        return Heads(range(kv.start * group, kv.stop * group), kv)
    mine = next(i for i in range(num_kv_heads) if share.rank in Share(i, num_kv_heads).of(share.size))
    ranks = Share(mine, num_kv_heads).of(share.size)
    if len(ranks) > group:
        raise UserError(
            f"{share.size} ranks cannot share {num_heads} query heads over {num_kv_heads} key-value heads.",
            f"Use at most {num_heads}.",
        )
    query = Share(share.rank - ranks.start, len(ranks)).of(group)
    return Heads(range(mine * group + query.start, mine * group + query.stop), range(mine, mine + 1))


def shard_config(config: TargetConfig, share: Share) -> TargetConfig:
    """Architecture of a rank's model. Its vocabulary stays the whole one.

    Raises:
        UserError: a target that is not cut, or that is too small for so many ranks.
    """
    if config.states is not None:
        raise UserError(
            f"Tensor parallelism does not cut the recurrent layers of {config.model_type}.",
            "Leave tensor_parallel at 1.",
        )
    query, kv = share_heads(config.num_heads, config.num_kv_heads, share)
    _check_size("the tokens", config.vocab_size, share)
    moe, has_mlp = config.moe, config.moe is None or len(config.moe.dense_layers) > 0
    if has_mlp:
        _check_size("the values of an MLP", config.intermediate_size, share)
    if moe is not None:
        _check_size("the values of an expert", moe.intermediate_size, share)
        inner, shared = share.of(moe.intermediate_size), share.of(moe.shared_intermediate_size)
        moe = replace(moe, intermediate_size=len(inner), shared_intermediate_size=len(shared))
    return replace(
        config,
        num_heads=len(query),
        num_kv_heads=len(kv),
        intermediate_size=len(share.of(config.intermediate_size)) if has_mlp else 1,
        moe=moe,
    )


def cuts_of(part: Part, config: TargetConfig, share: Share) -> list[Cut] | None:
    """What a rank has of a published tensor of ``config``, along one dimension; None for all of it."""
    rules = (rule for rule in CUTS if re.search(rf"(^|\.){rule[0]}$", part.name))
    if (rule := next(rules, None)) is None:
        return None
    _, dim, unit = rule
    count = part.shape[dim]
    if unit == "first":
        return [Cut(dim, 0, count)] if share.rank == 0 else []
    if unit in ("values", "halves"):
        parts = 2 if unit == "halves" else 1
        size = count // parts
        mine = share.of(size)
        return [Cut(dim, i * size + mine.start, i * size + mine.stop) for i in range(parts)]
    heads = share_heads(config.num_heads, config.num_kv_heads, share)
    mine, total = (heads.query, config.num_heads) if unit == "query" else (heads.kv, config.num_kv_heads)
    size = count // total
    return [Cut(dim, mine.start * size, mine.stop * size)]


def _check_size(what: str, count: int, share: Share) -> None:
    if count < share.size:
        raise UserError(f"{share.size} ranks are more than {what}, {count}.", "Use fewer.")
