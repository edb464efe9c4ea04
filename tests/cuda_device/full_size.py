"""Bytes of a run at full size beside its plan, as torch's allocator counts them."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.models.config import TargetConfig
from tests.cuda_device.device import counts

GB = 10**9
TOLERANCE = 0.06
DEVICE = torch.device("cuda", 0)


@dataclass
class Measured:
    """A run beside its plan.

    Attributes:
        planned: bytes, as a test fills them in.
        allocated, reserved: bytes at the peak, of tensors and of the segments that hold them, without the
            bytes from before.
        launches: kernels that were launched or captured.
        seconds: of the host.
    """

    planned: float = 0.0
    allocated: int = 0
    reserved: int = 0
    launches: int = 0
    seconds: float = 0.0
    _launches_before: int = 0
    _begun: float = 0.0

    def restart(self) -> None:
        """Begin anew: peaks, launches and seconds count from here; cached memory is given back."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._launches_before = num_launches()
        self._begun = time.perf_counter()

    def __str__(self) -> str:
        sizes = {"allocated": self.allocated, "reserved": self.reserved}
        shares = [f"{name} {size / GB:.2f} ({size / self.planned - 1:+.1%})" for name, size in sizes.items()]
        return (
            f"planned {self.planned / GB:.2f} GB, {', '.join(shares)}, {self.launches} launches, "
            f"{self.seconds:.0f} s"
        )

    def check(self, record_property: Callable[[str, object], None]) -> None:
        """Print and record the figures, and compare the plan with both numbers of bytes."""
        print(f"\n{self}")
        for name, value in asdict(self).items():
            if not name.startswith("_"):
                record_property(name, value)
        assert abs(self.allocated - self.planned) <= TOLERANCE * self.planned, str(self)
        assert abs(self.reserved - self.planned) <= TOLERANCE * self.planned, str(self)


def num_launches() -> int:
    """Kernels that this process has launched or captured."""
    found = counts()
    return found["runtime_launches"] + found["driver_launches"] + found["library_launches"]


@contextmanager
def measured() -> Iterator[Measured]:
    """Measure what is done within, beside the memory that is held before; ``planned`` is to be filled in."""
    found = Measured()
    found.restart()
    allocated = torch.cuda.memory_allocated()
    reserved = torch.cuda.memory_reserved()
    yield found
    found.seconds = time.perf_counter() - found._begun
    found.launches = num_launches() - found._launches_before
    found.allocated = torch.cuda.max_memory_allocated() - allocated
    found.reserved = torch.cuda.max_memory_reserved() - reserved


def eagle3_head(config: TargetConfig, *, latent: bool = False) -> Eagle3Head:
    """An EAGLE-3 head of 32,000 tokens in bf16, of memory that nobody writes."""
    with torch.device("meta"):
        head = Eagle3Head(Eagle3Config.for_target(config, 32000, latent=latent))
    head = head.to(torch.bfloat16).to_empty(device=DEVICE).eval().requires_grad_(False)

    # Buffers hold numbers that are computed, not read from a checkpoint.
    with DEVICE:
        head.make_buffers()
    return head.to(DEVICE)
