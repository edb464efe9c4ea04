"""A GPU to trace for where there is none: fake CUDA tensors, and guards that refuse what waits for the host.

A guard sees every operation before the fake tensors do. ``Copies`` is for code of the host around cycles: it
may make tensors of the host, and copies them at named places only. ``Device`` is for cycles: no tensor of the
host at all. Numbers enter a kernel as arguments. 0-dim tensors of the host are refused as well: some
operators take them as numbers, a graph then keeps their value, and others copy them to the device and wait.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eagle_kit.kernels.capability import device_facts, facts_of, traced_for

CUDA = torch.device("cuda", 0)
GPUS = {"8.0": facts_of(80)._replace(multiprocessors=108), "9.0": facts_of(90)}
COPIES = frozenset({"eagle_kit.kernels.transfer.to_device", "eagle_kit.serve.graph._to_pinned"})
"""Functions that are made for copies: through pinned memory, which the host does not wait for."""
NUM_CHOSEN = 5
"""Elements that a mask is said to have chosen where a place may ask for them."""

aten = torch.ops.aten
READS = {aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten.nonzero, aten.masked_select}
READS |= {aten.bincount, aten._unique, aten._unique2, aten.unique_dim, aten.unique_consecutive}
READS |= {aten.repeat_interleave, aten.histc, aten.argwhere, aten.allclose, aten.nonzero_static}
"""Operations whose shape or result the host reads, whatever their arguments."""


class Refused(AssertionError):
    """A copy, a read or a tensor of the host where there must be none; it names operation and place."""


class Copies(TorchDispatchMode):
    """Refuse reads on the host, mixed devices, and copies between devices but at ``places``, which are names
    of functions of the library; reads of numbers and masks are answered at ``reads``."""

    def __init__(self, places: frozenset[str] = COPIES, reads: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.places, self.reads = places, reads
        self.num_operations = 0
        self.used: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.num_operations += 1
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
        if func is aten._pin_memory.default:
            self._allow(func, self.places)
            return args[0].clone()
        if on_gpu and (answer := self._read(func, args, kwargs)) is not None:
            return answer
        if func is aten._local_scalar_dense.default and not on_gpu:
            return self._of_host(func, args)
        out = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self._look(func, tensors, made)
        return out

    def _of_host(self, func, args):
        """Read a number of the host, which nothing waits for: 1 where a fake tensor does not know it."""
        try:
            return func(*args)
        except DataDependentOutputException:
            return 1.0 if args[0].is_floating_point() else 1

    def _look(self, func, tensors, made) -> None:
        kinds = {tensor.device.type for tensor in (*tensors, *made)}
        if len(kinds) < 2:
            return
        if func in (aten._to_copy.default, aten.copy_.default):
            self._allow(func, self.places)
            return
        if func is aten.fill_.Tensor:
            return  # torch reads the value of a number on the host
        if tensors and len({tensor.device.type for tensor in tensors}) > 1:
            raise Refused(f"{func} mixes devices at {innermost(library_frames())}")

    def _read(self, func, args, kwargs):
        """Refuse operations that the host waits for -> the answer where they are allowed, else None."""
        packet = func.overloadpacket
        if packet is aten.repeat_interleave and kwargs.get("output_size") is not None:
            return None
        masks = ()
        if packet in (aten.index, aten.index_put, aten.index_put_, aten._unsafe_index):
            given = [index for index in args[1] if index is not None]
            masks = [index for index in given if index.dtype in (torch.bool, torch.uint8)]
        if packet is aten._grouped_mm and device_facts(CUDA).capability // 10 not in (9, 10):
            self._allow(func, self.reads)
        if packet not in READS and not masks:
            return None
        if masks and packet is not aten.index and args[2].numel() == 1 and not args[2].ndim:
            return None  # torch fills by the mask
        self._allow(func, self.reads)
        if packet is aten._local_scalar_dense:
            return 1.0 if args[0].is_floating_point() else 1
        if packet is aten.index:
            return args[0].new_empty(NUM_CHOSEN, *args[0].shape[masks[0].ndim :])
        if packet is aten.nonzero:
            return args[0].new_empty(NUM_CHOSEN, args[0].ndim, dtype=torch.int64)
        if packet is aten._unique2:
            chosen = args[0].new_empty(NUM_CHOSEN)
            return chosen, torch.empty_like(args[0], dtype=torch.int64), chosen.to(torch.int64)
        return None

    def _allow(self, func, places: frozenset[str]) -> None:
        frames = library_frames()
        allowed = places & frames.keys()
        if not allowed:
            raise Refused(f"{func} waits or copies at {innermost(frames)}")
        self.used |= allowed


class Device(Copies):
    """Refuse every tensor of the host besides."""

    def __init__(self) -> None:
        super().__init__(frozenset())

    def _look(self, func, tensors, made) -> None:
        for tensor in (*tensors, *made):
            if not tensor.is_cuda:
                raise Refused(f"{func} has a tensor of the host at {innermost(library_frames())}")


def library_frames() -> dict[str, int]:
    """Functions of the library on the stack and their lines, the innermost first; of one that calls itself
    the innermost line."""
    frames: dict[str, int] = {}
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("eagle_kit."):
            frames.setdefault(f"{module}.{frame.f_code.co_qualname}", frame.f_lineno)
        frame = frame.f_back
    return frames


def innermost(frames: dict[str, int]) -> str:
    """The innermost of these functions, and its line."""
    return next((f"{name}:{line}" for name, line in frames.items()), "no function of the library")


@contextmanager
def fake_gpu(capability: str = "9.0") -> Iterator[FakeTensorMode]:
    """Context manager: tensors made within are fake, those on ``cuda`` of a GPU of this capability."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, traced_for(GPUS[capability]):
        yield mode


def to_gpu(module: torch.nn.Module, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """Move the parameters and buffers of a module made outside, as :meth:`torch.nn.Module.to` would."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = moved.setdefault(tensor, _moved(tensor, dtype))
    return module


def _moved(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device=CUDA)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
