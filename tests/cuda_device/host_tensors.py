"""A guard for code that runs on the device alone."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HostTensor(AssertionError):
    """An operation with a tensor of the host."""


class OnDeviceOnly(TorchDispatchMode):
    """Refuse operations with a tensor of the host, even one of a single number.

    A capture refuses copies of such tensors, but some operators take a single number of the host as an
    argument of their kernel: a graph then keeps the value that it had in the capture.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, out)):
            if isinstance(each, torch.Tensor) and not each.is_cuda:
                raise HostTensor(f"{func} has a tensor of the host")
        self.num_operations += 1
        return out
