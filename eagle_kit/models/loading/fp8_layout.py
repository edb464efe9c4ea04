"""Scales of published fp8 weights: what a config's ``quantization_config`` says of their names and shapes.

| ``quant_method`` | scales |
|---|---|
| ``fp8`` with ``weight_block_size`` (DeepSeek, Qwen) | ``weight_scale_inv``, of blocks |
| ``fp8`` without (AutoFP8), ``fbgemm_fp8`` (Llama 3.1) | ``weight_scale``, of a tensor or its outputs |
| ``compressed-tensors`` in ``float-quantized`` | ``weight_scale``, of a tensor, its outputs or blocks |
| ``modelopt`` with ``quant_algo`` FP8 | ``weight_scale``, of a tensor or its outputs |

All are multiplied. Scales of activations and of keys and values stand beside them and are not needed, see
:data:`UNUSED`.
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
"""Suffixes of scales that calibration leaves for activations, keys and values: activations are scaled as they
come, and a pool in fp8 has scales of its own."""
STRATEGIES = ("tensor", "channel", "block")
FORMATS = ("float-quantized", "naive-quantized")
MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
REMEDY = (
    "Use the model's unquantised checkpoint, or one in fp8 with scales of blocks, of outputs or of tensors."
)


class FP8Layout(NamedTuple):
    """Names and shapes of scales.

    Attributes:
        suffix: of a scale's name, behind the name of its weight.
        block: rows and columns that share a scale; None where an output has one, or the whole tensor.
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
        """Return whether a tensor of ``published`` is in e4m3, with scales."""
        return published[name].dtype == E4M3 and name + self.suffix in published

    def weight(self, values: torch.Tensor, scales: torch.Tensor) -> FP8Weight:
        """Weight ``[..., N, K]`` with published ``scales`` of one of :meth:`scale_shapes`; where there are no
        blocks each output gets a scale."""
        if self.block is not None:
            return FP8Weight(values, scales.float(), self.block)
        *front, rows, columns = values.shape
        by_output = scales.float().reshape(*front, -1, 1).expand(*front, rows, 1)
        return FP8Weight(values, by_output.contiguous(), (1, columns))


def read_fp8_layout(config: Mapping[str, Any], where: str) -> FP8Layout | None:
    """Layout of the fp8 weights of a checkpoint, by its ``config.json``; None for unquantised weights.

    Raises:
        UserError: another quantisation.
    """
    given = config.get("quantization_config")
    if not given:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else given
    found: FP8Layout | str = f"({shown(method)})"
    if isinstance(given, dict):
        if method == "fp8":
            found = _of_blocks("_scale_inv", given.get("weight_block_size"))
        elif method == "fbgemm_fp8":
            found = FP8Layout("_scale")
        elif method == "modelopt":
            algorithm = given.get("quant_algo")
            found = FP8Layout("_scale") if algorithm in MODELOPT else f"(modelopt, {shown(algorithm)})"
        elif method == "compressed-tensors":
            found = _compressed(given)
    if isinstance(found, FP8Layout):
        return found
    raise UserError(f"The weights in {where} are quantised {found}, which cannot be run here.", REMEDY)


def _of_blocks(suffix: str, block: Any) -> FP8Layout | str:
    if block is None:
        return FP8Layout("_scale")
    if isinstance(block, list | tuple) and len(block) == 2 and all(type(x) is int and x > 0 for x in block):
        return FP8Layout(suffix, (block[0], block[1]))
    return f"in blocks of {shown(block)}"


def _compressed(given: Mapping[str, Any]) -> FP8Layout | str:
    """Layout of llm-compressor's ``config_groups``, which must agree."""
    if given.get("format") not in FORMATS:
        return f"(compressed-tensors, {shown(given.get('format'))})"
    groups = given.get("config_groups")
    weights = [
        group.get("weights") if isinstance(group, dict) else None
        for group in (groups.values() if isinstance(groups, dict) else ())
    ]
    layouts = set()
    for each in weights:
        each = each if isinstance(each, dict) else {}
        kind = f"{shown(each.get('type'))} of {shown(each.get('num_bits'))} bits"
        if each.get("type") != "float" or each.get("num_bits") != 8 or each.get("strategy") not in STRATEGIES:
            return f"(compressed-tensors, {kind}, by {shown(each.get('strategy'))})"
        is_block = each["strategy"] == "block"
        found = _of_blocks("_scale", each.get("block_structure") or "none" if is_block else None)
        if isinstance(found, str):
            return found
        layouts.add(found)
    return layouts.pop() if len(layouts) == 1 else f"(compressed-tensors, in {len(layouts)} ways)"
