"""States that another engine has written, text by text.

vLLM's hidden-state extraction writes a safetensors file a request, ``hidden_states [T, n, H]`` and
``token_ids [T]``; SGLang returns ``hidden_states`` with a response, which a client keeps as lines of JSON,
``{"input_ids": [...], "hidden_states": [[...], ...]}``, the states of all layers of a token end to end.
Texts are found by their tokens.

Legend: T tokens, n kept layers, H hidden.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from eagle_kit.core.errors import UserError, shown
from eagle_kit.models.targets.target import Target
from eagle_kit.objective.batch import MicroBatch
from eagle_kit.objective.target_features import TargetFeatures, vocab_argmax

FINAL = "final"
"""Name of the states after the final norm, among layer ids."""
CONVENTIONS = ("inputs", "outputs")
MAKE_THEM = "Write the texts to compute with eagle-kit data texts, and have the engine compute all of them."


@dataclass(frozen=True)
class FileLayout:
    """What lies beside one another in the files.

    Attributes:
        layers: of each state of a token, in this order: the layer, or :data:`FINAL`.
        convention: layers are named by their ``inputs``, as here and by vLLM, or their ``outputs``: output i
            is the input of layer i + 1.
    """

    layers: tuple[int | str, ...]
    convention: str = "inputs"

    def __post_init__(self) -> None:
        if self.convention not in CONVENTIONS:
            raise UserError(
                f"The convention is {shown(self.convention)}.", f"Use one of {', '.join(CONVENTIONS)}."
            )
        if len(set(self.layers)) != len(self.layers):
            raise UserError("A layer is named twice.", "Name each once, in the order of the files.")

    def places(self, layer_ids: Sequence[int], last: int) -> tuple[list[int], int, bool]:
        """Places of the inputs of ``layer_ids`` and of the last state, and whether it lacks its norm.

        Args:
            last: number of layers of the target.

        Raises:
            UserError: one is not there.
        """
        shift = 1 if self.convention == "outputs" else 0
        held = {layer if layer == FINAL else int(layer) + shift: i for i, layer in enumerate(self.layers)}
        missing = [layer for layer in layer_ids if layer not in held]
        if missing or (last not in held and FINAL not in held):
            wanted = [str(layer - shift) for layer in layer_ids] + [f"{last - shift} or {FINAL}"]
            raise UserError(
                f"The files have the {self.convention} of layers {', '.join(map(str, self.layers))}, and the "
                f"head needs {', '.join(wanted)}.",
                "Compute those, or name what the files have with --layers.",
            )
        is_raw = FINAL not in held
        return [held[layer] for layer in layer_ids], held[last if is_raw else FINAL], is_raw


class _Place(NamedTuple):
    """A file, and the byte at which a line of it begins; -1 of a whole safetensors file."""

    path: Path
    offset: int


class StateFiles:
    """Files of texts with their states.

    Args:
        skips_broken: leave out files and lines whose tokens cannot be read; their texts are missing.

    Raises:
        UserError: no files, or one that is neither of the two kinds.
    """

    def __init__(self, folder: Path, skips_broken: bool = False) -> None:
        self.folder = folder
        self._skips_broken = skips_broken
        self._places: dict[bytes, _Place] = {}
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder.", "Give the folder with the engine's files.")
        for path in sorted(folder.iterdir()):
            if path.suffix == ".safetensors":
                self._add(_read_ids, path, _Place(path, -1))
            elif path.suffix == ".jsonl":
                for offset, line in _lines(path):
                    self._add(partial(_line_ids, line), path, _Place(path, offset))
        if not self._places:
            raise UserError(f"{folder} has no states: no .safetensors and no .jsonl.", MAKE_THEM)

    def __len__(self) -> int:
        return len(self._places)

    def _add(self, read: Callable[[Path], Any], path: Path, place: _Place) -> None:
        """Note where the states of a text are."""
        try:
            self._places[_key(read(path))] = place
        except UserError:
            if not self._skips_broken:
                raise

    def read(self, ids: np.ndarray, num_layers: int, hidden_size: int) -> torch.Tensor:
        """States ``[T, n, H]`` of a text.

        Raises:
            UserError: the text is not there, or its states have another size or are not finite.
        """
        place = self._places.get(_key(ids))
        if place is None:
            raise UserError(
                f"The states of a text of {len(ids)} tokens are not in {self.folder}, which has {len(self)} "
                "texts.",
                MAKE_THEM,
            )
        states = _read_states(place)
        shapes = (len(ids), num_layers, hidden_size), (len(ids), num_layers * hidden_size)
        if 0 < len(states) < len(ids):
            raise UserError(
                f"{place.path} has states of {len(states)} tokens for a text of {len(ids)}.",
                "Switch prefix caching off in the engine, which leaves out the tokens of a cached prefix.",
            )
        if tuple(states.shape) not in shapes:
            raise UserError(
                f"{place.path} has states of the shape {list(states.shape)} for {len(ids)} tokens, and "
                f"{num_layers} layers of {hidden_size} are expected.",
                "Name the layers that the files have with --layers, in their order.",
            )
        if not bool(torch.isfinite(states).all()):
            raise UserError(f"{place.path} has states that are not finite.", "Compute them again.")
        return states.reshape(len(ids), num_layers, hidden_size)


class FileSource:
    """States of another engine's files as those of packed rows.

    Args:
        target: at least its embedding, final norm and output layer.
    """

    def __init__(self, files: StateFiles, layout: FileLayout, target: Target) -> None:
        self.files, self.layout, self._target = files, layout, target

    @torch.no_grad()
    def states(self, micro_batch: MicroBatch, layer_ids: tuple[int, ...]) -> TargetFeatures:
        """See :class:`~eagle_kit.train.run.state_source.StateSource`."""
        config, weight = self._target.config, self._target.embed_tokens.weight
        places, last, is_raw = self.layout.places(layer_ids, config.num_layers)
        ids, found = micro_batch.ids.cpu().numpy(), []
        for start, stop in micro_batch.plan.spans:
            found.append(self.files.read(ids[start:stop], len(self.layout.layers), config.hidden_size))
        states = torch.cat(found).to(weight.device, weight.dtype)
        aux = torch.cat([states[:, i] for i in places], -1) if places else states[:, 0, :0]
        hidden = states[:, last].contiguous()
        if is_raw:
            hidden = self._target.final_norm(hidden)
        argmax = torch.full(micro_batch.ids.shape, -1, device=weight.device)
        teachers = micro_batch.plan.teacher_positions
        argmax[teachers] = vocab_argmax(hidden[teachers], self._target.head_weight)
        return TargetFeatures(aux, hidden, argmax)


def _key(ids: Any) -> bytes:
    return hashlib.sha256(np.asarray(ids, dtype=np.int64).tobytes()).digest()


def _read_ids(path: Path) -> np.ndarray:
    try:
        with safe_open(path, "pt") as file:
            ids: np.ndarray = file.get_tensor("token_ids").numpy()
            return ids
    except (SafetensorError, OSError, RuntimeError) as error:
        raise UserError(
            f"{path} cannot be read as a text's states ({error}).", "Remove it, or have it computed again."
        ) from error


def _read_states(place: _Place) -> torch.Tensor:
    if place.offset < 0:
        try:
            with safe_open(place.path, "pt") as file:
                states: torch.Tensor = file.get_tensor("hidden_states")
                return states
        except (SafetensorError, OSError, RuntimeError) as error:
            raise UserError(f"{place.path} cannot be read ({error}).", "Compute it again.") from error
    with place.path.open("rb") as file:
        file.seek(place.offset)
        record = json.loads(file.readline())
    try:
        return torch.tensor(record["hidden_states"], dtype=torch.float32)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"A line of {place.path} has no hidden_states of one size for every token.", "Compute it again."
        ) from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines with the byte at which each begins."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield offset, line
            offset += len(line)


def _line_ids(line: bytes, path: Path) -> list[int]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(
            f"{path} has a line that is no JSON ({error}).", "Remove it, or write it again."
        ) from error
    ids = record.get("input_ids") if isinstance(record, dict) else None
    if not isinstance(ids, list) or not all(type(number) is int for number in ids):
        raise UserError(f"{path} has a line without input_ids.", "Write the tokens beside their states.")
    return ids
