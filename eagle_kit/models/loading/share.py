"""Loading of a rank's part of a target: only its slices are read from the files."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.kernels.collectives import Ranks
from eagle_kit.models.blocks.layers import Rope
from eagle_kit.models.bridge.config import BridgedConfig
from eagle_kit.models.loading.fp8_layout import read_fp8_layout
from eagle_kit.models.loading.loader import (
    IGNORED_SUFFIXES,
    check_tensors,
    fill,
    open_safetensors,
    read_raw_config,
    read_target_config,
    weight_files,
)
from eagle_kit.models.loading.published import expected_shapes, is_mtp, published_parts
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
"""Floating-point types of safetensors that a checkpoint may have here."""


class SlicedTensors(dict[str, torch.Tensor], AbstractContextManager["SlicedTensors"]):
    """Tensors of a model folder by published name without ``model.``: whole ones without memory, until
    :meth:`pop` reads a rank's part of one.

    Args:
        wanted: whether there is a use for a tensor of a name.

    Attributes:
        cuts: of the tensors that are read in part.

    Raises:
        UserError: a file that is missing or corrupt, now or when it is read.
    """

    def __init__(self, folder: Path, wanted: Callable[[str], bool]) -> None:
        super().__init__()
        self._stack, self._files = ExitStack(), {}
        self.cuts: dict[str, Sequence[Cut]] = {}
        for path in weight_files(folder):
            file = self._stack.enter_context(open_safetensors(path))
            for published in file.keys():  # noqa: SIM118
                name = published.removeprefix("model.")
                if published.endswith(IGNORED_SUFFIXES) or not wanted(name):
                    continue
                about = file.get_slice(published)
                self._files[name] = file, published
                dtype = DTYPES.get(about.get_dtype(), torch.uint8)
                self[name] = torch.empty(about.get_shape(), dtype=dtype, device="meta")

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def pop(self, name: str, default: Any = None) -> Any:
        """Read a tensor, or what its cuts say of it; in place of nothing, zeros for the whole."""
        if name not in self:
            return default
        about = super().pop(name)
        (file, published), cuts = self._files[name], self.cuts.get(name)
        if cuts is None:
            return file.get_tensor(published)
        if not cuts:
            return torch.zeros(about.shape, dtype=about.dtype)
        tensor = file.get_slice(published)
        pieces = [tensor[(*[slice(None)] * dim, slice(start, stop))] for dim, start, stop in cuts]
        return torch.cat(pieces, cuts[0].dim) if len(pieces) > 1 else pieces[0]


def load_share(
    folder: Path,
    ranks: Ranks,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    quantization: Quantization = "none",
    expert_parallel: bool = False,
) -> LlamaModel:
    """Load a rank's part of a target, frozen and in eval mode.

    Args:
        folder: of the model.
        ranks: the processes that share it; each reads its own part of the weights.
        dtype, quantization: see :func:`~eagle_kit.models.loading.loader.load_target`; what is cast to fp8
            gets scales of the rank's own part of an output.
        expert_parallel: see :class:`~eagle_kit.models.sharding.Sharding`.

    Raises:
        UserError: as ``load_target``; a target that tensor parallelism does not cut.
    """
    config = read_target_config(folder)
    whole = "Leave tensor_parallel at 1."
    if isinstance(config, BridgedConfig):
        raise UserError(f"Tensor parallelism does not cut {config.model_type}, run by transformers.", whole)
    layout = read_fp8_layout(read_raw_config(folder), str(folder))
    block = None if layout is None else layout.block
    sharding = Sharding.of(config, ranks.share, block, expert_parallel)
    with torch.device("meta"):
        parameters = list(LlamaModel(config).named_parameters())  # of all ranks
        model = LlamaModel(sharding.rank_config(), ranks)
    with SlicedTensors(folder, lambda name: not is_mtp(name, config)) as tensors:
        if config.tie_word_embeddings and "lm_head.weight" in tensors:
            del tensors["lm_head.weight"]
        parts = published_parts(parameters, config, tensors)
        everything = [part for group in parts.values() for part in group]
        check_tensors(tensors, expected_shapes(everything, tensors, layout), str(folder))
        for part in everything:
            if (cuts := sharding.cuts(part)) is None:
                continue
            tensors.cuts[part.name] = cuts
            if layout is not None and (scales := tensors.get(part.name + layout.suffix)) is not None:
                mine = scale_cuts(part, cuts, tuple(scales.shape), block)
                tensors.cuts |= {} if mine is None else {part.name + layout.suffix: mine}
        parts = {name: [part for part in group if sharding.has(part)] for name, group in parts.items()}
        if quantization != "none":
            fill_fp8(model, parts, tensors, layout, dtype, device, casts=quantization == "fp8")
        fill(model, parts, tensors, layout, dtype, device)
    model.rope = Rope(config.rope_dim, config.rope_theta, config.rope_scaling).to(device)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model.eval().requires_grad_(False)
