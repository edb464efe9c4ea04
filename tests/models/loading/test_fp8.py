"""Targets whose linear layers are in fp8: as checkpoints of four projects have them, and cast when loaded."""

import json

import pytest
import torch
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file
from tiny import tiny_head
from tiny_run import make_target

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.llm import LLM
from eagle_kit.models.loading.fp8_layout import FP8Layout, read_fp8_layout
from eagle_kit.models.loading.loader import load_target, read_raw_config
from eagle_kit.models.loading.share import load_share
from eagle_kit.ops.fp8 import E4M3, MAX, quantize_fp8

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONVENTIONS = {
    "autofp8": ({"quant_method": "fp8"}, "_scale", "tensor"),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, "_scale", "output"),
    "compressed tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}
            },
        },
        "_scale",
        "output",
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "_scale", "tensor"),
    "deepseek": ({"quant_method": "fp8", "weight_block_size": [16, 16]}, "_scale_inv", "block"),
}


def scales_of(weight, kind):
    """Scales as published, and one for every element."""
    if kind == "tensor":
        scales = weight.abs().max() / MAX
        return scales, scales
    if kind == "output":
        scales = weight.abs().amax(1, keepdim=True) / MAX
        return scales, scales
    rows, columns = weight.shape
    blocks = weight.view(rows // 16, 16, columns // 16, 16)
    scales = blocks.abs().amax((1, 3)) / MAX
    return scales, scales.repeat_interleave(16, 0).repeat_interleave(16, 1)


@pytest.fixture(params=CONVENTIONS)
def pair(request, tmp_path):
    """A checkpoint in fp8, and the same numbers in fp32."""
    config, suffix, kind = CONVENTIONS[request.param]
    small, wide = make_target(tmp_path / "fp8"), make_target(tmp_path / "fp32")
    tensors, meant = load_file(small / "model.safetensors"), load_file(wide / "model.safetensors")
    for name in list(tensors):
        if name.endswith(tuple(f"{each}.weight" for each in PROJECTIONS)):
            scales, each = scales_of(tensors[name], kind)
            tensors[name] = (tensors[name] / each).to(E4M3)
            tensors[name + suffix], meant[name] = scales, tensors[name].float() * each
            if suffix == "_scale":  # of activations, which calibration leaves
                tensors[name.removesuffix("weight") + "input_scale"] = torch.ones(())
    save_file(tensors, small / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, wide / "model.safetensors", metadata={"format": "pt"})
    path = small / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return small, wide


@torch.no_grad()
def logits(target, rows):
    """Logits of a text of ``rows`` tokens."""
    ids = torch.arange(rows) % 250 + 3
    positions = torch.arange(rows)
    out = target(ids, positions, target.packed([(0, rows)], torch.zeros(rows, dtype=torch.int32)), ())
    return out.hidden @ target.head_weight.t()


@pytest.mark.parametrize("rows", [5, 90])
def test_a_checkpoint_in_fp8_is_run_as_it_is_and_means_its_numbers(pair, rows):
    small, wide = pair
    kept, want = load_target(small, quantization="auto"), logits(load_target(wide), rows)
    assert len(kept.fp8_layers) == 4 * 4, "four layers, each with qkv, output, gate-up and down"
    assert all(layer.weight.dtype == E4M3 for layer in kept.fp8_layers)
    torch.testing.assert_close(logits(kept, rows), want, atol=2e-4, rtol=1e-4)
    widened = load_target(small)
    assert not widened.fp8_layers
    assert (kept.weight_format, widened.weight_format) == ("float32 with fp8 layers", "float32")
    torch.testing.assert_close(logits(widened, rows), want, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def of_a_rank(ranks, folder, rows, **options):
    """Logits of a text of ``rows`` tokens, the number of layers in fp8, and the bytes of their values."""
    target = load_share(folder, ranks, **options)
    ids, positions = torch.arange(rows) % 250 + 3, torch.arange(rows)
    hidden = target(ids, positions, target.packed([(0, rows)], torch.zeros(rows, dtype=torch.int32))).hidden
    values = sum(layer.weight.nbytes for layer in target.fp8_layers)
    return target.logits(hidden), len(target.fp8_layers), values


def test_ranks_have_parts_of_a_checkpoint_in_fp8(pair):
    """Values are cut, and so are the scales of blocks and of outputs; one of a tensor is every rank's."""
    small, wide = pair
    whole = load_target(small, quantization="auto")
    want = logits(load_target(wide), 90)
    found = run_ranks(2, of_a_rank, small, 90, quantization="auto")
    for each, number, _ in found:
        assert number == 16
        torch.testing.assert_close(each, want, atol=2e-4, rtol=1e-4)
    assert sum(values for *_, values in found) == sum(layer.weight.nbytes for layer in whole.fp8_layers)
    for each, number, _ in run_ranks(2, of_a_rank, small, 5):
        assert number == 0
        torch.testing.assert_close(each, logits(load_target(wide), 5), atol=2e-4, rtol=1e-4)


def test_ranks_cast_their_parts(tmp_path):
    """No farther from the unquantised target than one process' cast: of a cut output both have scales."""
    folder = make_target(tmp_path / "target")
    want, cast = logits(load_target(folder), 40), logits(load_target(folder, quantization="fp8"), 40)
    for each, number, _ in run_ranks(2, of_a_rank, folder, 40, quantization="fp8"):
        assert number == 16
        assert 1e-4 < (each - want).norm() / want.norm() < 1.5 * (cast - want).norm() / want.norm()


def test_a_target_is_cast_when_it_is_loaded(tmp_path):
    folder = make_target(tmp_path / "target")
    wide, cast = load_target(folder), load_target(folder, quantization="fp8")
    assert len(cast.fp8_layers) == 16 and not wide.fp8_layers
    assert torch.equal(cast.embed_tokens.weight, wide.embed_tokens.weight)
    for ours, theirs in zip(
        cast.fp8_layers, [m for m in wide.layers.modules() if hasattr(m, "swiglu")], strict=True
    ):
        meant = quantize_fp8(theirs.weight)
        assert torch.equal(ours.weight.view(torch.uint8), meant.values.view(torch.uint8))
        error = (ours.quantized.dense(torch.float32) - theirs.weight).abs()
        largest = theirs.weight.abs().amax(1, keepdim=True)
        assert (error <= torch.maximum(theirs.weight.abs() / 16, largest / MAX / 1024 * 1.01)).all()
    far = (logits(cast, 40) - logits(wide, 40)).norm() / logits(wide, 40).norm()
    assert 1e-4 < far < 0.5, "a random target of this size amplifies errors"


def test_speculation_says_what_the_cast_target_says_alone(tmp_path):
    folder = make_target(tmp_path / "target")
    plain = LLM(folder, max_context=96, quantization="fp8")
    head = tiny_head(plain.target)
    prompts = [[3, 70, 91], [5, 99, 120, 33, 41]]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    want = [response.token_ids for response in plain.generate(prompts, params)]
    for shape in ("3,1,4", "3,2,6"):
        llm = LLM(plain.target, head, max_context=96, quantization="fp8", shape=shape)
        assert [response.token_ids for response in llm.generate(prompts, params)] == want


def compressed(*weights, format="float-quantized"):
    """llm-compressor's ``quantization_config`` of groups of layers with these ``weights``."""
    groups = {f"group_{i}": {"weights": each} for i, each in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


FLOAT = {"type": "float", "num_bits": 8}
TENSOR, CHANNEL = ({**FLOAT, "strategy": strategy} for strategy in ("tensor", "channel"))
BLOCK = {**FLOAT, "strategy": "block", "block_structure": [128, 64]}


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (None, None),
        ({}, None),
        ({"quant_method": "fp8"}, FP8Layout("_scale")),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, FP8Layout("_scale_inv", (128, 64))),
        ({"quant_method": "fbgemm_fp8"}, FP8Layout("_scale")),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, FP8Layout("_scale")),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, FP8Layout("_scale")),
        (compressed(TENSOR), FP8Layout("_scale")),
        (compressed(CHANNEL, format="naive-quantized"), FP8Layout("_scale")),
        (compressed(TENSOR, CHANNEL), FP8Layout("_scale")),
        (compressed(BLOCK, BLOCK), FP8Layout("_scale", (128, 64))),
    ],
)
def test_the_layout_of_scales_is_that_of_the_config(config, layout):
    assert read_fp8_layout({"quantization_config": config}, "here") == layout


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128]}, "in blocks of"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "in blocks of"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt, 'NVFP4'"),
        ("fp8", "'fp8'"),
        (compressed(), "in 0 ways"),
        (compressed(CHANNEL, BLOCK), "in 2 ways"),
        (compressed({**BLOCK, "block_structure": None}), "in blocks of 'none'"),
        (compressed({**TENSOR, "type": "int"}), "'int' of 8 bits"),
        (compressed({**TENSOR, "num_bits": 4}), "'float' of 4 bits"),
        (compressed({**TENSOR, "strategy": "group"}), "by 'group'"),
        (compressed(CHANNEL, None), "by None"),
        (compressed(TENSOR, format="pack-quantized"), "'pack-quantized'"),
    ],
)
def test_other_quantisation_is_named(config, words):
    with pytest.raises(UserError, match=words):
        read_fp8_layout({"quantization_config": config}, "here")


