"""Target features of micro-batches in training: computed by the target, or read ahead from a store."""

import time
from collections.abc import Callable, Iterable

from eagle_kit.core.errors import UserError
from eagle_kit.data.hidden_states.prefetch import Prefetcher
from eagle_kit.data.hidden_states.store import StateStore
from eagle_kit.objective.batch import MicroBatch
from eagle_kit.objective.target_features import TargetFeatures
from eagle_kit.train.run.state_source import StateSource


class FeatureSource:
    """Source of the target features of micro-batches, one after the other.

    Args:
        source: computes the hidden states of rows that are not in the store.
        layer_ids: layers whose inputs are captured.
        store: captured hidden states, read first and filled if it may grow; None runs the target every time.
        everyone: True if its argument is true on all processes that share a target.
        pin: read into pinned memory, for a GPU.

    Attributes:
        wait_s: seconds that training has waited for the disk.
        capture_s: seconds that the target has run, with the write into the store. On a GPU, host time only:
            nothing here waits for the device.
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
        self.source = source
        self.layer_ids = layer_ids
        self.store = store
        self.everyone = everyone
        self.pin = pin
        self.wait_s = 0.0
        self.capture_s = 0.0
        self._prefetcher: Prefetcher | None = None

    def expect(self, order: Iterable[list[int]]) -> None:
        """Restart the prefetch with this order: the row numbers of every micro-batch to come."""
        if self.store is None:
            return
        self.close()
        self._prefetcher = Prefetcher(self.store, order, pin=self.pin)

    def get(self, micro_batch: MicroBatch) -> TargetFeatures:
        """Target features of ``micro_batch``.

        Raises:
            UserError: the store cannot be read or written, or lacks a row and may not grow.
        """
        # Stored features. Processes that share a target run it together: all of them, if one lacks a row.
        if self.store is not None:
            stored = self._load(micro_batch, self.store)
            if self.everyone(stored is not None) and stored is not None:
                return stored
            if stored is None and not self.store.can_grow:
                raise UserError(
                    f"The store {self.store.folder} lacks one of the rows {micro_batch.numbers}.",
                    "Run its eagle-kit data capture command again.",
                )

        # Run the target, and store its features. A lossy format is decoded again: the head must be trained on
        # the same features now as on a later pass.
        started = time.perf_counter()
        features = self.source.states(micro_batch, self.layer_ids)
        if self.store is not None:
            encoded = self.store.add(micro_batch.numbers, micro_batch.lengths, features.to_stored())
            if not self.store.is_exact:
                features = TargetFeatures.from_stored(self.store.decode(encoded, micro_batch.ids.device))
        self.capture_s += time.perf_counter() - started
        return features

    def flush(self) -> None:
        """Write captured hidden states that wait for their shard."""
        if self.store is not None:
            self.store.flush()

    def close(self) -> None:
        """Stop the prefetch, and :meth:`flush`."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
        self.flush()

    def _load(self, micro_batch: MicroBatch, store: StateStore) -> TargetFeatures | None:
        """Features of ``micro_batch`` in the store; None if one of its rows is missing."""
        started = time.perf_counter()
        device = micro_batch.ids.device
        encoded = None
        if self._prefetcher is not None:
            encoded = self._prefetcher.take(micro_batch.numbers)
        if encoded is None:
            found = store.load(micro_batch.numbers, device)
        else:
            found = store.decode(encoded, device)
        self.wait_s += time.perf_counter() - started
        if found is None:
            return None
        return TargetFeatures.from_stored(found)
