"""Save and load a draft: a folder with ``config.json``, ``model.safetensors`` and ``eagle_kit.json``."""

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eagle_kit.checkpoints import mtp
from eagle_kit.checkpoints.kind import algorithm_of
from eagle_kit.checkpoints.layout import (
    canonical_tensors,
    config_from_dict,
    config_to_dict,
    fuse,
    published_shapes,
    refuse_other_parts,
    to_published,
)
from eagle_kit.checkpoints.vocab import complete_map, map_fingerprint
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import ANOTHER_FOLDER, check_disk_space, replacing
from eagle_kit.models.config import DraftConfig, TargetConfig
from eagle_kit.models.heads.draft_head import DraftHead
from eagle_kit.models.heads.eagle1 import Eagle1Head
from eagle_kit.models.heads.eagle3 import Eagle3Head
from eagle_kit.models.heads.mtp import MTPHead
from eagle_kit.models.loading.loader import check_tensors, read_json, read_safetensors
from eagle_kit.models.targets.llama import LlamaModel

CONFIG, WEIGHTS, METADATA, CARD = "config.json", "model.safetensors", "eagle_kit.json", "README.md"
OLD_WEIGHTS = "pytorch_model.bin"
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


def save_draft(
    head: DraftHead,
    folder: str | Path,
    *,
    metadata: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    card: str | None = None,
) -> None:
    """Write a servable draft: beside the folder first, then renamed to it.

    Args:
        head: on any device; it is not changed.
        folder: new, empty, or holding an older draft, which is replaced whole.
        metadata: goes into ``eagle_kit.json``: data, tokens seen, seconds, command, accept lengths.
        dtype: of the weights on disk; bf16 for export, fp32 to train on.
        card: text of ``README.md``.

    Raises:
        UserError: the folder holds something else, or the disk is full; what was there before stays as it
            was.
    """
    tensors, config = _published(head, dtype)
    kind = str(dtype).removeprefix("torch.")
    write_draft(folder, tensors, config | {"dtype": kind, "torch_dtype": kind}, metadata=metadata, card=card)


def write_draft(
    folder: str | Path,
    tensors: dict[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    metadata: Mapping[str, Any],
    card: str | None = None,
) -> None:
    """Write the files of a draft, as :func:`save_draft` does, whatever their layout is.

    Args:
        tensors: by the names they have in the file; none shares memory with another.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = Path(os.path.abspath(folder))
    _check_replaceable(folder)
    texts = {
        CONFIG: json.dumps(dict(config), indent=2) + "\n",
        METADATA: json.dumps(dict(metadata), indent=2) + "\n",
    }
    if card is not None:
        texts[CARD] = card
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        need = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) + (1 << 20)
        check_disk_space(folder.parent, need)
        with replacing(folder) as partial:
            partial.mkdir()
            save_file(tensors, str(partial / WEIGHTS), metadata={"format": "pt"})
            (partial / WEIGHTS).chmod(0o644)
            for name, text in texts.items():
                (partial / name).write_text(text, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise UserError(f"The draft could not be written to {folder} ({error}).", ANOTHER_FOLDER) from error


def _published(head: DraftHead, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and config of a head in its published layout."""
    if isinstance(head, MTPHead):
        return mtp.to_published(head, dtype), mtp.config_to_dict(head.config)
    if isinstance(head, Eagle1Head):
        from eagle_kit.checkpoints import eagle1

        return eagle1.to_published(head, dtype), eagle1.config_to_dict(head.config)
    assert isinstance(head, Eagle3Head)
    config = config_to_dict(head.config)
    config["eagle_kit"] |= {"vocab_map": map_fingerprint(head.d2t)}
    return to_published(head, dtype), config


def _check_replaceable(folder: Path) -> None:
    """Refuse to replace a folder that is more than a draft."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file.", "Choose a folder for the draft.")
    found = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if others := sorted(found - {CONFIG, WEIGHTS, METADATA, CARD}):
        raise UserError(
            f"The folder {folder} holds other things than a draft ({', '.join(others[:4])}).",
            "Choose a new or empty folder.",
        )


def read_draft_config(folder: str | Path, target: TargetConfig | None = None) -> DraftConfig:
    """The architecture of a draft folder; ``target`` completes what old configs leave out (layer ids).

    Raises:
        UserError: it is missing, or not an EAGLE-3 head's.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"The draft folder {folder} does not exist.", "Give a folder with config.json and weights."
        )
    return config_from_dict(read_json(folder / CONFIG), str(folder), target)


