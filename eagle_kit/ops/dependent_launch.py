"""Programmatic dependent launch: programs of a kernel start while the launch before it still runs.

On capabilities from 9.0 on (:attr:`~.capability.DeviceFacts.starts_early`), and nowhere else, kernels with a
constant ``PDL`` are launched with :func:`launch_options`. Such a kernel

1. first lets the next launch start (``griddepcontrol.launch_dependents``), which happens when all of its
   programs have: none of them is left without a place on the GPU by programs that wait;
2. may bring weights into the second-level cache (:func:`prefetch`);
3. then waits, in every program, until the launch before is complete and its writes can be read
   (``griddepcontrol.wait``), before it loads, stores or changes anything: not only before it reads what the
   launch before writes, but also before it writes what that may still read.

Since every program waits before it ends, the end of a launch is the end of all launches before it, and a
kernel of another library behind it needs to know nothing. A prefetch reads nothing into a program, and the
second-level cache is where all writes meet, so that weights that are being written are no exception.
The laboratory holds compiled kernels to the third rule (``waits_first`` in ``kernels/kernel_lab/ptx.py``).

Stream capture turns such launches into programmatic edges of a CUDA graph from CUDA 12.3 on. After the CUDA
C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
    """Bring the lines of the second-level cache at ``pointers``, of any shape, which must be valid."""
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
    """Bring LINES lines of matrix rows that begin at ``rows [X]``, from ``column`` of ``size`` on; the last
    element is repeated."""
    OF_LINE: tl.constexpr = LINE // (rows.dtype.element_ty.primitive_bitwidth // 8)
    at = tl.minimum(column + tl.arange(0, LINES) * OF_LINE, size - 1)
    prefetch(rows[:, None] + at[None, :])


def launch_options(device: torch.device) -> dict[str, bool]:
    """Constant ``PDL`` and launch option of a kernel for ``device``: both true on a GPU of 9.0 or later."""
    early = device.type == "cuda" and device_facts(device).starts_early
    return {"PDL": early, "launch_pdl": early}
