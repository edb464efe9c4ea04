"""Where states come from: the target itself, or files of another engine (:mod:`.files`)."""

from typing import Protocol

import torch

from eagle_kit.distributed.collectives import Ranks
from eagle_kit.models.targets.target import Target
from eagle_kit.objective.batch import MicroBatch
from eagle_kit.objective.target_features import TargetFeatures, capture_features


class StateSource(Protocol):
    """Source of the states of packed rows."""

    def states(self, micro_batch: MicroBatch, layer_ids: tuple[int, ...]) -> TargetFeatures:
        """States of a packed row: the inputs of layers ``layer_ids``, and the last one."""


class TargetSource:
    """The target's own forward."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def states(self, micro_batch: MicroBatch, layer_ids: tuple[int, ...]) -> TargetFeatures:
        """See :class:`StateSource`."""
        ids, starts = micro_batch.ids, micro_batch.doc_start
        return capture_features(
            self._target, ids, starts, layer_ids, micro_batch.plan.teacher_positions, micro_batch.plan.spans
        )


class SharedTarget:
    """A target that processes share by tensor parallelism. All of them ask for the states of a row at a time,
    run each one's row together, in the order of their numbers, and keep their own states.

    Args:
        target: this process's part, with the whole embedding and output layer.
        ranks: the processes.
    """

    def __init__(self, target: Target, ranks: Ranks) -> None:
        self._target, self._ranks = target, ranks

    def states(self, micro_batch: MicroBatch, layer_ids: tuple[int, ...]) -> TargetFeatures:
        """See :class:`StateSource`."""
        device = micro_batch.ids.device
        plan = micro_batch.plan
        mine = None
        given = self._ranks.all((micro_batch.ids.cpu(), micro_batch.doc_start.cpu(), plan.spans))
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        for rank, (ids, starts, spans) in enumerate(given):
            # The forward of another process's row: no layer is captured for it here.
            if rank != self._ranks.rank:
                capture_features(self._target, ids.to(device), starts.to(device), (), nothing, spans)
                continue
            mine = capture_features(
                self._target, ids.to(device), starts.to(device), layer_ids, plan.teacher_positions, spans
            )
        assert mine is not None
        return mine


def state_source(target: Target, placement: str, cut: Target | None) -> StateSource:
    """The source of a target in its place (``training.target_placement``), or ``cut`` as the processes share
    it."""
    if placement != "tensor-parallel" or cut is None:
        return TargetSource(target)
    assert cut.ranks is not None
    return SharedTarget(target, cut.ranks)
