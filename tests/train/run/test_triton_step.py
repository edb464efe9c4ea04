"""A training step in the Triton kernels that the trainer calls on a GPU, against the same step in torch."""

from contextlib import nullcontext

import pytest
import torch
from tiny import tiny_head, tiny_target

from eagle_kit.objective.loss import TTTBatch
from eagle_kit.objective.row_plan import make_row_plan
from eagle_kit.objective.target_features import capture_features
from eagle_kit.objective.ttt import ttt_forward_backward
from eagle_kit.ops.backend import use

STEPS, LENGTH = 3, 33
CALLS = {  # a layer of the target, a step of training-time test, its backward, a block of rows
    "packed_attention": 4,
    "ttt_attention": 4 + STEPS,
    "ttt_attention_backward": STEPS,
    "linear_soft_cross_entropy_": 1,
}


@pytest.fixture
def calls(triton_device, monkeypatch):
    """How often each of the trainer's Triton forms has been called; packed attention calls TTT attention."""
    from eagle_kit.ops.attention.packed import triton as packed
    from eagle_kit.ops.attention.ttt import triton as ttt
    from eagle_kit.ops.soft_cross_entropy import triton as loss

    counts = {}

    def count(module, name):
        plain = getattr(module, name)

        def call(*args):
            counts[name] = counts.get(name, 0) + 1
            return plain(*args)

        monkeypatch.setattr(module, name, call)

    count(packed, "packed_attention")
    count(ttt, "ttt_attention")
    count(ttt, "ttt_attention_backward")
    count(loss, "linear_soft_cross_entropy_")
    return counts


class Step:
    """A tiny target and its head on two packed documents, one with two responses."""

    def __init__(self, device):
        self.target = tiny_target().to(device)
        self.head = tiny_head(self.target, 101).to(device)
        doc_start = torch.zeros(LENGTH, dtype=torch.int64)
        doc_start[12:] = 12
        response = torch.full_like(doc_start, -1)
        response[5:12], response[15:20], response[24:] = 0, 1, 2
        self.ids = torch.randint(0, 131, (LENGTH,), generator=torch.Generator().manual_seed(5)).to(device)
        self.plan = make_row_plan(response.to(device), doc_start.to(device), STEPS)
        self.weights = [torch.full((n,), 0.8**k / n, device=device) for k, n in enumerate(self.plan.counts)]

    def capture(self, backend):
        with use(backend) if backend else nullcontext():
            return capture_features(
                self.target,
                self.ids,
                self.plan.doc_start,
                self.head.config.aux_layer_ids,
                self.plan.is_teacher,
            )

    def train(self, backend, features, autocast=False):
        """The result, and the gradient of every parameter."""
        self.head.zero_grad(set_to_none=True)
        with (
            use(backend) if backend else nullcontext(),
            torch.autocast(self.ids.device.type, torch.bfloat16, enabled=autocast),
        ):
            result = ttt_forward_backward(
                self.head,
                TTTBatch(
                    self.ids,
                    self.plan,
                    self.weights,
                    features,
                    self.target.embed_tokens.weight,
                    self.target.head_weight[self.head.token_map],
                ),
            )
        return result, {name: parameter.grad for name, parameter in self.head.named_parameters()}


def distance(ours, theirs):
    """The largest difference of a gradient, over the norm of what it should be."""
    return max(((ours[name] - grad).norm() / grad.norm()).item() for name, grad in theirs.items())


def test_a_step_in_triton_is_the_step_in_torch(triton_device, calls):
    step = Step(triton_device)
    wanted_features = step.capture("reference")
    wanted, wanted_grads = step.train("reference", wanted_features)
    assert calls == {}
    features = step.capture("triton")
    result, grads = step.train("triton", features)
    assert calls == CALLS
    torch.testing.assert_close(
        features.aux_hidden_states, wanted_features.aux_hidden_states, rtol=1e-4, atol=1e-5
    )
    assert torch.equal(features.argmax, wanted_features.argmax)
    assert float(result.loss) == pytest.approx(float(wanted.loss), rel=1e-6)
    torch.testing.assert_close(result.losses, wanted.losses, rtol=1e-5, atol=1e-5)
    for ours, theirs in ((result.matches, wanted.matches), (result.leading, wanted.leading)):
        assert torch.equal(ours, theirs)
    assert distance(grads, wanted_grads) < 2e-5


@pytest.mark.nightly
def test_under_autocast_it_is_as_near_to_fp32_as_torch_is(triton_device, calls):
    step = Step(triton_device)
    features = step.capture("reference")
    exact, exact_grads = step.train("reference", features)
    _, their_grads = step.train("reference", features, autocast=True)
    assert calls == {}
    ours, grads = step.train("triton", features, autocast=True)
    assert calls == {name: n for name, n in (CALLS | {"ttt_attention": STEPS}).items() if name[0] != "p"}
    assert all(grad.dtype == torch.float32 for grad in grads.values())
    assert float(ours.loss) == pytest.approx(float(exact.loss), rel=2e-3) and ours.loss != exact.loss
    assert distance(grads, exact_grads) < 1.5 * distance(their_grads, exact_grads) < 0.1


def test_unasked_a_gpu_runs_the_kernels_and_a_cpu_does_not(triton_device, calls):
    step = Step(triton_device)
    step.train(None, step.capture(None))
    assert calls == (CALLS if triton_device == "cuda" else {})
