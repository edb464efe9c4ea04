"""Keys of a schema, and the nearest of them to a key that it lacks."""

import difflib
from typing import Any, get_args

from pydantic import BaseModel

SYNONYMS = {
    "batch_size": "sequences_per_step",
    "data_path": "source",
    "dataset": "source",
    "eval_interval": "every",
    "gradient_accumulation_steps": "gradient_accumulation",
    "gradient_clipping": "clip_norm",
    "log_interval": "log_every",
    "logging_steps": "log_every",
    "lr": "learning_rate",
    "lr_scheduler_type": "schedule",
    "max_grad_norm": "clip_norm",
    "max_seq_length": "max_length",
    "model": "target",
    "model_name_or_path": "target",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "num_train_steps": "max_steps",
    "per_device_train_batch_size": "sequences_per_step",
    "save_interval": "save_every",
    "save_path": "output_dir",
    "save_steps": "save_every",
    "target_model": "target",
    "target_model_path": "target",
    "total_num_steps": "max_steps",
    "total_seq_len": "max_length",
    "train_batch_size": "sequences_per_step",
    "train_data_path": "source",
    "ttt_steps": "ttt_length",
    "verifier_name_or_path": "target",
}
"""Names of keys in the trainings of transformers, SpecForge and speculators, and ours."""


def known_keys(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted keys of all fields of ``schema``, of sections and the fields inside them, each once."""
    keys: dict[str, None] = {}
    for name, field in schema.model_fields.items():
        keys[f"{prefix}{name}"] = None
        for section in sections_of(field.annotation):
            keys |= dict.fromkeys(known_keys(section, f"{prefix}{name}."))
    return list(keys)


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Schemas that a value of ``annotation`` may have or hold, as of ``Section | None`` or
    ``tuple[Section, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_of(part)]


def nearest_key(key: str, known: list[str]) -> str | None:
    """The known key most likely meant: another training's name for it, the same name in another section, or
    the closest spelling.

    Spelling is compared within the key's own section first, then over the last parts of all keys.
    """
    section, _, leaf = key.rpartition(".")
    leaves: dict[str, str] = {}
    for candidate in known:
        leaves.setdefault(candidate.rpartition(".")[2], candidate)
    for same in (SYNONYMS.get(leaf), leaf):
        if same in leaves:
            return leaves[same]
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    for choices in (siblings, leaves):
        close = difflib.get_close_matches(leaf, choices, n=1, cutoff=0.6)
        if close:
            return choices[close[0]]
    return None
