"""Our Qwen3-Next, Qwen3.5 and Falcon-H1 against transformers' own, and beside the bridge."""

import json

import pytest
import torch
from families import family_config, family_model
from tiny import tiny_head

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.drafts.base.draft_model import HeadDraftModel
from eagle_kit.drafts.files.validate import validate_draft
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.load_draft import load_draft_model
from eagle_kit.models.bridge.model import BridgedModel
from eagle_kit.models.count import layer_weights
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.ops.linear import FP8Linear, Linear

FALCON = "mamba", "time", "ssm", "mlp_m", "key_m", "lm_head_m"
"""How keys of Falcon-H1's configs begin."""
KINDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "falcon_h1")


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    if family_config(request.param) is None:
        pytest.skip(f"this transformers does not know {request.param}")
    return request.param


@pytest.fixture(scope="module")
def model(kind):
    return family_model(kind)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    place = tmp_path_factory.mktemp("ours")
    model.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def target(folder):
    return load_target(folder)


def exact_logits(model, ids):
    return model(input_ids=ids[None], use_cache=False).logits[0]


def texts(*lengths):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 131, (n,), generator=generator) for n in lengths]


@torch.no_grad()
def test_packed_texts_have_the_logits_and_states_of_transformers(model, target):
    assert isinstance(target, LlamaModel)
    first, second = texts(70, 9)
    ids, positions = torch.cat((first, second)), torch.cat((torch.arange(70), torch.arange(9)))
    out = target(ids, positions, target.packed([(0, 70), (70, 79)]), (0, 1, 2, 4))
    logits = target.logits(out.hidden)
    for rows, text in ((slice(0, 70), first), (slice(70, 79), second)):
        torch.testing.assert_close(logits[rows], exact_logits(model, text), rtol=1e-4, atol=1e-4)
        states = model.model(input_ids=text[None], use_cache=False, output_hidden_states=True).hidden_states
        for layer, state in zip((0, 1, 2), out.aux_hidden_states[rows].split(48, -1), strict=False):
            torch.testing.assert_close(state, states[layer][0], rtol=1e-4, atol=1e-4)
    alone = target(first, torch.arange(70), target.causal())
    torch.testing.assert_close(target.logits(alone.hidden), logits[:70], rtol=1e-5, atol=1e-5)


OPTIONS = {
    "falcon_h1: biases, bounded steps, norms first": (
        "falcon_h1",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "mamba_norm_before_gate": True,
            "time_step_limit": (0.6, 0.9),
            "rms_norm_eps": 0.03,
        },
    ),
    "falcon_h1: no bias of convolutions, one of two biases": (
        "falcon_h1",
        {"mamba_conv_bias": False, "projectors_bias": True, "mamba_rms_norm": False},
    ),
    "qwen3_next: biases": ("qwen3_next", {"attention_bias": True, "rms_norm_eps": 0.03}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe: biases, norms of heads": ("glm4_moe", {"attention_bias": True, "use_qk_norm": True}),
}


@torch.no_grad()
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_configs_have_the_logits_of_transformers(name, tmp_path):
    kind, changes = OPTIONS[name]
    if family_config(kind) is None:
        pytest.skip(f"this transformers does not know {kind}")
    theirs = family_model(kind, **changes)
    theirs.save_pretrained(tmp_path)
    ours = load_target(tmp_path)
    assert isinstance(ours, LlamaModel)
    (ids,) = texts(40)
    out = ours(ids, torch.arange(40), ours.causal())
    torch.testing.assert_close(ours.logits(out.hidden), exact_logits(theirs, ids), rtol=1e-4, atol=1e-4)


