"""Architectures of public targets, to plan a run without their weights and without a network.

Every entry repeats the ``config.json`` of that name on the Hugging Face hub, and the number of parameters in
its model card or weight index. Loading a target does not use it but reads the folder's own config.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.loading.loader import parse_target, read_target_config
from eagle_kit.models.loading.source import PACKAGED_TARGETS, REPOSITORY, split_revision


@dataclass(frozen=True)
class KnownTarget:
    """A published target.

    Attributes:
        config: keys of its ``config.json``.
        num_parameters: as published, without next-token-prediction layers.
    """

    config: dict[str, Any]
    num_parameters: int

    @property
    def architecture(self) -> TargetConfig:
        """The config as parsed by the loader."""
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
    from huggingface_hub import try_to_load_from_cache

    path = Path(name).expanduser()
    if name and path.is_dir():
        return read_target_config(path), f"{path}/config.json"
    packaged = PACKAGED_TARGETS.get(name.lower())
    repository, revision = split_revision(packaged.hub_id if packaged else name)
    known = known_target(repository)
    if known is not None:
        return known.architecture, "its published config.json"
    is_id = REPOSITORY.fullmatch(repository)
    cached = try_to_load_from_cache(repository, "config.json", revision=revision) if is_id else None
    if isinstance(cached, str):
        return read_target_config(Path(cached).parent), "its config.json in the hub's cache"
    raise UserError(
        f"The sizes of the target {name!r} are not known without a network, and it is no folder here.",
        "Give a folder that holds its config.json, or one of the targets in configs/.",
    )
