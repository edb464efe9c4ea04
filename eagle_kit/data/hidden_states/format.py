"""Formats of a target's states: as they were computed, in bfloat16, or in 8 bits with a scale per row.

``fp8`` is e4m3 with one fp32 scale for the ``H`` values of one layer at one token. The scale maps the largest
of them to 448, the largest number of e4m3. Layers, and single channels of a layer, differ by orders of
magnitude. A format with an exponent keeps small values, which integers of 8 bits would round to zero. The
error of a value is at most 1/16 of it, or 2^-10 of the scale for values below the smallest normal number.

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
    """Encode ``tensors``, which must be finite, for a store. The host does not wait for a GPU.

    Args:
        tensors: by name. States are floating, ``[T, L H]``; integers become int32; other tensors stay as they
            are.
        form: one of :data:`FORMATS`, for the states.
        hidden_size: H, the values that share a scale.
    """
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            stored[name] = tensor.to(torch.int32)
            continue
        if tensor.ndim != 2 or form == "computed":
            stored[name] = tensor
        elif form == "bf16":
            stored[name] = tensor.to(torch.bfloat16)
        else:
            values, scale = _to_fp8(tensor, hidden_size)
            stored[name] = values
            stored[name + SCALE] = scale
    return stored


def finite_flags(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """For each floating tensor by name, one bool on its device: are all of its values finite?"""
    return {name: torch.isfinite(t).all() for name, t in tensors.items() if t.is_floating_point()}


def check_finite(flags: dict[str, torch.Tensor], dtypes: dict[str, str]) -> None:
    """Check the result of :func:`finite_flags`. The host waits for a GPU.

    Args:
        dtypes: name and dtype, such as ``float32``, of every tensor.

    Raises:
        UserError: a state is not finite.
    """
    for name, flag in flags.items():
        if not bool(flag):
            raise UserError(
                f"The target's states ({name}) are not finite: it overflowed in {dtypes[name]}.",
                "Set training.precision to float32 or bfloat16, or check the target's weights.",
            )


def names_of_dtypes(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Name and dtype, such as ``float32``, of every tensor."""
    return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}


def is_finite(stored: dict[str, torch.Tensor]) -> bool:
    """Return False if an encoded state is NaN or infinite. No such state is written: the file is damaged."""
    return all(_is_finite(tensor) for tensor in stored.values())


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.dtype == FP8:
        # e4m3 has no infinity. torch.isfinite does not find its NaN, 0x7F or 0xFF.
        is_nan = tensor.view(torch.uint8) & 0x7F == 0x7F
        return not bool(is_nan.any())
    if not tensor.is_floating_point():
        return True
    return bool(torch.isfinite(tensor).all())


def decode(stored: dict[str, torch.Tensor], dtypes: dict[str, str]) -> dict[str, torch.Tensor]:
    """The inverse of :func:`encode`, on the device of ``stored``.

    Args:
        dtypes: name and dtype, such as ``float32``, of every tensor before it was encoded.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, dtype in dtypes.items():
        value = stored[name]
        scale = stored.get(name + SCALE)
        if scale is not None:
            value = _from_fp8(value, scale)
        tensors[name] = value.to(getattr(torch, dtype))
    return tensors


def choose_layers(
    stored: dict[str, torch.Tensor], name: str, places: list[int], hidden_size: int
) -> dict[str, torch.Tensor]:
    """Encoded tensors of which the states ``name`` are reduced to some layers.

    Args:
        stored: encoded tensors, of which ``name`` is ``[T, L H]``.
        places: indices of the layers to keep, in the order of the result.
        hidden_size: H.
    """
    by_layer = stored[name].unflatten(1, (-1, hidden_size))  # [T, L, H]
    chosen = {name: by_layer[:, places].flatten(1)}
    scale = stored.get(name + SCALE)
    if scale is not None:
        chosen[name + SCALE] = scale[:, places]
    return stored | chosen


def bytes_per_token(form: str, precision: str, num_layers: int, hidden_size: int) -> int:
    """Bytes on disk of a token: the states of ``num_layers`` captured layers, the final hidden state, and the
    int32 id of the target's most likely next token.

    Args:
        form: one of :data:`FORMATS`.
        precision: dtype in which the target computes.
    """
    num_states = num_layers + 1
    token_bytes = 4
    scale_bytes = 4
    if form == "fp8":
        return num_states * (hidden_size + scale_bytes) + token_bytes
    is_16_bit = form == "bf16" or precision == "bfloat16"
    value_bytes = 2 if is_16_bit else 4
    return num_states * hidden_size * value_bytes + token_bytes


def _to_fp8(x: torch.Tensor, hidden_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[T, L H]`` -> fp8 ``[T, L H]`` and fp32 scales ``[T, L]``; a row of zeros has the scale 1."""
    by_layer = x.float().unflatten(1, (x.shape[1] // hidden_size, hidden_size))  # [T, L, H]
    scale = by_layer.abs().amax(-1) / FP8_MAX
    scale = torch.where(scale > torch.finfo(torch.float32).tiny, scale, 1.0)
    values = (by_layer / scale[..., None]).clamp(-FP8_MAX, FP8_MAX)
    return values.flatten(1).to(FP8), scale


def _from_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`_to_fp8`, in fp32."""
    num_layers = scale.shape[1]
    if num_layers == 0:
        return x.float()
    by_layer = x.float().unflatten(1, (num_layers, x.shape[1] // num_layers))  # [T, L, H]
    return (by_layer * scale[..., None]).flatten(1)
