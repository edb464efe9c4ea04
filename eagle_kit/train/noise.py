"""Noise on the target's states, so that a head gets used to states that are not quite the target's (EAGLE,
arXiv 2401.15077, section 4.2).

It is a function of the seed, the optimiser step and the packed row: a resumed run draws what the whole one
drew, however rows are shared out over forwards and processes. Another kind of device draws other numbers.

Legend: T packed tokens, F values of a state.
"""

import hashlib

import torch

from eagle_kit.config.train import FeatureNoise
from eagle_kit.train.batch import Forward
from eagle_kit.train.teacher import TargetFeatures


def add_noise(
    features: TargetFeatures, noise: FeatureNoise, forward: Forward, *, seed: int, step: int
) -> TargetFeatures:
    """``features`` with noise on the states that a head reads: the captured ones, or the final ones of a head
    that captures none. The given tensors are not changed.

    Args:
        seed: of the run.
        step: finished optimiser steps.
    """
    name = "aux" if features.aux.shape[1] else "hidden"
    clean = getattr(features, name)
    drawn = torch.cat(
        [
            _draw(noise.kind, (length, clean.shape[1]), clean.device, seed, step, row)
            for row, length in zip(forward.numbers, forward.lengths, strict=True)
        ]
    )
    return features._replace(**{name: (clean.float() + _scale(noise, forward) * drawn).to(clean.dtype)})


def _scale(noise: FeatureNoise, forward: Forward) -> torch.Tensor | float:
    """Of all tokens, or of each by the length of its document ``[T, 1]``."""
    if noise.per_tokens is None:
        return noise.scale
    starts = forward.doc_start
    lengths = torch.bincount(starts, minlength=len(starts))[starts]
    return (noise.scale * noise.per_tokens / lengths.float())[:, None]


def _draw(
    kind: str, shape: tuple[int, int], device: torch.device, seed: int, step: int, row: int
) -> torch.Tensor:
    """Numbers in [-1, 1), or normal ones, fp32."""
    digest = hashlib.blake2b(f"noise {seed} {step} {row}".encode(), digest_size=8).digest()
    generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest) >> 1)
    if kind == "gaussian":
        return torch.randn(shape, generator=generator, device=device)
    return 2.0 * torch.rand(shape, generator=generator, device=device) - 1.0
