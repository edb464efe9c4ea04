"""Names and shapes of the scales of published fp8 weights, by a config's ``quantization_config``.

| ``quant_method`` | scales |
|---|---|
| ``fp8`` with ``weight_block_size`` (DeepSeek, Qwen) | ``weight_scale_inv``, of blocks |
| ``fp8`` without (AutoFP8), ``fbgemm_fp8`` (Llama 3.1) | ``weight_scale``, of a tensor or its outputs |
| ``compressed-tensors`` in ``float-quantized`` | ``weight_scale``, of a tensor, its outputs or blocks |
| ``modelopt`` with ``quant_algo`` FP8 | ``weight_scale``, of a tensor or its outputs |

Weights are multiplied by their scales. Checkpoints also have scales of activations, keys and values, which
are not used (:data:`UNUSED`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from eagle_kit.core.errors import UserError, shown
from eagle_kit.ops.fp8 import E4M3, FP8Weight

UNUSED = (
    ".input_scale",
    "_proj.output_scale",
    "_proj.k_scale",
    "_proj.v_scale",
    "self_attn.k_scale",
    "self_attn.v_scale",
)
"""Suffixes of calibrated scales of activations, keys and values. Activations are scaled when they are
computed, and an fp8 pool has its own scales."""
STRATEGIES = ("tensor", "channel", "block")
"""Supported ``strategy`` of the weights of compressed-tensors."""
FORMATS = ("float-quantized", "naive-quantized")
"""Supported ``format`` of compressed-tensors."""
MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
"""Supported ``quant_algo`` of ModelOpt."""
REMEDY = (
    "Use the model's unquantised checkpoint, or one in fp8 with scales of blocks, of outputs or of tensors."
)


class FP8Layout(NamedTuple):
    """Names and shapes of scales.

    Attributes:
        suffix: end of a scale's name, after the name of its weight.
        block: rows and columns that share a scale; None if each output has a scale, or the whole tensor.
    """

    suffix: str
    block: tuple[int, int] | None = None

    def scale_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Shapes that the scales of a weight ``[..., N, K]`` may have."""
        *front, rows, columns = shape
        if self.block is not None:
            return [(*front, -(-rows // self.block[0]), -(-columns // self.block[1]))]
        return [(*front, rows, 1), (*front, rows), (*front, 1, 1), (*front, 1), tuple(front)]

    def is_stored(self, published: Mapping[str, torch.Tensor], name: str) -> bool:
        """True if the tensor ``name`` of ``published`` is e4m3 and has scales."""
        return published[name].dtype == E4M3 and name + self.suffix in published

    def weight(self, values: torch.Tensor, scales: torch.Tensor) -> FP8Weight:
        """Make a weight. Without blocks, each of its outputs gets a scale.

        Args:
            values: e4m3 ``[..., N, K]``.
            scales: published scales, of one of :meth:`scale_shapes`.
        """
        if self.block is not None:
            return FP8Weight(values, scales.float(), self.block)
        *front, rows, columns = values.shape
        output_scales = scales.float().reshape(*front, -1, 1).expand(*front, rows, 1)
        return FP8Weight(values, output_scales.contiguous(), (1, columns))


def read_fp8_layout(config: Mapping[str, Any], where: str) -> FP8Layout | None:
    """Read the layout of the fp8 weights of a checkpoint; None for unquantised weights.

    Args:
        config: content of its ``config.json``.
        where: folder of the checkpoint, for messages.

    Raises:
        UserError: another quantisation.
    """
    given = config.get("quantization_config")
    if not given:
        return None
    try:
        return _read_layout(given)
    except _UnsupportedError as error:
        raise UserError(
            f"The weights in {where} are quantised {error}, which cannot be run here.", REMEDY
        ) from None


class _UnsupportedError(Exception):
    """A quantisation that is not supported, in words that follow "are quantised"."""


def _read_layout(given: Any) -> FP8Layout:
    """Layout of a ``quantization_config``, by its method."""
    if not isinstance(given, dict):
        raise _UnsupportedError(f"({shown(given)})")
    method = given.get("quant_method")
    if method == "fp8":
        block = given.get("weight_block_size")
        if block is None:
            return FP8Layout("_scale")
        return _block_layout("_scale_inv", block)
    if method == "fbgemm_fp8":
        return FP8Layout("_scale")
    if method == "modelopt":
        algorithm = given.get("quant_algo")
        if algorithm not in MODELOPT:
            raise _UnsupportedError(f"(modelopt, {shown(algorithm)})")
        return FP8Layout("_scale")
    if method == "compressed-tensors":
        return _compressed_layout(given)
    raise _UnsupportedError(f"({shown(method)})")


def _block_layout(suffix: str, block: Any) -> FP8Layout:
    """Layout with scales of blocks, a list of rows and columns."""
    is_pair = isinstance(block, list | tuple) and len(block) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in block):
        raise _UnsupportedError(f"in blocks of {shown(block)}")
    rows, columns = block
    return FP8Layout(suffix, (rows, columns))


def _compressed_layout(given: Mapping[str, Any]) -> FP8Layout:
    """Layout of compressed-tensors: that of all ``config_groups``, which must agree."""
    if given.get("format") not in FORMATS:
        raise _UnsupportedError(f"(compressed-tensors, {shown(given.get('format'))})")
    groups = given.get("config_groups")
    if not isinstance(groups, dict):
        groups = {}
    layouts = {_group_layout(group) for group in groups.values()}
    if len(layouts) != 1:
        raise _UnsupportedError(f"(compressed-tensors, in {len(layouts)} ways)")
    return layouts.pop()


def _group_layout(group: Any) -> FP8Layout:
    """Layout of the weights of a group of compressed-tensors."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        weights = {}
    strategy = weights.get("strategy")
    is_fp8 = weights.get("type") == "float" and weights.get("num_bits") == 8
    if not is_fp8 or strategy not in STRATEGIES:
        kind = f"{shown(weights.get('type'))} of {shown(weights.get('num_bits'))} bits"
        raise _UnsupportedError(f"(compressed-tensors, {kind}, by {shown(strategy)})")
    if strategy == "block":
        return _block_layout("_scale", weights.get("block_structure") or "none")
    return FP8Layout("_scale")
