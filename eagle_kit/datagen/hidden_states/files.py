"""States that another engine has written, text by text.

vLLM's hidden-state extraction writes a safetensors file for each request, with ``hidden_states [T, n, H]``
and ``token_ids [T]``. SGLang returns ``hidden_states`` with a response, and a client writes them as lines of
JSON, ``{"input_ids": [...], "hidden_states": [[...], ...]}``, with the states of all layers of a token end to
end. Texts are found by their token ids.

Legend: T tokens, n layers in the files, L captured layers, H hidden.
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
WHOLE_FILE = -1
"""Offset of a text that has a safetensors file of its own."""
MAKE_THEM = "Write the texts to compute with eagle-kit data texts, and have the engine compute all of them."


class StateColumns(NamedTuple):
    """Indices of a head's states among the n states of a token in the files.

    Attributes:
        aux: index of the input of each captured layer, L numbers.
        hidden: index of the final hidden state.
        needs_norm: True if the final hidden state is written before the target's final norm.
    """

    aux: list[int]
    hidden: int
    needs_norm: bool


@dataclass(frozen=True)
class FileLayout:
    """Layers of the states in the files.

    Attributes:
        layers: layer of each state of a token, or :data:`FINAL`, in the order of the files.
        convention: ``inputs`` if a layer's number means its input, as here and in vLLM; ``outputs`` if it
            means its output, which is the input of the next layer.
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

    def find(self, layer_ids: Sequence[int], num_layers: int) -> StateColumns:
        """Find the inputs of ``layer_ids`` and the final hidden state.

        Args:
            num_layers: number of layers of the target.

        Raises:
            UserError: the files lack one of them.
        """
        # Index of each input; output i is the input of layer i + 1.
        shift = 1 if self.convention == "outputs" else 0
        index_of: dict[int | str, int] = {}
        for index, layer in enumerate(self.layers):
            if layer == FINAL:
                index_of[FINAL] = index
            else:
                index_of[int(layer) + shift] = index

        # The final hidden state may be written before the final norm, as the input of layer ``num_layers``.
        needs_norm = FINAL not in index_of
        final: int | str = num_layers if needs_norm else FINAL
        if any(layer not in index_of for layer in (*layer_ids, final)):
            wanted = [str(layer - shift) for layer in layer_ids] + [f"{num_layers - shift} or {FINAL}"]
            raise UserError(
                f"The files have the {self.convention} of layers {', '.join(map(str, self.layers))}, and the "
                f"head needs {', '.join(wanted)}.",
                "Compute those, or name what the files have with --layers.",
            )
        return StateColumns([index_of[layer] for layer in layer_ids], index_of[final], needs_norm)


class _Location(NamedTuple):
    """Place of a text's states.

    Attributes:
        path: the file.
        offset: first byte of the text's line in a JSONL file; :data:`WHOLE_FILE` in a safetensors file.
    """

    path: Path
    offset: int


class StateFiles:
    """Files of texts with their states: ``.safetensors`` and ``.jsonl``; other files are not read.

    Args:
        folder: folder of the files.
        skips_broken: leave out files and lines whose tokens cannot be read, so that their texts are missing.

    Raises:
        UserError: the folder has no such files, or the tokens of one cannot be read.
    """

    def __init__(self, folder: Path, skips_broken: bool = False) -> None:
        self.folder = folder
        self._skips_broken = skips_broken
        self._locations: dict[bytes, _Location] = {}
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder.", "Give the folder with the engine's files.")
        for path in sorted(folder.iterdir()):
            if path.suffix == ".safetensors":
                self._add(partial(_read_ids, path), _Location(path, WHOLE_FILE))
            elif path.suffix == ".jsonl":
                for offset, line in _lines(path):
                    self._add(partial(_line_ids, line, path), _Location(path, offset))
        if not self._locations:
            raise UserError(f"{folder} has no states: no .safetensors and no .jsonl.", MAKE_THEM)

    def __len__(self) -> int:
        return len(self._locations)

    def _add(self, read_ids: Callable[[], Any], location: _Location) -> None:
        """Register the location of a text's states. Raises UserError if ``read_ids`` does and broken texts
        are not skipped."""
        try:
            self._locations[_key(read_ids())] = location
        except UserError:
            if not self._skips_broken:
                raise

    def read(self, ids: np.ndarray, num_layers: int, hidden_size: int) -> torch.Tensor:
        """Read the states ``[T, n, H]`` of a text.

        Args:
            ids: token ids of the text ``[T]``.
            num_layers: n.
            hidden_size: H.

        Raises:
            UserError: the files lack the text, or its states have another shape or are not finite.
        """
        location = self._locations.get(_key(ids))
        if location is None:
            raise UserError(
                f"The states of a text of {len(ids)} tokens are not in {self.folder}, which has {len(self)} "
                "texts.",
                MAKE_THEM,
            )
        states = _read_states(location)

        # Check tokens, shape and numbers. The layers of a token may be end to end.
        path = location.path
        num_tokens = len(ids)
        if 0 < len(states) < num_tokens:
            raise UserError(
                f"{path} has states of {len(states)} tokens for a text of {num_tokens}.",
                "Switch prefix caching off in the engine, which leaves out the tokens of a cached prefix.",
            )
        shape = (num_tokens, num_layers, hidden_size)
        flat_shape = (num_tokens, num_layers * hidden_size)
        if tuple(states.shape) not in (shape, flat_shape):
            raise UserError(
                f"{path} has states of the shape {list(states.shape)} for {num_tokens} tokens, and "
                f"{num_layers} layers of {hidden_size} are expected.",
                "Name the layers that the files have with --layers, in their order.",
            )
        if not bool(torch.isfinite(states).all()):
            raise UserError(f"{path} has states that are not finite.", "Compute them again.")
        return states.reshape(shape)


