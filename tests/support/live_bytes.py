"""Peak of the bytes that tensors made inside a block of code hold, by following every storage's life."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Within, ``now`` is what tensors made so far and still alive hold, ``peak`` its highest value."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        before = {_storage(x)._cdata for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if not torch.is_tensor(tensor) or tensor.is_meta:
                continue
            storage = _storage(tensor)
            key = storage._cdata
            size = tensor.numel() * tensor.element_size() if storage is tensor else storage.nbytes()
            if key in before or key in self._known:
                continue
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key, size)
        return out

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _storage(tensor: torch.Tensor) -> torch.Tensor | torch.UntypedStorage:
    """Storage of a tensor; itself where it is a matrix that oneDNN has packed, whose storage is its own."""
    return tensor if tensor.layout is torch._mkldnn else tensor.untyped_storage()
