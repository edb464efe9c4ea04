"""Everything a run is made of, put together in the order that refuses mistakes earliest."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eagle_kit.checkpoints.validate import template_hash
from eagle_kit.config.train import HeadConfig, TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.data.dataset import PreparedData, cache_root, prepare_dataset
from eagle_kit.models.config import DraftConfig, TargetConfig
from eagle_kit.models.eagle3 import Eagle3Head
from eagle_kit.models.llama import LlamaModel
from eagle_kit.models.loader import load_target
from eagle_kit.models.source import load_tokenizer, resolve_target
from eagle_kit.train.cache import StateStore, target_fingerprint

if TYPE_CHECKING:
    from accelerate import Accelerator


FIRST_NORM = 0.1
"""Share of the target's final norm that a head with the target's output layer starts with."""


@dataclass
class Ingredients:
    """What training needs besides the head.

    Attributes:
        target: frozen, in the run's precision, on the process's device.
        folder: where it was loaded from.
        tokenizer: the target's.
        data: packed rows, vocabulary map, held-out prompts.
    """

    target: LlamaModel
    folder: Path
    tokenizer: Any
    data: PreparedData


def gather(config: TrainConfig, accelerator: "Accelerator") -> Ingredients:
    """Resolve and load the target, prepare the data. The main process goes first and fills the caches."""
    with accelerator.local_main_process_first():
        folder = resolve_target(config.target)
        tokenizer = load_tokenizer(folder)
        data = prepare_dataset(
            config.data,
            tokenizer,
            config.head.draft_vocab_size,
            config.head.vocab_map,
            progress=accelerator.is_local_main_process,
        )
    dtype = torch.bfloat16 if config.training.precision == "bfloat16" else torch.float32
    target = load_target(folder, dtype=dtype, device=str(accelerator.device))
    return Ingredients(target, folder, tokenizer, data)


def draft_config(config: HeadConfig, target: TargetConfig, *, name: str, tokenizer: Any) -> DraftConfig:
    """The head's architecture. Raises UserError when the captured layers do not exist."""
    overrides: dict[str, Any] = {"fc_norm": config.fc_norm, "norm_output": config.norm_output}
    if config.intermediate_size is not None:
        overrides["intermediate_size"] = config.intermediate_size
    if config.aux_layer_ids is not None:
        if not config.aux_layer_ids or not all(0 <= i <= target.num_layers for i in config.aux_layer_ids):
            raise UserError(
                f"head.aux_layer_ids is {list(config.aux_layer_ids)}, but the target has layers 0 to "
                f"{target.num_layers - 1}.",
                f"Name inputs of layers, for example {list(target.default_aux_layer_ids)}.",
            )
        overrides["aux_layer_ids"] = config.aux_layer_ids
    if config.draft_vocab_size > target.vocab_size:
        raise UserError(
            f"head.draft_vocab_size is {config.draft_vocab_size}, but the target has {target.vocab_size}.",
            "Lower it.",
        )
    sized = DraftConfig.for_target(target, config.draft_vocab_size, **overrides)
    return replace(sized, target=name, template_hash=template_hash(tokenizer))


def new_head(
    config: TrainConfig, draft: DraftConfig, ingredients: Ingredients, device: torch.device
) -> Eagle3Head:
    """A head with seeded weights, in fp32; with ``lm_head_init: target`` its output layer is the target's.

    The final norm then starts at a tenth of the target's: a new layer says nothing yet, and at full size its
    first logits would be confidently wrong (loss 15 where guessing evenly costs 9).
    """
    torch.manual_seed(config.seed)
    head = Eagle3Head(draft)
    vocab = ingredients.data.vocab_map
    # A target may have more rows than its tokenizer has tokens.
    in_draft = torch.zeros(draft.vocab_size, dtype=torch.bool)
    in_draft[: len(vocab.t2d)] = torch.as_tensor(vocab.t2d)
    head.set_vocab_map(torch.as_tensor(vocab.d2t), in_draft)
    head.to(device=device, dtype=torch.float32)
    if config.head.lm_head_init == "target":
        target = ingredients.target
        with torch.no_grad():
            head.lm_head.weight.copy_(target.head_weight[head.target_ids])
            head.norm.weight.copy_(target.norm.weight * FIRST_NORM)
    return head


def state_store(config: TrainConfig, ingredients: Ingredients, draft: DraftConfig) -> StateStore | None:
    """The store of captured states, when the config asks for one."""
    if config.training.cache_hidden_states == "off":
        return None
    identity = {
        "target": target_fingerprint(ingredients.folder),
        "data": ingredients.data.fingerprint,
        "layer_ids": list(draft.aux_layer_ids),
        "layer_ids_are": "inputs of layers",
        "precision": config.training.precision,
        "ttt_length": config.training.ttt_length,
    }
    return StateStore(cache_root(config.data) / "states", identity)
