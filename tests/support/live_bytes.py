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
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if not torch.is_tensor(tensor):
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
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
