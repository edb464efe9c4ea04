"""Loading of bridged targets."""

from pathlib import Path
from typing import Any

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.models.bridge.attention import NAME, register
from eagle_kit.models.bridge.config import BridgedConfig
from eagle_kit.models.bridge.gate import check
from eagle_kit.models.bridge.model import BridgedModel


def load_bridged(
    folder: Path, config: BridgedConfig, dtype: torch.dtype, device: torch.device | str
) -> BridgedModel:
    """Load a target's weights and check that its forward is transformers' own.

    Raises:
        UserError: weights that are missing or do not fit, or a model whose forward differs.
    """
    from transformers import AutoModelForCausalLM

    register()
    try:
        model, about = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype,
            attn_implementation=NAME,
            use_safetensors=True,
            output_loading_info=True,
            local_files_only=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"The weights in {folder} cannot be loaded ({reason[0]}).",
            "Copy or download the model again.",
        ) from error
    missing = [*about["missing_keys"], *(str(each) for each in about.get("mismatched_keys", ()))]
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise UserError(
            f"The weights in {folder} do not fit their config: {shown} are missing or have other shapes.",
            "Use a complete, matching checkpoint.",
        )
    return bridge(model.to(device), config)


def bridge(model: Any, config: BridgedConfig) -> BridgedModel:
    """Make a target of a causal language model that was loaded with our attention.

    Raises:
        UserError: its forward differs from its own over single texts.
    """
    target = BridgedModel(config, model)
    target.eval().requires_grad_(False)
    target.learn()
    check(target)
    return target
