"""Formats of captured states: to the bit, bfloat16, and fp8 against its definition."""

import pytest
import torch

from eagle_kit.core.errors import UserError
from eagle_kit.data.hidden_states.format import (
    bytes_per_token,
    check_finite,
    decode,
    encode,
    finite_flags,
)

T, H, L = 37, 96, 3


def states(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Layers of very different sizes, single channels larger still, a row of zeros, tiny numbers."""
    generator = torch.Generator().manual_seed(0)
    aux = torch.randn(T, L, H, generator=generator) * torch.tensor([0.01, 1.0, 300.0])[:, None]
    aux[:, 1, 17] *= 1000
    aux[4] = 0
    aux[5, 0] = 1e-30
    hidden = torch.randn(T, H, generator=generator)
    argmax = torch.randint(-1, 150_000, (T,), generator=generator)
    return {"aux": aux.flatten(1).to(dtype), "hidden": hidden.to(dtype), "argmax": argmax}


DTYPES = {"aux": "float32", "hidden": "float32", "argmax": "int64"}


def size(stored: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in stored.values())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and a[name].equal(b[name]) for name in a
    )


def test_states_as_computed_come_back_to_the_bit() -> None:
    assert same(decode(encode(states(), "computed", H), DTYPES), states())
    half = {**DTYPES, "aux": "bfloat16", "hidden": "bfloat16"}
    for form in ("computed", "bf16"):
        assert same(decode(encode(states(torch.bfloat16), form, H), half), states(torch.bfloat16))


def test_bf16_is_the_nearest_number_of_seven_bits() -> None:
    before, after = states(), decode(encode(states(), "bf16", H), DTYPES)
    assert after["hidden"].equal(before["hidden"].bfloat16().float()) and after["argmax"].equal(
        before["argmax"]
    )


def test_fp8_is_the_nearest_of_the_256_numbers_that_the_format_has() -> None:
    """All e4m3 numbers by their definition (1 sign, 4 exponent bits with bias 7, 3 of fraction), times the
    scale that makes the largest one 448: no other is nearer than the one that was chosen."""
    fraction, exponent = torch.arange(8) / 8, torch.arange(1, 16)[:, None]
    normal = ((1 + fraction) * 2.0 ** (exponent - 7)).double().flatten()[:-1]  # the last pattern is no number
    grid = torch.cat((fraction.double() * 2.0**-6, normal))
    assert grid.max() == 448
    grid = torch.cat((-grid, grid)).unique()
    before = states()
    after = decode(encode(before, "fp8", H), DTYPES)
    for name in ("aux", "hidden"):
        x, y = (tensor[name].double().unflatten(1, (-1, H)) for tensor in (before, after))
        step = x.abs().amax(-1, keepdim=True) / 448
        for layer in range(x.shape[1]):
            rows = step[:, layer, 0] > 0
            nearest = ((x[rows, layer, :, None] / step[rows, layer, :, None]) - grid).abs().amin(-1)
            chosen = (x[rows, layer] - y[rows, layer]).abs() / step[rows, layer]
            assert (chosen <= nearest + 448 * 2**-22).all()
        assert ((x - y).abs() <= x.abs() / 16 + step * 2**-10 * 1.0001).all()
    assert after["aux"][4].eq(0).all() and after["argmax"].equal(before["argmax"])


def test_fp8_needs_scales_of_each_layer() -> None:
    """With one scale for all three layers the first would lose most of its bits."""
    before = states()["aux"].unflatten(1, (L, H))[:, 0]
    after = decode(encode(states(), "fp8", H), DTYPES)["aux"].unflatten(1, (L, H))[:, 0]
    rows = [i for i in range(T) if i != 4]
    assert ((before - after)[rows].norm() / before[rows].norm()) < 0.04


@pytest.mark.parametrize(
    ("form", "dtype"),
    [("computed", "float32"), ("computed", "bfloat16"), ("bf16", "float32"), ("fp8", "float32")],
)
def test_bytes_of_a_token_are_those_of_the_tensors(form: str, dtype: str) -> None:
    assert T * bytes_per_token(form, dtype, L, H) == size(encode(states(getattr(torch, dtype)), form, H))


def test_a_head_without_captured_layers_keeps_the_last_state_alone() -> None:
    tensors = {**states(), "aux": torch.zeros(T, 0)}
    for form in ("computed", "bf16", "fp8"):
        assert decode(encode(tensors, form, H), DTYPES)["aux"].shape == (T, 0)
    assert T * bytes_per_token("fp8", "float32", 0, H) == size(encode(tensors, "fp8", H))


def test_states_that_overflowed_are_refused() -> None:
    tensors = states()
    check_finite(finite_flags(tensors), DTYPES)
    tensors["aux"][3, 5] = float("inf")
    with pytest.raises(UserError, match=r"\(aux\) are not finite: it overflowed in float32"):
        check_finite(finite_flags(tensors), DTYPES)
