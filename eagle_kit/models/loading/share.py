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
    open_safetensors,
    read_raw_config,
    read_target_config,
    stays_exact,
    weight_files,
)
from eagle_kit.models.loading.published import Part, expected_shapes, is_mtp, published_parts
from eagle_kit.models.loading.quantize import Quantization
from eagle_kit.models.sharding import Cut, cuts_of, shard_config
from eagle_kit.models.targets.llama import LlamaModel

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Floating-point types of safetensors that a checkpoint may have here."""


class SlicedTensors(AbstractContextManager["SlicedTensors"]):
    """Tensors of a model folder, of which only slices are read.

    Args:
        wanted: whether there is a use for a tensor, by its published name without ``model.``.

    Attributes:
        shapes: tensors without memory of their shapes, by name.

    Raises:
        UserError: a file that is missing or corrupt, now or when it is read.
    """

    def __init__(self, folder: Path, wanted: Callable[[str], bool]) -> None:
        self._stack, self._files = ExitStack(), {}
        self.shapes: dict[str, torch.Tensor] = {}
        for path in weight_files(folder):
            file = self._stack.enter_context(open_safetensors(path))
            for published in file.keys():  # noqa: SIM118
                name = published.removeprefix("model.")
                if published.endswith(IGNORED_SUFFIXES) or not wanted(name):
                    continue
                about = file.get_slice(published)
                self._files[name] = file, published
                dtype = DTYPES.get(about.get_dtype(), torch.uint8)
                self.shapes[name] = torch.empty(about.get_shape(), dtype=dtype, device="meta")

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def leave_out(self, name: str) -> None:
        """Ignore a tensor."""
        self.shapes.pop(name, None)

    def read(self, part: Part, cuts: Sequence[Cut] | None) -> torch.Tensor:
        """A tensor, or what ``cuts`` say of it; in place of nothing, zeros for the whole."""
        file, published = self._files[part.name]
        if cuts is None:
            whole: torch.Tensor = file.get_tensor(published)
            return whole
        if not cuts:
            return torch.zeros(part.shape, dtype=self.shapes[part.name].dtype)
        about = file.get_slice(published)
        pieces = [about[(*[slice(None)] * dim, slice(start, stop))] for dim, start, stop in cuts]
        return torch.cat(pieces, cuts[0].dim) if len(pieces) > 1 else pieces[0]


def load_share(
    folder: Path,
    ranks: Ranks,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    quantization: Quantization = "none",
) -> LlamaModel:
    """Load a rank's part of a target, frozen and in eval mode.

    Args:
        folder: of the model.
        ranks: the processes that share it; each reads its own part of the weights.
        dtype, quantization: see :func:`~eagle_kit.models.loading.loader.load_target`.

    Raises:
        UserError: as ``load_target``; a target that tensor parallelism does not cut.
    """
    config = read_target_config(folder)
    whole = "Leave tensor_parallel at 1."
    if isinstance(config, BridgedConfig):
        raise UserError(f"Tensor parallelism does not cut {config.model_type}, run by transformers.", whole)
    layout = read_fp8_layout(read_raw_config(folder), str(folder))
    if quantization == "fp8" or layout is not None:
        raise UserError("Tensor parallelism does not cut weights in fp8 yet.", whole)
    mine = shard_config(config, ranks.share)
    with torch.device("meta"):
        parameters = list(LlamaModel(config).named_parameters())  # of all ranks
        model = LlamaModel(mine, ranks)
    with SlicedTensors(folder, lambda name: not is_mtp(name, config)) as tensors:
        if config.tie_word_embeddings:
            tensors.leave_out("lm_head.weight")
        parts = published_parts(parameters, config, tensors.shapes)
        expected = expected_shapes((part for group in parts.values() for part in group), {}, None)
        check_tensors(tensors.shapes, expected, str(folder))
        for name, parameter in list(model.named_parameters()):
            kind = torch.float32 if stays_exact(model, name) else dtype
            pieces = [
                tensors.read(part, cuts_of(part, config, ranks.share)).to(device, kind)
                for part in parts[name]
            ]
            value = torch.cat(pieces).view(parameter.shape) if len(pieces) > 1 else pieces[0]
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(value))
    model.rope = Rope(config.rope_dim, config.rope_theta, config.rope_scaling).to(device)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model.eval().requires_grad_(False)