@pytest.mark.parametrize("front", [(), (3,)], ids=["a matrix", "experts"])
def test_scales_of_every_shape_mean_their_outputs(front):
    layout = FP8Layout("_scale")
    weight = torch.randn(*front, 6, 8).to(E4M3)
    shapes = layout.scale_shapes(tuple(weight.shape))
    assert set(shapes) == {(*front, 6, 1), (*front, 6), (*front, 1, 1), (*front, 1), front}
    for shape in shapes:
        scales = 0.5 + torch.rand(shape)
        by_output = scales.reshape(*front, -1, 1)
        held = layout.weight(weight, scales).dense(torch.float32)
        torch.testing.assert_close(held, weight.float() * by_output, rtol=1e-6, atol=0)


def test_modelopts_own_file_says_the_quantisation_where_the_config_does_not(tmp_path):
    folder = make_target(tmp_path)
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert read_raw_config(folder)["quantization_config"] == {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
    }
    with pytest.raises(UserError, match="modelopt, 'NVFP4'"):
        load_target(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_raw_config(folder)["quantization_config"] == {"quant_method": "fp8"}


def test_biases_stay_beside_weights_that_are_cast(tmp_path):
    """Those of a Qwen2, which are large here."""
    folder = make_target(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["Qwen2ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    with_bias = tuple(f"{part}_proj.weight" for part in "qkv")
    rows = {name: len(tensor) for name, tensor in tensors.items() if name.endswith(with_bias)}
    biases = {name.replace(".weight", ".bias"): torch.full((count,), 2.0) for name, count in rows.items()}
    save_file(tensors | biases, folder / "model.safetensors", metadata={"format": "pt"})
    cast = load_target(folder, quantization="fp8")
    found = cast.layers[1].self_attn.qkv_proj
    assert found.weight.dtype == E4M3 and bool((found.bias == 2.0).all())


def test_what_cannot_be_is_refused(pair, tmp_path):
    small, _ = pair
    tensors = load_file(small / "model.safetensors")
    name = next(name for name in tensors if tensors[name].dtype == E4M3)
    tensors[name].view(torch.uint8)[0, 0] = 0x7F
    save_file(tensors, small / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"{name.removeprefix('model.')} has NaN"):
        load_target(small, quantization="auto")
    with pytest.raises(UserError, match="is a loaded model without it"):
        LLM(load_target(make_target(tmp_path / "plain")), quantization="fp8")
