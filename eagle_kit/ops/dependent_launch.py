"""Programmatic dependent launch: programs of a kernel start while the launch before it still runs.

On capabilities from 9.0 on (:attr:`~.capability.DeviceFacts.starts_early`), and nowhere else, kernels with a
constant ``PDL`` are launched with :func:`launch_options`. Such a kernel

1. first lets the next launch start (``griddepcontrol.launch_dependents``). The next launch starts when all
   programs of this one have done so: waiting programs then take the place of none of them;
2. may bring weights into the second-level cache (:func:`prefetch`);
3. then waits, in every program, until the launch before is complete and its writes are visible
   (``griddepcontrol.wait``), before it loads, stores or changes anything: not only before it reads what the
   launch before writes, but also before it writes what that launch may still read.

Since every program waits before it ends, the end of a launch is the end of all launches before it, and
kernels of other libraries behind it need no change. A prefetch loads nothing into a program, and all writes
go through the second-level cache, so weights that are being written may be prefetched too. The laboratory
checks the third rule in compiled kernels (``waits_first`` in ``kernels/kernel_lab/ptx.py``).

Stream capture turns such launches into programmatic edges of a CUDA graph from CUDA 12.3 on. After the CUDA
C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eagle_kit.core.switches import is_disabled
from eagle_kit.ops.capability import device_facts

LINE = tl.constexpr(128)
"""Bytes of a line of the cache."""


@triton.jit
def wait_for_launch(PDL: tl.constexpr):
    """Let the next launch start, and wait for the one before."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(pointers):
    """Bring the lines at ``pointers``, of any shape, into the second-level cache. They must be valid."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_rows(rows, column, size, LINES: tl.constexpr):
    """Bring LINES lines of the matrix rows at ``rows [X]``, from ``column`` on, into the second-level cache.
    Columns behind the last of ``size`` are the last one."""
    PER_LINE: tl.constexpr = LINE // (rows.dtype.element_ty.primitive_bitwidth // 8)
    columns = tl.minimum(column + tl.arange(0, LINES) * PER_LINE, size - 1)
    prefetch(rows[:, None] + columns[None, :])


def launch_options(device: torch.device) -> dict[str, bool]:
    """Constant ``PDL`` and launch option of a kernel for ``device``.

    Both are true on a GPU of 9.0 or later, unless ``EAGLE_KIT_DISABLE`` has ``programmatic-launch``.
    """
    early = device.type == "cuda" and device_facts(device).starts_early
    if early and is_disabled("programmatic-launch"):
        early = False
    return {"PDL": early, "launch_pdl": early}
