"""Ceilings of this machine, measured: copied bytes, multiplied matrices, launches."""

from dataclasses import dataclass

import torch

from eagle_kit.kernels.timing import Timer


@dataclass(frozen=True)
class Ceilings:
    """Attributes:
    copy_bytes_per_s: of a large copy, bytes read and bytes written.
    flops_per_s: of a large matrix product of random data.
    launch_s: device time of a graph of one tiny kernel: what no timing here can be below.
    """

    copy_bytes_per_s: float
    flops_per_s: float
    launch_s: float

    def __str__(self) -> str:
        copy, product = self.copy_bytes_per_s / 1e9, self.flops_per_s / 1e12
        return f"copy {copy:,.0f} GB/s, matmul {product:,.2f} TFLOP/s, a launch {1e6 * self.launch_s:.1f} us"


@torch.inference_mode()
def measure_ceilings(timer: Timer, dtype: torch.dtype, *, tiny: bool) -> Ceilings:
    """Measure all of them on the timer's device: 1 GiB copied, 8,192^3 multiplied; ``tiny`` 16 MiB and
    256^3."""
    source = torch.randn((1 << 22) if tiny else (1 << 28), device=timer.device)
    copied = torch.empty_like(source)
    copy = timer.time(lambda: copied.copy_(source))
    size = 256 if tiny else 8192
    a, b = (torch.randn(size, size, device=timer.device, dtype=dtype) for _ in range(2))
    c = torch.empty_like(a)
    product = timer.time(lambda: torch.mm(a, b, out=c))
    one = torch.zeros(1, device=timer.device)
    launch = timer.time(lambda: one.add_(1))
    return Ceilings(2 * source.nbytes / copy.median, 2 * size**3 / product.median, launch.median)


def device_state(device: torch.device) -> dict[str, str]:
    """Clocks, temperature and power of a GPU as they are now; empty where its tool is not there."""
    if device.type != "cuda":
        return {}
    import subprocess

    fields = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "-i", "0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (part.strip() for part in done.stdout.split(",")), strict=False))
