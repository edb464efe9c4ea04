"""Small random targets of every kind, of sizes that all Triton kernels take."""

from tiny import tiny_hybrid, tiny_target
from tiny_mixtures import LITE_YARN, MIXTURES, YARN, untrained, v2, v3

LATENT_SIZES = {"kv_lora_rank": 64, "qk_rope_head_dim": 16}
"""Powers of two, as those of DeepSeek's models."""
LATENTS = {
    "v2 lite": v2(q_lora_rank=None, rope_parameters=LITE_YARN, **LATENT_SIZES),
    "v3": v3(**LATENT_SIZES),
    "v3 with YaRN": v3(rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, **LATENT_SIZES),
}
TARGETS = {
    "llama": tiny_target,
    "hybrid": tiny_hybrid,
    "latents": lambda: untrained(LATENTS["v3 with YaRN"]),
    "experts": lambda: untrained(MIXTURES["qwen3-moe"]),
}
