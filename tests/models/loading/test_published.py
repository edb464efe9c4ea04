"""Loading mixtures and DeepSeek models: every layout of experts, fp8 in blocks, MTP layers, errors named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import randomise
from tiny_mixtures import DEEPSEEK, MIXTURES, randomised, v3

from eagle_kit.core.errors import UserError
from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.count import layer_weights
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.targets.llama import LlamaModel

ALL = {**DEEPSEEK, **MIXTURES}
EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"
V3 = "v3: sigmoid gate with bias, groups"


@pytest.fixture
def folder(tmp_path):
    """Tiny DeepSeek-V3 as a Hugging Face folder."""
    randomised(DEEPSEEK[V3]).save_pretrained(tmp_path)
    return tmp_path


def change_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def config_of(name, **changes) -> TargetConfig:
    config = ALL[name]
    names = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "qwen3_moe": "Qwen3Moe"}
    family = names.get(config.model_type, "Mixtral")
    return TargetConfig.from_dict(config.to_dict() | {"architectures": [f"{family}ForCausalLM"]} | changes)


@pytest.mark.parametrize("name", [V3, "mixtral", "qwen3-moe"])
def test_experts_in_one_tensor_are_those_one_by_one(name, tmp_path):
    """Layouts of the hub and of transformers 5 in memory."""
    theirs = randomised(ALL[name])
    theirs.save_pretrained(tmp_path / "apart")
    theirs.save_pretrained(tmp_path / "fused", save_original_format=False)
    names = load_file(tmp_path / "fused" / "model.safetensors").keys()
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in names)
    apart, fused = (load_target(tmp_path / kind).state_dict() for kind in ("apart", "fused"))
    assert all(torch.equal(apart[key], fused[key]) for key in apart)


def test_missing_unexpected_and_misshapen_experts_are_all_named(folder):
    def spoil(tensors):
        del tensors[EXPERT]
        tensors["model.layers.1.mlp.experts.12.up_proj.weight"] = torch.zeros(20, 48)
        tensors["model.layers.3.mlp.experts.0.down_proj.weight"] = torch.zeros(48, 21)
        del tensors["model.layers.1.mlp.gate.e_score_correction_bias"]

    change_weights(folder, spoil)
    with pytest.raises(UserError) as error:
        load_target(folder)
    assert "layers.2.mlp.experts.5.up_proj.weight is missing" in error.value.cause
    assert "layers.1.mlp.experts.12.up_proj.weight is unexpected" in error.value.cause
    assert (
        "layers.3.mlp.experts.0.down_proj.weight has shape [48, 21] instead of [48, 20]" in error.value.cause
    )
    assert "layers.1.mlp.gate.e_score_correction_bias is missing" in error.value.cause


def test_a_mixtral_expert_is_named_as_its_checkpoint_names_it(tmp_path):
    randomised(ALL["mixtral"]).save_pretrained(tmp_path)
    name = "model.layers.0.block_sparse_moe.experts.3.w3.weight"
    change_weights(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(UserError, match="layers.0.block_sparse_moe.experts.3.w3.weight is missing"):
        load_target(tmp_path)


def test_biases_of_gates_are_not_rounded(folder):
    def finer(tensors):
        for name, tensor in tensors.items():
            if name.endswith("e_score_correction_bias"):
                tensor.add_(1e-5)

    change_weights(folder, finer)
    model = load_target(folder, dtype=torch.bfloat16)
    bias = model.layers[1].mlp.gate.e_score_correction_bias
    assert bias.dtype == torch.float32 and not torch.equal(bias, bias.bfloat16().float())
    assert model.layers[1].mlp.experts.down_proj.dtype == torch.bfloat16


def test_prediction_layers_behind_the_decoders_are_left_out(folder):
    name = "model.layers.4.eh_proj.weight"
    change_weights(folder, lambda tensors: tensors.update({name: torch.zeros(48, 96)}))
    assert load_target(folder).config.num_mtp_layers == 1
    beyond = "model.layers.5.eh_proj.weight"
    change_weights(folder, lambda tensors: tensors.update({beyond: torch.zeros(48, 96)}))
    with pytest.raises(UserError, match="config: layers.5.eh_proj.weight is unexpected"):
        load_target(folder)
    change_weights(folder, lambda tensors: tensors.pop(beyond))
    change_config(folder, num_nextn_predict_layers=0)
    with pytest.raises(UserError, match="layers.4.eh_proj.weight is unexpected"):
        load_target(folder)


def to_fp8(tensors, block=(128, 128)):
    """Quantise every matrix of the layers but norms and gates as DeepSeek does, in place."""
    for name, tensor in list(tensors.items()):
        if "layers" not in name or tensor.ndim < 2 or "gate.weight" in name:
            continue
        rows, columns = tensor.shape
        scales = torch.zeros(-(-rows // block[0]), -(-columns // block[1]))
        held = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
                scales[i, j] = tensor[place].abs().max() / 448
                held[place] = (tensor[place] / scales[i, j]).to(torch.float8_e4m3fn)
                tensor[place] = held[place].float() * scales[i, j]
        tensors[name], tensors[name + "_scale_inv"] = held, scales


@pytest.fixture
def fp8(tmp_path):
    """DeepSeek-V3 with matrices of several blocks, some of them partial; its folder, and the dequantised
    weights."""
    sizes = {
        "hidden_size": 144,
        "intermediate_size": 200,
        "moe_intermediate_size": 136,
        "num_hidden_layers": 2,
    }
    randomised(v3(**sizes)).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    meant = {name: tensor for name, tensor in tensors.items()}
    to_fp8(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    change_config(tmp_path, quantization_config=quantised)
    return tmp_path, meant


def test_fp8_blocks_are_multiplied_by_their_scales(fp8, tmp_path_factory):
    folder, meant = fp8
    plain = tmp_path_factory.mktemp("plain")
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    want, got = load_target(plain).state_dict(), load_target(folder).state_dict()
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    scales = load_file(folder / "model.safetensors")["model.layers.0.mlp.gate_proj.weight_scale_inv"]
    assert scales.shape == (2, 2)


def test_fp8_without_its_scale_or_with_a_wrong_one_is_refused(fp8):
    folder, _ = fp8
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
    change_weights(folder, lambda tensors: tensors.update({name: torch.ones(1, 2)}))
    with pytest.raises(UserError, match=r"up_proj.weight_scale_inv has shape \[1, 2\] instead of \[2, 2\]"):
        load_target(folder)
    change_weights(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(UserError, match="experts.3.up_proj.weight_scale_inv is missing"):
        load_target(folder)


@pytest.mark.parametrize(
    "method",
    [
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"bits": 4},
    ],
)
def test_other_quantisation_is_refused(folder, method):
    change_config(folder, quantization_config=method)
    with pytest.raises(UserError, match="quantised"):
        load_target(folder)


def test_fp8_in_a_config_without_quantisation_is_refused(fp8):
    folder, _ = fp8
    change_config(folder, quantization_config=None)
    with pytest.raises(UserError, match="weight_scale_inv is unexpected"):
        load_target(folder)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"topk_method": "aux"}, "topk_method 'aux'"),
        ({"scoring_func": "relu"}, "scoring_func 'relu'"),
        ({"n_group": 5}, "5 groups"),
        ({"topk_group": 5}, "5 of 4 groups"),
    ],
)
def test_a_gate_that_would_be_computed_wrongly_is_refused(folder, values, words):
    change_config(folder, **values)
    with pytest.raises(UserError, match=words):
        load_target(folder)


@pytest.mark.parametrize("name", ["kimi k2: one group", "v2 lite: no query bottleneck, greedy gate, YaRN"])
def test_the_spelling_of_the_hub_is_read_as_that_of_transformers(name):
    """``rope_scaling`` with ``type`` and a base beside it, and gates by name."""
    config = ALL[name].to_dict()
    rope = dict(config.pop("rope_parameters"))
    kind, theta = rope.pop("rope_type"), rope.pop("rope_theta")
    old = {"rope_theta": theta, "rope_scaling": {**rope, "type": kind}}
    if config["model_type"] == "deepseek_v3":
        old |= {
            "model_type": "kimi_k2",
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
        }
        old["architectures"] = ["DeepseekV3ForCausalLM"]
    else:
        old |= {"scoring_func": "softmax", "architectures": ["DeepseekV2ForCausalLM"]}
    read = TargetConfig.from_dict(config | old)
    assert read == config_of(name) and read.rope_scaling is not None


def test_the_scale_of_the_scores_has_yarns_magnitude_squared():
    config = config_of("v3: YaRN")
    assert config.head_dim == 20
    magnitude = 0.1 * torch.tensor(40.0).log().item() + 1
    assert config.attention_scale == pytest.approx(20**-0.5 * magnitude**2)
    assert config_of(V3).attention_scale == pytest.approx(20**-0.5)


def test_a_head_for_latent_attention_has_llamas_sizes():
    sizes = {"hidden_size": 7168, "num_attention_heads": 128, "v_head_dim": 128, "num_hidden_layers": 61}
    target = config_of("v3: YaRN", **sizes)
    draft = Eagle3Config.for_target(target, 32000)
    assert (draft.num_heads, draft.num_kv_heads, draft.head_dim, draft.rope_scaling) == (56, 8, 128, None)
    tiny = Eagle3Head(Eagle3Config.for_target(config_of(V3), 67))
    assert tiny.config.num_heads * tiny.config.head_dim == 40


@pytest.mark.parametrize("name", ALL)
def test_weights_are_counted_from_the_config(name):
    config = config_of(name)
    model = LlamaModel(config)
    matrices = sum(p.numel() for key, p in model.named_parameters() if p.ndim > 1 and "layers" in key)
    assert layer_weights(config, active=False) == matrices
    assert config.moe is not None
    layers = config.num_layers - len(config.moe.dense_layers)
    idle = config.moe.num_experts - config.moe.num_experts_per_token
    expert = 3 * config.hidden_size * config.moe.intermediate_size
    assert matrices - layer_weights(config, active=True) == layers * idle * expert


def test_a_gradient_free_model_of_random_weights_runs_in_bf16():
    model = randomise(LlamaModel(config_of(V3)), 0, 0.1).bfloat16()
    ids = torch.arange(9)
    out = model(ids, ids, lambda layer, q, k, v: v)
    assert out.hidden.dtype == torch.bfloat16 and out.hidden.isfinite().all()
