"""What this machine reaches at best: copied bytes, multiplied matrices, launches. Measured, not quoted."""

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from eagle_kit.kernels.timing import Timer


@dataclass(frozen=True)
class Ceilings:
    """Attributes:
    copy_bytes_per_s: of a large copy, bytes read and bytes written.
    flops_per_s: of a large matrix product of random data.
    launch_s: device time of a graph of one tiny kernel: what no timing here can be below.
    host_launch_s: host time of launching one tiny torch operation.
    """

    copy_bytes_per_s: float
    flops_per_s: float
    launch_s: float
    host_launch_s: float

    def __str__(self) -> str:
        return (
            f"copy {self.copy_bytes_per_s / 1e9:,.0f} GB/s, matmul {self.flops_per_s / 1e12:,.2f} TFLOP/s, "
            f"a launch {1e6 * self.launch_s:.1f} us on the device, {1e6 * self.host_launch_s:.1f} us on the "
            "host"
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@torch.inference_mode()
def measure_ceilings(timer: Timer, dtype: torch.dtype, *, tiny: bool) -> Ceilings:
    """Measure all of them on the timer's device: 1 GiB copied, 8,192^3 multiplied; ``tiny`` 16 MiB and
    256^3."""
    device = timer.device
    copy = _copy_rate(timer, (1 << 22) if tiny else (1 << 28))
    size = 256 if tiny else 8192
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    c = torch.empty_like(a)
    product = timer.time(lambda: torch.mm(a, b, out=c))
    one = torch.zeros(1, device=device)
    launch = timer.time(lambda: one.add_(1))
    count = 1000
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        one.add_(1)
    host = (time.perf_counter() - start) / count
    return Ceilings(copy, 2 * size**3 / product.median, launch.median, host)


def _copy_rate(timer: Timer, count: int) -> float:
    """Bytes a second of a copy of ``count`` floats, read and written."""
    source = torch.randn(count, device=timer.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timer.time(lambda: target.copy_(source)).median


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
