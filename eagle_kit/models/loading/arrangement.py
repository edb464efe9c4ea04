"""Conversion of published tensors to the layout of our parameters, for families whose layout differs."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch

from eagle_kit.models.config import QWEN_HYBRIDS, TargetConfig
from eagle_kit.models.loading import falcon_h1, qwen_hybrid
from eagle_kit.models.loading.fp8_layout import FP8Layout
from eagle_kit.models.loading.published import take

_Value = TypeVar("_Value")


class Arrangement(NamedTuple):
    """Conversion of the published tensors of a family. Its functions take the config of the target, or that
    of a rank of tensor parallelism with the rank's part of the tensors.

    Attributes:
        rename: function from a published name without ``model.`` to our name; None for tensors that are not
            part of the target.
        changes: function from our name of a tensor and a config to True if its layout or scale must be
            changed.
        parts: function from our name of such a tensor, its values in fp32 and a config to the converted
            tensors by name. A tensor of an unexpected shape is yielded unchanged, so that it is named in an
            error later.
    """

    rename: Callable[[str], str | None] = lambda name: name
    changes: Callable[[str, TargetConfig], bool] = lambda name, config: False
    parts: Callable[[str, torch.Tensor, TargetConfig], Iterator[tuple[str, torch.Tensor]]] = (
        lambda name, tensor, config: iter([(name, tensor)])
    )

    def renamed(self, published: dict[str, _Value]) -> dict[str, _Value]:
        """Values of ``published`` by our names, without tensors that are not part of the target."""
        renamed: dict[str, _Value] = {}
        for published_name, value in published.items():
            name = self.rename(published_name)
            if name is not None:
                renamed[name] = value
        return renamed

    def arrange(
        self, published: dict[str, torch.Tensor], config: TargetConfig, layout: FP8Layout | None
    ) -> None:
        """Convert tensors in place.

        Args:
            published: tensors by our names.
            config: architecture that they belong to.
            layout: layout of fp8 weights; None where fp8 is not expected.
        """
        for name in list(published):
            if name not in published:
                continue  # the scales of a weight, which went with it
            if self.changes(name, config):
                tensor = take(published, name, torch.float32, layout)
                published.update(self.parts(name, tensor, config))


QWEN_HYBRID = Arrangement(qwen_hybrid.rename, qwen_hybrid.changes, qwen_hybrid.parts)
FALCON_H1 = Arrangement(falcon_h1.rename, falcon_h1.changes, falcon_h1.parts)
AS_PUBLISHED = Arrangement()


def arrangement_of(config: TargetConfig) -> Arrangement:
    """Conversion for the family of ``config``."""
    if config.model_type in QWEN_HYBRIDS:
        return QWEN_HYBRID
    if config.model_type == "falcon_h1":
        return FALCON_H1
    return AS_PUBLISHED
