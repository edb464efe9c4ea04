"""Tensor parallelism (Megatron-LM, arXiv 1909.08053): the part of every published tensor that a rank has.

A rank's model is a smaller model of the same class. It has some of the heads and a part of the MLP's
intermediate values, so that the outputs of all ranks after attention and after the MLP add up to those of
the whole model. One all-reduce adds them. Embedding and output layer are cut by tokens of the vocabulary.

* Attention: a rank has whole groups of query heads with their key-value head, as evenly as possible. With
more ranks
  than key-value heads, several ranks have a copy of one, and a part of its query heads each. With latent
  attention ranks share query heads, and every rank has all latents.
* Experts: every rank has a part of the intermediate values of each expert, so that ranks have equal work
for any
  routing. With expert parallelism (GShard, arXiv 2006.16668) a rank has whole experts, contiguous and in
  nearly equal numbers. Every rank has every token, so the same all-reduce adds their outputs, and no token
  is dispatched.
* Recurrent layers are cut like attention: a rank has whole groups of value heads with the key head that
they share,
  and their channels of convolutions, decays and gates. States are those of the rank's heads.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from eagle_kit.core.errors import UserError
from eagle_kit.distributed.collectives import Share
from eagle_kit.models.cache_specs import RecurrenceSpec
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.layer_configs import DeltaConfig, MambaConfig, MoEConfig
from eagle_kit.models.loading.published import Part


class Cut(NamedTuple):
    """Indices ``start`` to ``stop - 1`` of dimension ``dim``."""

    dim: int
    start: int
    stop: int


class Heads(NamedTuple):
    """Indices of a rank's heads.

    Attributes:
        query: query heads; value heads of recurrent layers.
        kv: key-value heads that the query heads share; key heads of recurrent layers.
    """

    query: range
    kv: range


Unit = Literal["query heads", "kv heads", "tokens", "intermediate", "gate and up", "first rank"]
"""Content of a dimension: heads, tokens of the vocabulary, intermediate values of an MLP, or those of gate
and up one after the other. With ``first rank`` the first rank has the whole dimension, and others have
zeros."""
Section = Literal["key", "value", "head"]
"""Section of a dimension of a recurrent layer: keys or values of all heads, or one number of each value
head."""


class Sections(NamedTuple):
    """Dimension of a recurrent layer.

    Attributes:
        sections: its sections, in order.
        by_key_head: the sections are those of one key head, and are repeated for each.
    """

    sections: tuple[Section, ...]
    by_key_head: bool = False


class CutRule(NamedTuple):
    """Rule for the published tensors whose names end with ``pattern``: dimension ``dim`` consists of
    ``unit``."""

    pattern: str
    dim: int
    unit: Unit | Sections


QUERIES_KEYS_VALUES: tuple[Section, ...] = ("key", "key", "value")
VALUES_KEYS_QUERIES: tuple[Section, ...] = ("value", "key", "key")
CUT_RULES = (
    CutRule(r"embed_tokens\.weight", 0, "tokens"),
    CutRule(r"lm_head\.weight", 0, "tokens"),
    CutRule(r"self_attn\.(q|q_b|gate)_proj\.(weight|bias)", 0, "query heads"),
    CutRule(r"self_attn\.[kv]_proj\.(weight|bias)", 0, "kv heads"),
    CutRule(r"self_attn\.kv_b_proj\.weight", 0, "query heads"),
    CutRule(r"self_attn\.o_proj\.weight", 1, "query heads"),
    CutRule(r"(mlp|shared_experts)\.(gate|up)_proj\.(weight|bias)", 0, "intermediate"),
    CutRule(r"(mlp|shared_experts)\.down_proj\.weight", 1, "intermediate"),
    CutRule(r"(self_attn\.o_proj|mlp\.down_proj|shared_experts\.down_proj)\.bias", 0, "first rank"),
    CutRule(r"experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight", 0, "intermediate"),
    CutRule(r"experts\.\d+\.(down_proj|w2)\.weight", 1, "intermediate"),
    CutRule(r"experts\.gate_up_proj", 1, "gate and up"),
    CutRule(r"experts\.down_proj", 2, "intermediate"),
    CutRule(r"linear_attn\.(in_proj_qkv|conv1d)\.weight", 0, Sections(QUERIES_KEYS_VALUES)),
    CutRule(r"linear_attn\.in_proj_z\.weight", 0, Sections(("value",))),
    CutRule(r"linear_attn\.(in_proj_[ab]\.weight|A_log|dt_bias)", 0, Sections(("head",))),
    CutRule(
        r"linear_attn\.in_proj_qkvz\.weight", 0, Sections((*QUERIES_KEYS_VALUES, "value"), by_key_head=True)
    ),
    CutRule(r"linear_attn\.in_proj_ba\.weight", 0, Sections(("head", "head"), by_key_head=True)),
    CutRule(r"(linear_attn|mamba)\.out_proj\.weight", 1, Sections(("value",))),
    CutRule(r"mamba\.in_proj\.(weight|bias)", 0, Sections(("value", *VALUES_KEYS_QUERIES, "head"))),
    CutRule(r"mamba\.conv1d\.(weight|bias)", 0, Sections(VALUES_KEYS_QUERIES)),
    CutRule(r"mamba\.(A_log|dt_bias|D)", 0, Sections(("head",))),
    CutRule(r"mamba\.norm\.weight", 0, Sections(("value",))),
    CutRule(r"mamba\.out_proj\.bias", 0, "first rank"),
)
"""Rules of the tensors that are cut. Every rank has all others whole."""
EXPERTS = r"(^|\.)experts\."
"""Tensors of routed experts."""
ONE_EXPERT = r"(?:^|\.)experts\.(\d+)\."
"""Tensors of a routed expert that is published by itself, and its index."""


def share_heads(
    num_heads: int, num_kv_heads: int, share: Share, names: tuple[str, str] = ("query", "key-value")
) -> Heads:
    """Find the heads of a rank.

    Args:
        num_heads: number of query heads.
        num_kv_heads: number of key-value heads.
        share: the rank.
        names: words for both kinds of heads, for messages.

    Raises:
        UserError: there are more ranks than query heads for them.
    """
    group_size = num_heads // num_kv_heads

    # Whole groups.
    if share.size <= num_kv_heads:
        kv = share.of(num_kv_heads)
        return Heads(range(kv.start * group_size, kv.stop * group_size), kv)

    # A part of one group: the ranks are shared out among the key-value heads.
    for kv_head in range(num_kv_heads):
        ranks = Share(kv_head, num_kv_heads).of(share.size)
        if share.rank in ranks:
            break
    if len(ranks) > group_size:
        raise UserError(
            f"{share.size} ranks cannot share {num_heads} {names[0]} heads over {num_kv_heads} {names[1]} "
            "heads.",
            f"Use at most {num_heads}.",
        )
    within_group = Share(share.rank - ranks.start, len(ranks)).of(group_size)
    first = kv_head * group_size
    return Heads(range(first + within_group.start, first + within_group.stop), range(kv_head, kv_head + 1))


@dataclass(frozen=True)
class Sharding:
    """The part of a target that a rank has.

    Attributes:
        config: architecture of the whole target.
        share: the rank.
        expert_parallel: ranks share whole routed experts, and not the intermediate values of each.
        block: number of intermediate values that share a scale of fp8 weights and are not cut apart.
        data_parallel_attention: every rank has the attention of all heads, for its own requests.
    """

    config: TargetConfig
    share: Share
    expert_parallel: bool = False
    block: int = 1
    data_parallel_attention: bool = False

    @classmethod
    def of(
        cls,
        config: TargetConfig,
        share: Share,
        block: tuple[int, int] | None,
        expert_parallel: bool,
        data_parallel_attention: bool = False,
    ) -> "Sharding":
        """Make the sharding of a checkpoint whose fp8 weights have scales of ``block`` rows and columns; None
        without blocks."""
        block_size = 1
        if block is not None:
            block_size = math.lcm(*block)
        return cls(config, share, expert_parallel, block_size, data_parallel_attention)

    def rank_config(self) -> TargetConfig:
        """Architecture of the rank's model, except that its vocabulary stays the whole one.

        Raises:
            UserError: a target that is not cut, or that is too small for so many ranks.
        """
        config = self.config
        share = self.share
        if share.size == 1:
            return config
        self._check_options()
        self._check("tokens", config.vocab_size)

        # Attention.
        num_heads = config.num_heads
        num_kv_heads = config.num_kv_heads
        if not self.data_parallel_attention:
            heads = share_heads(num_heads, num_kv_heads, share)
            num_heads = len(heads.query)
            num_kv_heads = len(heads.kv)

        # Recurrent layers.
        delta = config.delta
        mamba = config.mamba
        if delta is not None:
            delta = self._rank_delta(delta)
        if mamba is not None:
            mamba = self._rank_mamba(mamba)

        # MLP, if some layer has one, and experts.
        moe = config.moe
        intermediate_size = 1
        if moe is None or len(moe.dense_layers) > 0:
            self._check("inner values of an MLP", config.intermediate_size, self.block)
            intermediate_size = len(self._intermediate(config.intermediate_size))
        if moe is not None:
            moe = self._rank_moe(moe)
        return replace(
            config,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            intermediate_size=intermediate_size,
            moe=moe,
            delta=delta,
            mamba=mamba,
            data_parallel_attention=self.data_parallel_attention,
        )

    def _check_options(self) -> None:
        """Raise UserError for an option that the target has no layers for."""
        config = self.config
        if self.expert_parallel and config.moe is None:
            raise UserError(
                f"Expert parallelism shares routed experts, and this {config.model_type} has none.",
                "Leave expert_parallel out.",
            )
        if self.data_parallel_attention and config.mla is None:
            raise UserError(
                f"Data-parallel attention is for latents, and this {config.model_type} has keys and values, "
                "which ranks share by heads.",
                "Leave data_parallel_attention out.",
            )

    def _rank_delta(self, delta: DeltaConfig) -> DeltaConfig:
        """Layers with the gated delta rule of the rank's model."""
        heads = self._state_heads()
        return replace(delta, num_key_heads=len(heads.kv), num_heads=len(heads.query))

    def _rank_mamba(self, mamba: MambaConfig) -> MambaConfig:
        """Mamba-2 layers of the rank's model. Raises UserError if ranks would share the norm of a group."""
        heads = self._state_heads()
        if mamba.has_norm and self.share.size > mamba.num_groups:
            groups = f"{mamba.num_groups} groups of {mamba.num_heads} heads"
            raise UserError(
                f"{self.share.size} ranks would cut the norms of {groups}.",
                f"Use at most {mamba.num_groups}.",
            )
        return replace(mamba, num_groups=len(heads.kv), num_heads=len(heads.query))

    def _rank_moe(self, moe: MoEConfig) -> MoEConfig:
        """Experts of the rank's model."""
        shared_size = len(self._intermediate(moe.shared_intermediate_size))
        moe = replace(moe, shared_intermediate_size=shared_size)
        if self.expert_parallel:
            self._check("experts", moe.num_experts)
            return replace(moe, local_experts=self.share.of(moe.num_experts))
        self._check("inner values of an expert", moe.intermediate_size, self.block)
        return replace(moe, intermediate_size=len(self._intermediate(moe.intermediate_size)))

    def has(self, part: Part) -> bool:
        """False for a published expert of another rank."""
        expert = re.search(ONE_EXPERT, part.name)
        if expert is None or not self.expert_parallel or self.config.moe is None:
            return True
        return int(expert[1]) in self.share.of(self.config.moe.num_experts)

    def cuts(self, part: Part) -> list[Cut] | None:
        """Find the rank's part of a published tensor.

        Returns:
            Cuts along one dimension, whose values the rank has one after the other; empty if it has none;
            None if it has the whole tensor.
        """
        # Whole experts.
        if self.expert_parallel and re.search(EXPERTS, part.name):
            if re.search(ONE_EXPERT, part.name):
                return None if self.has(part) else []
            experts = self.share.of(part.shape[0])
            return [Cut(0, experts.start, experts.stop)]

        # Attention of all heads.
        if self.data_parallel_attention and "self_attn." in part.name:
            return None

        # Other tensors by the first rule for their name.
        for rule in CUT_RULES:
            if re.search(rf"(^|\.){rule.pattern}$", part.name):
                ranges = self._ranges(rule.unit, part.shape[rule.dim])
                return [Cut(rule.dim, each.start, each.stop) for each in ranges]
        return None

    def _ranges(self, unit: Unit | Sections, size: int) -> list[range]:
        """Indices that the rank has of a dimension of ``size`` that consists of ``unit``."""
        if isinstance(unit, Sections):
            return self._section_ranges(unit)
        if unit == "first rank":
            return [range(size)] if self.share.rank == 0 else []
        if unit == "tokens":
            return [self.share.of(size)]
        if unit == "intermediate":
            return [self._intermediate(size)]
        if unit == "gate and up":
            half = size // 2
            gate = self._intermediate(half)
            return [gate, range(half + gate.start, half + gate.stop)]

        # Heads.
        config = self.config
        heads = share_heads(config.num_heads, config.num_kv_heads, self.share)
        if unit == "query heads":
            rank_heads = heads.query
            head_size = size // config.num_heads
        else:
            rank_heads = heads.kv
            head_size = size // config.num_kv_heads
        return [range(rank_heads.start * head_size, rank_heads.stop * head_size)]

    def _section_ranges(self, unit: Sections) -> list[range]:
        """Indices that the rank has of a dimension of a recurrent layer."""
        recurrence = self._recurrence()
        rank_heads = self._state_heads()
        group_size = recurrence.num_heads // recurrence.num_key_heads

        # Key heads of the sections, or of each repetition of them.
        repetitions = [range(recurrence.num_key_heads)]
        if unit.by_key_head:
            repetitions = [range(head, head + 1) for head in range(recurrence.num_key_heads)]

        ranges: list[range] = []
        offset = 0
        for key_heads in repetitions:
            value_heads = range(key_heads.start * group_size, key_heads.stop * group_size)
            for section in unit.sections:
                # Heads of the section, heads of the rank, and size of a head.
                section_heads = value_heads
                wanted_heads = rank_heads.query
                size = 1
                if section == "key":
                    section_heads = key_heads
                    wanted_heads = rank_heads.kv
                    size = recurrence.key_dim
                elif section == "value":
                    size = recurrence.value_dim

                # The rank's heads in the section.
                first = max(wanted_heads.start, section_heads.start)
                last = min(wanted_heads.stop, section_heads.stop)
                if first < last:
                    start = offset + (first - section_heads.start) * size
                    stop = offset + (last - section_heads.start) * size
                    ranges.append(range(start, stop))
                offset += len(section_heads) * size
        return ranges

    def _recurrence(self) -> RecurrenceSpec:
        """Recurrence of the target; all recurrent layers have the same."""
        assert self.config.states is not None
        return self.config.states.recurrences[0]

    def _state_heads(self) -> Heads:
        """Value heads of recurrent layers, and the key heads that they share."""
        recurrence = self._recurrence()
        return share_heads(recurrence.num_heads, recurrence.num_key_heads, self.share, ("value", "key"))

    def _intermediate(self, size: int) -> range:
        """The rank's intermediate values of ``size``, in whole blocks."""
        blocks = self.share.of(-(-size // self.block))
        return range(blocks.start * self.block, min(size, blocks.stop * self.block))

    def _check(self, things: str, count: int, block: int = 1) -> None:
        """Raise UserError if some rank would have none of ``count`` things in blocks of ``block``."""
        if -(-count // block) >= self.share.size:
            return
        blocks = ""
        if block > 1:
            blocks = f" in fp8 blocks of {block}"
        raise UserError(f"{self.share.size} ranks are too many for {count} {things}{blocks}.", "Use fewer.")


def scale_cuts(
    part: Part, cuts: Sequence[Cut] | None, scales: tuple[int, ...], block: tuple[int, int] | None
) -> list[Cut] | None:
    """Find the rank's part of the scales of an fp8 weight.

    Args:
        part: the weight ``[..., N, K]``.
        cuts: the rank's part of the weight, see :meth:`Sharding.cuts`.
        scales: shape of the scales.
        block: rows and columns that share a scale; None if each output has one, or the whole tensor.

    Returns:
        As :meth:`Sharding.cuts`.

    Raises:
        UserError: a block would be cut apart.
    """
    if cuts is None:
        return None

    # Scales of outputs are cut like the weight. A scale of the whole tensor is not cut.
    if block is None:
        for cut in cuts:
            if cut.dim >= len(scales) or scales[cut.dim] != part.shape[cut.dim]:
                return None
        return list(cuts)

    # Scales of blocks.
    block_sizes = {len(part.shape) - 2: block[0], len(part.shape) - 1: block[1]}
    found: list[Cut] = []
    for dim, start, stop in cuts:
        size = block_sizes.get(dim, 1)
        ends_block = stop % size == 0 or stop == part.shape[dim]
        if start % size or not ends_block:
            raise UserError(
                f"A rank would have {start} to {stop - 1} of {part.name}, whose fp8 scales are those of "
                f"blocks of {size}.",
                "Use another number of ranks, or the unquantised checkpoint.",
            )
        found.append(Cut(dim, start // size, -(-stop // size)))
    return found
