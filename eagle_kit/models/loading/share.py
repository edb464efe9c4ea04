"""Loading of a rank's part of a target (tensor parallelism). Only the rank's slices are read from the
files."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.distributed.collectives import Ranks
from eagle_kit.models.blocks.layers import Rope
from eagle_kit.models.bridge.config import BridgedConfig
from eagle_kit.models.loading.arrangement import arrangement_of
from eagle_kit.models.loading.fp8_layout import FP8Layout, read_fp8_layout
from eagle_kit.models.loading.loader import (
    IGNORED_SUFFIXES,
    check_tensors,
    fill,
    open_safetensors,
    read_raw_config,
    read_target_config,
    weight_files,
)
from eagle_kit.models.loading.published import Part, expected_shapes, is_mtp, published_parts
from eagle_kit.models.loading.quantize import Quantization, fill_fp8
from eagle_kit.models.sharding import Cut, Sharding, scale_cuts
from eagle_kit.models.targets.llama import LlamaModel

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Floating-point types of safetensors that are supported."""


class SlicedTensors(dict[str, torch.Tensor], AbstractContextManager["SlicedTensors"]):
    """Tensors of a model folder by our names, which are read by :meth:`pop`.

    Until then a tensor is on the meta device, with the shape of the whole published tensor. Tensors that are
    assigned later are returned as they are.

    Args:
        folder: the model folder.
        name_of: function from a published name without ``model.`` to our name; None for tensors without use.

    Attributes:
        cuts: the rank's part of each tensor that is not read whole.

    Raises:
        UserError: a file that is missing or corrupt, now or when it is read.
    """

    def __init__(self, folder: Path, name_of: Callable[[str], str | None]) -> None:
        super().__init__()
        self.cuts: dict[str, Sequence[Cut]] = {}
        self._stack = ExitStack()
        # Open file and published name of each tensor that is not read yet.
        self._unread: dict[str, tuple[Any, str]] = {}
        for path in weight_files(folder):
            file = self._stack.enter_context(open_safetensors(path))
            for published in file.keys():  # noqa: SIM118
                name = name_of(published.removeprefix("model."))
                if name is None or published.endswith(IGNORED_SUFFIXES):
                    continue
                header = file.get_slice(published)
                dtype = DTYPES.get(header.get_dtype(), torch.uint8)
                self[name] = torch.empty(header.get_shape(), dtype=dtype, device="meta")
                self._unread[name] = (file, published)

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def pop(self, name: str, default: Any = None) -> Any:
        """Remove a tensor, and read the rank's part of it.

        Where the rank has no part, the result is zeros with the shape of the whole tensor.
        """
        if name not in self:
            return default
        tensor = super().pop(name)
        if name not in self._unread:
            return tensor

        # The whole tensor, or zeros.
        file, published = self._unread.pop(name)
        cuts = self.cuts.get(name)
        if cuts is None:
            return file.get_tensor(published)
        if not cuts:
            return torch.zeros(tensor.shape, dtype=tensor.dtype)

        # Slices of one dimension.
        stored = file.get_slice(published)
        slices: list[torch.Tensor] = []
        for dim, start, stop in cuts:
            index: list[slice] = [slice(None)] * dim
            index.append(slice(start, stop))
            slices.append(stored[tuple(index)])
        if len(slices) == 1:
            return slices[0]
        return torch.cat(slices, cuts[0].dim)


def load_share(
    folder: Path,
    ranks: Ranks,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    quantization: Quantization = "none",
    expert_parallel: bool = False,
    data_parallel_attention: bool = False,
) -> LlamaModel:
    """Load a rank's part of a target, frozen and in eval mode.

    Args:
        folder: folder of the model.
        ranks: the processes that share the target. Each calls this, and reads its own part of the weights.
        dtype: see :func:`~eagle_kit.models.loading.loader.load_target`.
        device: device of the weights.
        quantization: see ``load_target``. Weights that are cast to fp8 have scales of the rank's part of an
            output.
        expert_parallel: see :class:`~eagle_kit.models.sharding.Sharding`.
        data_parallel_attention: see ``Sharding``.

    Raises:
        UserError: as ``load_target``; a target that tensor parallelism does not cut.
    """
    config = read_target_config(folder)
    if isinstance(config, BridgedConfig):
        raise UserError(
            f"Tensor parallelism does not cut {config.model_type}, run by transformers.",
            "Leave tensor_parallel at 1.",
        )

    # The rank's model, and the parameters of the whole one, on the meta device.
    layout = read_fp8_layout(read_raw_config(folder), str(folder))
    block = None
    if layout is not None:
        block = layout.block
    sharding = Sharding.of(config, ranks.share, block, expert_parallel, data_parallel_attention)
    with torch.device("meta"):
        whole_parameters = list(LlamaModel(config).named_parameters())
        model = LlamaModel(sharding.rank_config(), ranks)

    arrangement = arrangement_of(config)

    def name_of(published: str) -> str | None:
        name = arrangement.rename(published)
        if name is None or is_mtp(name, config):
            return None
        return name

    with SlicedTensors(folder, name_of) as tensors:
        if config.tie_word_embeddings and "lm_head.weight" in tensors:
            del tensors["lm_head.weight"]

        # The whole tensors must have exactly the expected names and shapes.
        whole_tensors = dict(tensors)
        arrangement.arrange(whole_tensors, config, layout)
        parts = published_parts(whole_parameters, config, whole_tensors)
        all_parts = [part for group in parts.values() for part in group]
        check_tensors(whole_tensors, expected_shapes(all_parts, whole_tensors, layout), str(folder))

        # Read the rank's part of them.
        tensors.cuts = cuts_of(tensors, sharding, layout)
        arrangement.arrange(tensors, model.config, layout)
        rank_parts = {name: [part for part in group if sharding.has(part)] for name, group in parts.items()}
        if quantization != "none":
            fill_fp8(model, rank_parts, tensors, layout, dtype, device, casts=quantization == "fp8")
        fill(model, rank_parts, tensors, layout, dtype, device)
    model.rope = Rope(config.rope_dim, config.rope_theta, config.rope_scaling).to(device)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model.eval().requires_grad_(False)


def cuts_of(
    tensors: Mapping[str, torch.Tensor], sharding: Sharding, layout: FP8Layout | None
) -> dict[str, Sequence[Cut]]:
    """Find a rank's part of the tensors that it does not read whole, and of their scales.

    Args:
        tensors: published tensors by our names.
        sharding: the rank's part of the target.
        layout: layout of fp8 weights; None where fp8 is not expected.

    Raises:
        UserError: a block of an fp8 weight would be cut apart.
    """
    found: dict[str, Sequence[Cut]] = {}
    for name, tensor in tensors.items():
        if layout is not None and name.endswith(layout.suffix):
            continue  # scales, with their weight
        part = Part(name, tuple(tensor.shape))
        cuts = sharding.cuts(part)
        if cuts is None:
            continue
        found[name] = cuts
        if layout is None or name + layout.suffix not in tensors:
            continue
        scales = tensors[name + layout.suffix]
        cuts_of_scales = scale_cuts(part, cuts, tuple(scales.shape), layout.block)
        if cuts_of_scales is not None:
            found[name + layout.suffix] = cuts_of_scales
    return found
