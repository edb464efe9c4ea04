"""Traces for a GPU that is not there need torch's CUDA build: `make test-cuda-fake`."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.backends.cuda.is_built():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="torch without CUDA: make test-cuda-fake"))
