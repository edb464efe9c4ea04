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
"""Names of keys in the trainings of transformers, SpecForge and speculators -> our names."""


def known_keys(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted keys of all fields of ``schema``, of sections and the fields inside them, each once."""
    keys: dict[str, None] = {}
    for name, field in schema.model_fields.items():
        keys[f"{prefix}{name}"] = None
        for section in sections_of(field.annotation):
            keys |= dict.fromkeys(known_keys(section, f"{prefix}{name}."))
    return list(keys)


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Schemas in an annotation, such as ``Section | None`` or ``tuple[Section, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    sections: list[type[BaseModel]] = []
    for part in get_args(annotation):
        sections += sections_of(part)
    return sections


def nearest_key(key: str, known: list[str]) -> str | None:
    """The known key that is probably meant; None if no key is near.

    It is the key of which ``key`` is another training's name, the key of the same name in another section, or
    the key of the closest spelling, in its own section first.
    """
    section, _, leaf = key.rpartition(".")
    leaves: dict[str, str] = {}  # first key by its last part
    for candidate in known:
        leaves.setdefault(candidate.rpartition(".")[2], candidate)

    # Another training's name, or another section.
    for same in (SYNONYMS.get(leaf), leaf):
        if same in leaves:
            return leaves[same]

    # Another spelling.
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    for choices in (siblings, leaves):
        close = difflib.get_close_matches(leaf, choices, n=1, cutoff=0.6)
        if close:
            return choices[close[0]]
    return None
