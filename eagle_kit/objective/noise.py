"""Noise on captured states, so that a head does not rely on details that its own outputs will not repeat.

EAGLE-1 (arXiv 2401.15077) adds uniform noise to the features that its head reads. The noise of a packed
sequence depends on the seed, the optimiser step and the number of the sequence alone. It does not depend on
the process, the device, other sequences or earlier draws, so a resumed run is bitwise the uninterrupted one.

Legend: T packed tokens of a micro-batch, L captured layers, H hidden of the target.
"""

import torch

from eagle_kit.config.training import FeatureNoise
from eagle_kit.objective.batch import MicroBatch
from eagle_kit.objective.row_drop import row_generator

_STREAM = 0x6E6F6973
"""First word of the seeds of these draws, so that they differ from other draws of the run."""


def add_noise(
    aux: torch.Tensor, micro_batch: MicroBatch, noise: FeatureNoise, num_layers: int, seed: int, step: int
) -> torch.Tensor:
    """Copy of hidden states with noise.

    Args:
        aux: hidden states of the packed sequences of ``micro_batch``, ``[T, L * H]``; not changed.
        noise: kind and amount of the noise.
        num_layers: L; 1 for the final hidden states.
        seed: seed of the run.
        step: finished optimiser steps.
    """
    # Each packed sequence has draws of its own.
    scales = _scales(noise, micro_batch.doc_start).split(micro_batch.lengths)
    rows = aux.split(micro_batch.lengths)
    noisy = []
    for states, scale, number in zip(rows, scales, micro_batch.numbers, strict=True):
        generator = row_generator(_STREAM, seed, step, number)
        noisy.append(_noisy(states, noise, num_layers, scale, generator))
    return torch.cat(noisy)


def _scales(noise: FeatureNoise, doc_start: torch.Tensor) -> torch.Tensor:
    """Amount of noise for each token, by the length of its document, fp32 ``[T, 1]``."""
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
    """Copy of the states of one packed sequence with noise.

    Args:
        aux: ``[T, L * H]`` with the T tokens of the row.
        num_layers: L.
        scale: amount of noise for each token, fp32 ``[T, 1]``.
        generator: generator on the CPU, so that the draws are the same on every device.
    """
    draw = torch.randn if noise.kind == "gaussian" else torch.rand
    drawn = draw(aux.shape, generator=generator).to(aux.device)
    if noise.kind == "dropout":
        return torch.where(drawn < noise.amount, 0.0, aux / (1.0 - noise.amount)).to(aux.dtype)

    # Uniform noise is drawn from [-1, 1).
    if noise.kind == "uniform":
        drawn = drawn.mul_(2.0).sub_(1.0)
    drawn = drawn.mul_(scale)

    # The unit may be the root mean square of each layer's state.
    if noise.unit == "rms":
        layers = aux.float().unflatten(-1, (num_layers, -1))
        size = layers.pow(2).mean(-1, keepdim=True).sqrt()
        drawn = (drawn.unflatten(-1, (num_layers, -1)) * size).flatten(-2)
    return (aux.float() + drawn).to(aux.dtype)
