"""What is measured: cases of kernels, at sizes of a model, over random data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from eagle_kit.bench.kernels.cost import Cost
from eagle_kit.kernels.backend import Backend


@dataclass(frozen=True)
class Sizes:
    """Of a model and of the loads it is under. Fields are named as in ``TargetConfig``.

    Attributes:
        decode, verify, drafts: batches and contexts of window attention.
        windows: nodes of a verified window.
        flex: batch and context at which FlexAttention is compared, which takes seconds to compile.
        prompts: batch, cached tokens and new tokens of a prefill.
        tokens: rows of element-wise operations.
        train_tokens: a packed row of training.
    """

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    latent: tuple[int, int]
    latent_heads: tuple[int, ...]
    page_size: int
    decode: tuple[tuple[int, int], ...]
    windows: tuple[int, ...]
    verify: tuple[tuple[int, int], ...]
    drafts: tuple[tuple[int, int], ...]
    flex: tuple[int, int]
    prompts: tuple[tuple[int, int, int], ...]
    tokens: tuple[int, ...]
    batches: tuple[int, ...]
    train_tokens: int


K = 1024
FULL = Sizes(
    name="full",
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    draft_vocab_size=32000,
    latent=(512, 64),
    latent_heads=(16, 32, 128),
    page_size=16,
    decode=(
        *((1, K), (1, 8 * K), (1, 32 * K), (8, K), (8, 8 * K), (8, 32 * K), (32, 2 * K), (32, 8 * K)),
        *((64, K), (64, 8 * K), (64, 32 * K)),
    ),
    windows=(8, 16, 32),
    verify=((1, K), (1, 8 * K), (1, 32 * K), (8, 8 * K), (32, 2 * K), (64, 8 * K)),
    drafts=((1, K), (8, 8 * K), (64, 8 * K)),
    flex=(8, 8 * K),
    prompts=((1, 0, 2 * K), (1, 0, 8 * K), (1, 30 * K, 2 * K), (8, K, 256)),
    tokens=(1, 64, 2 * K),
    batches=(1, 8, 64),
    train_tokens=2 * K,
)
"""Llama-3.1-8B with a draft vocabulary of 32,000; the latent is DeepSeek's."""

TINY = Sizes(
    name="tiny",
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=512,
    draft_vocab_size=128,
    latent=(64, 16),
    latent_heads=(2, 4),
    page_size=16,
    decode=((1, 64), (2, 128)),
    windows=(8, 16),
    verify=((1, 64), (2, 128)),
    drafts=((2, 128),),
    flex=(0, 0),
    prompts=((1, 0, 32), (2, 48, 16)),
    tokens=(1, 8),
    batches=(1, 2),
    train_tokens=64,
)
"""To try the benchmark; its times say nothing about kernels."""


class RandomInputs:
    """Random inputs on a device. Its generator is its own: the default one is of no use after a failed
    capture."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> torch.Tensor:
        """Normally distributed numbers."""
        wanted = dtype or self.dtype
        is_fp8 = wanted.itemsize == 1
        out = torch.randn(
            shape,
            generator=self._generator,
            device=self.device,
            dtype=torch.bfloat16 if is_fp8 else wanted,
        )
        out = out if scale == 1.0 else out.mul_(scale)
        return out.to(wanted)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Numbers in [0, 1)."""
        return torch.rand(shape, generator=self._generator, device=self.device, dtype=dtype)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """int64 in 0..high-1."""
        return torch.randint(high, shape, generator=self._generator, device=self.device)

    def permutation(self, count: int) -> torch.Tensor:
        """0..count-1 in another order, int64."""
        return torch.randperm(count, generator=self._generator, device=self.device)

    def below(self, limits: torch.Tensor) -> torch.Tensor:
        """int64 in 0..limit-1 for every one of ``limits`` int64."""
        return (self.uniform(*limits.shape) * limits).long()

    def parents(self, batch: int, nodes: int) -> torch.Tensor:
        """A random tree: int64 ``[B, N]``, the root's is 0, parents before children."""
        limits = torch.arange(nodes, device=self.device).clamp(min=1).expand(batch, nodes)
        return self.below(limits)


class PreparedCase(NamedTuple):
    """A case with its inputs.

    Attributes:
        op: runs the form that it is told.
        rivals: other ways to the same result, measured on a GPU; called once they return a function.
        reads: what a run must read, to count bytes by; None where that depends on the data.
        writes: what a run must write besides what it returns, or instead when ``returns`` is False.
        eager: forms in which the host takes part, so that no graph is made of them.
    """

    op: Callable[[Backend], Any]
    rivals: Mapping[str, Callable[[], Callable[[], Any]]] = {}
    reads: tuple[torch.Tensor, ...] | None = None
    writes: tuple[torch.Tensor, ...] = ()
    returns: bool = True
    eager: tuple[Backend, ...] = ()


@dataclass(frozen=True)
class Case:
    """One measurement of a kernel.

    Attributes:
        name: such as ``"decode, batch 8, context 8192"``.
        cost: what it must do, from its shapes and the bytes of an element.
        make: draws the inputs.
        values: what plots and targets tell cases apart by.
        trains: with gradients.
    """

    name: str
    cost: Callable[[int], Cost]
    make: Callable[[RandomInputs], PreparedCase]
    values: dict[str, Any] = field(default_factory=dict)
    trains: bool = False
