"""Tensor parallelism (Megatron-LM, arXiv 1909.08053): which part of every published tensor a rank has.

A rank's model is a smaller model of the same class. It has some of the heads and some of the MLP's inner
values, so that its output projections give one summand each; after attention and after the MLP one all-reduce
adds them. Embedding and output layer are cut by vocabulary.

Ranks have whole groups of query heads with their key-value head, as evenly as these are divisible. Where
there are more ranks than key-value heads, several ranks have a copy of one, and a part of its query heads
each. Latent attention shares query heads over latents that every rank has. Of a mixture every rank has all
experts and a part of each one's inner values, so that ranks have equal work whatever the router chooses; or,
with expert parallelism (GShard, arXiv 2006.16668), whole experts, contiguous and nearly equal numbers of
them: as every rank has every token, the same sum adds what they give, and there is nothing to dispatch.

Recurrent layers are cut as attention is: whole groups of heads with the key head that they share, and their
channels of convolutions, decays and gates; states are those of a rank's heads, and one sum adds the outputs.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from eagle_kit.core.errors import UserError
from eagle_kit.distributed.collectives import Share
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.loading.published import Part


class Cut(NamedTuple):
    """Indices ``start`` to ``stop - 1`` of dimension ``dim``."""

    dim: int
    start: int
    stop: int


class Heads(NamedTuple):
    """Numbers of a rank's query heads, and of the key-value heads that they share; of recurrent layers value
    heads, and key heads."""

    query: range
    kv: range


Unit = Literal["query", "kv", "tokens", "values", "halves", "first"]
"""What a dimension consists of: heads, tokens of the vocabulary, inner values, or two halves of such; all of
``first`` is the first rank's, others have zeros."""
State = Literal["key", "value", "head"]
"""A section of a dimension of a recurrent layer: all key heads, all value heads, or a number of each of the
latter."""


class States(NamedTuple):
    """Sections of a dimension of a recurrent layer, in order; perhaps those of each key head, one after
    another."""

    sections: tuple[State, ...]
    by_key_head: bool = False


KEYS_FIRST: tuple[State, ...] = "key", "key", "value"
VALUES_FIRST: tuple[State, ...] = "value", "key", "key"
CUTS: tuple[tuple[str, int, Unit | States], ...] = (
    (r"embed_tokens\.weight", 0, "tokens"),
    (r"lm_head\.weight", 0, "tokens"),
    (r"self_attn\.(q|q_b|gate)_proj\.(weight|bias)", 0, "query"),
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
    (r"linear_attn\.(in_proj_qkv|conv1d)\.weight", 0, States(KEYS_FIRST)),
    (r"linear_attn\.in_proj_z\.weight", 0, States(("value",))),
    (r"linear_attn\.(in_proj_[ab]\.weight|A_log|dt_bias)", 0, States(("head",))),
    (r"linear_attn\.in_proj_qkvz\.weight", 0, States((*KEYS_FIRST, "value"), by_key_head=True)),
    (r"linear_attn\.in_proj_ba\.weight", 0, States(("head", "head"), by_key_head=True)),
    (r"(linear_attn|mamba)\.out_proj\.weight", 1, States(("value",))),
    (r"mamba\.in_proj\.(weight|bias)", 0, States(("value", *VALUES_FIRST, "head"))),
    (r"mamba\.conv1d\.(weight|bias)", 0, States(VALUES_FIRST)),
    (r"mamba\.(A_log|dt_bias|D)", 0, States(("head",))),
    (r"mamba\.norm\.weight", 0, States(("value",))),
    (r"mamba\.out_proj\.bias", 0, "first"),
)
"""Published names as they end, the dimension that is cut, and its unit; every rank has the others whole."""
ONE_EXPERT = r"(?:^|\.)experts\.(\d+)\."
"""An expert that is published by itself."""


