"""Values of Triton's launches on the device, eagerly and in graphs."""

import pytest
import torch

from eagle_kit.ops.draft_topk import draft_topk
from eagle_kit.ops.norm import add_rms_norm
from kernel_lab.selfcheck import triton_runs
from tests.cuda_device.device import phase
from tests.cuda_device.values import launches

WITHOUT_A_LAUNCH = {"dense", "dense, window, cap, sinks"}
"""Forms of the checks that call torch's attention: prompts that are not in a pool."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_of_a_graph_compute_with_the_inputs_of_each_replay(dtype):
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x = drawn(5, 96)
    residual = drawn(5, 96)
    weight = drawn(96)
    head = drawn(50, 96)
    there = [each.cuda() for each in (x, residual, weight, head)]

    def body() -> tuple[torch.Tensor, ...]:
        normed, total = add_rms_norm(there[0], there[1], there[2], 1e-5)
        ids, _ = draft_topk(normed, there[3], 1)
        return normed, total, ids

    with torch.inference_mode():
        body()  # compiled before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = body()
        for _ in range(2):
            x = drawn(5, 96)
            there[0].copy_(x)
            with phase() as found:
                graph.replay()
            assert found.counts["uncomputed_launches"] == 0
            normed, total = add_rms_norm(x, residual, weight, 1e-5, backend="reference")
            ids, _ = draft_topk(normed, head, 1, backend="reference")
            for ours, expected in zip(outs, (normed, total, ids), strict=True):
                assert torch.allclose(ours.cpu().float(), expected.float(), rtol=1e-2, atol=1e-5)


def test_a_kernel_refuses_a_tensor_of_the_host():
    from eagle_kit.ops.norm.triton import rms_norm

    x = torch.randn(3, 8, device="cuda")
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        rms_norm(x, torch.ones(8), 1e-5)


RUNS = list(triton_runs(in_one_dtype=False))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name.replace(" ", "-"))
def test_the_check_of_every_kernel(run):
    before = launches.num_launches.total()
    with phase() as found:
        error = run.error(torch.device("cuda"))
    assert error <= run.tolerance
    has_launched = launches.num_launches.total() > before
    assert has_launched == (run.case.form not in WITHOUT_A_LAUNCH)
    assert found.counts["uncomputed_launches"] == 0
