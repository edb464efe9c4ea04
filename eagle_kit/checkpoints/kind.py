"""Which algorithm a draft folder is for."""

from pathlib import Path
from typing import Literal

from eagle_kit.checkpoints.layout import ARCHITECTURES
from eagle_kit.checkpoints.mtp import is_mtp_config
from eagle_kit.core.errors import UserError
from eagle_kit.models.config import FAMILIES
from eagle_kit.models.loading.loader import read_json

Algorithm = Literal["EAGLE3", "EAGLE", "NEXTN", "STANDALONE"]


def algorithm_of(folder: str | Path) -> Algorithm:
    """Read it from ``config.json``.

    The architectures of EAGLE-3, EAGLE and MTP modules (NEXTN) name themselves; a published EAGLE-1 head may
    also call itself a Llama of one layer, and is then known by its ``fc``. Everything else is a whole model.

    Raises:
        UserError: the folder or its config cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"The draft folder {folder} does not exist.", "Give a folder with config.json and weights."
        )
    config = read_json(folder / "config.json")
    names = config.get("architectures") or ["?"]
    if names[0] in ARCHITECTURES or "Eagle3" in str(names[0]):
        return "EAGLE3"
    if is_mtp_config(config):
        return "NEXTN"
    is_small_llama = names[0] in {"?", *FAMILIES} and config.get("num_hidden_layers") == 1
    if "eagle" in str(names[0]).lower() or (is_small_llama and _has_fc(folder)):
        return "EAGLE"
    return "STANDALONE"


def _has_fc(folder: Path) -> bool:
    """Whether the weights have the layer that joins feature and embedding, which no whole model has."""
    weights = folder / "model.safetensors"
    if weights.is_file():
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(weights, framework="pt") as file:
                return any(name.endswith("fc.weight") for name in file.keys())  # noqa: SIM118
        except (SafetensorError, OSError):
            return False  # the loader says what is wrong with it
    return (folder / "pytorch_model.bin").is_file()
