"""The GPU engine with true values: its texts are those of the CPU's engine of the same weights."""

import copy

import pytest
from tiny import tiny_head, tiny_target

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.serve.llm import LLM
from tests.cuda_device.device import phase
from tests.cuda_device.values import launches

PROMPTS = [[5, 6, 7], [1] * 40, [9, 8], [1] * 40]
REQUESTS = (
    {},
    {"temperature": 0.8, "top_p": 0.9, "seed": 2},
    {"repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 1.0, "seed": 1},
)
"""Greedy, sampled, with a penalty and log-probabilities; two of them share a prefix."""


@pytest.mark.parametrize("shape", ["3,1,4", "3,2,6"], ids=["chain", "tree"])
def test_texts_are_those_of_the_engine_on_the_cpu(shape):
    """Through captures and replays of real graphs, at lag 1."""
    target = tiny_target(
        256,
        4,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_position_embeddings=256,
    )
    head = tiny_head(target, 128)
    params = [SamplingParams(max_tokens=20, ignore_eos=True, **kind) for kind in REQUESTS]
    texts = {}
    before = launches.num_launches.total()
    with phase() as found:
        for device in ("cpu", "cuda"):
            models = [copy.deepcopy(each).to(device) for each in (target, head)]
            llm = LLM(
                *models, shape=shape, max_batch_size=2, max_context=160, batch_sizes=(1, 2), kv_tokens=1024
            )
            texts[device] = [out.token_ids for out in llm.generate(PROMPTS, params, shape=shape)]
            llm.engine().check()
    assert texts["cuda"] == texts["cpu"]
    assert all(len(text) == 20 for text in texts["cpu"])
    assert found.counts["graph_launches"] > 0 and launches.num_launches.total() > before
    assert found.counts["uncomputed_launches"] == 0
