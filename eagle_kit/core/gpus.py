"""Kinds of GPU, from their makers' data sheets; nothing here was measured."""

from dataclasses import dataclass

from eagle_kit.core.errors import UserError

RUNTIME_BYTES = 1.5e9
"""CUDA context, kernels, libraries' workspaces."""


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        memory: bytes; the advertised gigabytes, of 10^9.
        bf16: dense FLOP/s in bfloat16 with sums in fp32.
        fp32: FLOP/s in fp32 without tensor cores.
        bandwidth: of its memory, bytes/s.
        link: to the other GPUs of its machine, bytes/s in one direction.
    """

    memory: float
    bf16: float
    fp32: float
    bandwidth: float
    link: float

    def flops(self, precision: str) -> float:
        """FLOP/s of matmuls in a run's ``training.precision``."""
        by_precision = {"bfloat16": self.bf16, "tf32": self.bf16 / 2, "float32": self.fp32}
        return by_precision[precision]


PLANNED_GPU = "h100-80g"
"""Kind of GPU of a plan that names none."""
GPUS = {
    "rtx4090": Gpu(24e9, 165e12, 82.6e12, 1.008e12, 32e9),
    "l40s": Gpu(48e9, 362e12, 91.6e12, 0.864e12, 32e9),
    "a100-40g": Gpu(40e9, 312e12, 19.5e12, 1.555e12, 300e9),
    "a100-80g": Gpu(80e9, 312e12, 19.5e12, 2.039e12, 300e9),
    "h100-80g": Gpu(80e9, 989e12, 67e12, 3.35e12, 450e9),
    "h200": Gpu(141e9, 989e12, 67e12, 4.8e12, 450e9),
    "b200": Gpu(180e9, 2250e12, 75e12, 7.7e12, 900e9),
}
"""SXM forms where there are several. Links: NVLink, or PCIe 4.0 x16."""


def find_gpu(name: str) -> Gpu:
    """A kind by name. Raises UserError for one that is not in the table."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise UserError(f"The GPU {name!r} is not in the table.", f"Use one of {', '.join(GPUS)}.")
    return gpu
