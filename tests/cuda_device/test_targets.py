"""Targets that are no Llamas: traffic behind their warm-up captures, compiles and reserves nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import family_model
from tiny import randomise, tiny_hybrid

from eagle_kit.models.config import TargetConfig
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.models.targets.target import Target
from tests.cuda_device.device import LogKind, phase
from tests.cuda_device.engines import SIZES, made_up_results
from tests.cuda_device.test_warm_up import USUAL, WAITS, prepared, serve

SMALL_DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def gated_delta(folder: Path) -> Target:
    """Three of four layers are the gated delta rule."""
    return tiny_hybrid(512, **{**SIZES, "rotary_dim": 32}).to("cuda", torch.bfloat16)


def latents(folder: Path) -> Target:
    """A small DeepSeek-V3: latent attention, and experts behind the first layer."""
    model = LlamaModel(TargetConfig.from_dict(SMALL_DEEPSEEK))
    return randomise(model, 3, 0.2).eval().requires_grad_(False).to("cuda", torch.bfloat16)


def of_family(name: str) -> Callable[[Path], Target]:
    """A small model of a family of transformers in bf16, as a server loads a user's folder to a GPU.

    In fp32 torch's grouped products read the sizes of their groups on the host, which waits for the device.
    """

    def load(folder: Path) -> Target:
        family_model(name).save_pretrained(folder)
        # A bridged target is compared with transformers' own forward, so on the host.
        return load_target(folder, torch.bfloat16).to("cuda")

    return load


LOADERS = {
    "gated delta": gated_delta,
    "gated delta and experts": of_family("qwen3_next"),
    "mamba beside attention": of_family("falcon_h1"),
    "latents and experts": latents,
    "experts": of_family("qwen3_moe"),
    "bridged": of_family("gemma3_text"),
    "bridged with sinks and experts": of_family("gpt_oss"),
}


@pytest.mark.parametrize("name", LOADERS)
def test_traffic_behind_a_warm_up_is_prepared_for(name, tmp_path):
    target = LOADERS[name](tmp_path)
    llm, warmed = prepared("usual", target=target)
    engine = llm.engine()
    num_graphs = engine.num_graphs
    assert warmed.counts["captures"] >= num_graphs > 0
    reserved = torch.cuda.memory_reserved()

    with phase(LogKind.SYNCHRONISATION | LogKind.ALLOCATION) as found, made_up_results():
        num_tokens = serve(llm, USUAL)
    assert num_tokens > 100
    assert found.counts["captures"] == 0 and engine.num_graphs == num_graphs
    assert found.counts["modules_loaded"] == 0, "compiled in traffic"
    grown = torch.cuda.memory_reserved() - reserved
    assert grown == 0, [str(call) for call in found.of(LogKind.ALLOCATION)]
    waits = {call.place.function for call in found.of(LogKind.SYNCHRONISATION) if call.place}
    assert waits <= WAITS, [str(call) for call in found.of(LogKind.SYNCHRONISATION)]
