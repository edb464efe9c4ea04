"""The engine on a GPU: graphs say what eager cycles say, speculation what plain decoding says, and a replay
neither waits for the device nor takes memory. Nothing here runs without a CUDA device."""

import pytest
import torch
from tiny import tiny_head, tiny_target

from eagle_kit.core.request import SamplingParams
from eagle_kit.serve.llm import LLM

pytestmark = pytest.mark.gpu
PROMPTS = [[5, 6, 7], [9, 10, 11, 12, 13], [20], [3, 4, 3, 4, 3, 4]]
SIZES = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "intermediate_size": 512}


def make(dtype=torch.float32, **options) -> LLM:
    target = tiny_target(512, std=0.05, max_position_embeddings=4096, **SIZES).to("cuda", dtype)
    head = tiny_head(target, 256, std=0.05).to("cuda", dtype)
    return LLM(target, head, **{"max_batch_size": 4, "max_context": 2200, **options})


def replies(llm, shape, max_tokens=64, **law):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **law)
    return [answer.token_ids for answer in llm.generate(PROMPTS, params, shape=shape)]


@pytest.mark.parametrize("law", [{}, {"temperature": 1.0, "seed": 1, "top_k": 40}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("shape", ["none", "4,1,5", "5,4,16"])
@pytest.mark.parametrize("mode", ["cycle", "phases"])
def test_graphs_say_what_eager_cycles_say(mode, shape, law):
    expected = replies(make(graph_mode="off"), shape, **law)
    llm = make(graph_mode=mode)
    assert replies(llm, shape, **law) == expected
    assert llm.engine().runner.graphs.num_graphs > 0


@pytest.mark.parametrize("shape", ["4,1,5", "5,4,16"])
def test_greedy_text_is_plain_text_over_2000_tokens_in_fp32(shape):
    llm = make()
    assert replies(llm, shape, max_tokens=2000) == replies(llm, "none", max_tokens=2000)


@pytest.mark.parametrize("shape", ["4,1,5", "5,4,16"])
def test_in_bf16_the_first_difference_is_a_near_tie(shape):
    llm = make(torch.bfloat16)
    plain, drafted = replies(llm, "none", max_tokens=500), replies(llm, shape, max_tokens=500)
    for prompt, one, other in zip(PROMPTS, plain, drafted, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        if at is not None:
            logits = llm.logits(prompt + one[:at])[-1].float()
            gap = float(logits.max() - logits[other[at]])
            assert gap < 0.05 * float(logits.abs().max()), f"token {at}: a gap of {gap}"


def test_a_replay_neither_waits_nor_allocates():
    llm = make(torch.bfloat16, shape="5,4,16")
    engine = llm.engine()
    engine.runner.warm_up()
    requests = [llm.make_request(p, SamplingParams(max_tokens=200, ignore_eos=True)) for p in PROMPTS]
    for request in requests:
        engine.add_request(request)
    for _ in range(8):
        engine.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = engine.runner.decode(engine.scheduler.running, 300)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    results.copy.wait()
    made = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert made <= 2, "the rows of the batch, and nothing in the replay"


def test_the_memory_plan_is_what_is_taken():
    before = torch.cuda.memory_allocated()
    llm = make(torch.bfloat16, shape="5,4,16", kv_tokens=65536)
    llm.engine()
    plan = llm.memory_plan
    taken = torch.cuda.memory_allocated() - before
    assert taken == pytest.approx(plan.weights + plan.pool + plan.scratch, rel=0.1)


@pytest.mark.parametrize("shape", ["4,1,5", "5,4,16"])
def test_the_triton_kernels_say_what_the_reference_says(shape):
    from eagle_kit.kernels.backend import use

    with use("reference"):
        expected = replies(make(graph_mode="off"), shape)
    assert replies(make(graph_mode="off"), shape) == expected
