"""Static trees: drafts of a fixed topology, EAGLE-1's tree (arXiv 2401.15077), where node r of a parent is
its r-th candidate. As the topology does not depend on the drafted values, siblings may also be sampled from
the draft's own distribution, without replacement, and verified by rejection (SpecInfer, arXiv 2305.09781).

Legend: B requests, N window nodes, S depth, M nodes that are forwarded, F size of a feature, V / Vd target /
draft vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import MAX_WINDOW, SpecShape
from eagle_kit.drafts.base.cycle_state import CycleState
from eagle_kit.drafts.base.draft_model import DraftModel, StepRows
from eagle_kit.drafts.base.sampled import SampledDrafter, SampledDraftState, draft_distribution
from eagle_kit.ops.attention.window import ancestor_bits
from eagle_kit.ops.sampling import DRAFT_UNIFORMS, SamplingBatch, sample_distinct, window_uniforms
from eagle_kit.ops.tree_build import Tree
from eagle_kit.verify.proposal import Deterministic, DraftOutput, Proposal, SampledTree
from eagle_kit.verify.verifiers import RejectionSampling, Relaxed, TargetOnly

EAGLE1_CHOICES = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
"""EAGLE-1's published tree: a node is its ranks from the root on."""


class Topology(NamedTuple):
    """Nodes of a window in breadth-first order, the root first.

    ``parents``, ``ranks`` (which candidate of its parent a node is), ``depths``: one number a node, 0 for the
    root. ``inner``: for each depth from 0, the nodes there that have children.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]
    inner: tuple[tuple[int, ...], ...]

    @classmethod
    def parse(cls, choices: str) -> "Topology":
        """Read nodes like ``"0 1 00 01"``; parents must be among them."""
        paths = sorted({tuple(int(rank, 36) for rank in word) for word in choices.split()}, key=_order)
        nodes: dict[tuple[int, ...], int] = {(): 0}
        for path in paths:
            assert path[:-1] in nodes, f"the node {path} has no parent"
            nodes[path] = len(nodes)
        assert 2 <= len(nodes) <= MAX_WINDOW
        parents = [0] + [nodes[path[:-1]] for path in paths]
        depth = max(map(len, paths))
        inner = [sorted({nodes[path[:-1]] for path in paths if len(path) == d + 1}) for d in range(depth)]
        return cls(
            tuple(parents),
            (0, *(path[-1] for path in paths)),
            (0, *(len(path) for path in paths)),
            tuple(tuple(level) for level in inner),
        )

    @property
    def shape(self) -> SpecShape:
        """Depth, most children of a node, nodes."""
        return SpecShape(max(self.depths), max(self.ranks) + 1, len(self.parents))

    def children(self, node: int) -> list[int]:
        """Nodes below ``node``, best rank first."""
        return [i for i in range(1, len(self.parents)) if self.parents[i] == node]


def _order(path: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    return len(path), tuple(path)


class _Children(NamedTuple):
    """Children of a node.

    Attributes:
        node_index: index of the node in its level.
        node: the node.
        below: int64, its children, on the device.
        ranks: int64, which candidate of the node each child is, on the device.
        num_candidates: candidates that hold all ranks.
    """

    node_index: int
    node: int
    below: torch.Tensor
    ranks: torch.Tensor
    num_candidates: int


class _Level(NamedTuple):
    """Nodes of one depth that have children; M nodes.

    Attributes:
        depth: their depth.
        nodes: int64 ``[M]``.
        parent_index: int64 ``[M]``, index of each one's parent in the level before.
        bits: int64 ``[1, M]``, ancestors among the nodes forwarded so far.
        num_keys: number of nodes forwarded so far.
        families: the children of each node.
    """

    depth: int
    nodes: torch.Tensor
    parent_index: torch.Tensor
    bits: torch.Tensor
    num_keys: int
    families: list[_Children]


class StaticDrafter(SampledDrafter):
    """Drafter of a fixed topology, filled with the most likely candidates. All indices are on the device from
    the start, so that a graph can hold them."""

    verifiers: tuple[type, ...] = (TargetOnly, Relaxed)
    topology = Topology.parse(EAGLE1_CHOICES)
    has_any_shape = False
    samples = False
    """True if siblings are sampled for requests that sample."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        topology = self.topology
        device = self.model.device
        parents = torch.tensor([topology.parents], device=device)
        self._parents = parents
        self._depths = torch.tensor([topology.depths], device=device)
        self._bits = ancestor_bits(parents, max(topology.depths))
        self._levels = [self._level(depth) for depth in range(len(topology.inner))]

    @classmethod
    def default_shape(cls, model: DraftModel, model_type: str) -> SpecShape:
        """See :class:`Drafter`: the topology's."""
        return cls.topology.shape

    @classmethod
    def check_shape(cls, model: DraftModel, shape: SpecShape) -> None:
        """See :class:`Drafter`."""
        super(SampledDrafter, cls).check_shape(model, shape)
        if shape.steps and shape != cls.topology.shape:
            raise UserError(
                f"The shape {shape} was asked of a static tree.",
                f"Use its own, {cls.topology.shape}, or a dynamic tree.",
            )

    def _level(self, depth: int) -> _Level:
        """Make the indices of one depth."""
        topology = self.topology
        device = self.model.device
        level = topology.inner[depth]

        # Nodes are forwarded level by level; the root is not. So a node of depth 1 is its own parent.
        forwarded = [node for inner in topology.inner[1 : depth + 1] for node in inner]
        index_of = {node: i for i, node in enumerate(forwarded)}
        parents = [index_of.get(topology.parents[node], index_of[node]) for node in forwarded]
        bits = ancestor_bits(torch.tensor([parents or [0]]), depth)[:, -len(level) :]

        # Children of each node, and the parents of the nodes.
        families = []
        for node_index, node in enumerate(level):
            children = topology.children(node)
            ranks = [topology.ranks[child] for child in children]
            below = torch.tensor(children, device=device)
            families.append(
                _Children(node_index, node, below, torch.tensor(ranks, device=device), ranks[-1] + 1)
            )
        before = topology.inner[depth - 1] if depth else level
        parent_index = [before.index(topology.parents[node]) for node in level]
        return _Level(
            depth,
            torch.tensor(level, device=device),
            torch.tensor(parent_index, device=device),
            bits.to(device),
            len(forwarded),
            families,
        )

    def propose(
        self,
        state: CycleState,
        shape: SpecShape,
        num_columns: int,
        sampling: SamplingBatch | None = None,
    ) -> DraftOutput:
        """Fill the topology after the roots; ``shape`` must be the topology's."""
        assert isinstance(state.draft, SampledDraftState)
        roots = state.roots
        b = roots.shape[0]
        num_nodes = len(self.topology.parents)

        # The window, and what sampling needs.
        sampled = sampling if self.samples else None
        tokens = roots[:, None].expand(b, num_nodes).clone()
        distributions = None
        uniforms = None
        if sampled is not None:
            distributions = torch.zeros(b, num_nodes, self.vocab_size, device=roots.device)
            uniforms = window_uniforms(sampled.seeds, state.seq_lens, num_nodes, DRAFT_UNIFORMS)

        # Level by level: logits of the nodes with children, then the tokens of the children.
        logits = state.draft.logits[:, None]  # [B, M, Vd]
        features = state.draft.features[:, None]  # [B, M, F]
        for level in self._levels:
            if level.depth:
                logits, features = self._forward(state, tokens, features, level, num_columns)
            for node_index, node, below, ranks, num_candidates in level.families:
                if distributions is not None and uniforms is not None and sampled is not None:
                    distributions[:, node] = draft_distribution(self, logits[:, node_index], sampled)
                    chosen = sample_distinct(distributions[:, node], uniforms.index_select(1, below))
                else:
                    ids = logits[:, node_index].topk(num_candidates, -1).indices
                    chosen = self.model.to_target(ids).index_select(1, ranks)
                tokens.index_copy_(1, below, chosen)

        parents, depths, bits = (
            part.expand(b, num_nodes) for part in (self._parents, self._depths, self._bits)
        )
        proposal: Proposal = Deterministic()
        if distributions is not None:
            proposal = SampledTree(distributions)
        return DraftOutput(Tree(tokens, parents, depths, bits), proposal)

    def _forward(
        self,
        state: CycleState,
        tokens: torch.Tensor,
        features: torch.Tensor,
        level: _Level,
        num_columns: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the nodes of one level that have children.

        Returns:
            Their logits ``[B, M, Vd]``, and the features of the next level ``[B, M, F]``.
        """
        b = tokens.shape[0]
        m = len(level.nodes)
        attend = self.kv.window_attend(
            state.page_table, state.seq_lens + 1, level.bits.expand(b, m), level.num_keys, num_columns
        )
        parent_features = features.index_select(1, level.parent_index).flatten(0, 1)
        rope_positions = (state.seq_lens + (level.depth - self.model.first_position))[:, None].expand(b, m)
        node_tokens = tokens.index_select(1, level.nodes).reshape(-1)
        out = self.model.step(StepRows(parent_features, node_tokens, rope_positions.reshape(-1)), attend)
        logits = self.model.logits(out.lm_head_input).float()
        return logits.view(b, m, -1), self._next_features(out).view(b, m, -1)


class SampledStaticDrafter(StaticDrafter):
    """Drafter of a fixed topology whose siblings are sampled."""

    verifiers: tuple[type, ...] = (RejectionSampling,)
    samples = True
