"""Set-up of a training run: target, tokenizer, packed data and captured hidden states.

The parts are loaded in the order in which mistakes of the user are found earliest.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import expand
from eagle_kit.data.chat.dataset import PreparedData, cache_root
from eagle_kit.data.chat.template import set_chat_template, template_hash
from eagle_kit.data.chat.vocab_map import tokenizer_hash
from eagle_kit.data.hidden_states import manifest as state_manifest
from eagle_kit.data.hidden_states.store import StateStore
from eagle_kit.data.packed_data import check_sources, load_packed_data
from eagle_kit.drafts.base.initial_weights import check_vocab_size
from eagle_kit.drafts.registry import training_kind
from eagle_kit.models.bridge.config import BridgedConfig
from eagle_kit.models.config import HeadArchitecture
from eagle_kit.models.loading.loader import load_target, read_target_config, target_fingerprint
from eagle_kit.models.loading.source import (
    load_tokenizer,
    resolve_target,
    target_revision,
)
from eagle_kit.models.loading.target_folders import remember_folder
from eagle_kit.models.targets.target import Target
from eagle_kit.train.parallel.placement import between_whole_ends, check_shared, load_cut, load_placed

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState


@dataclass
class TrainingComponents:
    """Parts of a training run other than the head.

    Attributes:
        target: frozen target in the run's precision, loaded as ``training.target_placement`` configures.
        folder: folder of the target's files.
        weights: hash of these files, :func:`target_fingerprint`.
        tokenizer: tokenizer of the target.
        data: packed sequences, vocabulary map and held-out prompts.
        cut: this process's tensor-parallel shard of a target that processes share, for validation, and for
            hidden states with the placement "tensor-parallel"; None if the run does not need one.
    """

    target: Target
    folder: Path
    weights: str
    tokenizer: Any
    data: PreparedData
    cut: Target | None = None

    def share_embedding(self) -> None:
        """Let ``cut`` use the whole embedding of ``target`` in place of its shard."""
        if self.cut is not None and not self.cut.has_whole_embedding:
            self.cut.take_embedding(self.target.embed_tokens)


def load_components(
    config: TrainConfig, accelerator: "Accelerator | PartialState", *, with_layers: bool | None = None
) -> TrainingComponents:
    """Load the target and the tokenizer, and prepare the data. All processes call it together.

    The main process of each node goes first and fills the caches.

    Args:
        with_layers: load the whole target, not only its embedding and output layer; None loads it if the run
            computes hidden states.

    Raises:
        UserError: target, data and settings do not fit together.
    """
    # Target files, tokenizer and packed data.
    with accelerator.local_main_process_first():
        check_sources(config.data)
        folder = resolve_target(config.target)
        weights = target_fingerprint(folder)
        if accelerator.is_local_main_process:
            remember_folder(weights, folder)
        tokenizer = load_tokenizer(folder)
        set_chat_template(tokenizer, config.data.chat_template)
        data = load_packed_data(
            config.data,
            tokenizer,
            config.head.num_counted_tokens,
            config.head.vocab_map_file,
            progress=accelerator.is_local_main_process,
        )

    # Sizes of the target.
    architecture = read_target_config(folder)
    if config.head.num_counted_tokens is not None:
        check_vocab_size(config.head.num_counted_tokens, architecture)
    data.check_rows(architecture.vocab_size)
    max_context = architecture.max_position_embeddings
    if isinstance(architecture, BridgedConfig) and config.data.max_length > max_context:
        raise UserError(
            f"data.max_length is {config.data.max_length}, and the target's context ends at "
            f"{max_context} here.",
            "Lower data.max_length.",
        )

    # How the target is placed.
    placement = config.training.target_placement
    runs_target = with_layers
    if runs_target is None:
        runs_target = training_kind(config).runs_target(config)
    if runs_target and config.training.shares_target:
        check_shared(placement, accelerator)
    dtype = torch.bfloat16 if config.training.precision == "bfloat16" else torch.float32

    # A tensor-parallel target: the shard, with whole embedding and output layer.
    if runs_target and placement == "tensor-parallel":
        cut = load_cut(
            folder, accelerator, dtype, "Set training.target_placement=fsdp and validation.every=0."
        )
        target = between_whole_ends(cut, folder)
        return TrainingComponents(target, folder, weights, tokenizer, data, cut)

    # Embedding and output layer alone.
    if not runs_target:
        target = load_target(folder, dtype=dtype, device=accelerator.device, with_layers=False)
        return TrainingComponents(target, folder, weights, tokenizer, data)

    # A target of one process, or one that FSDP shards; validation decodes that one by tensor parallelism.
    validates = config.validation.every > 0
    target = load_placed(folder, placement, accelerator, dtype, validates=validates)
    validation_cut = None
    if placement == "fsdp" and validates:
        validation_cut = load_cut(folder, accelerator, dtype, "Set validation.every=0.")
    return TrainingComponents(target, folder, weights, tokenizer, data, validation_cut)


def state_store(
    config: TrainConfig, components: TrainingComponents, draft: HeadArchitecture
) -> StateStore | None:
    """Open the store of captured hidden states.

    Returns:
        The store of ``data.store``, or of the cache with ``training.cache_hidden_states=disk``, else None.

    Raises:
        UserError: the store is damaged, lacks rows, or differs from the run in a field, which is named.
    """
    # A store of the user.
    training = config.training
    manifest = states_manifest(config, components, draft)
    if config.data.store is not None:
        return _given_store(config, manifest)

    # The cache, or none.
    if training.cache_hidden_states == "off":
        if training.state_format != "computed":
            raise UserError(
                f"training.state_format is {training.state_format}, but no states are kept.",
                "Set training.cache_hidden_states=disk or data.store, or leave the format out.",
            )
        return None
    folder = cache_root(config.data) / "states" / state_manifest.key(manifest)
    return StateStore(folder, manifest, components.data.folder)


def states_manifest(
    config: TrainConfig, components: TrainingComponents, draft: HeadArchitecture, **made: Any
) -> dict[str, Any]:
    """Manifest of hidden states captured over this run's rows.

    Args:
        draft: architecture of the head, for the captured layers.
        made: origin of the store, such as its command.
    """
    data = components.data
    settings = config.data
    last_hidden_state = "after the final norm"
    if components.target.logit_form.scale != 1.0:
        last_hidden_state += ", without the factor of logits"
    return {
        "version": state_manifest.VERSION,
        "target": {
            "name": config.target,
            "revision": target_revision(components.folder),
            "weights": components.weights,
        },
        "tokenizer": tokenizer_hash(components.tokenizer),
        "template": template_hash(components.tokenizer),
        "layer_ids": list(draft.aux_layer_ids),
        "layer_ids_are": "inputs of layers",
        "last_hidden_state": last_hidden_state,
        "precision": config.training.precision,
        "format": config.training.state_format,
        "hidden_size": components.target.config.hidden_size,
        "data": {
            "fingerprint": data.fingerprint,
            "source": settings.origin,
            "limit": settings.limit,
            "max_length": settings.max_length,
            "eval_conversations": settings.eval_conversations,
            **settings.template_settings,
            "rows": len(data),
            "tokens": data.num_tokens,
            "supervised_tokens": data.num_supervised_tokens,
        },
        "made": made,
    }


def _given_store(config: TrainConfig, manifest: dict[str, Any]) -> StateStore:
    """Open the store of ``data.store``. Raises UserError if it does not fit ``manifest`` or is incomplete."""
    # The store may have more layers than the run, and any format that the config does not set.
    folder = expand(str(config.data.store))
    expected = state_manifest.identity(manifest)
    layer_ids = expected.pop("layer_ids")
    if "state_format" not in config.training.model_fields_set:
        del expected["format"]
    found = state_manifest.need_manifest(folder)
    remedy = "Change the config, or capture for it."
    state_manifest.check_fields(folder, found, expected, remedy, "for this run")

    # All rows must be there.
    store = StateStore(folder, layer_ids=layer_ids)
    missing = store.missing()
    if missing:
        command = store.manifest.get("made", {}).get("command")
        raise UserError(
            f"The store {store.folder} lacks {len(missing)} of {store.manifest['data']['rows']} rows.",
            f"Finish it: {command or 'run its eagle-kit data capture command again'}",
        )
    return store
