"""The packed rows of a run, from conversations or from a store of captured states that carries them."""

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
    """Raise UserError where a file, package or preset of the sources is missing; a store needs none."""
    if settings.store is None:
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
    """The packed rows of ``settings.store``, or of ``settings.source`` without one.

    Raises:
        UserError: a store that is none, is of another tokenizer, chat template or data than is set, or has
            damaged rows; or what :func:`eagle_kit.data.chat.dataset.prepare_dataset` raises.
    """
    if settings.store is None:
        return prepare_dataset(settings, tokenizer, draft_vocab_size, vocab_map, progress=progress)
    folder = expand(settings.store)
    manifest = need_manifest(folder)
    remedy = "Restore the setting, or capture anew with eagle-kit data capture."
    check_fields(
        folder,
        manifest,
        {"tokenizer": tokenizer_hash(tokenizer), "template": template_hash(tokenizer)},
        "Name the target that the store was captured from.",
        "of this target",
    )
    wanted = {f"data.{name}": value for name, value in settings.explicit.items()}
    check_fields(folder, manifest, wanted, remedy, "in this config")
    check_data_files(folder, manifest, whole=True)
    if not (folder / DATA / "summary.json").is_file():
        raise UserError(f"The store {folder} lacks its packed rows.", "Copy it again.")
    fingerprint = str(field(manifest, "data.fingerprint"))
    data = load_prepared(folder / DATA, fingerprint, tokenizer, draft_vocab_size, vocab_map)
    if "decontaminate" in settings.model_fields_set:
        sets = ExcludedSets.load(settings.decontaminate)
        if set(sets.about.values()) != set(data.excluded.values()):
            now, before = (", ".join(each) or "none" for each in (sets.about, data.excluded))
            raise UserError(
                f"data.decontaminate is {now}, but the store {folder} was captured without the prompts of "
                f"{before}{', which were others then' if now == before else ''}.",
                remedy,
            )
    return data
