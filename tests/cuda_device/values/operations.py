"""Values of ATen's operations on the device, by torch's own kernels for the CPU over the same bytes.

Every operation with a kernel under the dispatch key CUDA is replaced there. So all above it is as on a GPU:
autograd, autocast, modes, captures, the caching allocator. The replacement first calls the kernel for CUDA
with the runtime covered. That allocates the outputs, checks the arguments and counts the launches. Then it
enqueues the computation.
"""

import functools
from typing import Any

import torch

from tests.cuda_device.values.work import BelowAutograd, Covered, HostViews, enqueue, start, state

DYNAMIC = frozenset(
    {
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "bincount",
        "repeat_interleave.Tensor",
        "equal",
        "histc",
    }
)
"""Operations whose shape or answer depends on values. They wait for the device, so they are computed at once.
In a capture torch's kernel is called, which fails as on hardware."""
WITHOUT_VALUES = frozenset(
    {
        "_local_scalar_dense",
        "_fused_sdp_choice",
        "record_stream",
        "resize_",
        "set_",
        "empty",
        "empty_strided",
        "is_pinned",
        "_pin_memory",
        "_has_same_storage_numel",
        "_resize_output_",
        "is_set_to",
    }
)
"""Operations that compute nothing, and the copy of a number to the host, which the runtime makes."""
OF_ALL_DEVICES = ("aten::copy_",)
"""Operations that launch kernels of CUDA and are registered for all devices at once."""
ATTENTION_LIBRARIES = ("flash", "mem_efficient", "cudnn")
"""Fused attention has no kernel for the CPU: products are taken in its place."""

_replay_numbers = torch.Generator().manual_seed(0)
_libraries: list[torch.library.Library] = []