def share_heads(
    num_heads: int, num_kv_heads: int, share: Share, names: tuple[str, str] = ("query", "key-value")
) -> Heads:
    """The heads of a rank.

    Args:
        names: of both kinds.

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
            f"{share.size} ranks cannot share {num_heads} {names[0]} heads over {num_kv_heads} {names[1]} "
            "heads.",
            f"Use at most {num_heads}.",
        )
    query = Share(share.rank - ranks.start, len(ranks)).of(group)
    return Heads(range(mine * group + query.start, mine * group + query.stop), range(mine, mine + 1))


@dataclass(frozen=True)
class Sharding:
    """What a rank has of a target.

    Attributes:
        config: of the whole target.
        share: the rank's part.
        expert_parallel: routed experts are shared by number, whole ones, and not cut inside.
        block: inner values that share a scale of fp8 weights, and stay together.
        attends_whole: every rank has the whole attention, for requests of its own.
    """

    config: TargetConfig
    share: Share
    expert_parallel: bool = False
    block: int = 1
    attends_whole: bool = False

    @classmethod
    def of(
        cls,
        config: TargetConfig,
        share: Share,
        block: tuple[int, int] | None,
        expert_parallel: bool,
        attends_whole: bool = False,
    ) -> "Sharding":
        """With fp8 scales of ``block`` rows and columns, or without blocks."""
        return cls(config, share, expert_parallel, 1 if block is None else math.lcm(*block), attends_whole)

    def rank_config(self) -> TargetConfig:
        """Architecture of the rank's model. Its vocabulary stays the whole one.

        Raises:
            UserError: a target that is not cut, or that is too small for so many ranks.
        """
        config, share = self.config, self.share
        if share.size == 1:
            return config
        if self.expert_parallel and config.moe is None:
            raise UserError(
                f"Expert parallelism shares routed experts, and this {config.model_type} has none.",
                "Leave expert_parallel out.",
            )
        if self.attends_whole and config.mla is None:
            raise UserError(
                f"Data-parallel attention is for latents, and this {config.model_type} has keys and values, "
                "which ranks share by heads.",
                "Leave data_parallel_attention out.",
            )
        query, kv = share_heads(
            config.num_heads, config.num_kv_heads, Share(0, 1) if self.attends_whole else share
        )
        self._check("tokens", config.vocab_size)
        delta, mamba = config.delta, config.mamba
        if delta is not None:
            heads = self._state_heads()
            delta = replace(delta, num_key_heads=len(heads.kv), num_heads=len(heads.query))
        if mamba is not None:
            heads = self._state_heads()
            if mamba.has_norm and share.size > mamba.num_groups:
                groups = f"{mamba.num_groups} groups of {mamba.num_heads} heads"
                raise UserError(
                    f"{share.size} ranks would cut the norms of {groups}.", f"Use at most {mamba.num_groups}."
                )
            mamba = replace(mamba, num_groups=len(heads.kv), num_heads=len(heads.query))
        moe, has_mlp = config.moe, config.moe is None or len(config.moe.dense_layers) > 0
        if has_mlp:
            self._check("inner values of an MLP", config.intermediate_size, self.block)
        if moe is not None:
            shared = self._values(moe.shared_intermediate_size)
            moe = replace(moe, shared_intermediate_size=len(shared))
            if self.expert_parallel:
                self._check("experts", moe.num_experts)
                moe = replace(moe, local_experts=share.of(moe.num_experts))
            else:
                self._check("inner values of an expert", moe.intermediate_size, self.block)
                moe = replace(moe, intermediate_size=len(self._values(moe.intermediate_size)))
        return replace(
            config,
            num_heads=len(query),
            num_kv_heads=len(kv),
            intermediate_size=len(self._values(config.intermediate_size)) if has_mlp else 1,
            moe=moe,
            delta=delta,
            mamba=mamba,
            attends_whole=self.attends_whole,
        )

    def has(self, part: Part) -> bool:
        """False for a published expert of another rank."""
        number = re.search(ONE_EXPERT, part.name)
        if number is None or not self.expert_parallel or self.config.moe is None:
            return True
        return int(number[1]) in self.share.of(self.config.moe.num_experts)

    def cuts(self, part: Part) -> list[Cut] | None:
        """What the rank has of a published tensor, along one dimension; None for all of it."""
        is_expert = re.search(r"(^|\.)experts\.", part.name) is not None
        if is_expert and self.expert_parallel:
            if re.search(ONE_EXPERT, part.name):
                return None if self.has(part) else []
            mine = self.share.of(part.shape[0])
            return [Cut(0, mine.start, mine.stop)]
        if self.attends_whole and "self_attn." in part.name:
            return None
        rules = (rule for rule in CUTS if re.search(rf"(^|\.){rule[0]}$", part.name))
        if (rule := next(rules, None)) is None:
            return None
        _, dim, unit = rule
        count = part.shape[dim]
        if isinstance(unit, States):
            return [Cut(dim, start, stop) for start, stop in self._of_states(unit)]
        if unit == "first":
            return [Cut(dim, 0, count)] if self.share.rank == 0 else []
        if unit == "tokens":
            mine = self.share.of(count)
            return [Cut(dim, mine.start, mine.stop)]
        if unit in ("values", "halves"):
            parts = 2 if unit == "halves" else 1
            size = count // parts
            mine = self._values(size)
            return [Cut(dim, i * size + mine.start, i * size + mine.stop) for i in range(parts)]
        config = self.config
        heads = share_heads(config.num_heads, config.num_kv_heads, self.share)
        mine, total = (heads.query, config.num_heads) if unit == "query" else (heads.kv, config.num_kv_heads)
        size = count // total
        return [Cut(dim, mine.start * size, mine.stop * size)]

    def _state_heads(self) -> Heads:
        """Value heads of recurrent layers, and the key heads that they share."""
        assert self.config.states is not None
        one = self.config.states.recurrences[0]
        return share_heads(one.num_heads, one.num_key_heads, self.share, ("value", "key"))

    def _of_states(self, unit: States) -> Iterator[tuple[int, int]]:
        """Start and stop of its parts of a dimension of a recurrent layer."""
        assert self.config.states is not None
        one, (query, kv) = self.config.states.recurrences[0], self._state_heads()
        shared = one.num_heads // one.num_key_heads
        sizes = {"key": one.key_dim, "value": one.value_dim, "head": 1}
        groups = [range(i, i + 1) for i in range(one.num_key_heads)]
        place = 0
        for group in groups if unit.by_key_head else [range(one.num_key_heads)]:
            for section in unit.sections:
                there, mine, size = group, kv, sizes[section]
                if section != "key":
                    there, mine = range(group.start * shared, group.stop * shared), query
                first, last = max(mine.start, there.start), min(mine.stop, there.stop)
                if first < last:
                    yield place + (first - there.start) * size, place + (last - there.start) * size
                place += len(there) * size

    def _values(self, count: int) -> range:
        """Its inner values of ``count``: whole blocks."""
        blocks = self.share.of(-(-count // self.block))
        return range(blocks.start * self.block, min(count, blocks.stop * self.block))

    def _check(self, what: str, count: int, block: int = 1) -> None:
        blocks = "" if block == 1 else f" in fp8 blocks of {block}"
        if -(-count // block) < self.share.size:
            raise UserError(f"{self.share.size} ranks are too many for {count} {what}{blocks}.", "Use fewer.")


def scale_cuts(
    part: Part, cuts: Sequence[Cut] | None, scales: tuple[int, ...], block: tuple[int, int] | None
) -> list[Cut] | None:
    """What a rank has of the scales of an fp8 weight that it has ``cuts`` of; None for all of them.

    Args:
        part: the weight ``[..., N, K]``.
        scales: their shape.
        block: rows and columns that share one; None where an output has one, or the whole tensor.

    Raises:
        UserError: a block would be cut apart.
    """
    if not cuts:
        return None if cuts is None else []
    found = []
    for dim, start, stop in cuts:
        if block is None:
            if dim >= len(scales) or scales[dim] != part.shape[dim]:
                return None
            found.append(Cut(dim, start, stop))
            continue
        size = {len(part.shape) - 2: block[0], len(part.shape) - 1: block[1]}.get(dim, 1)
        if start % size or (stop % size and stop != part.shape[dim]):
            raise UserError(
                f"A rank would have {start} to {stop - 1} of {part.name}, whose fp8 scales are those of "
                f"blocks of {size}.",
                "Use another number of ranks, or the unquantised checkpoint.",
            )
        found.append(Cut(dim, start // size, -(-stop // size)))
    return found