def read_metadata(folder: str | Path) -> dict[str, Any]:
    """``eagle_kit.json`` of a draft; empty for drafts of other trainers."""
    path = Path(folder) / METADATA
    return read_json(path) if path.is_file() else {}


def read_state(folder: str | Path, config: DraftConfig) -> dict[str, torch.Tensor]:
    """The state dict of a draft folder by our names, every tensor checked, in the dtypes of the file.

    ``lm_head.weight`` may be absent when the config names no draft vocabulary: the target's is meant.

    Raises:
        UserError: a corrupt file; missing, unexpected or misshapen tensors by name; an impossible vocabulary
            map.
    """
    folder = Path(folder)
    raw = read_json(folder / CONFIG)
    refuse_other_parts(raw, published := read_draft_tensors(folder), str(folder))
    tensors = canonical_tensors(published, str(folder))
    d2t, t2d = complete_map(tensors.pop("d2t", None), tensors.pop("t2d", None), config, str(folder))
    fingerprint = (raw.get("eagle_kit") or {}).get("vocab_map")
    if fingerprint is not None and fingerprint != map_fingerprint(d2t):
        raise UserError(
            f"The vocabulary map of the draft in {folder} is not the one it was saved with.",
            "Use config.json and model.safetensors of one checkpoint.",
        )
    expected = published_shapes(config)
    if EMBEDDING in tensors:
        warnings.warn(
            f"The draft in {folder} brings an embedding of its own; the target's is used.", stacklevel=3
        )
        expected[EMBEDDING] = (config.vocab_size, config.hidden_size)
    if raw.get("draft_vocab_size") is None and HEAD not in tensors:
        expected.pop(HEAD)
    check_tensors(tensors, expected, str(folder))
    tensors.pop(EMBEDDING, None)
    return fuse(tensors, config) | {"d2t": d2t, "t2d": t2d}


def load_draft(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    target: LlamaModel | None = None,
) -> DraftHead:
    """Load a draft of ours or of another trainer: an EAGLE-3 or EAGLE-1 head, or MTP modules in a folder of
    their own.

    Tensors may be named ``midlayer.*`` or ``layers.0.*``; ``t2d`` may be missing and ``d2t`` unsorted;
    weights may be a ``pytorch_model.bin``.

    Args:
        dtype: of the weights in memory; RoPE frequencies stay fp32.
        target: needed only by drafts that name no layer ids, or have no ``lm_head`` because they share the
            target's. MTP modules and EAGLE-1 heads are bound to it.

    Raises:
        UserError: a corrupt file; missing, unexpected or misshapen tensors by name; an impossible vocabulary
            map.
    """
    folder = Path(folder)
    if folder.is_dir() and mtp.is_mtp_config(read_json(folder / CONFIG)):
        return mtp.load_mtp(folder, dtype, device, target=target)
    names = read_json(folder / CONFIG).get("architectures") if folder.is_dir() else None
    if names and algorithm_of(folder) == "EAGLE":
        from eagle_kit.checkpoints.eagle1 import load_eagle1

        return load_eagle1(folder, target).train().requires_grad_(True).to(device=device, dtype=dtype)
    config = read_draft_config(folder, None if target is None else target.config)
    state = read_state(folder, config)
    if HEAD not in state:
        if target is None:
            raise UserError(
                f"The draft in {folder} has no lm_head because it shares its target's.",
                "Load it together with its target.",
            )
        check_tensors(
            {HEAD: target.head_weight}, {HEAD: (config.vocab_size, config.hidden_size)}, "the target"
        )
        state[HEAD] = target.head_weight.detach()
    head = Eagle3Head(config)
    head.load_state_dict(state)
    return head.to(device=device, dtype=dtype)


def read_draft_tensors(folder: Path) -> dict[str, torch.Tensor]:
    old = folder / OLD_WEIGHTS
    if (folder / WEIGHTS).is_file() or not old.is_file():
        return read_safetensors(folder / WEIGHTS)
    try:
        tensors = torch.load(old, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling raises whatever the broken bytes make it raise
        raise UserError(f"The file {old} is corrupt or truncated.", "Copy or download it again.") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(tensor, torch.Tensor) for tensor in tensors.values()
    ):
        raise UserError(f"The file {old} is not a table of tensors.", "Use the draft's published weights.")
    return tensors
