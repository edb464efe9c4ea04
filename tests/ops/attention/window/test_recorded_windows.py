"""Windows of several requests in recordings of cycles: replays for other lengths attend as eager calls do."""

import pytest
import torch

from eagle_kit.engine.graphs import cpu_graph
from eagle_kit.engine.graphs.cuda_graph import Lengths
from eagle_kit.ops.attention.mla import mla_window_attention
from eagle_kit.ops.attention.variant import AttentionVariant, Limits
from eagle_kit.ops.attention.window import WindowPlan, ancestor_bits, window_attention
from tests.ops.attention.test_variant import VARIANTS

pytestmark = pytest.mark.skipif(not cpu_graph.available(), reason="torch without TorchScript's graphs")

PAGE = 8
SCRATCH = 480
NODES = 4
LENGTHS = ((3, 131, 20), (150, 0, 7), (150, 151, 149))


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plan_of(lengths, start=SCRATCH):
    """Windows of a root, its two children and a child of the first, behind prompts of ``lengths``."""
    parents = torch.tensor([[0, 0, 0, 1]] * 3)
    return WindowPlan(
        page_table=torch.arange(60).view(3, 20).flip(1),
        page_size=PAGE,
        prefix_lens=lengths,
        first_position=0,
        scratch_start=start,
        scratch_stride=16,
        num_keys=NODES,
        ancestors=ancestor_bits(parents, 2),
        num_columns=160,
        dummy_row=SCRATCH - 1,
        dtype=torch.bfloat16,
    )


def check_replays(body, *tensors):
    """Record for the first lengths, replay for all of them."""
    with torch.inference_mode():
        given = [(torch.tensor(lengths), *tensors) for lengths in LENGTHS]
        recording = cpu_graph.Recording(body, given[0])
        recording.compile(Lengths(given[0][0], torch.arange(3)))
        for inputs in given:
            for ours, theirs in zip(recording.replay(inputs), body(inputs), strict=True):
                assert theirs.isfinite().all()
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", VARIANTS)
def test_layers_of_all_variants_attend_in_replays_as_in_eager_calls(name):
    variant = VARIANTS[name]
    plain = AttentionVariant(0.3)
    stores = drawn(2, 2, SCRATCH + 48, 16).bfloat16()

    # Two plans, each shared by layers of one variant and another.
    def body(inputs):
        lengths = inputs[0]
        q = inputs[1]
        k, v = inputs[2:]
        first = plan_of(lengths)
        second = plan_of(lengths + 1)
        plans = first, second, first, first
        variants = variant, variant, plain, variant
        return tuple(window_attention(q, k, v, *each) for each in zip(plans, variants, strict=True))

    check_replays(body, drawn(3, NODES, 6, 16, seed=2).bfloat16(), *stores)
    # The plans and variants differ in what they see.
    with torch.inference_mode():
        varied, other, usual, again = body(
            (torch.tensor(LENGTHS[1]), drawn(3, NODES, 6, 16).bfloat16(), *stores)
        )
    assert torch.equal(varied, again)
    assert not torch.equal(varied, other)
    assert not torch.equal(varied, usual)


def test_stores_in_fp8_keep_their_scales():
    rows = drawn(2, 2, SCRATCH + 48, 16).to(torch.float8_e4m3fn)
    latents = drawn(SCRATCH + 48, 24, seed=1).to(torch.float8_e4m3fn)
    limits = AttentionVariant(0.3, Limits(window=9))

    def body(inputs):
        lengths, q, wide, k, v, latents = inputs
        plan = plan_of(lengths)
        usual = window_attention(q, k, v, plan, 0.3, k_scale=0.5, v_scale=3.0)
        limited = window_attention(q, k, v, plan, limits, k_scale=2.0, v_scale=0.25)
        absorbed = mla_window_attention(wide, latents, plan, 0.2, kv_scale=0.5, latent_dim=16)
        return usual, limited, absorbed

    queries = drawn(3, NODES, 6, 16, seed=2).bfloat16(), drawn(3, NODES, 5, 24, seed=3).bfloat16()
    check_replays(body, *queries, *rows, latents)
