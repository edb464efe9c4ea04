"""What replaces a part that a switch disables works on the device, in captures and prompts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from disabled import disabled
from tiny import tiny_head, tiny_hybrid, tiny_p_eagle, tiny_target
from tiny_cycle import BATCH, cycle_engine, cycle_settings, sampling_batch
from tiny_mixtures import MIXTURES, untrained

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.switches import OPERATIONS, of_operation
from eagle_kit.drafts.base.draft_model import HeadDraftModel
from eagle_kit.engine.graphs.cuda_graph import Graph
from eagle_kit.engine.runner import CycleInputs
from eagle_kit.ops.linear.backends import LinearBackend, use_backends
from tests.cuda_device.device import phase
from tests.cuda_device.engines import made_up_results, small_llm
from tests.cuda_device.host_tensors import OnDeviceOnly
from tests.cuda_device.kernel_calls import called_kernels
from tests.cuda_device.targets import LATENTS

CUDA = torch.device("cuda", 0)


class Cycle(NamedTuple):
    """A cycle that launches the kernels of an operation."""

    make_target: Callable[[], Any]
    shape: str = "5,4,16"
    sampling: str = "greedy"
    make_head: Callable[..., Any] = tiny_head
    dtype: torch.dtype = torch.bfloat16
    linear: LinearBackend = "torch"


CYCLES = {
    "accept": Cycle(tiny_target),
    "attention/mla": Cycle(lambda: untrained(LATENTS["v3"])),
    "attention/window": Cycle(tiny_target),
    "best_first": Cycle(tiny_target, "4,3,14", make_head=tiny_p_eagle),
    "commit": Cycle(tiny_target),
    "draft_inputs": Cycle(tiny_target),
    "draft_topk": Cycle(tiny_target),
    # In bf16 torch's grouped matmul runs on capability 9.0, whatever the switch.
    "experts": Cycle(lambda: untrained(MIXTURES["mixtral"]), dtype=torch.float16),
    "norm": Cycle(tiny_target),
    "recurrence": Cycle(tiny_hybrid),
    "rope": Cycle(tiny_target),
    "rows": Cycle(tiny_target),
    "sampling": Cycle(tiny_target, sampling="sampled"),
    "small_linear": Cycle(tiny_target, linear="triton"),
    "swiglu": Cycle(tiny_target),
    "tree_build": Cycle(tiny_target),
}
TRAINING = {"attention/packed", "attention/ttt", "soft_cross_entropy"}
"""Operations of training alone, which are tested in mode "values"."""
PROMPTS = ("attention/prefill",)


def test_every_operation_is_disabled_in_a_test():
    assert {*CYCLES, *TRAINING, *PROMPTS} == {*OPERATIONS}


def capture(cycle: Cycle) -> None:
    """Capture a cycle and replay it; the host must read no tensor."""
    target = cycle.make_target().to(CUDA, cycle.dtype)
    head = cycle.make_head(target).to(CUDA, cycle.dtype)
    engine = cycle_engine(target, HeadDraftModel(head, target), cycle.shape)
    runner = engine.runner
    settings = cycle_settings(engine, cycle.shape)
    sampling = sampling_batch(cycle.sampling, target.config.vocab_size, CUDA)
    inputs = CycleInputs(torch.arange(BATCH, device=CUDA), sampling)

    def body(inputs: CycleInputs) -> Any:
        with OnDeviceOnly():
            return runner.run_cycle(inputs, settings)

    with torch.inference_mode(), use_backends(lambda size: cycle.linear), phase() as found:
        Graph(body, inputs).replay()
    assert found.counts["captures"] == 1 and found.counts["replayed_nodes"] > 50


@pytest.mark.smoke
@pytest.mark.parametrize("operation", CYCLES)
def test_a_cycle_with_the_reference_of_an_operation_is_captured(operation):
    with called_kernels() as called:
        capture(CYCLES[operation])
    assert operation in called
    with disabled(of_operation(operation)), called_kernels() as called:
        capture(CYCLES[operation])
    assert operation not in called and called


def test_experts_in_bf16_read_no_routing_on_the_host():
    """On capability 8.0 torch's grouped matmul would, within a capture."""
    with disabled("triton:experts"):
        capture(CYCLES["experts"]._replace(dtype=torch.bfloat16))


@pytest.mark.parametrize("name", CYCLES)
def test_a_cycle_without_triton_is_captured(name):
    with disabled("triton"), called_kernels() as called, phase() as found:
        capture(CYCLES[name])
    assert not called and found.counts["driver_launches"] == 0


@pytest.mark.parametrize("operation", PROMPTS)
def test_prompts_with_the_reference_of_an_operation(operation):
    texts = []
    for parts in ((), (of_operation(operation),)):
        with disabled(*parts), called_kernels() as called, made_up_results():
            responses = small_llm("3,1,4").generate([[1, 2, 3], [4] * 40], SamplingParams(max_tokens=4))
        assert (operation in called) == (not parts)
        texts.append([response.token_ids for response in responses])
    assert all(len(text) == 4 for text in texts[1])


def test_without_graphs_nothing_is_captured():
    with disabled("graphs"), phase() as found, made_up_results():
        llm = small_llm("3,1,4")
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8))
        assert llm.config.graph_mode == "off"
    assert found.counts["captures"] == 0 and found.counts["graph_launches"] == 0


def test_without_lag_a_step_waits_for_its_own_results():
    with disabled("lag"):
        assert small_llm("3,1,4", lag=None).config.lag == 0
    assert small_llm("3,1,4", lag=None).config.lag == 1


@pytest.mark.parametrize(("part", "options"), [("graphs", {"graph_mode": "cycle"}), ("lag", {"lag": 1})])
def test_an_option_that_asks_for_a_disabled_part_is_refused(part, options):
    with disabled(part), pytest.raises(UserError, match="EAGLE_KIT_DISABLE"):
        small_llm("3,1,4", **options)


@pytest.mark.parametrize("parts", [(), ("programmatic-launch",)], ids=["on", "off"])
def test_programmatic_launches_have_a_switch(parts):
    with disabled(*parts), phase() as found:
        capture(CYCLES["norm"])
    can_start_early = torch.cuda.get_device_capability() >= (9, 0)
    assert (found.counts["programmatic_launches"] > 0) == (can_start_early and not parts)
    assert found.counts["driver_launches"] > 0
