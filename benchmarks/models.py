"""Models of known shapes with random weights, for benchmarks: made where they run, read from nowhere."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.drafts.base.draft_model import HeadDraftModel
from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.engine.memory.engine_memory import free_memory
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.loading.known_targets import KNOWN_TARGETS
from eagle_kit.models.targets.llama import LlamaModel

TINY = TargetConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 512,
        "rope_theta": 100000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
)
PRESETS = {
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B-Instruct", 32000),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", 32000),
    "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M-Instruct", 8192),
    "tiny": ("tiny", 128),
}
"""Hub id of a target's shapes, and the draft vocabulary of its head."""


def preset_named(name: str) -> tuple[TargetConfig, int]:
    """Target and draft vocabulary. Raises UserError for what is not known."""
    if name not in PRESETS:
        raise UserError(f"There are no shapes of {name!r}.", f"Choose of {', '.join(PRESETS)}.")
    hub_id, draft_vocab_size = PRESETS[name]
    return TINY if name == "tiny" else KNOWN_TARGETS[hub_id].architecture, draft_vocab_size


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
    with torch.device(device), default_dtype(dtype), torch.no_grad():
        target = LlamaModel(config)
        head = Eagle3Head(Eagle3Config.for_target(config, draft_vocab_size))
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
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
