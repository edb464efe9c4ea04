"""Hot-token maps of FR-Spec (arXiv 2502.14856): the target ids that a draft may propose.

Published maps (``freq_*.pt``, SGLang's ``--speculative-token-map``) are torch files that hold a list or a
tensor of ids, most frequent first. A safetensors file of one tensor, a JSON list and the ``.npz`` file of
``eagle-kit data vocab`` are read too.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import expand
from eagle_kit.data.chat.vocab_map import read_vocab_map, tokenizer_hash
from eagle_kit.models.loading.source import hub_error, load_tokenizer, resolve_target, split_revision

HUB_PATH = re.compile(r"([\w-][\w.-]*/[\w.-]+(?:@[\w.-]+)?)/([^\0]+)")
"""A repository, perhaps with a revision, and a file in it."""
GIVE_A_FILE = (
    "Give a .pt, .safetensors, .json or .npz file, or a hub path such as org/repository/freq_32768.pt."
)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def load_token_map(path: str | Path, vocab_size: int, target_name: str | Path | None = None) -> torch.Tensor:
    """Target ids int64 ``[Vd]`` in the order of the file.

    Args:
        path: a ``.json``, ``.safetensors`` or ``.npz`` file; anything else is read as a torch file. Where no
            such file is here, a path such as ``org/repository/freq_32768.pt`` is one file of the hub.
        vocab_size: of the target.
        target_name: folder or name of the target. A ``.npz`` file must be of its tokenizer; None does not
            compare.

    Raises:
        UserError: a file that cannot be fetched or read or holds something else, a map of another tokenizer,
            an id that the target does not have, or the same id twice.
    """
    path = _resolve(path)
    ids = _read(path, target_name)
    if isinstance(ids, torch.Tensor):
        _check_tensor(ids, path, vocab_size)
        ids = ids.tolist()
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise UserError(f"The token map {path} is not a list of token ids.", "Give a list of whole numbers.")
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise UserError(
            f"The token map {path} has the id {outside}, and the target's are 0 to {vocab_size - 1}.",
            "Use the map that was made for this target.",
        )
    seen: set[int] = set()
    for token in ids:
        if token in seen:
            raise UserError(f"The token map {path} has the id {token} twice.", "Leave each id in once.")
        seen.add(token)
    return torch.tensor(ids, dtype=torch.int64)


def _check_tensor(ids: torch.Tensor, path: Path, vocab_size: int) -> None:
    """Raise UserError before a tensor becomes a list that is larger than its file, or cannot become one."""
    is_list = ids.layout is torch.strided and ids.device.type == "cpu" and ids.dim() == 1
    if not is_list or ids.dtype not in INTEGERS:
        raise UserError(f"The token map {path} is not a list of token ids.", "Give a list of whole numbers.")
    if len(ids) > vocab_size:
        raise UserError(
            f"The token map {path} has {len(ids)} ids, and the target has {vocab_size}.",
            "Use the map that was made for this target.",
        )


def _resolve(path: str | Path) -> Path:
    """The local file; a file of the hub is downloaded alone, once."""
    local = expand(path)
    hub_path = HUB_PATH.fullmatch(str(path))
    if local.exists() or hub_path is None:
        return local

    from huggingface_hub import hf_hub_download

    name, file = hub_path.groups()
    repository, revision = split_revision(name)
    try:
        return Path(hf_hub_download(repository, file, revision=revision))
    except Exception as error:  # network, access and naming errors of many kinds
        failure = f"The token map {path} does not exist here, and could not be fetched"
        raise hub_error(error, name, failure) from error


def _read(path: Path, target_name: str | Path | None) -> Any:
    """Whatever the file holds; of a safetensors file its only tensor."""
    if path.exists() and not path.is_file():
        raise UserError(f"The token map {path} cannot be read: it is not a file.", GIVE_A_FILE)
    try:
        match path.suffix.lower():
            case ".json":
                return json.loads(path.read_text(encoding="utf-8"))
            case ".safetensors":
                from safetensors.torch import load_file

                tensors = list(load_file(path).values())
                return tensors[0] if len(tensors) == 1 else None
            case ".npz":
                found = read_vocab_map(path)
                ids = torch.from_numpy(np.flatnonzero(found.t2d))
                tokenizer = found.tokenizer
            case _:
                return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"The token map {path} does not exist.", GIVE_A_FILE) from None
    except Exception as error:  # unpickling raises whatever the broken bytes make it raise
        raise UserError(f"The token map {path} cannot be read.", "Copy or download it again.") from error

    # Ids of another tokenizer are other words, and would only be seen in the acceptance.
    if target_name is not None and tokenizer != tokenizer_hash(load_tokenizer(resolve_target(target_name))):
        raise UserError(
            f"The token map {path} was made for another tokenizer than the target's.",
            "Make one for this target with eagle-kit data vocab CONFIG --out FILE.",
        )
    return ids
