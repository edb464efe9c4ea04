"""Targets whose routed experts are in fp8: as DeepSeek-V3's checkpoint has them, with scales of outputs, in
one tensor, and cast when they are loaded."""

import json
import re

import pytest
import torch
from crossed import crossed
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file
from tiny import tiny_head
from tiny_engine import decode, resolved
from tiny_mixtures import MIXTURES, randomised, run, v3

from eagle_kit.core.errors import UserError
from eagle_kit.engine.memory.engine_memory import plan_memory
from eagle_kit.models.blocks.moe import Experts, FP8Experts
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.share import load_share
from eagle_kit.ops.fp8 import E4M3, MAX, quantize_fp8
from eagle_kit.ops.linear import FP8Linear

OF_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 32]}
LAYOUTS = {
    "blocks that end with the parts": (OF_BLOCKS, 32),
    "blocks across the parts": (OF_BLOCKS, 24),
    "outputs": ({"quant_method": "fbgemm_fp8"}, 24),
}


def quantised(weight, block):
    """Values in e4m3 and scales as published, ``weight [..., N, K]`` in blocks or by its outputs, and what
    they stand for."""
    rows, columns = block or (1, weight.shape[-1])
    padded = torch.zeros(
        *weight.shape[:-2], *(-(-n // b) * b for n, b in zip(weight.shape[-2:], (rows, columns), strict=True))
    )
    padded[..., : weight.shape[-2], : weight.shape[-1]] = weight
    blocks = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    scales = blocks.abs().amax((-3, -1)) / MAX
    each = scales.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    each = each[..., : weight.shape[-2], : weight.shape[-1]]
    values = (weight / each).to(E4M3)
    return values, scales, values.float() * each


def save(folder, config, *, inner, fused=False, **changes):
    """Save a DeepSeek-V3 whose layers are in fp8, and beside it the same numbers in fp32."""
    theirs = randomised(v3(moe_intermediate_size=inner, num_hidden_layers=3, **changes))
    for name in ("fp8", "fp32"):
        theirs.save_pretrained(folder / name, save_original_format=not fused)
    small, wide = folder / "fp8", folder / "fp32"
    tensors = load_file(small / "model.safetensors")
    meant, block = dict(tensors), config.get("weight_block_size")
    suffix = "_scale_inv" if block else "_scale"
    for name in list(tensors):
        if "layers" in name and tensors[name].ndim > 1 and "gate.weight" not in name:
            tensors[name], tensors[name + suffix], meant[name] = quantised(tensors[name], block)
    save_file(tensors, small / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, wide / "model.safetensors", metadata={"format": "pt"})
    path = small / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return small, wide


@torch.no_grad()
def logits(target):
    return run(target, torch.arange(40) * 7 % 271).hidden @ target.head_weight.t()


@crossed(
    ("fused", [pytest.param(False, id="one by one"), pytest.param(True, id="in one tensor")]),
    ("layout", LAYOUTS),
)
def test_published_experts_are_kept_and_mean_their_numbers(tmp_path, layout, fused):
    config, inner = LAYOUTS[layout]
    small, wide = save(tmp_path, config, inner=inner, fused=fused)
    kept, want = load_target(small, quantization="auto"), load_target(wide)
    pairs = [
        (ours.mlp.experts, theirs.mlp.experts)
        for ours, theirs in zip(kept.layers[1:], want.layers[1:], strict=True)
    ]
    assert all(isinstance(ours, FP8Experts) and isinstance(theirs, Experts) for ours, theirs in pairs)
    for ours, theirs in pairs:
        assert ours in kept.fp8_layers and ours.gate_up_proj.dtype == ours.down_proj.dtype == E4M3
        assert ours.gate_up_proj.shape == theirs.gate_up_proj.shape
        assert ours.down_proj.shape == theirs.down_proj.shape
        for held, plain in zip(ours.quantized, theirs.parameters(), strict=True):
            torch.testing.assert_close(held.dense(torch.float32), plain, rtol=1e-6, atol=0)
    torch.testing.assert_close(logits(kept), logits(want), atol=2e-4, rtol=1e-4)
    widened = load_target(small)
    assert not widened.fp8_layers
    torch.testing.assert_close(logits(widened), logits(want), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_experts_are_cast_with_a_scale_for_each_output(tmp_path, name):
    randomised(MIXTURES[name]).save_pretrained(tmp_path)
    cast, wide = load_target(tmp_path, quantization="fp8"), load_target(tmp_path)
    for ours, theirs in zip(cast.layers, wide.layers, strict=True):
        for held, plain in zip(ours.mlp.experts.quantized, theirs.mlp.experts.parameters(), strict=True):
            assert torch.equal(held.values.view(torch.uint8), quantize_fp8(plain).values.view(torch.uint8))
            assert held.scales.shape == (*plain.shape[:2], 1)
            largest = plain.abs().amax(-1, keepdim=True)
            error = (held.dense(torch.float32) - plain).abs()
            assert (error <= torch.maximum(plain.abs() / 16, largest / MAX / 1024 * 1.01)).all()
    far = (logits(cast) - logits(wide)).norm() / logits(wide).norm()
    assert 1e-4 < far < 0.5, "a random target of this size amplifies errors"


def test_a_checkpoint_with_half_of_its_experts_in_fp8_keeps_them_wide_unless_cast(tmp_path):
    small, _ = save(tmp_path, OF_BLOCKS, inner=32)
    tensors = load_file(small / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    tensors[name] = tensors[name].float()
    del tensors[name + "_scale_inv"]
    save_file(tensors, small / "model.safetensors", metadata={"format": "pt"})
    first, second = (layer.mlp.experts for layer in load_target(small, quantization="auto").layers[1:])
    assert isinstance(first, Experts) and isinstance(second, FP8Experts)
    first, second = (layer.mlp.experts for layer in load_target(small, quantization="fp8").layers[1:])
    assert [weight.block for weight in first.quantized] == [(16, 32), (1, 32)]
    assert [weight.block for weight in second.quantized] == [(16, 32), (16, 32)]


def test_speculation_says_what_the_target_says_alone(tmp_path):
    """By recordings too, and in the memory plan weights count by their bytes."""
    small, wide = save(tmp_path, OF_BLOCKS, inner=24)
    target = load_target(small, quantization="auto")
    plain = [response.token_ids for response in decode((target, None), max_tokens=20)]
    models = target, tiny_head(target, draft_vocab_size=67)
    for shape, batch, mode in (("4,1,5", 5, "off"), ("3,2,6", 1, "cycle")):
        responses = decode(models, shape, batch, max_tokens=20, options={"graph_mode": mode})
        assert [response.token_ids for response in responses] == plain
    assert plain == [response.token_ids for response in decode((load_target(wide), None), max_tokens=20)]
    plan = plan_memory(target, None, resolved(1, 64))
    assert plan.weights == sum(tensor.nbytes for tensor in target.parameters())
    layers = [layer for layer in target.layers.modules() if isinstance(layer, FP8Experts | FP8Linear)]
    values = [tensor for layer in layers for tensor in layer.parameters()]
    assert plan.fp8 == sum(x.numel() * (1 if x.dtype == E4M3 else 4) for x in values)
    assert f"{plan.fp8 / 1e9:.2f} GB are fp8 layers" in str(plan)


HEADS_OF_BLOCKS = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}


@torch.no_grad()
def of_a_rank(ranks, folder, **options):
    try:
        target = load_share(folder, ranks, quantization="auto", **options)
    except UserError as error:
        return error.cause
    shapes = [layer.gate_up_proj.shape[:2] for layer in target.fp8_layers if isinstance(layer, FP8Experts)]
    return target.logits(run(target, torch.arange(40) * 7 % 271).hidden), shapes


@crossed(
    ("fused", [pytest.param(False, id="one by one"), pytest.param(True, id="in one tensor")]),
    ("layout", LAYOUTS),
)
def test_ranks_have_parts_of_experts_in_fp8(tmp_path, layout, fused):
    """By number whatever the blocks are; inside where ranks have whole blocks."""
    config, inner = LAYOUTS[layout]
    inner *= 2 if inner == 32 else 1
    small, wide = save(tmp_path, config, inner=inner, fused=fused, **HEADS_OF_BLOCKS)
    want = logits(load_target(wide))
    for expert_parallel in (False, True):
        found = run_ranks(2, of_a_rank, small, expert_parallel=expert_parallel)
        if "across" in layout and not expert_parallel:
            assert found == ["2 ranks are too many for 24 inner values of an expert in fp8 blocks of 32."] * 2
            continue
        for ours, shapes in found:
            torch.testing.assert_close(ours, want, atol=1e-3, rtol=1e-4)
            assert shapes == [(6, 2 * inner) if expert_parallel else (12, inner)] * 2


def test_blocks_are_not_cut_apart(tmp_path):
    """Those of attention are whole where ranks attend to requests of their own."""
    small, wide = save(tmp_path, OF_BLOCKS, inner=64)
    for cause in run_ranks(2, of_a_rank, small):
        assert re.match(
            r"A rank would have .*_b_proj.weight, whose fp8 scales are those of blocks of 16", cause
        )
    want = logits(load_target(wide))
    for expert_parallel in (False, True):
        found = run_ranks(2, of_a_rank, small, data_parallel_attention=True, expert_parallel=expert_parallel)
        for ours, shapes in found:
            torch.testing.assert_close(ours, want, atol=1e-3, rtol=1e-4)
            assert shapes == [(6, 128) if expert_parallel else (12, 64)] * 2
