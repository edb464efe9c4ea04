"""The memory plan of a full-size engine beside the bytes that torch's allocator takes."""

import pytest
import torch

from eagle_kit.models.blocks.layers import Rope
from eagle_kit.models.heads.eagle3 import Eagle3Config, Eagle3Head
from eagle_kit.models.loading.known_targets import target_architecture
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.serve.llm import LLM
from eagle_kit.serve.warm_up import warm_up
from tests.cuda_device.device import phase
from tests.cuda_device.engines import made_up_results

TOLERANCE = 0.06
DEVICE = torch.device("cuda", 0)


def llama_8b_with_a_head() -> tuple[LlamaModel, Eagle3Head]:
    """Llama-3.1-8B and an EAGLE-3 head of 32,000 tokens in bf16, of memory that nobody touches."""
    config, _ = target_architecture("meta-llama/Llama-3.1-8B-Instruct")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            target = LlamaModel(config)
            head = Eagle3Head(Eagle3Config.for_target(config, 32000))
    finally:
        torch.set_default_dtype(torch.float32)
    target = target.to_empty(device=DEVICE).eval().requires_grad_(False)
    head = head.to_empty(device=DEVICE).eval().requires_grad_(False)

    # Buffers hold numbers that are computed, not read from a checkpoint.
    with DEVICE:
        target.rope = Rope(config.rope_dim, config.rope_theta, config.rope_scaling)
        head.make_buffers()
    return target, head.to(DEVICE)


@pytest.mark.nightly
def test_llama_8b_takes_what_is_planned(record_property):
    """Planned, without the estimate for graphs' nodes, which this device has not: 27.20 GB."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    # The draft has a copy of the head, so nothing here may hold the original.
    llm = LLM(*llama_8b_with_a_head(), shape="5,4,8", max_batch_size=8)
    engine = llm.engine()
    with phase() as found, made_up_results():
        prepared = warm_up(engine, "usual")
    plan = llm.memory_plan
    assert plan is not None

    planned = plan.weights + plan.pool + plan.scratch + plan.logits + plan.activations
    allocated = torch.cuda.max_memory_allocated() - before
    reserved = torch.cuda.max_memory_reserved()
    figures = {"planned": planned, "allocated": allocated, "reserved": reserved, "launches": found.launches}
    for name, value in figures.items():
        record_property(name, value)
    print(f"\n{figures}\n{prepared}")
    assert prepared.num_graphs > 0
    assert abs(allocated - planned) <= TOLERANCE * planned, figures
    assert abs(reserved - planned) <= TOLERANCE * planned, figures
