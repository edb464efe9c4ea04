"""Triton kernels run under its interpreter where there is no GPU, and on the GPU where there is one."""

import pytest
import torch


@pytest.fixture(scope="session")
def triton_device() -> str:
    """Where Triton kernels run: `cuda`, or `cpu` under the repaired interpreter."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return "cuda"
    from eagle_kit.kernels.interpreter import repair

    repair()
    return "cpu"
