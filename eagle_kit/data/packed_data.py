"""The packed sequences of a run, from conversations or from a store of captured states that holds them."""

from pathlib import Path
from typing import Any

from eagle_kit.config.train import DataConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import expand
from eagle_kit.data.chat.dataset import PreparedData, load_prepared, prepare_dataset
from eagle_kit.data.chat.records import check_source
from eagle_kit.data.chat.template import template_hash
from eagle_kit.data.chat.vocab_map import tokenizer_hash
from eagle_kit.data.hidden_states.manifest import DATA, check_data_files, check_fields, field, need_manifest
from eagle_kit.data.tasks.excluded import ExcludedSets


def check_sources(settings: DataConfig) -> None:
    """Raise UserError if a file, package or preset of the sources is missing. With a store they are not
    needed."""
    if settings.store is not None:
        return
    for source in settings.sources:
        for file in source.files:
            check_source(file)


def load_packed_data(
    settings: DataConfig,
    tokenizer: Any,
    draft_vocab_size: int | None,
    vocab_map: str | Path | None = None,
    *,
    progress: bool = True,
) -> PreparedData:
    """The packed sequences of ``settings.store``, or, without a store, of ``settings.source``.

    Raises:
        UserError: the store does not exist, is of another tokenizer, chat template or data than the settings,
            or has damaged rows; or :func:`eagle_kit.data.chat.dataset.prepare_dataset` raises.
    """
    if settings.store is None:
        return prepare_dataset(settings, tokenizer, draft_vocab_size, vocab_map, progress=progress)

    # The target and the settings must be those of the store.
    folder = expand(settings.store)
    manifest = need_manifest(folder)
    of_target = {"tokenizer": tokenizer_hash(tokenizer), "template": template_hash(tokenizer)}
    another_target = "Name the target that the store was captured from."
    check_fields(folder, manifest, of_target, another_target, "of this target")
    of_config = {f"data.{name}": value for name, value in settings.explicit.items()}
    another_setting = "Restore the setting, or capture anew with eagle-kit data capture."
    check_fields(folder, manifest, of_config, another_setting, "in this config")

    # The files must be whole.
    check_data_files(folder, manifest, whole=True)
    if not (folder / DATA / "summary.json").is_file():
        raise UserError(f"The store {folder} lacks its packed sequences.", "Copy it again.")
    fingerprint = str(field(manifest, "data.fingerprint"))
    data = load_prepared(folder / DATA, fingerprint, tokenizer, draft_vocab_size, vocab_map)

    # Evaluation sets are compared by their fingerprints.
    if "decontaminate" not in settings.model_fields_set:
        return data
    sets = ExcludedSets.load(settings.decontaminate)
    if set(sets.about.values()) != set(data.excluded.values()):
        now = ", ".join(sets.about) or "none"
        before = ", ".join(data.excluded) or "none"
        changed = ", which were others then" if now == before else ""
        raise UserError(
            f"data.decontaminate is {now}, but the store {folder} was captured without the prompts of "
            f"{before}{changed}.",
            another_setting,
        )
    return data
