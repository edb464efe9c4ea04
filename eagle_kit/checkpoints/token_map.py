"""Hot-token maps of FR-Spec (arXiv 2502.14856): the target ids that a draft may propose.

Published maps are torch files that hold a list or a tensor of ids, most frequent first; a JSON list does too.
"""

import json
from pathlib import Path
from typing import Any

import torch

from eagle_kit.core.errors import UserError


def load_token_map(path: str | Path, vocab_size: int) -> torch.Tensor:
    """Target ids int64 ``[Vd]`` in the order of the file.

    Args:
        vocab_size: of the target.

    Raises:
        UserError: a file that cannot be read or holds something else, an id that the target does not have, or
            the same id twice.
    """
    path = Path(path)
    try:
        if path.suffix == ".json":
            value: Any = json.loads(path.read_text(encoding="utf-8"))
        else:
            value = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(
            f"The token map {path} does not exist.", "Give the path of a .pt or .json file."
        ) from None
    except Exception as error:  # unpickling raises whatever the broken bytes make it raise
        raise UserError(f"The token map {path} cannot be read.", "Copy or download it again.") from error
    ids = value.tolist() if isinstance(value, torch.Tensor) else value
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise UserError(f"The token map {path} is not a list of token ids.", "Give a list of whole numbers.")
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise UserError(
            f"The token map {path} has the id {outside[0]}, and the target's end at {vocab_size - 1}.",
            "Use the map that was made for this target.",
        )
    if len(set(ids)) != len(ids):
        twice = next(token for i, token in enumerate(ids) if token in ids[:i])
        raise UserError(f"The token map {path} has the id {twice} twice.", "Leave each id in once.")
    return torch.tensor(ids, dtype=torch.int64)
