"""Budgets of launches: no phase of a cycle launches more; and the counter counts what is launched."""

from functools import cache

import pytest
import torch
from crossed import crossed
from tiny import tiny_hybrid
from tiny_mixtures import MIXTURES, v3
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.engine.launches import (
    PHASES,
    cycle_launches,
    model_launches,
    table,
    whole_cycle_launches,
)
from eagle_kit.core.shape import SpecShape
from eagle_kit.models.config import TargetConfig
from eagle_kit.ops.accept import accept_most_likely
from eagle_kit.ops.backend import use
from eagle_kit.ops.draft_topk import draft_topk
from eagle_kit.ops.norm import add_rms_norm
from kernel_lab.launches import LaunchCounter

pytest.importorskip("triton")

LLAMA = {
    "5,4,16": (1, 56, 325, 5, 22, 1),
    "3,1,4": (1, 28, 293, 5, 21, 1),
    "none": (1, 2, 291, 5, 0, 1),
}
"""Launches of Llama-3.1-8B with an EAGLE-3 head, by phase as in ``PHASES``."""
TOTALS = {"5,4,16": 410, "3,1,4": 349, "none": 300}
SMALL = {
    "mixture": {"5,4,16": (81, 5), "3,1,4": (81, 5), "none": (79, 5)},
    "latent attention, experts": {"5,4,16": (176, 5), "3,1,4": (176, 5), "none": (174, 5)},
    "hybrid": {"5,4,16": (371, 29), "3,1,4": (371, 29), "none": (366, 29)},
}
"""Launches of verification and acceptance of small targets of four layers; other phases are Llama's."""


def small(kind: str) -> TargetConfig:
    if kind == "hybrid":
        return tiny_hybrid().config
    mixture = kind == "mixture"
    config = MIXTURES["qwen3-moe"] if mixture else v3()
    name = "Qwen3MoeForCausalLM" if mixture else "DeepseekV3ForCausalLM"
    return TargetConfig.from_dict({**config.to_dict(), "architectures": [name]})


@cache
def launches(kind: str, shape: SpecShape):
    return cycle_launches(small(kind), 67, shape)


def over(counts, budget) -> list[str]:
    """Phases that launch more than their budget, with what they launch."""
    return [
        f"{phase}: {counts[phase].total()} of {most}: {dict(counts[phase])}"
        for phase, most in zip(PHASES, budget, strict=True)
        if counts[phase].total() > most
    ]


@pytest.mark.parametrize("shape", LLAMA)
def test_a_cycle_of_llama_is_within_its_budget(shape):
    counts = model_launches(SpecShape.parse(shape))
    assert not over(counts, LLAMA[shape])
    assert sum(count.total() for count in counts.values()) <= TOTALS[shape]


@pytest.mark.parametrize("shape", LLAMA)
def test_a_longer_context_launches_no_more(shape):
    """The last programs merge the parts of attention where they do for a context of 8,192."""
    counts = model_launches(SpecShape.parse(shape), context=131072)
    assert not over(counts, LLAMA[shape])


@crossed(("kind", SMALL), ("shape", LLAMA))
def test_cycles_of_other_targets_are_within_their_budgets(shape, kind):
    gather, propose, _, _, extend, scatter = LLAMA[shape]
    verify, accept = SMALL[kind][shape]
    counts = launches(kind, SpecShape.parse(shape))
    assert not over(counts, (gather, propose, verify, accept, extend, scatter))


@pytest.mark.parametrize("shape", LLAMA)
def test_phases_are_the_whole_cycle_that_an_engine_runs(shape):
    counts = launches("mixture", SpecShape.parse(shape))
    whole = whole_cycle_launches(small("mixture"), 67, SpecShape.parse(shape))
    assert sum(count.total() for count in counts.values()) == whole


def test_the_table_names_phases_and_shapes():
    lines = [line.split() for line in table(lambda shape: launches("mixture", shape))]
    assert lines[0] == ["shape", *PHASES, "all"]
    assert [line[0] for line in lines[1:]] == list(LLAMA)
    assert all(sum(map(int, line[1:-1])) == int(line[-1]) for line in lines[1:])


def _operations():
    x, weight = torch.randn(3, 32), torch.randn(70, 32)
    tokens = torch.arange(6).view(2, 3)
    yield lambda: draft_topk(x, weight, 4)
    yield lambda: add_rms_norm(x, x, weight[0], 1e-5)
    yield lambda: accept_most_likely(torch.randn(2, 3, 70), tokens, torch.zeros_like(tokens), 1)


def test_custom_operators_count_as_what_their_bodies_launch(triton_device, monkeypatch):
    """The same operations are run for real, and Triton's launches counted there."""
    from triton.runtime.jit import KernelInterface

    plain, launched = KernelInterface.__getitem__, []

    def noting(kernel, grid):
        launched.append(kernel.fn.__name__.lstrip("_"))
        return plain(kernel, grid)

    for run in _operations():
        launched.clear()
        with monkeypatch.context() as patch, use("triton"):
            patch.setattr(KernelInterface, "__getitem__", noting)
            run()
        with FakeTensorMode(allow_non_fake_inputs=True), use("triton"), LaunchCounter() as counter:
            run()
        counted = [name.split(": ")[1] for name in counter.phases[""].elements() if ": " in name]
        assert launched
        assert sorted(counted) == sorted(launched)


def test_views_and_allocations_are_not_counted_and_fills_copies_and_casts_are():
    with FakeTensorMode(), LaunchCounter() as counter:
        x = torch.empty(4, 6)
        x.view(2, 12)[:, :3].t().expand(3, 2).unsqueeze(0).detach().contiguous  # noqa: B018
        x.new_empty(3), torch.empty_like(x), x.split(2), x.to(torch.float32), x[:0].clone()
        assert counter.total == 0
        x.zero_()
        x.t().contiguous()
        x.to(torch.float16)
        x[:, 1] = x[:, 0]
        torch.cat((x, x))
    assert counter.total == 5
