"""Models of known shapes with random weights, for benchmarks: made where they run, read from nowhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.models.config import DraftConfig, TargetConfig
from eagle_kit.models.config_parts import MoEConfig
from eagle_kit.models.heads.eagle3 import Eagle3Head
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.serve.memory import free_memory
from eagle_kit.speculation.propose.draft_model import HeadDraftModel


class Preset(NamedTuple):
    """A target's shape, and the draft vocabulary of its head."""

    target: TargetConfig
    draft_vocab_size: int


_LLAMA = TargetConfig(
    model_type="llama",
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling={
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    max_position_embeddings=131072,
    tie_word_embeddings=False,
)
_SMOLLM = replace(
    _LLAMA,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    rope_theta=100000.0,
    rope_scaling=None,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
_TINY = replace(
    _SMOLLM,
    hidden_size=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=512,
    max_position_embeddings=4096,
)
_QWEN3_MOE = replace(
    _LLAMA,
    model_type="qwen3_moe",
    hidden_size=2048,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    intermediate_size=6144,
    vocab_size=151936,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    rope_scaling=None,
    max_position_embeddings=40960,
    qk_norm=True,
    moe=MoEConfig(128, 8, 768, normalises=True),
)
PRESETS = {
    "llama-3.1-8b": Preset(_LLAMA, 32000),
    "qwen3-30b-a3b": Preset(_QWEN3_MOE, 32000),
    "smollm2-135m": Preset(_SMOLLM, 8192),
    "tiny": Preset(_TINY, 128),
}


def preset_named(name: str) -> tuple[TargetConfig, int]:
    """Target and draft vocabulary. Raises UserError for what is not known."""
    if name not in PRESETS:
        raise UserError(f"There are no shapes of {name!r}.", f"Choose of {', '.join(PRESETS)}.")
    return PRESETS[name]


def check_room(config: TargetConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raises UserError when the target's weights alone do not fit into the free memory."""
    with torch.device("meta"):
        needed = dtype.itemsize * sum(p.numel() for p in LlamaModel(config).parameters())
    free = free_memory(device)
    if needed > 0.8 * free:
        raise UserError(
            f"The weights take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free.",
            "Choose a smaller --model, such as tiny.",
        )


def make_models(
    config: TargetConfig, draft_vocab_size: int, device: torch.device, dtype: torch.dtype, seed: int
) -> tuple[LlamaModel, HeadDraftModel]:
    """A random target and a random EAGLE-3 head of its shape, with a random hot-token map."""
    torch.manual_seed(seed)
    with torch.device(device), _default(dtype), torch.no_grad():
        target = LlamaModel(config)
        head = Eagle3Head(DraftConfig.for_target(config, draft_vocab_size))
        for model in (target, head):
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        hot = torch.randperm(config.vocab_size)[:draft_vocab_size].sort().values
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        t2d[hot] = True
        head.set_vocab_map(hot - torch.arange(draft_vocab_size), t2d)
    for model in (target, head):
        model.eval().requires_grad_(False)
    return target, HeadDraftModel(head, target)


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def as_transformers(config: TargetConfig) -> Any:
    """The same shape as a config of transformers, of Llama's architecture or Qwen3's mixture."""
    from transformers import LlamaConfig, Qwen3MoeConfig

    mixture: dict[str, Any] = {}
    kind: Any = LlamaConfig
    if config.moe is not None:
        kind, mixture = (
            Qwen3MoeConfig,
            {
                "num_experts": config.moe.num_experts,
                "num_experts_per_tok": config.moe.num_experts_per_token,
                "moe_intermediate_size": config.moe.intermediate_size,
                "norm_topk_prob": config.moe.normalises,
            },
        )
    scaling = config.rope_scaling or {"rope_type": "default"}
    return kind(
        **mixture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={**scaling, "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=None,
    )
