"""Which operations call their Triton kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from eagle_kit.ops.attention.packed import triton as packed
from eagle_kit.ops.custom_operator import CustomOperator


@contextmanager
def called_kernels() -> Iterator[set[str]]:
    """The set of operations, by their folders, whose Triton kernels are called within."""
    called: set[str] = set()
    call = CustomOperator.__call__
    attend = packed.packed_attention

    def recorded(self: CustomOperator, *args: Any, **kwargs: Any) -> Any:
        folders = self._function.__module__.removeprefix("eagle_kit.ops.").split(".")[:-1]
        called.add("/".join(folders))
        return call(self, *args, **kwargs)

    def packed_attention(*args: Any) -> Any:
        """It has no kernel of its own, but uses that of training-time test."""
        called.add("attention/packed")
        return attend(*args)

    with (
        mock.patch.object(CustomOperator, "__call__", recorded),
        mock.patch.object(packed, "packed_attention", packed_attention),
    ):
        yield called
