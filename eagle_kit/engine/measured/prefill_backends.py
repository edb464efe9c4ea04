"""Choice of the attention of a target's prompts: ours, a library that was named, or the fastest by
measurements.

A warm-up measures, at the first call of each number of rows and kind of layer, with the arguments of that
call. A choice is kept in a file; sizes that never came up in a warm-up take ours. Drafts always take ours:
the first positions of most of their stores are unused, and they have a layer or two.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eagle_kit.config.engine import PrefillBackend
from eagle_kit.core.errors import UserError
from eagle_kit.core.switches import VARIABLE, is_disabled
from eagle_kit.distributed.collectives import Ranks
from eagle_kit.engine.measured.choice_file import ChoiceFile, device_key
from eagle_kit.engine.measured.choices import MeasuredChoices
from eagle_kit.kv.keys_values import PagedKV
from eagle_kit.kv.store import PagedStore
from eagle_kit.ops.attention import prefill
from eagle_kit.ops.attention.prefill import PrefillPlan, PromptAttention, own_attention
from eagle_kit.ops.attention.prefill.libraries import (
    LIBRARIES,
    LibraryName,
    PrefillLibrary,
    StoreFacts,
    is_installed,
    open_library,
)
from eagle_kit.ops.attention.prefill.libraries.flashinfer import PLAN_BYTES, WORKSPACE_BYTES
from eagle_kit.ops.attention.variant import AttentionVariant
from eagle_kit.ops.backend import Backend, uses_triton
from eagle_kit.ops.capability import device_facts
from eagle_kit.ops.timing import Timer
from eagle_kit.report.environment import package_versions

SOURCES = (Path(prefill.__file__).parent,)
"""Sources of our prompt attention: another kernel has another file of choices."""
PACKAGES = ("flash-attn", "flash-attn-3", "flashinfer-python")
OTHER = "Choose another prefill backend, or leave it at auto."
logger = logging.getLogger(__name__)


class PromptSize(NamedTuple):
    """Rows of all prompts, rounded up to a power of two, and the layer."""

    rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    variant: str

    @classmethod
    def of(cls, q: torch.Tensor, k_rows: torch.Tensor, variant: AttentionVariant) -> "PromptSize":
        """Size of ``q [T, Hq, D]`` over ``k_rows [Hkv, R, D]``."""
        rows, heads, size = q.shape
        return cls(1 << max(0, rows - 1).bit_length(), heads, k_rows.shape[0], size, str(variant))

    def __str__(self) -> str:
        return (
            f"{self.rows} rows, {self.num_heads} heads on {self.num_kv_heads} of {self.head_dim}, "
            f"{self.variant}"
        )


def time_attention(run: Callable[[], Any], device: torch.device) -> float:
    """Measure the seconds of one call between CUDA events. Libraries make their plans before."""
    return Timer(device, budget_s=0.02, least=5).time(run, as_graph=False).median


class PrefillBackends(MeasuredChoices[PromptSize, str]):
    """Table from sizes to backends of prompt attention over one store.

    Args:
        default: name of our backend, which runs sizes that were not measured.
        libraries: libraries that may be chosen, by name.
        forced: name of the library for all layers; None chooses by measurement.
        left_out: sentences on why other libraries cannot be chosen, for people.
        timer: measures the seconds of a call on a device.
        file, ranks: see :class:`MeasuredChoices`.
    """

    def __init__(
        self,
        default: str,
        libraries: Mapping[str, PrefillLibrary],
        *,
        forced: str | None = None,
        left_out: Sequence[str] = (),
        timer: Callable[[Callable[[], Any], torch.device], float] = time_attention,
        file: ChoiceFile | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(file, ranks)
        self.default = default
        self.libraries = libraries
        self.forced = forced
        self.left_out = left_out
        self.timer = timer

    def serve(self, store: PagedStore) -> None:
        """Let the prompts of ``store`` use these backends, if there is one besides ours."""
        if self.libraries:
            assert isinstance(store, PagedKV)
            store.prompt_attention = partial(self._attention, store_facts(store))

    def _attention(self, store: StoreFacts, plan: PrefillPlan) -> PromptAttention:
        planned: dict[str, PromptAttention] = {self.default: own_attention(plan)}

        def attend(
            q: torch.Tensor, k_rows: torch.Tensor, v_rows: torch.Tensor, variant: AttentionVariant
        ) -> torch.Tensor:
            def run(backend: str) -> torch.Tensor:
                if backend not in planned:
                    planned[backend] = self.libraries[backend].attention(plan)
                return planned[backend](q, k_rows, v_rows, variant)

            if self.forced is not None:
                return run(self.forced)
            size = PromptSize.of(q, k_rows, variant)
            if size not in self._choices and self._measures:
                fit = [name for name, it in self.libraries.items() if not it.reason_against(store, variant)]
                timers = {}
                for backend in [self.default, *fit]:
                    timers[backend] = partial(self.timer, partial(run, backend), q.device)
                self._measure(size, f"Prompts of {size}", timers)
            choice = self._choices.get(size)
            return run(self.default if choice is None else choice.backend)

        return attend

    def __str__(self) -> str:
        titles = [f"{name} ({library.title})" for name, library in self.libraries.items()]
        if self.forced is not None:
            return titles[0]
        others = f"; {'; '.join(self.left_out)}" if self.left_out else ""
        if titles:
            return f"{self.default} or {' or '.join(titles)}, as measured in the warm-up{others}"
        return f"{self.default}{others}"

    def report(self) -> list[str]:
        """One line for each size that was measured, for people."""
        return [f"{size}: {choice}" for size, choice in sorted(self._choices.items())]


def open_backends(
    name: PrefillBackend, store: PagedStore, ranks: Ranks | None = None, *, has_equal_parts: bool = True
) -> PrefillBackends:
    """Open the libraries that may attend to the prompts of ``store``: the one that is named, or with ``auto``
    all that are installed and can compute at least one of its layers. On a CPU none.

    Args:
        ranks: processes that choose together; None for one that chooses alone.
        has_equal_parts: False if weights of ranks differ in shape; with ``auto`` prompts are then ours.

    Raises:
        UserError: a backend was named and is not there, is disabled, or cannot compute a layer of the store.
    """
    # A CPU has no choice.
    device = store.device
    if device.type != "cuda":
        if name != "auto":
            raise UserError(
                f"The prefill backend {name} was asked for, and runs on GPUs only.",
                "Leave the prefill backend at auto, which is torch on a CPU.",
            )
        return PrefillBackends("torch", {})

    # Our own kernel, where it was asked for.
    forced: Backend | None = "triton" if name == "triton" else None
    default = "triton" if uses_triton("attention/prefill", store.tensors[0], forced) else "torch"
    if name == "triton":
        if is_disabled("triton:attention/prefill"):
            raise UserError(
                f"The prefill backend triton was asked for, and {VARIABLE} disables it.",
                "Leave one of the two out.",
            )
        return PrefillBackends(default, {})

    # One library, where it was asked for.
    capability = device_facts(device).capability // 10
    if name != "auto":
        library = open_library(name, device, capability)
        if reason := next(iter(reasons_against(library, store)), None):
            raise UserError(f"The target cannot be prefilled by {name}: {library.title} {reason}.", OTHER)
        return PrefillBackends(default, {name: library}, forced=name)

    # All libraries that can compute a layer.
    libraries: dict[LibraryName, PrefillLibrary] = {}
    left_out: list[str] = []
    for each in LIBRARIES:
        if not is_installed(each):
            left_out.append(f"{each} is not installed")
            continue
        try:
            library = open_library(each, device, capability)
        except UserError as error:
            logger.warning("The prefill backend %s is left out. %s", each, error.cause)
            left_out.append(f"{each} cannot be used")
            continue
        reasons = reasons_against(library, store)
        if len(reasons) == num_layers(store):
            left_out.append(f"{library.title} {reasons[0]}")
        else:
            libraries[each] = library
    return _measured_backends(default, libraries, left_out, store, ranks, has_equal_parts)


def _measured_backends(
    default: str,
    libraries: dict[LibraryName, PrefillLibrary],
    left_out: list[str],
    store: PagedStore,
    ranks: Ranks | None,
    has_equal_parts: bool,
) -> PrefillBackends:
    """Backends that are chosen by measurement, with the file of their choices. Ranks that cannot choose
    together have no library."""
    # Libraries that every rank has.
    titles = [library.title for library in libraries.values()]
    if ranks is not None and not (has_equal_parts and all(each == titles for each in ranks.all(titles))):
        left_out = [*left_out, "the ranks have different libraries or parts of different sizes"]
        libraries = {}
    named = {str(name): library for name, library in libraries.items()}
    if not libraries:
        return PrefillBackends(default, named, left_out=left_out, ranks=ranks)

    # The first rank reads and writes the file.
    file = None
    if ranks is None or ranks.is_first:
        assert isinstance(store, PagedKV)
        facts = store_facts(store)._replace(num_values=0)  # whose size does not change the times
        key = {
            **device_key(store.device, SOURCES),
            **package_versions(PACKAGES),
            "libraries": ", ".join(titles),
            "store": str(facts),
        }
        file = ChoiceFile("prefill", key)
    return PrefillBackends(default, named, left_out=left_out, file=file, ranks=ranks)


def num_layers(store: PagedStore) -> int:
    """Number of layers of a store that libraries might read."""
    return len(store.variants) if isinstance(store, PagedKV) else 1


def reasons_against(library: PrefillLibrary, store: PagedStore) -> list[str]:
    """Why a library cannot compute layers of a store, one reason for each such layer."""
    if not isinstance(store, PagedKV):
        return ["reads keys and values, and the target keeps latents"]
    facts = store_facts(store)
    found = (library.reason_against(facts, variant) for variant in store.variants)
    return [reason for reason in found if reason is not None]


def store_facts(store: PagedKV) -> StoreFacts:
    """What decides whether a library can read ``store``."""
    rows, size = store.k.shape[-2:]
    return StoreFacts(size, store.dtype, store.k.dtype, store.page_size, store.first_position, rows * size)


def working_bytes(name: PrefillBackend, device: torch.device, variants: Sequence[AttentionVariant]) -> int:
    """Bytes that libraries will allocate on ``device`` for layers that attend as ``variants`` say."""
    is_possible = name == "flashinfer" or (name == "auto" and is_installed("flashinfer"))
    if device.type != "cuda" or not is_possible:
        return 0
    return WORKSPACE_BYTES + PLAN_BYTES * len({str(variant) for variant in variants})
