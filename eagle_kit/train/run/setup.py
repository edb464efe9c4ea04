"""Target, tokenizer, data and states of a run, loaded in the order that refuses mistakes earliest."""

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
from eagle_kit.models.loading.places import remember_place
from eagle_kit.models.loading.source import (
    load_tokenizer,
    resolve_target,
    target_revision,
)
from eagle_kit.models.targets.target import Target
from eagle_kit.train.parallel.placement import between_whole_ends, check_shared, load_cut, loading_device

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState


@dataclass
class TrainingComponents:
    """Parts of a run besides the head.

    Attributes:
        target: frozen, in the run's precision, where ``training.target_placement`` loads it.
        folder: where it was loaded from.
        weights: hash of the files there, :func:`target_fingerprint`.
        tokenizer: the target's.
        data: packed rows, vocabulary map, held-out prompts.
        cut: this process's part of the target by tensor parallelism, for the judge of one that processes
            share; None where there is no use for it.
    """

    target: Target
    folder: Path
    weights: str
    tokenizer: Any
    data: PreparedData
    cut: Target | None = None

    def share_embedding(self) -> None:
        """Let ``cut`` read the target's embedding, which lies beside the head, in place of its part."""
        if self.cut is not None and not self.cut.has_whole_embedding:
            self.cut.take_embedding(self.target.embed_tokens)


def load_components(
    config: TrainConfig, accelerator: "Accelerator | PartialState", *, with_layers: bool | None = None
) -> TrainingComponents:
    """Resolve and load the target, prepare the data. The main process goes first and fills the caches.

    Args:
        with_layers: load the whole target; default where the run computes its states.
    """
    with accelerator.local_main_process_first():
        check_sources(config.data)
        folder = resolve_target(config.target)
        weights = target_fingerprint(folder)
        if accelerator.is_local_main_process:
            remember_place(weights, folder)
        tokenizer = load_tokenizer(folder)
        set_chat_template(tokenizer, config.data.chat_template)
        data = load_packed_data(
            config.data,
            tokenizer,
            config.head.num_counted_tokens,
            config.head.vocab_map_file,
            progress=accelerator.is_local_main_process,
        )
    architecture = read_target_config(folder)
    size = config.head.num_counted_tokens
    if size is not None:
        check_vocab_size(size, architecture)
    data.check_rows(architecture.vocab_size)
    if (
        isinstance(architecture, BridgedConfig)
        and config.data.max_length > architecture.max_position_embeddings
    ):
        raise UserError(
            f"data.max_length is {config.data.max_length}, and the target's context ends at "
            f"{architecture.max_position_embeddings} here.",
            "Lower data.max_length.",
        )
    dtype = torch.bfloat16 if config.training.precision == "bfloat16" else torch.float32
    runs = training_kind(config).runs_target(config) if with_layers is None else with_layers
    placement = config.training.target_placement
    if runs and config.training.shares_target:
        check_shared(placement, accelerator)
    if runs and placement == "tensor-parallel":
        cut = load_cut(folder, accelerator, dtype, "Set training.target_placement=fsdp and judge.every=0.")
        return TrainingComponents(between_whole_ends(cut, folder), folder, weights, tokenizer, data, cut)
    device = loading_device(placement, accelerator)
    target = load_target(folder, dtype=dtype, device=str(device), with_layers=runs)
    is_judged = runs and placement == "fsdp" and config.judge.every > 0
    judged = load_cut(folder, accelerator, dtype, "Set judge.every=0.") if is_judged else None
    return TrainingComponents(target, folder, weights, tokenizer, data, judged)


def state_store(
    config: TrainConfig, components: TrainingComponents, draft: HeadArchitecture
) -> StateStore | None:
    """The captured states that the config asks for: those of ``data.store``, or the cache's, or none.

    Raises:
        UserError: a store of other states than this run needs, with the differing field, one that is not
            whole, or damaged.
    """
    training = config.training
    manifest = states_manifest(config, components, draft)
    if config.data.store is not None:
        return _given_store(config, manifest)
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
    """The manifest of states of this run's rows. ``made``: who made them, when and how."""
    data, settings = components.data, config.data
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
        "last_hidden_state": "after the final norm"
        + ("" if components.target.logit_form.scale == 1.0 else ", without the factor of logits"),
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
    folder = expand(str(config.data.store))
    wanted = state_manifest.identity(manifest)
    layer_ids = wanted.pop("layer_ids")  # the store may have others besides
    if "state_format" not in config.training.model_fields_set:
        del wanted["format"]
    state_manifest.check_fields(
        folder,
        state_manifest.need_manifest(folder),
        wanted,
        "Change the config, or capture for it.",
        "for this run",
    )
    store = StateStore(folder, layer_ids=layer_ids)
    if missing := store.missing():
        made = store.manifest.get("made", {}).get("command")
        raise UserError(
            f"The store {store.folder} lacks {len(missing)} of {store.manifest['data']['rows']} rows.",
            f"Finish it: {made or 'run its eagle-kit data capture command again'}",
        )
    return store
