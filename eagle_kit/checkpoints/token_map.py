"""Hot-token maps of FR-Spec (arXiv 2502.14856): the target ids that a draft may propose.

Published maps (``freq_*.pt``, SGLang's ``--speculative-token-map``) are torch files that hold a list or a
tensor of ids, most frequent first. A safetensors file of one tensor or a JSON list does too.
"""

import json
from pathlib import Path
from typing import Any

import torch

from eagle_kit.core.errors import UserError

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def load_token_map(path: str | Path, vocab_size: int) -> torch.Tensor:
    """Target ids int64 ``[Vd]`` in the order of the file.

    Args:
        path: a ``.json`` or ``.safetensors`` file; anything else is read as a torch file.
        vocab_size: of the target.

    Raises:
        UserError: a file that cannot be read or holds something else, an id that the target does not have, or
            the same id twice.
    """
    path = Path(path)
    ids = _read(path)
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


def _read(path: Path) -> Any:
    """Whatever the file holds; of a safetensors file its only tensor."""
    if path.exists() and not path.is_file():
        raise UserError(
            f"The token map {path} cannot be read: it is not a file.",
            "Give a .pt, .safetensors or .json file.",
        )
    try:
        match path.suffix.lower():
            case ".json":
                return json.loads(path.read_text(encoding="utf-8"))
            case ".safetensors":
                from safetensors.torch import load_file

                tensors = list(load_file(path).values())
                return tensors[0] if len(tensors) == 1 else None
            case _:
                return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(
            f"The token map {path} does not exist.", "Give the path of a .pt, .safetensors or .json file."
        ) from None
    except Exception as error:  # unpickling raises whatever the broken bytes make it raise
        raise UserError(f"The token map {path} cannot be read.", "Copy or download it again.") from error
