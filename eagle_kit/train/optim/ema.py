"""Exponential moving average of a head's weights, judged, saved and served in their place."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from eagle_kit.models.draft_head import DraftHead


class Ema:
    """The average of the weights that are trained, in their own dtype and on their device.

    Args:
        head: starts as its weights.
        decay: what the average keeps of itself at a step. The first steps keep less, ``(1 + t) / (10 + t)``
            after t finished ones, or the untrained weights would be in it for a thousand steps.
    """

    def __init__(self, head: DraftHead, decay: float) -> None:
        self.head, self.decay = head, decay
        self.average = {name: p.detach().clone() for name, p in self._trained()}

    def _trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, p) for name, p in self.head.named_parameters() if p.requires_grad)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights of the step that followed ``step`` finished ones."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, parameter in self._trained():
            self.average[name].lerp_(parameter, 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the head has the average for weights; the two change places, nothing is copied."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def raw(self) -> dict[str, torch.Tensor]:
        """The trained weights themselves, while the average is applied."""
        return self.average

    def restore(self, raw: Mapping[str, torch.Tensor]) -> None:
        """Give the head, which has the average now, its own weights back. Raises ValueError when they are not
        of this head."""
        shapes = {name: p.shape for name, p in self.average.items()}
        if {name: p.shape for name, p in raw.items()} != shapes:
            raise ValueError("the weights beside the average are of another head")
        with torch.no_grad():
            for name, parameter in self._trained():
                parameter.copy_(raw[name])

    def _swap(self) -> None:
        for name, parameter in self._trained():
            parameter.data, self.average[name] = self.average[name], parameter.data
