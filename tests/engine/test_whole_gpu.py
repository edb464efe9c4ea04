"""An engine that takes a whole GPU: batch, context and pool by its memory, on the meta device."""

from dataclasses import replace

import pytest
import torch
from tiny import tiny_target

from eagle_kit.config.engine import SERVER_UTILIZATION, EngineConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.gpus import GPUS, RUNTIME_BYTES, Gpu
from eagle_kit.drafts.base.draft_model import HeadDraftModel
from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.memory.engine_memory import (
    TOKENS_OF_REQUEST,
    Place,
    plan_memory,
    usable_bytes,
)
from eagle_kit.engine.memory.rank_memory import Planner, RankPlan

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
SERVER = EngineConfig(gpu_memory_utilization=SERVER_UTILIZATION, shape="5,4,8")


def plan_of(name: str = LLAMA, size: int = 1, **options) -> RankPlan:
    """The plan of a target with an EAGLE-3 head of 32,000 tokens; neither has weights."""
    plan = Planner(name, None, SERVER.replace(**options)).plan(size)
    with torch.device("meta"):
        head = Eagle3Head(Eagle3Config.for_target(plan.target.config, 32000)).to(torch.bfloat16)
    return replace(plan, draft=HeadDraftModel(head, plan.target))


def bytes_on(plan: RankPlan, gpu: Gpu) -> float:
    """Bytes of all that the plan knows, on a GPU."""
    memory = plan.on(gpu)
    used = memory.weights + memory.pool + memory.scratch + memory.logits + memory.activations
    return RUNTIME_BYTES + used + memory.states + memory.graphs.bytes


def test_a_server_takes_most_of_a_gpu():
    gpu = GPUS["h100-80g"]
    plan = plan_of()
    sizes = plan.sizes_on(gpu)
    assert (sizes.max_batch_size, sizes.max_context) == (256, 131072), "vLLM's, and the model's"
    assert sizes.batch_sizes[-1] == 256
    assert 0.85 * gpu.memory < bytes_on(plan, gpu) <= 0.9 * gpu.memory
    assert plan.on(gpu).kv_tokens == sizes.kv_tokens > 256 * TOKENS_OF_REQUEST
    assert plan.tokens(gpu) == sizes.kv_tokens


@pytest.mark.parametrize("kind", ["rtx4090", "a100-40g", "l40s", "h200"])
def test_batch_and_context_are_what_the_pool_holds(kind):
    gpu = GPUS[kind]
    sizes = plan_of().sizes_on(gpu)
    assert 8 <= sizes.max_batch_size <= 256
    assert sizes.kv_tokens >= sizes.max_batch_size * TOKENS_OF_REQUEST
    assert sizes.max_context <= min(131072, sizes.kv_tokens)
    assert bytes_on(plan_of(), gpu) <= 0.9 * gpu.memory
    if kind == "rtx4090":
        assert sizes.max_batch_size < 64 and 8192 < sizes.max_context < 40_000
    if kind == "h200":
        assert (sizes.max_batch_size, sizes.max_context) == (256, 131072)


def test_what_the_user_gives_rules():
    gpu = GPUS["h100-80g"]
    given = {"kv_tokens": 50_000, "max_batch_size": 300, "max_context": 4096}
    for name, value in given.items():
        assert getattr(plan_of(**{name: value}).sizes_on(gpu), name) == value
    small = plan_of(kv_tokens=20_000).sizes_on(gpu)
    assert (small.max_batch_size, small.kv_tokens) == (16, 20_000)
    assert 19_000 < small.max_context < 20_000
    assert plan_of(kv_memory="2G").on(gpu).pool <= 2e9
    half = plan_of(gpu_memory_utilization=0.5)
    assert 0.45 * gpu.memory < bytes_on(half, gpu) <= 0.5 * gpu.memory
    without_cache = plan_of(prefix_cache=False, max_batch_size=4, max_context=4096).on(gpu)
    assert without_cache.kv_tokens < 4 * 4300, "no request could use more"


def test_a_share_that_is_too_small_for_the_weights_is_named():
    plan = plan_of(gpu_memory_utilization=0.2)
    gpu = GPUS["h100-80g"]
    assert plan.sizes_on(gpu) is None and plan.tokens(gpu) == 0
    free = plan.free(gpu)
    place = Place(torch.device("cuda", 0), free, int(gpu.memory), int(gpu.memory) - free)
    with pytest.raises(UserError, match="may take 0.00 GB") as error:
        plan_memory(plan.target, plan.draft, plan.config, place=place)
    assert "raise gpu_memory_utilization" in error.value.remedy


def test_memory_of_other_programs_is_left_to_them():
    config = plan_of().config
    gpu = torch.device("cuda", 0)
    alone = Place(gpu, free=60, total=80, taken=20)
    assert usable_bytes(alone, config) == 52, "0.9 of 80, less what the process has"
    beside = Place(gpu, free=20, total=80, taken=20)
    assert usable_bytes(beside, config) == 18, "0.9 of what others leave"
    # Two servers with half of a GPU each.
    half = config.replace(gpu_memory_utilization=0.45)
    assert usable_bytes(Place(gpu, free=24, total=80, taken=20), half) == int(0.45 * 24)


def test_latents_of_a_long_context_do_not_take_the_batch():
    """Prompts expand latents: the context is shorter where it would leave no room for a batch."""
    plan = plan_of("deepseek-ai/DeepSeek-V3", size=8)
    assert plan.sizes_on(GPUS["h200"]).max_context == 163840
    for memory in (118e9, 110e9, 106e9, 103e9):
        sizes = plan.sizes_on(Gpu(memory, 1e15, 1e15, 1e12, 1e11))
        assert sizes.max_batch_size >= 8 and 8192 < sizes.max_context < 163840


def test_engines_that_do_not_take_a_gpu_have_the_defaults_of_a_cpu():
    for on_gpu in (False, True):
        config = EngineConfig().resolve(on_gpu=on_gpu, max_positions=131072)
        assert (config.max_batch_size, config.max_context, config.kv_tokens) == (8, 8192, None)
    server = SERVER.resolve(on_gpu=True, max_positions=131072)
    assert (server.max_batch_size, server.max_context) == (256, 131072)


def test_a_share_of_a_gpu_is_refused_on_a_cpu():
    with pytest.raises(UserError, match="gpu_memory_utilization is 0.9, and the engine runs on a CPU"):
        LLM(tiny_target(), gpu_memory_utilization=0.9, device="cpu")
    with pytest.raises(UserError, match="gpu_memory_utilization"):
        EngineConfig(gpu_memory_utilization=1.5)
