"""A GPU that is not there: tensors that say they are on it, computed on the CPU, and a count of the places
where the host waits for it.

``with PretendGPU() as gpu`` runs the code of a GPU on real values, whatever build of torch is installed. A
tensor on the device is an :class:`OnDevice` around one of the CPU; to torch's C++ it is on ``meta``, the
one device besides the CPU whose backward pass needs no library. :attr:`PretendGPU.waits` counts by operation
and by the function of eagle_kit that called it:

* host reads (``item``, ``tolist``, ``cpu``), and shapes that depend on values (``nonzero``, boolean
  indexing, ``unique``, ``bincount``, ``repeat_interleave`` without its size);
* copies from pageable memory of the host, which torch ends with a synchronisation, and copies to the host,
  unless they are into pinned memory and asked not to block;
* indexing of the device by a tensor of the host, which is such a copy.

Other operations that return numbers of Python or whose shape depends on values are refused.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from eagle_kit.kernels.capability import facts_of, traced_for

HERE, THERE = torch.device("meta"), torch.device("cuda:0")
aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default: "item",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten._unique2.default: "unique",
    aten.unique_dim.default: "unique",
    aten.unique_consecutive.default: "unique_consecutive",
    aten.bincount.default: "bincount",
    aten.equal.default: "equal",
    aten.histc.default: "histc",
}


WAITING = torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output
"""Tags of operations whose shape or result depends on values."""


def _gives_tensors(func: Any) -> bool:
    return all("Tensor" in str(returned.type) for returned in func._schema.returns)


class OnDevice(torch.Tensor):
    """A tensor on the device; ``held`` is the same, on the CPU."""

    held: torch.Tensor
    is_cuda = True

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> "OnDevice":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=HERE,
        )
        made.held = values.detach()
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return THERE

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise AssertionError("tensors of the device outlive PretendGPU")

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def _is_there(device: Any) -> bool:
    if device is None:
        return False
    return torch.device(device).type in ("cuda", "meta") if not isinstance(device, int) else True


class _Devices(TorchFunctionMode):
    """Names the device ``meta`` before torch looks for a driver."""

    def __init__(self, gpu: "PretendGPU") -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.pin_memory:
            pinned = args[0].clone()
            self.gpu.pinned.append(pinned)  # kept, so that no other tensor has its identity
            return pinned
        if kwargs.get("pin_memory") and not _is_there(kwargs.get("device")):
            made = func(*args, **{**kwargs, "pin_memory": False})
            self.gpu.pinned.append(made)
            return made
        if func is torch.Tensor.tolist and isinstance(args[0], OnDevice):
            self.gpu.wait("tolist")
            return args[0].held.tolist()
        if func in (torch.tensor, torch.as_tensor) and _is_there(kwargs.get("device")):
            return func(*args, **{**kwargs, "device": "cpu"}).to(THERE)
        args, kwargs = tree_map(self._named, (args, kwargs))
        return func(*args, **kwargs)

    @staticmethod
    def _named(x: Any) -> Any:
        return HERE if isinstance(x, torch.device) and x.type == "cuda" else x


class PretendGPU(TorchDispatchMode):
    """Context manager; see the module.

    Attributes:
        waits: number of waits by ``(operation, file:function)``.
        phases: number of waits of each phase by name.
        operations: number of operations on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[tuple[str, str]] = Counter()
        self.phases: dict[str, int] = {}
        self.operations = 0
        self.pinned: list[torch.Tensor] = []
        self._stack = ExitStack()

    def __enter__(self) -> "PretendGPU":
        self._stack.enter_context(patch.object(torch.cuda, "device", lambda device: nullcontext()))
        self._stack.enter_context(patch.object(torch.cuda, "synchronize", lambda device=None: None))
        self._stack.enter_context(traced_for(facts_of(90)))
        super().__enter__()
        self._stack.enter_context(_Devices(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        super().__exit__(*error)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the waits within as those of ``name``, too."""
        before = self.waits.total()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0) + self.waits.total() - before

    def put(self, module: nn.Module) -> nn.Module:
        """Move the parameters and buffers of ``module`` to the device, uncounted, in place."""
        made: dict[int, Any] = {}
        for part in module.modules():
            for name, value in part._parameters.items():
                if value is not None:
                    new = nn.Parameter(OnDevice(value.detach()), value.requires_grad)
                    part._parameters[name] = made.setdefault(id(value), new)
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = OnDevice(buffer)
        return module

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flat = tree_flatten((args, kwargs))[0]
        of_device = [x for x in flat if isinstance(x, OnDevice)]
        asked = kwargs.get("device")
        if not of_device and not _is_there(asked):
            return func(*args, **kwargs)
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        goes_home = asked is not None and not _is_there(asked)
        self.operations += 1
        self._count(func, args, kwargs, flat, of_device, goes_home)
        inner_args, inner_kwargs = tree_map(self._inside, (args, kwargs))
        out = func(*inner_args, **inner_kwargs)
        if goes_home and of_device:
            return out
        return tree_map(lambda x: OnDevice(x) if isinstance(x, torch.Tensor) else x, out)

    @staticmethod
    def _inside(x: Any) -> Any:
        return x.held if isinstance(x, OnDevice) else x

    def _is_pinned(self, x: Any) -> bool:
        return any(x is pinned for pinned in self.pinned)

    def _count(
        self, func: Any, args: Any, kwargs: Any, flat: list[Any], of_device: list[Any], goes_home: bool
    ) -> None:
        hosts = [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, OnDevice)]
        name = func._schema.name.removeprefix("aten::")
        is_copy = name in ("_to_copy", "copy_")
        if func in READS:
            self.wait(READS[func])
        elif goes_home and of_device:
            self.wait("copy to the host")
        elif is_copy and hosts:
            if isinstance(args[0], OnDevice) or not of_device:
                if not any(map(self._is_pinned, hosts)):
                    self.wait("copy from pageable memory")
            elif not (self._is_pinned(args[0]) and (kwargs.get("non_blocking") or args[2:] == (True,))):
                self.wait("copy to the host")
        elif func is aten.repeat_interleave.Tensor:
            if not any(isinstance(x, int) for x in flat):
                self.wait("repeat_interleave")
        elif name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            indices = [x for x in args[1] if x is not None]
            for index in indices:
                is_mask = index.dtype in (torch.bool, torch.uint8)
                if is_mask and (name == "index" or args[2].numel() != 1):
                    self.wait("boolean index")
                elif not isinstance(index, OnDevice):
                    self.wait("index of the host")
        elif any(kind in func.tags for kind in WAITING) or not _gives_tensors(func):
            raise AssertionError(f"{name} may have the host wait: say in READS what it counts as")
        elif of_device and any(x.dim() for x in hosts):
            raise AssertionError(f"{name} mixes tensors of the host and of the device")

    def wait(self, what: str) -> None:
        """Count a wait of the function of eagle_kit that runs."""
        frame = sys._getframe(1)
        while frame is not None and (
            "eagle_kit/" not in frame.f_code.co_filename or frame.f_code.co_filename == __file__
        ):
            frame = frame.f_back  # type: ignore[assignment]
        where = "?"
        if frame is not None:
            file = frame.f_code.co_filename.rpartition("eagle_kit/")[2]
            where = f"{file}:{frame.f_code.co_name}"
        self.waits[what, where] += 1

    def table(self) -> str:
        """The count, a line each."""
        lines = [f"{count:5}  {what:26} {where}" for (what, where), count in self.waits.most_common()]
        return "\n".join([*lines, f"{self.waits.total():5}  in all"])
