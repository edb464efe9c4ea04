"""Formats of a target's states: as they were computed, in bfloat16, or in 8 bits with a scale per row.

``fp8`` is e4m3 with one fp32 scale for the ``H`` values that one layer has at one token, so that the largest
of them is 448, the largest number e4m3 has. States of different layers lie apart by orders of magnitude, and
single channels by as much; a format with an exponent keeps the small ones, which integers of 8 bits would
not. A value is off by at most 1/16 of itself, or by 2^-10 of the scale where it is smaller than that.

Legend: T tokens, H hidden, L captured layers.
"""

import torch

from eagle_kit.core.errors import UserError

FORMATS = ("computed", "bf16", "fp8")
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SCALE = ".scale"
"""Suffix of the name of a tensor of scales."""


def encode(tensors: dict[str, torch.Tensor], form: str, hidden_size: int) -> dict[str, torch.Tensor]:
    """Encode ``tensors`` for a store.

    Args:
        tensors: by name: states, floating ``[T, L H]``; anything else as it is, whole numbers in 32 bits.
        form: one of :data:`FORMATS`, for the states.
        hidden_size: H, the values that share a scale.

    Raises:
        UserError: a state is not finite.
    """
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            stored[name] = tensor.to(torch.int32)
            continue
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(
                f"The target's states ({name}) are not finite: it overflowed in {tensor.dtype}.",
                "Set training.precision to float32 or bfloat16, or check the target's weights.",
            )
        if tensor.ndim != 2 or form == "computed":
            stored[name] = tensor
        elif form == "bf16":
            stored[name] = tensor.to(torch.bfloat16)
        else:
            stored[name], stored[name + SCALE] = _to_fp8(tensor, hidden_size)
    return stored


def is_finite(stored: dict[str, torch.Tensor]) -> bool:
    """Return False if an encoded state is NaN or infinite, which :func:`encode` does not make."""
    return all(_is_finite(tensor) for tensor in stored.values())


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.dtype == FP8:  # it has no infinity, and torch does not look for its NaN
        return not bool((tensor.view(torch.uint8) & 0x7F == 0x7F).any())
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def decode(stored: dict[str, torch.Tensor], dtypes: dict[str, str]) -> dict[str, torch.Tensor]:
    """The inverse of :func:`encode`, on whatever device ``stored`` is.

    Args:
        dtypes: name and type, such as ``float32``, of every tensor before it was encoded.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, dtype in dtypes.items():
        scale = stored.get(name + SCALE)
        value = stored[name] if scale is None else _from_fp8(stored[name], scale)
        tensors[name] = value.to(getattr(torch, dtype))
    return tensors


def choose_layers(
    stored: dict[str, torch.Tensor], name: str, places: list[int], hidden_size: int
) -> dict[str, torch.Tensor]:
    """Encoded tensors with the layers at ``places`` alone, in this order, in the states called ``name``."""
    states = stored[name]
    chosen = {name: states.unflatten(1, (-1, hidden_size))[:, places].flatten(1)}
    if (scale := stored.get(name + SCALE)) is not None:
        chosen[name + SCALE] = scale[:, places]
    return stored | chosen


def bytes_per_token(form: str, precision: str, num_layers: int, hidden_size: int) -> int:
    """Bytes on disk of a token: states of ``num_layers`` layers and the last one, and its best next token."""
    states = num_layers + 1
    if form == "fp8":
        return states * (hidden_size + 4) + 4
    half = form == "bf16" or precision == "bfloat16"
    return states * hidden_size * (2 if half else 4) + 4


def _to_fp8(x: torch.Tensor, hidden_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[T, L H]`` -> fp8 ``[T, L H]`` and fp32 scales ``[T, L]``; a row of zeros has the scale 1."""
    parts = x.float().unflatten(1, (x.shape[1] // hidden_size, hidden_size))
    scale = parts.abs().amax(-1) / FP8_MAX
    scale = torch.where(scale > torch.finfo(torch.float32).tiny, scale, 1.0)
    return (parts / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).flatten(1).to(FP8), scale


def _from_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    layers = scale.shape[1]
    if not layers:
        return x.float()
    return (x.float().unflatten(1, (layers, x.shape[1] // layers)) * scale[..., None]).flatten(1)
