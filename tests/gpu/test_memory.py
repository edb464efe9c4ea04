"""The memory plan is what the engine takes: not less, and not much more."""

import gc

import pytest
import torch

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.graphs.warm_up import warm_up
from tests.gpu.engines import make, random_models
from tests.gpu.place import DEVICE, ON_GPU, memory, pick, synchronize

SLACK = 256 << 20
"""Bytes beside the plan: workspaces of matrix products (32 MiB a stream), activations of 512 prompt tokens,
the allocator's rounding and what graphs keep of their outputs."""


def bytes_of(plan) -> int:
    return plan.weights + plan.pool + plan.scratch + plan.logits


@pytest.mark.parametrize("mode", ["off", "cycle"])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "seed": 1, "top_p": 0.9}], ids=["greedy", "sampled"]
)
def test_the_peak_is_within_the_plan(mode, sampling):
    gc.collect()
    before = memory("allocated_bytes.all.current")
    models = random_models(torch.bfloat16, vocab=pick(128256, 64))
    options = {"max_batch_size": 32, "batch_sizes": (1, 8, 32), "kv_tokens": 400_000, "prefill_tokens": 512}
    llm = make(models, mode, shape="5,4,16", **pick(options, {"kv_tokens": 3000}))
    engine = llm.engine()
    warm_up(engine)
    plan = llm.memory_plan
    synchronize()
    held = memory("allocated_bytes.all.current") - before
    if ON_GPU:  # forms of linear layers are measured while it warms up, which is over now
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    params = SamplingParams(max_tokens=pick(64, 8), ignore_eos=True, **sampling)
    prompts = [[1 + i, *range(2, pick(300, 20))] for i in range(pick(48, 5))]
    assert all(len(answer.token_ids) == params.max_tokens for answer in llm.generate(prompts, params))
    synchronize()
    if ON_GPU:
        peak = memory("allocated_bytes.all.peak") - before
        assert peak <= bytes_of(plan) + SLACK, f"{peak >> 20} MiB at the peak; {plan}"
        fixed = plan.weights + plan.pool + plan.scratch
        assert held >= 0.98 * fixed, f"{held >> 20} MiB are held, less than was planned; {plan}"
        reserved = memory("reserved_bytes.all.peak")
        assert reserved <= before + 1.25 * bytes_of(plan) + 2 * SLACK, (
            f"{reserved >> 20} MiB reserved; {plan}"
        )


def test_nothing_stays_behind():
    """An engine that is gone holds no memory, its graphs and their pool included."""

    def once() -> None:
        llm = make(random_models(torch.bfloat16), "cycle", shape="5,4,16")
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=pick(20, 4), ignore_eos=True))

    once()
    gc.collect()
    after_one = memory("allocated_bytes.all.current")
    for _ in range(pick(3, 1)):
        once()
        gc.collect()
    assert memory("allocated_bytes.all.current") <= after_one + (64 << 20), f"on {DEVICE}"