def install() -> list[str]:
    """Replace the kernels of CUDA.

    Returns:
        Names of operations without a kernel for the CPU, whose launches stay uncomputed.
    """
    torch.empty(1, device="cuda")
    library = torch.library.Library("aten", "IMPL")
    missing = []
    for listed in (*torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"), *OF_ALL_DEVICES):
        if not listed.startswith("aten::"):
            continue
        name = listed.removeprefix("aten::")
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if packet in WITHOUT_VALUES or _is_view(operation):
            continue
        if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(listed, "CPU"):
            missing.append(name)
            continue
        kernel = torch.library.get_kernel(operation, "CUDA")
        replaced = _Dynamic if name in DYNAMIC else _Replaced
        library.impl(name, replaced(name, operation, kernel), "CUDA", with_keyset=True)
    _libraries.append(library)
    start()
    for name in ATTENTION_LIBRARIES:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(False)
    return missing


def _is_view(operation: Any) -> bool:
    aliases = [returned.alias_info for returned in operation._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


class _Operation:
    """An operation of ATen and torch's kernel of it for CUDA."""

    def __init__(self, name: str, operation: Any, kernel: Any) -> None:
        self.name = name
        self.operation = operation
        self.kernel = kernel
        arguments = operation._schema.arguments
        self.tensor_arguments = [i for i, each in enumerate(arguments) if str(each.type) == "Tensor"]

    def call_kernel(self, keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call torch's kernel for CUDA."""
        return self.kernel.call_boxed(keys, *self.with_tensors(args), **kwargs)

    def with_tensors(self, args: tuple[Any, ...]) -> list[Any]:
        """Tensors without dimensions for numbers that were such tensors in C++ and are numbers in Python."""
        found = [args[i] for i in self.tensor_arguments if i < len(args)]
        tensors = [value for value in found if isinstance(value, torch.Tensor)]

        def tensor(place: int, value: Any) -> Any:
            if place not in self.tensor_arguments or not isinstance(value, (bool, int, float, complex)):
                return value
            return torch.tensor(value, dtype=torch.result_type(tensors[0], value), device="cpu")

        return [tensor(place, value) for place, value in enumerate(args)]


class _Replaced(_Operation):
    """An operation whose outputs have shapes that the arguments decide."""

    def __init__(self, name: str, operation: Any, kernel: Any) -> None:
        super().__init__(name, operation, kernel)
        schema = operation._schema
        self.is_random = torch.Tag.nondeterministic_seeded in operation.tags
        self.takes_generator = any(argument.name == "generator" for argument in schema.arguments)
        self.takes_numbers = torch._C._should_allow_numbers_as_tensors(schema.name)
        self.new_outputs = [i for i, returned in enumerate(schema.returns) if returned.alias_info is None]
        self.returns_list = len(schema.returns) == 1

    def __call__(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        if state.is_inside:
            return self.call_kernel(keys, args, kwargs)
        is_capturing = torch.cuda.is_current_stream_capturing()
        seed = self.seed_of(args, kwargs, is_capturing) if self.is_random else None

        # torch's kernel allocates the outputs; what it would compute is computed below.
        with Covered():
            out = self.call_kernel(keys, args, kwargs)

        with BelowAutograd():
            views = HostViews(is_capturing, is_copy=self.operation._schema.name == "aten::copy_")
            given = args if self.takes_numbers else self.with_tensors(args)
            here = [views.of(value) for value in given]
            named = {name: views.of(value) for name, value in kwargs.items()}
            outputs = {i: views.of(value) for i, value in self.outputs(out).items()}
        run = functools.partial(self.compute, here, named, outputs, seed)
        enqueue(self.name, run, views.storages)
        return out

    def outputs(self, out: Any) -> dict[int, torch.Tensor]:
        """The tensors that the operation made, by their places."""
        listed = out if isinstance(out, (list, tuple)) else [out]
        made = range(len(listed)) if self.new_outputs and self.returns_list else self.new_outputs
        return {i: listed[i] for i in made if isinstance(listed[i], torch.Tensor)}

    def seed_of(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_capturing: bool) -> int:
        """Seed of what is drawn, from the generator's seed and offset; 0 in a graph, where replays differ."""
        if is_capturing:
            return 0
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
        default = torch.cuda.default_generators[torch.cuda.current_device()]
        generator = given[0] if given else default
        return (generator.initial_seed() * 1_000_003 + generator.get_offset()) % 2**63 or 1

    def compute(
        self, args: list[Any], kwargs: dict[str, Any], outputs: dict[int, torch.Tensor], seed: int | None
    ) -> None:
        """Compute on the CPU and write what is new into ``outputs``."""
        if seed is None:
            got = self.operation(*args, **kwargs)
        else:
            got = self.draw(args, kwargs, seed)
        listed = got if isinstance(got, (list, tuple)) else [got]
        for i, output in outputs.items():
            here = (listed[i].shape, listed[i].dtype)
            there = (output.shape, output.dtype)
            if here != there:
                raise AssertionError(f"{self.operation}: {here} on the CPU, {there} on the device")
            output.copy_(listed[i])

    def draw(self, args: list[Any], kwargs: dict[str, Any], seed: int) -> Any:
        """Compute with random numbers of a seed, or with new ones for a replay.

        The default generator of the host is left as it was.
        """
        generator = torch.Generator().manual_seed(seed) if seed else _replay_numbers
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        if self.takes_generator:
            kwargs = {**kwargs, "generator": generator}
        try:
            return self.operation(*args, **kwargs)
        finally:
            torch.default_generator.set_state(before)


class _Dynamic(_Operation):
    """An operation whose shape or answer depends on values."""

    def __call__(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        if state.is_inside or torch.cuda.is_current_stream_capturing():
            return self.call_kernel(keys, args, kwargs)
        torch.cuda.current_stream().synchronize()
        device = next(value.device for value in args if isinstance(value, torch.Tensor) and value.is_cuda)
        with BelowAutograd():
            views = HostViews(is_capturing=False)
            here = [views.of(value) for value in args]
            named = {name: views.of(value) for name, value in kwargs.items()}
            got = self.compute(here, named)
        return _sent(got, device)

    def compute(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Compute on the CPU, which makes no histogram of integers."""
        first = args[0]
        if self.name != "histc" or first.is_floating_point():
            return self.operation(*args, **kwargs)
        return self.operation(first.double(), *args[1:], **kwargs).to(first.dtype)


def _sent(value: Any, device: torch.device) -> Any:
    """What was computed on the host, on the device."""
    if isinstance(value, tuple):
        return tuple(_sent(part, device) for part in value)
    if not isinstance(value, torch.Tensor):
        return value
    there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    with BelowAutograd():
        views = HostViews(is_capturing=False)
        copy = functools.partial(views.of(there).copy_, value)
    enqueue("a result", copy, views.storages)
    return there
