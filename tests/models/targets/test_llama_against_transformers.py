"""Targets against transformers, family by family, on tiny random models and on the real one."""

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.targets.llama import LlamaModel, TargetOutput
from eagle_kit.ops.attention.prefill import prefill_attention

SIZES = {
    "vocab_size": 271,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "rms_norm_eps": 0.03,  # large: every norm has to add the config's
    "tie_word_embeddings": False,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 48}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "llama 2: every head its own keys": (LlamaForCausalLM, LlamaConfig(**SIZES | {"num_key_value_heads": 6})),
    "llama 3: grouped heads": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "llama 3.1: scaled rope": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE)),
    "llama: linear rope": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    ),
    "llama: YaRN with both magnitudes": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}),
    ),
    "qwen3: YaRN with its own bounds and magnitude": (
        Qwen3ForCausalLM,
        Qwen3Config(
            **SIZES,
            head_dim=20,
            rope_parameters=YARN
            | {"beta_fast": 8.0, "beta_slow": 0.25, "truncate": False, "attention_factor": 1.375}
            | {"original_max_position_embeddings": 4096},
        ),
    ),
    "llama: YaRN beyond all pairs, one magnitude": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, rope_parameters=YARN | {"beta_fast": 4096.0, "beta_slow": 1e-8, "mscale": 0.5}),
    ),
    "llama: tied": (LlamaForCausalLM, LlamaConfig(**SIZES | {"tie_word_embeddings": True})),
    "llama: biases": (LlamaForCausalLM, LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, head_dim=16, sliding_window=None)),
    "qwen2: tied": (Qwen2ForCausalLM, Qwen2Config(**SIZES | {"tie_word_embeddings": True})),
    "qwen3: wide heads": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=20)),
    "qwen3: biases, tied": (
        Qwen3ForCausalLM,
        Qwen3Config(**SIZES | {"tie_word_embeddings": True}, head_dim=8, attention_bias=True),
    ),
}


def run(model: LlamaModel, ids: torch.Tensor, capture: tuple[int, ...] = ()) -> TargetOutput:
    """One document through a target."""
    scale = model.config.attention_scale

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return prefill_attention(q, k, v, scale)

    return model(ids, torch.arange(len(ids)), attend, capture=capture)


def randomised(kind: type, config) -> torch.nn.Module:
    """Model with random values in every parameter, also biases and norms, which transformers initialises to 0
    and 1."""
    torch.manual_seed(7)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_captured_states_equal_those_of_transformers(family, tmp_path):
    theirs = randomised(*FAMILIES[family])
    theirs.save_pretrained(tmp_path)
    ours = load_target(tmp_path)
    ids = torch.randint(0, 271, (101,), generator=torch.Generator().manual_seed(1))
    layers = theirs.config.num_hidden_layers
    with torch.no_grad():
        want = theirs(ids[None], output_hidden_states=True)
        got = run(ours, ids, capture=tuple(range(layers)))
        logits = ours.logits(got.hidden)
    scale = want.logits.abs().max()
    assert scale > 1
    assert (logits - want.logits[0]).abs().max() < 2e-5 * scale
    for i, state in enumerate(got.aux_hidden_states.chunk(layers, -1)):
        expected = want.hidden_states[i][0]
        assert (state - expected).abs().max() < 2e-5 * expected.abs().max(), f"input of layer {i}"
    assert (got.hidden - want.hidden_states[-1][0]).abs().max() < 2e-5 * want.hidden_states[-1].abs().max()


@pytest.mark.real
def test_the_real_target_computes_what_transformers_computes():
    from transformers import AutoModelForCausalLM

    from eagle_kit.models.loading.source import load_tokenizer, resolve_target

    folder = resolve_target("smollm2-135m-instruct")
    text = "Explain how a bicycle stays upright, step by step.\n\n1. Wheels, 2. steering, 3. the rider. " * 40
    ids = torch.tensor(load_tokenizer(folder)(text)["input_ids"][:512])
    assert len(ids) == 512
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = load_target(folder)
    with torch.no_grad():
        want = theirs(ids[None], output_hidden_states=True)
        got = run(ours, ids, capture=(2, 15, 27))
        logits = ours.logits(got.hidden)
    assert (logits - want.logits[0]).abs().max() <= 2e-3
    assert torch.equal(logits.argmax(-1), want.logits[0].argmax(-1))
    for i, state in zip((2, 15, 27), got.aux_hidden_states.chunk(3, -1), strict=True):
        expected = want.hidden_states[i][0]
        assert (state - expected).abs().max() <= 1e-4 * expected.abs().max()
