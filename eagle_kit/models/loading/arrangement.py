"""Families whose published tensors are not laid out as our parameters."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch

from eagle_kit.models.config import QWEN_HYBRIDS, TargetConfig
from eagle_kit.models.loading import falcon_h1, qwen_hybrid
from eagle_kit.models.loading.fp8_layout import FP8Layout
from eagle_kit.models.loading.published import take

_Value = TypeVar("_Value")


class Arrangement(NamedTuple):
    """How published tensors of a family become those that our parameters are stacked from. With the config of
    a rank of tensor parallelism they are that rank's part.

    Attributes:
        rename: our name of a published one without ``model.``; None for what is no part of the target.
        changes: whether a tensor of our name has another layout or another scale.
        parts: the tensors that such a one, in fp32, is made into; as it is where its shape is unexpected.
    """

    rename: Callable[[str], str | None] = lambda name: name
    changes: Callable[[str, TargetConfig], bool] = lambda name, config: False
    parts: Callable[[str, torch.Tensor, TargetConfig], Iterator[tuple[str, torch.Tensor]]] = (
        lambda name, tensor, config: iter([(name, tensor)])
    )

    def renamed(self, published: dict[str, _Value]) -> dict[str, _Value]:
        """Tensors of the target by our names."""
        names = ((self.rename(name), value) for name, value in published.items())
        return {name: value for name, value in names if name is not None}

    def arrange(
        self, published: dict[str, torch.Tensor], config: TargetConfig, layout: FP8Layout | None
    ) -> None:
        """Replace tensors ``published`` by our names where they are to change.

        Args:
            layout: see :func:`~eagle_kit.models.loading.published.take`.
        """
        for name in list(published):
            if name in published and self.changes(name, config):
                tensor = take(published, name, torch.float32, layout)
                published.update(self.parts(name, tensor, config))


QWEN_HYBRID = Arrangement(qwen_hybrid.rename, qwen_hybrid.changes, qwen_hybrid.parts)
FALCON_H1 = Arrangement(falcon_h1.rename, falcon_h1.changes, falcon_h1.parts)
AS_PUBLISHED = Arrangement()


def arrangement_of(config: TargetConfig) -> Arrangement:
    """That of the family of ``config``."""
    found = {**dict.fromkeys(QWEN_HYBRIDS, QWEN_HYBRID), "falcon_h1": FALCON_H1}
    return found.get(config.model_type, AS_PUBLISHED)
