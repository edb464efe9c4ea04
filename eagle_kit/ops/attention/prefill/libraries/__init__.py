"""Prompt attention of other libraries over our pages, which they read in place.

A library is looked for by the name of its option and imported when it is asked for; none is required.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.ops.attention.prefill.libraries.flash_attn import FlashAttention2, FlashAttention3
from eagle_kit.ops.attention.prefill.libraries.flashinfer import FlashInfer
from eagle_kit.ops.attention.prefill.libraries.library import PrefillLibrary, PromptAttention, StoreFacts

__all__ = [
    "LIBRARIES",
    "LibraryName",
    "PrefillLibrary",
    "PromptAttention",
    "StoreFacts",
    "is_installed",
    "open_library",
]

LibraryName = Literal["flash-attn", "flashinfer"]
LIBRARIES: dict[LibraryName, tuple[str, ...]] = {
    "flash-attn": ("flash_attn_interface", "flash_attn"),
    "flashinfer": ("flashinfer",),
}
"""Modules of a library, the preferred one first."""
REMEDIES: dict[LibraryName, str] = {
    "flash-attn": "Install flash-attn 2.6 or later, or flash_attn_interface of FlashAttention-3",
    "flashinfer": "Install flashinfer-python 0.2 or later",
}
LAST_OF_FLASH_ATTENTION_3 = 9
"""Major compute capability of the last GPUs that FlashAttention-3 is made for."""


def is_installed(name: LibraryName) -> bool:
    """Return whether one of a library's modules can be found."""
    return any(map(_is_found, LIBRARIES[name]))


def open_library(name: LibraryName, device: torch.device, capability: int) -> PrefillLibrary:
    """Import a library for a GPU of the major compute capability ``capability``.

    ``flash-attn`` is FlashAttention-3 where its module is installed and made for the GPU, and
    FlashAttention-2 otherwise.

    Raises:
        UserError: it is not installed, cannot be imported, or is too old.
    """
    remedy = f"{REMEDIES[name]}, or leave the prefill backend at auto."
    if name == "flashinfer":
        module = _imported(name, "flashinfer", remedy)
        wrapper = getattr(module, "BatchPrefillWithPagedKVCacheWrapper", None)
        if wrapper is None or not hasattr(wrapper, "plan") or not hasattr(wrapper, "run"):
            raise UserError("This flashinfer has no plan and run of paged prompts.", remedy)
        return FlashInfer(wrapper, device)
    if _is_found("flash_attn_interface") and capability <= LAST_OF_FLASH_ATTENTION_3:
        module = _imported(name, "flash_attn_interface", remedy)
        return FlashAttention3(_call(module, "flash_attn_with_kvcache", {"page_table", "softcap"}, remedy))
    module = _imported(name, "flash_attn", remedy)
    return FlashAttention2(_call(module, "flash_attn_varlen_func", {"block_table", "softcap"}, remedy))


def _call(module: ModuleType, name: str, parameters: set[str], remedy: str) -> Callable[..., Any]:
    """The function of a module. Raise UserError where it is older than ``parameters``."""
    found: Callable[..., Any] | None = getattr(module, name, None)
    if found is None or not parameters <= inspect.signature(found).parameters.keys():
        raise UserError(f"This {module.__name__} cannot read pages with soft caps.", remedy)
    return found


def _is_found(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _imported(name: LibraryName, module: str, remedy: str) -> ModuleType:
    if not _is_found(module):
        raise UserError(f"The prefill backend {name} needs {module}, which is not installed.", remedy)
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # made for another torch or CUDA
        raise UserError(f"{module} is installed, but cannot be imported: {error}.", remedy) from error
