"""Everything a run is made of, put together in the order that refuses mistakes earliest."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eagle_kit.config.train import TrainConfig
from eagle_kit.data.dataset import PreparedData, cache_root, prepare_dataset
from eagle_kit.models.llama import LlamaModel
from eagle_kit.models.loader import load_target
from eagle_kit.models.source import load_tokenizer, resolve_target
from eagle_kit.train.cache import StateStore, target_fingerprint
from eagle_kit.train.placement import loading_device
from eagle_kit.train.sizes import HeadArchitecture

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass
class Ingredients:
    """What training needs besides the head.

    Attributes:
        target: frozen, in the run's precision, where ``training.target_placement`` loads it.
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
            config.head.vocab_size,
            config.head.vocab_map,
            progress=accelerator.is_local_main_process,
        )
    dtype = torch.bfloat16 if config.training.precision == "bfloat16" else torch.float32
    device = loading_device(config.training.target_placement, accelerator)
    target = load_target(folder, dtype=dtype, device=str(device))
    return Ingredients(target, folder, tokenizer, data)


def state_store(config: TrainConfig, ingredients: Ingredients, draft: HeadArchitecture) -> StateStore | None:
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
