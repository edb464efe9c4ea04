"""Checks of every operation against the same computation written out in fp64: one list for
`eagle-kit doctor --gpu`, `python kernels check` and the tests of a GPU.

Shapes are small and hostile: three requests, six heads over two, sizes that no tile divides.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from eagle_kit.doctor.operations import attention_checks, decoding_checks, layer_checks, loss_checks

FP32 = torch.float32
BF16 = torch.bfloat16
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest error by the dtype of the inputs, relative to the largest value: sums of a few hundred terms of
order one, and results and probabilities that are rounded once each."""
ROUNDS_TO_FP8 = 7e-2
"""Largest error of results that are rounded to e4m3: half of a step of 2**-3, and the dtype's."""
EXACT = 2e-5
"""Largest error where sums are fp32 for inputs of any dtype, or where nothing is rounded."""


class Case(NamedTuple):
    """A check of one operation.

    Attributes:
        operation: its folder in ``eagle_kit/ops``.
        form: what is checked of it; unique within an operation.
        error: function of the dtype of the inputs that makes tensors on torch's default device, calls the
            operation with its default backend, and returns the largest relative error.
        dtypes: dtypes that it is checked in.
        tolerance: largest error in place of that of the dtype.
    """

    operation: str
    form: str
    error: Callable[[torch.dtype], float]
    dtypes: tuple[torch.dtype, ...] = (FP32, BF16)
    tolerance: float | None = None

    def tolerance_of(self, dtype: torch.dtype) -> float:
        """Largest error that is a rounding error."""
        return TOLERANCES[dtype] if self.tolerance is None else self.tolerance


class CaseRun(NamedTuple):
    """A case in one dtype."""

    case: Case
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """``"norm, add, bfloat16"``."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.case.operation}, {self.case.form}, {dtype}"

    @property
    def tolerance(self) -> float:
        """Largest error that is a rounding error."""
        return self.case.tolerance_of(self.dtype)

    def error(self, device: torch.device) -> float:
        """Run the case on ``device``; return its error."""
        with torch.device(device):
            return self.case.error(self.dtype)


CASES = (
    # Attention.
    Case("attention/window", "tree", attention_checks.window),
    Case("attention/window", "tree, window, cap, sinks", attention_checks.limited_window),
    Case("attention/window", "tree, fp8 store", attention_checks.fp8_window, (BF16,)),
    Case("attention/window", "draft of 66 nodes", attention_checks.draft_step),
    Case("attention/window", "draft of 66 nodes, window, cap, sinks", attention_checks.limited_draft_step),
    Case("attention/mla", "chain", attention_checks.latents),
    Case("attention/mla", "chain, fp8 store", attention_checks.fp8_latents, (BF16,)),
    Case("attention/mla", "draft of 66 nodes", attention_checks.draft_step_over_latents),
    Case("attention/prefill", "dense", attention_checks.prompt),
    Case("attention/prefill", "dense, window, cap, sinks", attention_checks.limited_prompt),
    Case("attention/prefill", "paged", attention_checks.paged_prompts),
    Case("attention/prefill", "paged, fp8 store", attention_checks.fp8_paged_prompts, (BF16,)),
    Case("attention/packed", "two texts", attention_checks.packed_texts),
    Case("attention/packed", "window, cap, sinks", attention_checks.limited_packed_texts),
    Case("attention/packed", "gradients", attention_checks.packed_gradients),
    Case("attention/ttt", "values and gradients", attention_checks.training_time_test),
    # Layers.
    Case("norm", "add", layer_checks.norms),
    Case("norm", "gradients", layer_checks.norm_gradients),
    Case("rope", "window rows", layer_checks.rotated_windows),
    Case("rope", "window rows, fp8 store", layer_checks.fp8_rotated_windows, (BF16,), ROUNDS_TO_FP8),
    Case("rope", "gradients", layer_checks.rotation_gradients),
    Case("swiglu", "values", layer_checks.swiglu_values),
    Case("swiglu", "gradients", layer_checks.swiglu_gradients),
    Case("linear", "library", layer_checks.linears),
    Case("linear", "fp8, 300 rows", layer_checks.fp8_linears, (BF16,), ROUNDS_TO_FP8),
    Case("small_linear", "plain and SwiGLU", layer_checks.small_linears, (BF16,), EXACT),
    Case("small_linear", "fp8", layer_checks.fp8_small_linears, (BF16,)),
    Case("experts", "odd sizes", layer_checks.routed_experts),
    Case("experts", "sizes of groups", layer_checks.grouped_experts),
    Case("experts", "fp8", layer_checks.fp8_routed_experts, (BF16,)),
    Case("recurrence", "delta rule over trees", layer_checks.delta_rule),
    Case("recurrence", "decayed sums over trees", layer_checks.decayed_sums),
    Case("recurrence", "delta rule over texts", layer_checks.recurrence_of_texts),
    # A decode cycle.
    Case("draft_inputs", "normed and joined", decoding_checks.inputs_of_head),
    Case("draft_topk", "of states", decoding_checks.most_likely_drafts),
    Case("tree_build", "two steps", decoding_checks.tree, (FP32,)),
    Case("tree_build", "33 depths of two nodes", decoding_checks.deep_beam, (FP32,)),
    Case("best_first", "two depths", decoding_checks.best_first_tree, (FP32,)),
    Case("accept", "greedy", decoding_checks.greedy_acceptance, tolerance=EXACT),
    Case("accept", "sampled chain", decoding_checks.sampled_acceptance, (FP32,)),
    Case("accept", "outcome", decoding_checks.outcome_of_path, tolerance=EXACT),
    Case("sampling", "distribution", decoding_checks.distribution),
    Case("sampling", "samples", decoding_checks.samples, (FP32,)),
    Case("sampling", "uniform numbers", decoding_checks.uniform_numbers, (FP32,)),
    Case("commit", "paths", decoding_checks.commits, tolerance=EXACT),
    Case("rows", "gathered, written, appended", decoding_checks.slot_rows, tolerance=EXACT),
    # Losses.
    Case("soft_cross_entropy", "loss and gradients", loss_checks.soft_cross_entropy),
    Case("draft_loss", "acceptance rate", loss_checks.acceptance_loss, (FP32,)),
)
"""Checks of all operations."""


def case_runs() -> Iterator[CaseRun]:
    """Every case in each of its dtypes."""
    for case in CASES:
        for dtype in case.dtypes:
            yield CaseRun(case, dtype)
