"""Maps of FR-Spec from a file of the hub and from ``data vocab``, for every kind of draft that proposes all
tokens by itself."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import randomise
from tiny_mtp import save_target
from tiny_run import make_target

from eagle_kit.config.drafts.eagle1 import Eagle1HeadConfig
from eagle_kit.data.chat.vocab_map import VocabMap, tokenizer_hash
from eagle_kit.drafts.eagle1.head import Eagle1Head
from eagle_kit.drafts.eagle1.kind import EAGLE1
from eagle_kit.drafts.files.draft import save_draft
from eagle_kit.engine.load_draft import load_draft_model
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.source import load_tokenizer

IDS = [9, 3, 0, 7, 5]
"""Most frequent first, as published maps are."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target with a draft of each kind beside it."""
    place = tmp_path_factory.mktemp("maps")
    target = load_target(make_target(place / "target"))
    config = EAGLE1.new_config(Eagle1HeadConfig(), target.config)
    save_draft(randomise(Eagle1Head(config), 1, 0.1), place / "eagle1", metadata={})
    save_target(place / "modules")
    return place


def write_map(folder: Path, form: str, target: Path, hub) -> str:
    """A map in ``form`` -> its path."""
    folder.mkdir()
    if form == "hub":
        torch.save(IDS, folder / "freq_5.pt")
        hub.add("org/maps", folder)
        return "org/maps/freq_5.pt"
    tokenizer = ""
    if (target / "tokenizer.json").is_file():
        tokenizer = tokenizer_hash(load_tokenizer(target))
    # As data vocab writes it: ids ascending.
    kept = np.zeros(max(IDS) + 1, dtype=bool)
    kept[IDS] = True
    d2t = np.flatnonzero(kept) - np.arange(len(IDS))
    VocabMap(d2t, kept, 1.0, "data", tokenizer).save(folder / "map.npz")
    return str(folder / "map.npz")


@pytest.mark.parametrize("form", ["hub", "npz"])
@pytest.mark.parametrize(
    ("algorithm", "target", "draft"),
    [("EAGLE", "target", "eagle1"), ("STANDALONE", "target", "target"), ("NEXTN", "modules", "modules")],
)
def test_a_draft_proposes_the_ids_of_its_map(folder, tmp_path, hub, form, algorithm, target, draft):
    path = write_map(tmp_path / "map", form, folder / target, hub)
    model = load_target(folder / target)
    has_tokenizer = (folder / target / "tokenizer.json").is_file()
    name = folder / target if has_tokenizer else None
    made = load_draft_model(folder / draft, model, algorithm=algorithm, token_map=path, target_name=name)
    expected = IDS
    if form == "npz":
        expected = sorted(IDS)
    assert made.token_map.tolist() == expected and made.draft_vocab_size == len(IDS)
