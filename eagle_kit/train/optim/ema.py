"""Exponential moving average of a head's weights, judged, saved and served in their place."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from eagle_kit.models.draft_head import DraftHead


class Ema:
    """Average of the trained weights, in their dtype and on their device.

    Args:
        head: head whose weights are averaged; the average starts with them.
        decay: share of the average that remains in a step. After t finished steps it is at most ``(1 + t) /
            (10 + t)``, because otherwise the untrained weights would be in it for a thousand steps.

    Attributes:
        average: the average by name; while it is applied, the trained weights.
    """

    def __init__(self, head: DraftHead, decay: float) -> None:
        self.head = head
        self.decay = decay
        self.average = {name: p.detach().clone() for name, p in self._trained()}

    def _trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Trained weights by name."""
        for name, parameter in self.head.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after the optimiser step that followed ``step`` finished ones."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, parameter in self._trained():
            self.average[name].lerp_(parameter, 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the head has the average as its weights. The two are swapped, not copied."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def raw(self) -> dict[str, torch.Tensor]:
        """The trained weights by name, while the average is applied."""
        return self.average

    def restore(self, raw: Mapping[str, torch.Tensor]) -> None:
        """Load the trained weights into a head that was created with the average.

        Args:
            raw: the weights by name, see :meth:`raw`.

        Raises:
            ValueError: the weights are those of another head.
        """
        expected = {name: p.shape for name, p in self.average.items()}
        given = {name: p.shape for name, p in raw.items()}
        if given != expected:
            raise ValueError("the weights beside the average are of another head")
        with torch.no_grad():
            for name, parameter in self._trained():
                parameter.copy_(raw[name])

    def _swap(self) -> None:
        """Swap the weights of the head with :attr:`average`."""
        for name, parameter in self._trained():
            parameter.data, self.average[name] = self.average[name], parameter.data
