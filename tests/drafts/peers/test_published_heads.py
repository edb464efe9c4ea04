"""Heads of EAGLE, SpecForge, speculators, NeMo, ModelOpt, z-lab and DeepSeek, by the files that they publish.

Sizes are the published ones; weights are zeros that take no room (``peer_files.py``). Each head is
recognised, fits its target, is read into our head, and goes back with the names, shapes and dtypes that it
came with.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peer_files import PeerHead, header_of, peer_names, read_peer, write_peer

from eagle_kit.drafts.base.kind import HeadKind
from eagle_kit.drafts.files.convert import read_draft, write_draft_as
from eagle_kit.drafts.files.draft import DraftFolder
from eagle_kit.drafts.files.draft_files import DraftFiles
from eagle_kit.drafts.files.formats import Served
from eagle_kit.models.loading.known_targets import known_target

LARGE = "deepseek-v3-mtp"
"""The fixture of 1,575 tensors, whose reading opens its file for each of them (20 CPU s)."""


def each_head() -> list:
    """One parameter for every fixture."""
    heads = []
    for name in peer_names():
        marks = [pytest.mark.nightly] if name == LARGE else []
        heads.append(pytest.param(name, marks=marks))
    return heads


def target_of(head: PeerHead):
    """The architecture of its target; None where it is not known here."""
    return None if head.target is None else known_target(head.target).architecture


def without_weights(files: DraftFiles) -> DraftFiles:
    """``files`` with floating tensors on the meta device: a head of 70 B's size is then read in no memory."""
    tensors = {
        name: tensor.to("meta") if tensor.is_floating_point() else tensor
        for name, tensor in files.tensors.items()
    }
    return replace(files, tensors=tensors)


BROUGHT = ("embed_tokens.weight", "lm_head.weight", "shared_head.head.weight", "d2t", "t2d")
"""Ends of names of tensors that are the target's, or that a head keeps as a buffer."""
FOLDED = ("mask_hidden", "mask_embedding", "weight_scale_inv")
"""Ends of names of tensors that become others: a mask in front of ``fc``, and scales."""


def num_weights(tensors) -> list[tuple[str, int]]:
    """Names and sizes of a head's own weights."""
    return [(name, tensor.numel()) for name, tensor in tensors if not name.endswith((*BROUGHT, *FOLDED))]


def load(kind: HeadKind, files: DraftFiles):
    """Our head, without weights."""
    return kind.read(without_weights(files), dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("name", each_head())
def test_a_published_head_is_read_and_goes_back_as_it_came(tmp_path: Path, name: str):
    peer = read_peer(name)
    folder = write_peer(peer, tmp_path / name)
    target = target_of(peer)

    # Recognised by config and names alone.
    draft = DraftFolder.open(folder)
    files = draft.files
    seen = draft.layout
    assert seen.kind.name == peer.kind
    assert seen.format in (peer.format, None)

    # In our layout, every tensor accounted for.
    ours = read_draft(files, seen, format=peer.format, target=target)
    if target is not None:
        config = seen.kind.read_config(ours, target)
        errors = [found for found in seen.kind.check(ours, config, target) if found.level == "error"]
        assert errors == []

    # Into our head: as many weights as the file has, without maps, scales and the target's own matrices.
    head = load(seen.kind, ours)
    own = sum(count for name, count in num_weights(head.named_parameters()))
    assert own == sum(count for name, count in num_weights(files.tensors.items()))

    # Back, with names, shapes and dtypes as they came.
    back = write_draft_as(ours, seen.kind, peer.format, Served(target))
    assert back.config == peer.config
    assert header_of(dict(back.tensors)) == peer.header


@pytest.mark.parametrize("name", peer_names())
def test_a_fixture_says_where_it_comes_from(name: str):
    provenance = read_peer(name).provenance
    assert provenance.keys() >= {"project", "files", "head", "copied", "reconstructed"}
    assert "commit" in provenance or "version" in provenance


def test_every_project_is_there():
    makers = {name.partition("-")[0] for name in peer_names()}
    assert makers >= {"eagle", "specforge", "speculators", "nemo", "modelopt", "z", "deepseek"}
