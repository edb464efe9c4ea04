"""Architectures of public targets, to plan a run without their weights and without a network.

Every entry repeats the ``config.json`` of that name on the Hugging Face hub, and the number of parameters in
its model card or weight index. Loading a target does not use it but reads the folder's own config.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import expand
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.loading.fp8_layout import FP8Layout, read_fp8_layout
from eagle_kit.models.loading.loader import parse_target, read_raw_config, read_target_config
from eagle_kit.models.loading.source import (
    GGUF,
    PACKAGED_TARGETS,
    REPOSITORY,
    resolve_target,
    split_revision,
)


@dataclass(frozen=True)
class KnownTarget:
    """A published target.

    Attributes:
        config: keys of its ``config.json``.
        num_parameters: as published, without next-token-prediction layers; of the text model, where there are
            others beside it.
    """

    config: dict[str, Any]
    num_parameters: int

    @cached_property
    def architecture(self) -> TargetConfig:
        """The config as parsed by the loader, once: a bridged one takes a model without weights."""
        return parse_target(self.config)


_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"],
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": _LLAMA_3_ROPE,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
_QWEN_HYBRID = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}
_LLAMA_3_8B = _LLAMA_3 | {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 14336,
}
_LLAMA_3_70B = _LLAMA_3 | {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
_QWEN3_8B = _QWEN3 | {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 12288,
}
_MISTRAL = {
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 14336,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
_MLA = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "moe_layer_freq": 1,
}
_YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
_DEEPSEEK_V3 = _MLA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "vocab_size": 129280,
    "num_nextn_predict_layers": 1,
    "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
_GEMMA_3 = {
    "model_type": "gemma3_text",
    "sliding_window": 1024,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
}
_GEMMA_3_WHOLE = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}

KNOWN_TARGETS: dict[str, KnownTarget] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": KnownTarget(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 1536,
            "vocab_size": 49152,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        134_515_008,
    ),
    "meta-llama/Llama-3.1-8B-Instruct": KnownTarget(_LLAMA_3_8B, 8_030_261_248),
    "meta-llama/Llama-3.1-70B-Instruct": KnownTarget(_LLAMA_3_70B, 70_553_706_496),
    "meta-llama/Llama-3.3-70B-Instruct": KnownTarget(_LLAMA_3_70B, 70_553_706_496),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": KnownTarget(_LLAMA_3_8B, 8_030_261_248),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": KnownTarget(_LLAMA_3_70B, 70_553_706_496),
    "Qwen/Qwen3-0.6B": KnownTarget(
        _QWEN3
        | {
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "intermediate_size": 3072,
            "tie_word_embeddings": True,
        },
        596_049_920,
    ),
    "Qwen/Qwen3-8B": KnownTarget(_QWEN3_8B, 8_190_735_360),
    "Qwen/Qwen3-32B": KnownTarget(
        _QWEN3
        | {
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "intermediate_size": 25600,
        },
        32_762_123_264,
    ),
    "Qwen/Qwen3-30B-A3B": KnownTarget(
        _QWEN3
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        30_532_122_624,
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": KnownTarget(
        _MISTRAL | {"architectures": ["MistralForCausalLM"], "vocab_size": 32768}, 7_248_023_552
    ),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": KnownTarget(
        _MISTRAL
        | {
            "architectures": ["MixtralForCausalLM"],
            "vocab_size": 32000,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        46_702_792_704,
    ),
    "deepseek-ai/DeepSeek-V2-Lite-Chat": KnownTarget(
        _MLA
        | {
            "architectures": ["DeepseekV2ForCausalLM"],
            "hidden_size": 2048,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "vocab_size": 102400,
            "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
        15_706_484_224,
    ),
    "openai/gpt-oss-20b": KnownTarget(
        _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32}, 20_914_757_184
    ),
    "openai/gpt-oss-120b": KnownTarget(
        _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}, 116_829_156_672
    ),
    "google/gemma-3-12b-it": KnownTarget(
        _GEMMA_3_WHOLE
        | {
            "text_config": _GEMMA_3
            | {
                "hidden_size": 3840,
                "intermediate_size": 15360,
                "num_hidden_layers": 48,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 256,
                "query_pre_attn_scalar": 256,
            }
        },
        11_766_034_176,
    ),
    "google/gemma-3-27b-it": KnownTarget(
        _GEMMA_3_WHOLE
        | {
            "text_config": _GEMMA_3
            | {
                "hidden_size": 5376,
                "intermediate_size": 21504,
                "num_hidden_layers": 62,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "head_dim": 128,
                "query_pre_attn_scalar": 168,
            }
        },
        27_009_346_304,
    ),
    "zai-org/GLM-4.5-Air": KnownTarget(
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "attention_bias": True,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "partial_rotary_factor": 0.5,
            "num_nextn_predict_layers": 1,
            "use_qk_norm": False,
            "vocab_size": 151552,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
        106_852_251_264,
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": KnownTarget(
        _QWEN_HYBRID
        | {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 32,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "vocab_size": 151936,
            "eos_token_id": 151645,
        },
        79_674_391_296,
    ),
    "Qwen/Qwen3.5-27B": KnownTarget(
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": _QWEN_HYBRID
            | {
                "model_type": "qwen3_5_text",
                "hidden_size": 5120,
                "intermediate_size": 17408,
                "num_hidden_layers": 64,
                "num_attention_heads": 24,
                "num_key_value_heads": 4,
                "linear_num_value_heads": 48,
                "vocab_size": 248320,
                "mtp_num_hidden_layers": 1,
            },
        },
        26_895_998_464,
    ),
    "Qwen/Qwen3.5-35B-A3B": KnownTarget(
        {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "text_config": _QWEN_HYBRID
            | {
                "model_type": "qwen3_5_moe_text",
                "hidden_size": 2048,
                "num_hidden_layers": 40,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "linear_num_value_heads": 32,
                "num_experts": 256,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
                "vocab_size": 248320,
                "mtp_num_hidden_layers": 1,
            },
        },
        34_660_610_688,
    ),
    "microsoft/phi-4": KnownTarget(
        {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "vocab_size": 100352,
            "rms_norm_eps": 1e-5,
            "rope_theta": 250000,
            "sliding_window": None,
            "max_position_embeddings": 16384,
            "pad_token_id": 100349,
            "tie_word_embeddings": False,
        },
        14_659_507_200,
    ),
    "MiniMaxAI/MiniMax-M2": KnownTarget(
        {
            "architectures": ["MiniMaxM2ForCausalLM"],
            "model_type": "minimax_m2",
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_hidden_layers": 62,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "rotary_dim": 64,
            "vocab_size": 200064,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5000000,
            "max_position_embeddings": 196608,
            "tie_word_embeddings": False,
        },
        228_689_748_992,
    ),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": KnownTarget(
        {
            "architectures": ["Llama4ForConditionalGeneration"],
            "model_type": "llama4",
            "text_config": {
                "model_type": "llama4_text",
                "hidden_size": 5120,
                "intermediate_size": 8192,
                "intermediate_size_mlp": 16384,
                "num_hidden_layers": 48,
                "num_attention_heads": 40,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "num_local_experts": 16,
                "num_experts_per_tok": 1,
                "attention_chunk_size": 8192,
                "attn_temperature_tuning": True,
                "vocab_size": 202048,
                "rms_norm_eps": 1e-5,
                "rope_theta": 500000.0,
                "rope_scaling": _LLAMA_3_ROPE
                | {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0},
                "max_position_embeddings": 10485760,
            },
        },
        107_769_861_120,
    ),
    "deepseek-ai/DeepSeek-V3": KnownTarget(_DEEPSEEK_V3, 671_026_419_200),
    "deepseek-ai/DeepSeek-R1": KnownTarget(_DEEPSEEK_V3, 671_026_419_200),
}
"""Known targets by hub id."""


def known_target(name: str) -> KnownTarget | None:
    """Entry of a hub id, case-insensitive; None for an unknown one."""
    wanted = name.lower()
    return next((entry for id_, entry in KNOWN_TARGETS.items() if id_.lower() == wanted), None)


def target_architecture(name: str) -> tuple[TargetConfig, str]:
    """Architecture of a target and the source it was found in, without weights and without a network.

    Args:
        name: a folder with ``config.json``, a packaged name, an id of the table, or another hub id whose
            ``config.json`` is in the hub's cache on this machine.

    Raises:
        UserError: ``name`` is none of these.
    """
    found, source = _find(name)
    return read_target_config(found) if isinstance(found, Path) else found.architecture, source


def target_fp8_layout(name: str) -> FP8Layout | None:
    """Layout of the fp8 weights of a target, found as :func:`target_architecture` does; None for unquantised
    weights."""
    found, source = _find(name)
    return read_fp8_layout(read_raw_config(found) if isinstance(found, Path) else found.config, source)


def _find(name: str) -> tuple[Path | KnownTarget, str]:
    """Folder with the ``config.json`` of a target, or an entry of the table, and the source in words."""
    from huggingface_hub import try_to_load_from_cache

    path = expand(name)
    if path.suffix.lower() == GGUF and path.is_file():
        folder = resolve_target(path)
        return folder, f"{folder}/config.json"
    if name and path.is_dir():
        return path, f"{path}/config.json"
    packaged = PACKAGED_TARGETS.get(name.lower())
    repository, revision = split_revision(packaged.hub_id if packaged else name)
    known = known_target(repository)
    if known is not None:
        return known, "its published config.json"
    is_id = REPOSITORY.fullmatch(repository)
    cached = try_to_load_from_cache(repository, "config.json", revision=revision) if is_id else None
    if isinstance(cached, str):
        return Path(cached).parent, "its config.json in the hub's cache"
    raise UserError(
        f"The sizes of the target {name!r} are not known without a network, and it is no folder here.",
        "Give a folder that holds its config.json, or one of the targets in configs/.",
    )
