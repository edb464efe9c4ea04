"""Where states come from: the target itself, or files of another engine (:mod:`.files`)."""

from typing import Protocol

from eagle_kit.models.targets.target import Target
from eagle_kit.train.algorithm.batch import MicroBatch
from eagle_kit.train.algorithm.target_features import TargetFeatures, capture_features


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
            self._target, ids, starts, layer_ids, micro_batch.plan.taught, micro_batch.plan.spans
        )
