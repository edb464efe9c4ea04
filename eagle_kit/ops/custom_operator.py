"""Custom operators whose plain calls do without torch's dispatcher: :func:`custom_operator`.

A call of ``torch.library.custom_op`` takes the host some 60 microseconds, and three times as many if
the operator changes an argument. Launches of Triton kernels in prompts are bound by that.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import update_wrapper
from typing import Any, Generic, TypeVar

import torch
from torch import nn

Result = TypeVar("Result")

_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
_VALUES = (int, float, bool, str, type(None), torch.dtype)


class CustomOperator(Generic[Result]):
    """A function that is a custom operator of torch too; made by :func:`custom_operator`.

    A call goes through the operator where torch's dispatcher may have to see or replace it:

    * within a dispatch or function mode (fake tensors, recordings, counters, captures);
    * within a transform such as ``vmap``, and in code that ``torch.compile`` or ``torch.export`` trace;
    * for tensors of a subclass, of another device than a GPU, or that need a gradient.

    Any other call is a plain call of the function.

    Attributes:
        overload: the operator in torch's dispatcher.
    """

    def __init__(self, name: str, function: Callable[..., Result], mutates_args: Sequence[str]) -> None:
        self._definition = torch.library.custom_op(name, function, mutates_args=mutates_args)
        namespace, _, base = name.partition("::")
        self.overload: Any = getattr(getattr(torch.ops, namespace), base).default
        self._function = function
        parameters = list(inspect.signature(function).parameters)
        self._mutated = tuple(parameters.index(each) for each in mutates_args)
        update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        """Call the function, or the operator. Arguments are positional; with a keyword it is the operator."""
        if torch.compiler.is_compiling() or kwargs or not _is_plain_call(args):
            result: Result = self.overload(*args, **kwargs)
            return result
        result = self._function(*args, **kwargs)

        # Autograd finds changes of tensors that it has saved by their version, as the operator sets it.
        for index in self._mutated:
            changed = args[index]
            if changed is not None:
                torch.autograd.graph.increment_version(changed)
        return result

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: set the function that makes outputs of the right shapes for fake tensors."""
        self._definition.register_fake(function)
        return function

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., Any]) -> None:
        """Set the backward pass; arguments of ``torch.library.register_autograd``."""
        self._definition.register_autograd(backward, setup_context=setup_context)


def custom_operator(
    name: str, *, mutates_args: Sequence[str] = ()
) -> Callable[[Callable[..., Result]], CustomOperator[Result]]:
    """Decorator: make a custom operator of a function of plain tensors, numbers and lists of tensors.

    Args:
        name: of the operator, such as ``"eagle_kit::rms_norm"``.
        mutates_args: names of the arguments that the function changes in place. It returns none of its
            arguments.
    """
    return lambda function: CustomOperator(name, function, mutates_args)


def _is_plain_call(args: Iterable[Any]) -> bool:
    """Return True if torch's dispatcher would only call the function."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    return _are_plain(args, torch.is_grad_enabled())


def _are_plain(args: Iterable[Any], needs_gradients: bool) -> bool:
    """Return True if all tensors are plain ones on a GPU, and none is differentiated."""
    for arg in args:
        kind = type(arg)
        if kind in _VALUES:
            continue
        if kind in _PLAIN_TENSORS:
            if not arg.is_cuda or (needs_gradients and arg.requires_grad):
                return False
        elif kind not in (list, tuple) or not _are_plain(arg, needs_gradients):
            return False
    return True
