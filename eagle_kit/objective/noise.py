"""Noise on captured states, so that a head does not rely on details that its own outputs will not repeat.

EAGLE-1 (arXiv 2401.15077) adds uniform noise to the features that its head reads. The noise of a packed row
depends on the seed, the optimiser step and the row's number alone: not on the process that has it, on the
rows beside it, on the device, or on what was sampled before. So a run resumes to the bit.

Legend: T packed tokens of a micro_batch, L captured layers, H hidden of the target.
"""

import torch

from eagle_kit.config.training import FeatureNoise
from eagle_kit.objective.batch import MicroBatch
from eagle_kit.objective.row_drop import row_generator

_STREAM = 0x6E6F6973
"""Keeps these draws apart from others that begin with the run's seed."""


def add_noise(
    aux: torch.Tensor, micro_batch: MicroBatch, noise: FeatureNoise, num_layers: int, seed: int, step: int
) -> torch.Tensor:
    """Copy of ``aux`` with noise.

    Args:
        aux: ``[T, L * H]``, states of the packed rows of ``micro_batch``; not changed. The final states alone
            are one layer.
        num_layers: L.
        seed: of the run.
        step: finished optimiser steps.
    """
    scales = _scales(noise, micro_batch.doc_start)
    return torch.cat(
        [
            _noisy(part, noise, num_layers, scale, row_generator(_STREAM, seed, step, number))
            for part, scale, number in zip(
                aux.split(micro_batch.lengths),
                scales.split(micro_batch.lengths),
                micro_batch.numbers,
                strict=True,
            )
        ]
    )


def _scales(noise: FeatureNoise, doc_start: torch.Tensor) -> torch.Tensor:
    """Amount of noise for each token, by the length of its document: fp32 ``[T, 1]``."""
    if noise.per_tokens is None:
        return torch.full((len(doc_start), 1), noise.amount, device=doc_start.device)
    lengths = torch.bincount(doc_start, minlength=len(doc_start))[doc_start]
    return (noise.amount * noise.per_tokens / lengths.float())[:, None]


def _noisy(
    aux: torch.Tensor,
    noise: FeatureNoise,
    num_layers: int,
    scale: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    draw = torch.randn if noise.kind == "gaussian" else torch.rand
    drawn = draw(aux.shape, generator=generator).to(aux.device)
    if noise.kind == "dropout":
        return torch.where(drawn < noise.amount, 0.0, aux / (1.0 - noise.amount)).to(aux.dtype)
    if noise.kind == "uniform":
        drawn = drawn.mul_(2.0).sub_(1.0)
    drawn = drawn.mul_(scale)
    if noise.unit == "rms":
        layers = aux.float().unflatten(-1, (num_layers, -1))
        size = layers.pow(2).mean(-1, keepdim=True).sqrt()
        drawn = (drawn.unflatten(-1, (num_layers, -1)) * size).flatten(-2)
    return (aux.float() + drawn).to(aux.dtype)