def test_the_bridge_gives_the_same(model, target, tmp_path):
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["BridgedForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    bridged = load_target(tmp_path)
    assert isinstance(bridged, BridgedModel)
    assert bridged.config.states == target.config.states
    assert bridged.config.cache == target.config.cache
    (ids,) = texts(40)
    mine, theirs = (each(ids, torch.arange(40), each.causal(), (1, 3)) for each in (target, bridged))
    torch.testing.assert_close(mine.aux_hidden_states, theirs.aux_hidden_states, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        target.logits(mine.hidden), bridged.logits(theirs.hidden), rtol=1e-4, atol=1e-4
    )


@pytest.fixture(scope="module")
def wanted(model):
    found = []
    with torch.no_grad():
        for prompt in texts(4, 17, 9):
            ids = prompt
            for _ in range(14):
                ids = torch.cat((ids, exact_logits(model, ids)[-1].argmax()[None]))
            found.append((prompt.tolist(), ids[len(prompt) :].tolist()))
    return found


@pytest.mark.parametrize("shape", ["none", pytest.param("3,1,4", marks=pytest.mark.nightly), "3,2,6"])
def test_greedy_text_is_that_of_transformers(target, wanted, shape):
    draft = None if shape == "none" else HeadDraftModel(tiny_head(target, 67), target)
    llm = LLM(target, draft, shape=shape, max_batch_size=4, max_context=128, page_size=4)
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    for _ in range(2):
        responses = llm.generate([prompt for prompt, _ in wanted], params)
        assert [response.token_ids for response in responses] == [text for _, text in wanted]


def test_models_that_see_are_read_for_their_text(model, folder, target, tmp_path):
    """As Qwen3.5 is published: the text model inside, images beside it, and an MTP module."""
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    name = (
        "Qwen3_5MoeForConditionalGeneration"
        if config.get("num_experts")
        else "Qwen3_5ForConditionalGeneration"
    )
    if not config["model_type"].startswith("qwen3_5"):
        pytest.skip("published as a text model only")
    outer = {"architectures": [name], "model_type": "qwen3_5", "text_config": config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(folder / "model.safetensors")
    moved = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    moved |= {"model.visual.patch_embed.proj.weight": torch.zeros(2, 2), "mtp.fc.weight": torch.zeros(2, 2)}
    save_file(moved, tmp_path / "model.safetensors")
    seen = load_target(tmp_path)
    (ids,) = texts(20)
    both = [each(ids, torch.arange(20), each.causal()).hidden for each in (target, seen)]
    assert both[0].equal(both[1])


def test_weights_are_counted_from_the_config(target):
    matrices = (p.numel() for key, p in target.named_parameters() if p.ndim > 1 and "layers" in key)
    assert layer_weights(target.config, active=False) == sum(matrices)


def test_routers_and_gates_of_shared_experts_stay_wide_where_layers_are_cast(folder):
    cast = load_target(folder, quantization="fp8")
    linear = {
        name: each for name, each in cast.layers.named_modules() if isinstance(each, Linear | FP8Linear)
    }
    wide = {name.rpartition(".")[2] for name, each in linear.items() if not isinstance(each, FP8Linear)}
    expected = {"gate", "shared_expert_gate"}
    if cast.config.moe is None:
        expected = set()
    assert wide == expected


def test_norms_and_decays_stay_in_fp32(folder, kind):
    if kind == "falcon_h1":
        pytest.skip("its norms are published whole")
    target = load_target(folder, torch.bfloat16)
    kinds = {name: parameter.dtype for name, parameter in target.named_parameters()}
    exact = {name for name, dtype in kinds.items() if dtype == torch.float32}
    assert "norm.weight" in exact and "layers.0.linear_attn.A_log" in exact
    assert "layers.1.self_attn.q_norm.weight" in exact and "layers.0.linear_attn.norm.weight" not in exact
    (ids,) = texts(20)
    out = target(ids, torch.arange(20), target.causal())
    assert out.hidden.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention", "lightning"] * 2}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ({"linear_num_key_heads": 3}, "shares 3 key heads"),
        ({"rope_parameters": {"partial_rotary_factor": 0.2}}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "activation"),
        ({"mamba_n_heads": 7}, "divides 96 values by 7 heads"),
        ({"time_step_limit": ["soon", 1]}, "time_step_limit"),
        ({"time_step_limit": [0.2, 0.1]}, "the smaller first"),
        ({"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers .* a list of 5 numbers"),
        ({"mlp_multipliers": [1.0, "two"]}, "mlp_multipliers"),
        ({"key_multiplier": "half"}, "key_multiplier"),
        ({"lm_head_multiplier": 0}, "lm_head_multiplier"),
    ],
)
def test_impossible_configs_are_refused(kind, folder, tmp_path, changes, message):
    if (kind == "falcon_h1") != any(key.startswith(FALCON) for key in changes):
        pytest.skip("a key of other families")
    config = json.loads((folder / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        load_target(tmp_path)


def test_missing_and_misshapen_tensors_are_named(kind, folder, tmp_path):
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    mixer = "mamba" if kind == "falcon_h1" else "linear_attn"
    tensors.pop(f"model.layers.0.{mixer}.A_log")
    tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(5, 48)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="A_log is missing") as error:
        load_target(tmp_path)
    assert "q_proj.weight has shape [5, 48]" in str(error.value)


def test_a_hybrid_is_no_draft_of_another_target(folder, target):
    with pytest.raises(UserError, match="recurrent layers"):
        load_draft_model(folder, target, algorithm="STANDALONE")
    (finding,) = validate_draft(folder, folder)
    assert finding.level == "error" and "recurrent layers" in finding.cause
