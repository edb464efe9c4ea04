"""Fixtures of kernel tests, which run on a GPU or under Triton's interpreter."""

import pytest
import torch


@pytest.fixture(scope="session")
def triton_device() -> str:
    """Device of Triton kernels: `cuda`, or `cpu` under the repaired interpreter."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return "cuda"
    from eagle_kit.kernels.interpreter import repair

    repair()
    return "cpu"
