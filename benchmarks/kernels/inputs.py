"""Sizes, random inputs, and the work of a kernel's case."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.models import preset_named
from eagle_kit.models.config import TargetConfig
from eagle_kit.ops.backend import Backend

K = 1024


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model and of the loads it is under, by default Llama-3.1-8B with a draft vocabulary of
    32,000 and DeepSeek's latent.

    Attributes:
        experts: number of experts, those of a token, and their intermediate size, by default Mixtral's.
        delta: heads, key heads, sizes of a key and a value of a recurrent layer, by default Qwen3-Next's.
        decode, verify, drafts: batches and contexts of window attention.
        windows: nodes of a verified window.
        prompts: batch, cached tokens and new tokens of a prefill.
        tokens: rows of element-wise operations.
        train_tokens: a packed sequence of training.
    """

    name: str = "full"
    model: TargetConfig = preset_named("llama-3.1-8b")[0]
    draft_vocab_size: int = 32000
    latent: tuple[int, int] = (512, 64)
    latent_heads: tuple[int, ...] = (16, 32, 128)
    experts: tuple[int, int, int] = (8, 2, 14336)
    delta: tuple[int, int, int, int] = (32, 16, 128, 128)
    page_size: int = 16
    decode: tuple[tuple[int, int], ...] = (
        *((1, K), (1, 8 * K), (1, 32 * K), (8, K), (8, 8 * K), (8, 32 * K), (32, 2 * K), (32, 8 * K)),
        *((64, K), (64, 8 * K), (64, 32 * K)),
    )
    windows: tuple[int, ...] = (8, 16, 32)
    verify: tuple[tuple[int, int], ...] = (
        *((1, K), (1, 8 * K), (1, 32 * K), (8, 8 * K), (32, 2 * K), (64, 8 * K)),
    )
    drafts: tuple[tuple[int, int], ...] = ((1, K), (8, 8 * K), (64, 8 * K))
    prompts: tuple[tuple[int, int, int], ...] = (
        *((1, 0, 2 * K), (1, 0, 8 * K), (1, 30 * K, 2 * K), (8, K, 256)),
    )
    tokens: tuple[int, ...] = (1, 64, 2 * K)
    batches: tuple[int, ...] = (1, 8, 64)
    train_tokens: int = 2 * K


TINY = Sizes(
    name="tiny",
    model=preset_named("tiny")[0],
    draft_vocab_size=128,
    latent=(64, 16),
    latent_heads=(2, 4),
    experts=(4, 2, 16),
    delta=(4, 2, 16, 16),
    decode=((1, 64), (2, 128)),
    windows=(8, 16),
    verify=((1, 64), (2, 128)),
    drafts=((2, 128),),
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
        drawn = torch.bfloat16 if wanted.itemsize == 1 else wanted
        out = torch.randn(shape, generator=self._generator, device=self.device, dtype=drawn)
        return (out if scale == 1.0 else out.mul_(scale)).to(wanted)

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
    """A kernel with its inputs. The bytes that it must move are those of ``reads``, ``writes`` and its
    result, each tensor once; small tables (page tables, row numbers of attention) are left out where they are
    thousandths.

    Attributes:
        op: runs the form that it is told.
        flops: multiplications and additions.
        reads, writes: tensors; ``writes`` besides the result, or instead of it where ``returns`` is False.
        moved: the bytes where they depend on the data; None counts tensors.
        rivals: other ways to the same result, measured on a GPU; called once they return a function.
        eager: forms in which the host takes part, so that no graph is made of them.
    """

    op: Callable[[Backend], Any]
    flops: int = 0
    reads: tuple[torch.Tensor, ...] = ()
    writes: tuple[torch.Tensor, ...] = ()
    returns: bool = True
    moved: int | None = None
    rivals: Mapping[str, Callable[[], Callable[[], Any]]] = {}
    eager: tuple[Backend, ...] = ()

    def num_bytes(self, result: Any) -> int:
        """Bytes that a run must move, given what it returned."""
        if self.moved is not None:
            return self.moved
        results = tensors_of(result) if self.returns else []
        return sum(tensor.nbytes for tensor in (*self.reads, *self.writes, *results))


class KernelCase(NamedTuple):
    """One load on a kernel: its name, what draws the inputs, what plots and targets tell cases apart by, and
    whether gradients are taken."""

    name: str
    make: Callable[[RandomInputs], PreparedCase]
    values: Mapping[str, Any] = {}
    trains: bool = False


Cases = dict[str, Callable[[Sizes], list[KernelCase]]]
"""Makers of the cases of kernels, by name."""


def case(
    name: str, make: Callable[..., PreparedCase], *args: Any, trains: bool = False, **values: Any
) -> KernelCase:
    """A case whose inputs are drawn by ``make(*args, rng)``."""
    return KernelCase(name, partial(make, *args), values, trains)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a result."""
    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, tuple | list):
        return []
    return [tensor for part in value for tensor in tensors_of(part)]
