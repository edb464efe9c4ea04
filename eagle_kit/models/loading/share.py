"""Loading of a rank's part of a target: only its slices are read from the files."""

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
"""Floating-point types of safetensors that a checkpoint may have here."""


class SlicedTensors(dict[str, torch.Tensor], AbstractContextManager["SlicedTensors"]):
    """Tensors of a model folder by our names: whole ones without memory, until :meth:`pop` reads a rank's
    part of one. What is put in comes out as it is.

    Args:
        name_of: our name of a published one without ``model.``; None where there is no use for it.

    Attributes:
        cuts: of the tensors that are read in part.

    Raises:
        UserError: a file that is missing or corrupt, now or when it is read.
    """

    def __init__(self, folder: Path, name_of: Callable[[str], str | None]) -> None:
        super().__init__()
        self._stack, self._files = ExitStack(), {}
        self.cuts: dict[str, Sequence[Cut]] = {}
        for path in weight_files(folder):
            file = self._stack.enter_context(open_safetensors(path))
            for published in file.keys():  # noqa: SIM118
                name = name_of(published.removeprefix("model."))
                if name is None or published.endswith(IGNORED_SUFFIXES):
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
        if name not in self._files:
            return about
        (file, published), cuts = self._files.pop(name), self.cuts.get(name)
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
    attends_whole: bool = False,
) -> LlamaModel:
    """Load a rank's part of a target, frozen and in eval mode.

    Args:
        folder: of the model.
        ranks: the processes that share it; each reads its own part of the weights.
        dtype, quantization: see :func:`~eagle_kit.models.loading.loader.load_target`; what is cast to fp8
            gets scales of the rank's own part of an output.
        expert_parallel, attends_whole: see :class:`~eagle_kit.models.sharding.Sharding`.

    Raises:
        UserError: as ``load_target``; a target that tensor parallelism does not cut.
    """
    config = read_target_config(folder)
    whole = "Leave tensor_parallel at 1."
    if isinstance(config, BridgedConfig):
        raise UserError(f"Tensor parallelism does not cut {config.model_type}, run by transformers.", whole)
    layout, arrangement = read_fp8_layout(read_raw_config(folder), str(folder)), arrangement_of(config)
    block = None if layout is None else layout.block
    sharding = Sharding.of(config, ranks.share, block, expert_parallel, attends_whole)
    with torch.device("meta"):
        parameters = list(LlamaModel(config).named_parameters())  # of all ranks
        model = LlamaModel(sharding.rank_config(), ranks)

    def name_of(published: str) -> str | None:
        name = arrangement.rename(published)
        return None if name is None or is_mtp(name, config) else name

    with SlicedTensors(folder, name_of) as tensors:
        if config.tie_word_embeddings and "lm_head.weight" in tensors:
            del tensors["lm_head.weight"]
        whole_tensors = dict(tensors)
        arrangement.arrange(whole_tensors, config, layout)
        parts = published_parts(parameters, config, whole_tensors)
        expected = expected_shapes(
            (part for group in parts.values() for part in group), whole_tensors, layout
        )
        check_tensors(whole_tensors, expected, str(folder))
        tensors.cuts = cuts_of(tensors, sharding, layout)
        arrangement.arrange(tensors, model.config, layout)
        parts = {name: [part for part in group if sharding.has(part)] for name, group in parts.items()}
        if quantization != "none":
            fill_fp8(model, parts, tensors, layout, dtype, device, casts=quantization == "fp8")
        fill(model, parts, tensors, layout, dtype, device)
    model.rope = Rope(config.rope_dim, config.rope_theta, config.rope_scaling).to(device)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model.eval().requires_grad_(False)


def cuts_of(
    tensors: Mapping[str, torch.Tensor], sharding: Sharding, layout: FP8Layout | None
) -> dict[str, Sequence[Cut]]:
    """What a rank reads of published ``tensors`` that it does not read whole, and of their scales. Raises
    UserError where a block of an fp8 weight would be cut apart."""
    found: dict[str, Sequence[Cut]] = {}
    suffix = None if layout is None else layout.suffix
    for name, tensor in tensors.items():
        if suffix is not None and name.endswith(suffix):
            continue
        part = Part(name, tuple(tensor.shape))
        if (cuts := sharding.cuts(part)) is None:
            continue
        found[name] = cuts
        if layout is not None and (scales := tensors.get(name + layout.suffix)) is not None:
            mine = scale_cuts(part, cuts, tuple(scales.shape), layout.block)
            found |= {} if mine is None else {name + layout.suffix: mine}
    return found