class FileSource:
    """Source of the target features of packed rows: the states in another engine's files.

    Args:
        files: the files.
        layout: layers of their states.
        target: its embedding, final norm and output layer are used, but none of its layers.
    """

    def __init__(self, files: StateFiles, layout: FileLayout, target: Target) -> None:
        self.files = files
        self.layout = layout
        self._target = target

    @torch.no_grad()
    def states(self, micro_batch: MicroBatch, layer_ids: tuple[int, ...]) -> TargetFeatures:
        """See :class:`~eagle_kit.train.run.state_source.StateSource`."""
        config = self._target.config
        weight = self._target.embed_tokens.weight
        columns = self.layout.find(layer_ids, config.num_layers)

        # States of the row's documents, end to end.
        ids = micro_batch.ids.cpu().numpy()
        documents = []
        for start, stop in micro_batch.plan.spans:
            document = self.files.read(ids[start:stop], len(self.layout.layers), config.hidden_size)
            documents.append(document)
        states = torch.cat(documents).to(weight.device, weight.dtype)  # [T, n, H]

        # Captured layers side by side, and the final hidden states.
        aux = states[:, 0, :0]
        if columns.aux:
            aux = torch.cat([states[:, i] for i in columns.aux], -1)  # [T, L * H]
        hidden = states[:, columns.hidden].contiguous()  # [T, H]
        if columns.needs_norm:
            hidden = self._target.final_norm(hidden)

        # The most likely tokens.
        argmax = torch.full(micro_batch.ids.shape, -1, device=weight.device)  # [T]
        teachers = micro_batch.plan.teacher_positions
        argmax[teachers] = vocab_argmax(hidden[teachers], self._target.head_weight)
        return TargetFeatures(aux, hidden, argmax)


def _key(ids: Any) -> bytes:
    """Hash of a text's token ids."""
    return hashlib.sha256(np.asarray(ids, dtype=np.int64).tobytes()).digest()


def _read_ids(path: Path) -> np.ndarray:
    """Read the token ids of a safetensors file. Raises UserError if that fails."""
    try:
        with safe_open(path, "pt") as file:
            ids: np.ndarray = file.get_tensor("token_ids").numpy()
            return ids
    except (SafetensorError, OSError, RuntimeError) as error:
        raise UserError(
            f"{path} cannot be read as a text's states ({error}).", "Remove it, or have it computed again."
        ) from error


def _read_states(location: _Location) -> torch.Tensor:
    """Read the states of a text, ``[T, n, H]`` or ``[T, n * H]``. Raises UserError if that fails."""
    path = location.path
    if location.offset == WHOLE_FILE:
        try:
            with safe_open(path, "pt") as file:
                states: torch.Tensor = file.get_tensor("hidden_states")
                return states
        except (SafetensorError, OSError, RuntimeError) as error:
            raise UserError(f"{path} cannot be read ({error}).", "Compute it again.") from error

    # A line of JSON.
    with path.open("rb") as file:
        file.seek(location.offset)
        record = json.loads(file.readline())
    try:
        return torch.tensor(record["hidden_states"], dtype=torch.float32)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"A line of {path} has no hidden_states of one size for every token.", "Compute it again."
        ) from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines of a file that are not empty, as (offset of the first byte, line)."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield offset, line
            offset += len(line)


def _line_ids(line: bytes, path: Path) -> list[int]:
    """Read the token ids of a line of ``path``. Raises UserError if that fails."""
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
