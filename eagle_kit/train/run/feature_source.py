"""Features of the rows of a step: from the target, or from captured states read ahead."""

import time
from collections.abc import Callable, Iterable

from eagle_kit.core.errors import UserError
from eagle_kit.data.hidden_states.prefetch import Prefetcher
from eagle_kit.data.hidden_states.store import StateStore
from eagle_kit.objective.batch import MicroBatch
from eagle_kit.objective.target_features import TargetFeatures
from eagle_kit.train.run.state_source import StateSource


class FeatureSource:
    """Features of micro_batches, one after the other.

    Args:
        source: of the states of rows that no store has.
        layer_ids: captured states, as inputs of these layers.
        store: read, and filled when it may grow; None runs the target every time.
        everyone: turns one process's answer into that of all, where they share a target.
        pin: read into pinned memory, for a GPU.

    Attributes:
        wait_s: seconds that training waited for the disk so far.
        capture_s: seconds that the target ran for it, the states' way into the store included; on a GPU
            only what the host spent, since nothing here waits for the device.
    """

    def __init__(
        self,
        source: StateSource,
        layer_ids: tuple[int, ...],
        store: StateStore | None,
        everyone: Callable[[bool], bool] = bool,
        *,
        pin: bool = False,
    ) -> None:
        self.source, self.pin, self.layer_ids, self.store, self.everyone = (
            source,
            pin,
            layer_ids,
            store,
            everyone,
        )
        self.wait_s = self.capture_s = 0.0
        self._ahead: Prefetcher | None = None

    def expect(self, order: Iterable[list[int]]) -> None:
        """Read ahead in this order from now on: the rows of every forward to come."""
        if self.store is None:
            return
        self.close()
        self._ahead = Prefetcher(self.store, order, pin=self.pin)

    def get(self, micro_batch: MicroBatch) -> TargetFeatures:
        """The target's view of the rows of ``micro_batch``.

        Raises:
            UserError: a store that cannot be read or written, or that may not grow and lacks a row.
        """
        store, started = self.store, time.perf_counter()
        if store is not None:
            device = micro_batch.ids.device
            parts = None if self._ahead is None else self._ahead.take(micro_batch.numbers)
            kept = store.load(micro_batch.numbers, device) if parts is None else store.decode(parts, device)
            self.wait_s += time.perf_counter() - started
            has_all = self.everyone(kept is not None)
            if kept is not None and has_all:
                return TargetFeatures(**kept)
            if kept is None and not store.can_grow:
                raise UserError(
                    f"The store {store.folder} lacks one of the rows {micro_batch.numbers}.",
                    "Run its eagle-kit data capture command again.",
                )
            started = time.perf_counter()
        features = self.source.states(micro_batch, self.layer_ids)
        if store is not None:
            parts = store.add(micro_batch.numbers, micro_batch.lengths, features._asdict())
            if not store.is_exact:  # learn from the same now as later
                features = TargetFeatures(**store.decode(parts, micro_batch.ids.device))
        self.capture_s += time.perf_counter() - started
        return features

    def flush(self) -> None:
        """Write captured states that wait for their shard."""
        if self.store is not None:
            self.store.flush()

    def close(self) -> None:
        """Stop reading ahead, and :meth:`flush`."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        self.flush()
