"""Ceilings of this machine, measured: copied bytes, multiplied matrices, launches; and the bandwidth of its
data sheet."""

from dataclasses import dataclass, replace

import torch

from eagle_kit.ops.timing import Timer

SHEET_BYTES_PER_S = {
    "NVIDIA A100-SXM4-40GB": 1.555e12,
    "NVIDIA A100-PCIE-40GB": 1.555e12,
    "NVIDIA A100-SXM4-80GB": 2.039e12,
    "NVIDIA A100 80GB PCIe": 1.935e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,  # SXM
    "NVIDIA H100 PCIe": 2.0e12,
    "NVIDIA H100 NVL": 3.9e12,
    "NVIDIA H200": 4.8e12,
    "NVIDIA H200 NVL": 4.8e12,
    "NVIDIA B200": 8.0e12,
    "NVIDIA L4": 0.3e12,
    "NVIDIA L40S": 0.864e12,
}
"""Memory bandwidth by the name that the driver gives a GPU, from NVIDIA's data sheets."""


@dataclass(frozen=True)
class Ceilings:
    """Attributes:
    copy_bytes_per_s: of a large copy, bytes read and bytes written.
    flops_per_s: of a large matrix product of random data.
    launch_s: device time of a graph of one tiny kernel: what no timing here can be below.
    sheet_bytes_per_s: memory bandwidth of the data sheet; None for a device that is not in the table.
    """

    copy_bytes_per_s: float
    flops_per_s: float
    launch_s: float
    sheet_bytes_per_s: float | None = None

    def by_data_sheet(self) -> "Ceilings | None":
        """The same with the bandwidth of the data sheet, which no copy reaches, in place of the measured one;
        None where that is not known."""
        sheet = self.sheet_bytes_per_s
        return None if sheet is None else replace(self, copy_bytes_per_s=sheet)

    def __str__(self) -> str:
        copy, product = self.copy_bytes_per_s / 1e9, self.flops_per_s / 1e12
        sheet = self.sheet_bytes_per_s
        stated = "" if sheet is None else f" (data sheet {sheet / 1e9:,.0f})"
        launch = f"a launch {1e6 * self.launch_s:.1f} us"
        return f"copy {copy:,.0f} GB/s{stated}, matmul {product:,.2f} TFLOP/s, {launch}"


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
    name = torch.cuda.get_device_name(timer.device) if timer.device.type == "cuda" else ""
    rates = 2 * source.nbytes / copy.median, 2 * size**3 / product.median
    return Ceilings(*rates, launch.median, SHEET_BYTES_PER_S.get(name))


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
