"""The memory plan of an engine at full size beside the bytes that torch's allocator takes.

Engines of one GPU and of one rank of eight are loaded, planned, warmed up, and serve requests.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from eagle_kit.core.gpus import RUNTIME_BYTES
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.memory.engine_memory import MemoryPlan
from eagle_kit.engine.request import Request
from eagle_kit.models.loading.known_targets import target_architecture
from tests.cuda_device.device import memory_of, phase
from tests.cuda_device.engines import made_up_results
from tests.cuda_device.full_size import GB, eagle3_head, measured
from tests.cuda_device.published import publish, unread_weights
from tests.cuda_device.ranks import first_of
from tests.cuda_device.test_warm_up import USUAL, serve

pytestmark = pytest.mark.usefixtures("memory_of_its_own")
ROOM_TO_LOAD = 400 * GB
"""Memory of the device while a model is loaded: fp8 weights that loaders join on the host are on it here."""


class Case(NamedTuple):
    """A target and a draft on a kind of GPU.

    Attributes:
        draft: ``eagle3`` or ``eagle3-mla``.
        num_ranks: GPUs that share the target.
        memory: bytes of each.
        options: of the engine.
    """

    target: str
    draft: str
    num_ranks: int
    memory: int
    options: dict[str, Any]


LLAMA_8B = Case(
    "meta-llama/Llama-3.1-8B-Instruct", "eagle3", 1, 80 * GB, {"shape": "5,4,8", "max_batch_size": 8}
)
LLAMA_8B_SERVER = LLAMA_8B._replace(options={"shape": "5,4,8", "gpu_memory_utilization": 0.9})
LLAMA_70B = Case(
    "meta-llama/Llama-3.3-70B-Instruct", "eagle3", 8, 141 * GB, {"shape": "5,4,8", "batch_sizes": (1,)}
)
DEEPSEEK_V3 = Case(
    "deepseek-ai/DeepSeek-V3", "eagle3-mla", 8, 141 * GB, {"shape": "5,4,8", "batch_sizes": (1,)}
)


def fixed_bytes(plan: MemoryPlan) -> int:
    """All that is planned but the estimate for graphs' nodes, which this device has not."""
    return plan.weights + plan.pool + plan.scratch + plan.states + plan.logits + plan.activations


@contextmanager
def loaded(case: Case, folder: Any) -> Iterator[LLM]:
    """The model of a case, on a device that has room for its loading."""
    publish(case.target, folder)
    config, _ = target_architecture(case.target)
    options = {**case.options, "tensor_parallel": case.num_ranks}
    with ExitStack() as stack:
        if case.num_ranks > 1:
            stack.enter_context(first_of(case.num_ranks))
        stack.enter_context(unread_weights())
        with memory_of(ROOM_TO_LOAD):
            # The draft has a copy of the head, so nothing here may hold the original.
            latent = case.draft == "eagle3-mla"
            llm = LLM(folder, eagle3_head(config, latent=latent), tokenizer=object(), **options)
        stack.enter_context(memory_of(case.memory))
        stack.callback(llm.close)
        yield llm


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(LLAMA_8B, id="Llama-3.1-8B"),
        pytest.param(LLAMA_70B, id="Llama-3.3-70B, a rank of eight"),
        pytest.param(DEEPSEEK_V3, id="DeepSeek-V3, a rank of eight"),
    ],
)
def test_an_engine_takes_what_is_planned(case, tmp_path, record_property):
    """Traffic behind the warm-up captures and reserves nothing more."""
    with measured() as found, loaded(case, tmp_path / "target") as llm, made_up_results():
        found.restart()
        held = torch.cuda.memory_allocated()
        llm.engine()
        assert llm.memory_plan is not None
        found.planned = fixed_bytes(llm.memory_plan)
        assert abs(held - llm.memory_plan.weights) <= 0.01 * held, "what is loaded are the weights"

        prepared = llm.warm_up("usual")
        assert prepared.num_graphs > 0
        llm.tokenizer = None  # requests are token ids, and responses too
        reserved = torch.cuda.memory_reserved()
        with phase() as traffic:
            assert serve(llm, USUAL) > 100
        assert traffic.counts["captures"] == 0
        assert traffic.counts["modules_loaded"] == 0
        assert torch.cuda.memory_reserved() == reserved
        print(f"\n{llm.memory_plan}\n{prepared}")
    found.check(record_property)


@pytest.mark.nightly
def test_a_server_takes_the_share_of_the_device_that_it_may(tmp_path):
    """256 requests at the model's own context decode in what is left of nine tenths of the memory."""
    with loaded(LLAMA_8B_SERVER, tmp_path / "target") as llm, made_up_results():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        engine = llm.engine()
        config = llm.config
        plan = llm.memory_plan
        assert plan is not None
        assert (config.max_batch_size, config.max_context) == (256, 131072)
        assert config.kv_tokens is not None and config.kv_tokens >= 256 * 1024
        assert 0.85 * 80 * GB <= fixed_bytes(plan) + plan.graphs.bytes + RUNTIME_BYTES <= 0.9 * 80 * GB

        # A whole batch, whose graph is captured when it is first needed.
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        for number in range(256):
            engine.add_request(Request(number, [5] * 20, params))
        for _ in range(4):
            engine.step()
        assert engine.num_running == 256
        reserved = torch.cuda.max_memory_reserved()
        print(f"\n{plan}\nreserved {reserved / GB:.2f} GB at the peak")
        assert 0.8 * 80 * GB <= reserved <= 0.9 * 80 * GB - RUNTIME_BYTES
        for request in list(engine.scheduler.running):
            engine.abort(request)
        engine.drain()
