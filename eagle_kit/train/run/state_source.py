"""Where states come from: the target itself, or files of another engine (:mod:`.files`)."""

from typing import Protocol

import torch

from eagle_kit.distributed.collectives import Ranks
from eagle_kit.models.targets.target import Target
from eagle_kit.objective.batch import MicroBatch
from eagle_kit.objective.target_features import TargetFeatures, capture_features


class StateSource(Protocol):
    """Source of the target features of packed sequences."""

    def states(self, micro_batch: MicroBatch, layer_ids: tuple[int, ...]) -> TargetFeatures:
        """Target features of the packed sequences of ``micro_batch``, on its device.

        Args:
            layer_ids: layers whose inputs are captured.
        """


class TargetSource:
    """Source that runs the target in this process."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def states(self, micro_batch: MicroBatch, layer_ids: tuple[int, ...]) -> TargetFeatures:
        """See :class:`StateSource`."""
        plan = micro_batch.plan
        return capture_features(
            self._target,
            micro_batch.ids,
            micro_batch.doc_start,
            layer_ids,
            plan.teacher_positions,
            plan.spans,
        )


class SharedTarget:
    """Source that runs a target which processes share by tensor parallelism.

    All processes call :meth:`states` at the same time. Together they run the rows of each process, in the
    order of the ranks, and each process returns the features of its own rows.

    Args:
        target: this process's shard, with the whole embedding and output layer.
        ranks: the processes.
    """

    def __init__(self, target: Target, ranks: Ranks) -> None:
        self._target = target
        self._ranks = ranks

    def states(self, micro_batch: MicroBatch, layer_ids: tuple[int, ...]) -> TargetFeatures:
        """See :class:`StateSource`."""
        # Rows of all processes.
        device = micro_batch.ids.device
        plan = micro_batch.plan
        gathered = self._ranks.all((micro_batch.ids.cpu(), micro_batch.doc_start.cpu(), plan.spans))

        # Run them one after the other. Nothing is captured of the rows of other processes.
        mine = None
        no_teachers = torch.empty(0, dtype=torch.int64, device=device)
        for rank, (ids, starts, spans) in enumerate(gathered):
            ids = ids.to(device)
            starts = starts.to(device)
            if rank == self._ranks.rank:
                teachers = plan.teacher_positions
                mine = capture_features(self._target, ids, starts, layer_ids, teachers, spans)
            else:
                capture_features(self._target, ids, starts, (), no_teachers, spans)
        assert mine is not None
        return mine


def state_source(target: Target, placement: str, cut: Target | None) -> StateSource:
    """Source of the target features of a run.

    Args:
        target: the target of the run.
        placement: ``training.target_placement``.
        cut: this process's shard of a target that processes share; used with "tensor-parallel".
    """
    if placement != "tensor-parallel" or cut is None:
        return TargetSource(target)
    assert cut.ranks is not None
    return SharedTarget(target, cut.ranks)
