"""With a part disabled, the device's texts and training steps are still those of the CPU."""

import pytest
import torch
from disabled import disabled

from eagle_kit.core.switches import of_operation
from tests.cuda_device.kernel_calls import called_kernels
from tests.cuda_device.values.models import Models, compare, serve_all
from tests.cuda_device.values.test_engine import LLAMA, Case, mixed_requests
from tests.cuda_device.values.test_training import MICRO_BATCHES, SMALL, TOLERANCES, Trainer, difference

TREE = Case(LLAMA, "eagle3", "3,2,6")
CASES = [
    pytest.param("triton", TREE, marks=pytest.mark.smoke),
    ("triton:attention/window", TREE),
    ("triton:accept", TREE),
    ("triton:sampling", TREE),
    ("triton:tree_build", TREE),
    ("triton:rope", Case("sliding windows", "eagle3", "4,1,5")),
    ("triton:attention/mla", Case("latents", "eagle3", "5,4,16")),
    ("triton:recurrence", Case("recurrent layers", "eagle3", "3,2,6")),
    ("triton:experts", Case("experts", "eagle1", "3,2,6")),
    ("triton:best_first", Case("state spaces", "dspark", "4,3,14")),
    ("triton:attention/prefill", TREE),
    ("programmatic-launch", TREE),
    ("lag", TREE),
]


@pytest.mark.parametrize(("part", "case"), CASES)
def test_texts_are_those_of_the_cpu_without_a_part(models: Models, part: str, case: Case):
    target, draft, shape, options = case
    expected = serve_all(models.llm("cpu", target, draft, shape=shape, **options), mixed_requests())
    with disabled(part):
        llm = models.llm("cuda", target, draft, shape=shape, **options)
        requests = serve_all(llm, mixed_requests())
    assert compare(models.target(target), expected, requests) <= 1
    assert llm.engine().num_graphs > 0


TRAINING = ("attention/packed", "attention/ttt", "soft_cross_entropy", "norm", "rope", "swiglu")


@pytest.mark.parametrize("operation", TRAINING)
def test_training_steps_are_those_of_the_cpu_without_an_operation(operation: str):
    """The step before has the kernels of the operation, forward and backward."""
    ours = Trainer(torch.device("cuda:0"), "float32", "ce", "off")
    theirs = Trainer(torch.device("cpu"), "float32", "ce", "off")
    with called_kernels() as called:
        ours.step(MICRO_BATCHES[0])
    assert operation in called
    theirs.step(MICRO_BATCHES[0])

    with disabled(of_operation(operation)), called_kernels() as called:
        found = ours.step(MICRO_BATCHES[1])
    expected = theirs.step(MICRO_BATCHES[1])
    assert operation not in called and called
    tolerance = TOLERANCES["float32"]
    assert found.loss == pytest.approx(expected.loss, rel=tolerance.loss, abs=SMALL)
    for name, gradient in expected.gradients.items():
        assert difference(found.gradients[name], gradient) <= 10 * tolerance.gradient, name
