"""Captured states on disk: the results of the target's forward for every packed row, so that it is run once.

A store is a folder of shards beside a manifest (``manifest.py``) and the packed rows, so
it is enough to train from, here or on another machine. Shards (``shards.py``) are
written beside their name and renamed, so there are whole ones only; any number of processes may write
different rows.

Bytes and dtypes are those of :mod:`eagle_kit.data.hidden_states.format`.
"""

import shutil
import socket
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import (
    check_disk_space,
    making,
    remove,
    write_json_atomically,
    writing_remedy,
)
from eagle_kit.core.process import is_alive
from eagle_kit.data.hidden_states.format import choose_layers, decode, encode, is_finite
from eagle_kit.data.hidden_states.manifest import (
    DATA,
    DATA_FILES,
    NAME,
    check_data_files,
    check_fields,
    describe_files,
    identity,
    need_manifest,
    read_manifest,
)
from eagle_kit.data.hidden_states.shards import (
    Damaged,
    Parts,
    Shard,
    check_shard,
    num_bytes,
    read_row,
    read_shard,
    write_shard,
)

SHARD_BYTES = 256 * 2**20
"""A shard is written when the next row would make it larger than this; one row is a shard of any size."""
LAYERS = "aux"
"""Name of the states of the captured layers, side by side."""
ANOTHER = "Restore the setting, or capture into another folder."
WITHOUT_STORE = "choose another disk with --out, or data.cache_dir for the cache"


class StateStore:
    """Encoded tensors of packed rows by row number. Nothing is made on disk before the first :meth:`flush`.

    Args:
        folder: of the store; it is opened when its manifest is there.
        manifest: what the states to come are of: the store may grow, and a damaged shard is set aside with a
            warning, so that its rows are captured again. None opens a store that is there to be read, where
            damage is an error.
        data_folder: the packed rows, copied into a new store.
        layer_ids: which of the captured layers are read, of a store that does not grow, in this order; None
            reads all of them.

    Raises:
        UserError: another identity than the store that is there, with the differing field; a missing or
            damaged shard; layers that it does not have.
    """

    def __init__(
        self,
        folder: Path,
        manifest: dict[str, Any] | None = None,
        data_folder: Path | None = None,
        *,
        shard_bytes: int = SHARD_BYTES,
        layer_ids: Sequence[int] | None = None,
    ) -> None:
        self.folder, self.data_folder, self.shard_bytes = folder, data_folder, shard_bytes
        self.can_grow = manifest is not None
        found = read_manifest(folder) if manifest is not None else need_manifest(folder)
        if found is not None and manifest is not None:
            check_fields(folder, found, identity(manifest), ANOTHER, "of this run")
        self.manifest: dict[str, Any] = found or manifest or {}
        self._columns = None if layer_ids is None else self._find_columns(layer_ids)
        self._buffer: dict[int, Parts] = {}
        self._shards: dict[str, Shard] = {}
        self._place: dict[int, Shard] = {}
        if found is not None:
            if not self.can_grow:
                check_data_files(folder, found, whole=False)
            self._open_shards()

    @property
    def format(self) -> str:
        """``computed``, ``bf16`` or ``fp8``."""
        return str(self.manifest["format"])

    @property
    def is_exact(self) -> bool:
        """True when states come back to the bit."""
        return self.format == "computed" or (
            self.format == "bf16" and self.manifest["precision"] == "bfloat16"
        )

    def rows(self) -> set[int]:
        """The rows that are stored or wait to be written."""
        return self._place.keys() | self._buffer.keys()

    def shards(self) -> list[Shard]:
        """The shards, in the order of their first rows."""
        return sorted(self._shards.values(), key=lambda shard: (shard.rows, shard.path.name))

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.bytes for shard in self._shards.values())

    def read(self, rows: Sequence[int]) -> Parts | None:
        """The encoded tensors of ``rows`` on the CPU; None unless every row is there. May be called from
        another thread than the one that adds.

        Raises:
            UserError: a shard cannot be read any more.
        """
        found = [self._read_row(row) for row in rows]
        parts = [part for part in found if part is not None]
        if len(parts) < len(found):
            return None
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def decode(self, parts: Parts, device: torch.device) -> dict[str, torch.Tensor]:
        """Decode the result of :meth:`read` on ``device``, in the types that were captured."""
        moved = {name: part.to(device, non_blocking=True) for name, part in parts.items()}
        return decode(moved, self.manifest["tensors"])

    def load(self, rows: Sequence[int], device: torch.device) -> dict[str, torch.Tensor] | None:
        """:meth:`read`, and where it found nothing once more after a look for other processes' shards; then
        :meth:`decode`."""
        parts = self.read(rows)
        if parts is None and self._find_new_shards():
            parts = self.read(rows)
        return None if parts is None else self.decode(parts, device)

    def add(self, rows: Sequence[int], lengths: Sequence[int], tensors: dict[str, torch.Tensor]) -> Parts:
        """Take in ``tensors``, rows of ``lengths`` tokens end to end, and write a shard when it is full.

        Returns:
            The encoded tensors, for :meth:`decode`: the same as will be read.

        Raises:
            UserError: states that are not finite, a full disk, or a folder that cannot be written to.
        """
        encoded = encode(tensors, self.format, self.manifest["hidden_size"])
        self.manifest.setdefault(
            "tensors", {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
        )
        split = {name: tensor.split(list(lengths)) for name, tensor in encoded.items()}
        for i, row in enumerate(rows):
            if row in self._place or row in self._buffer:
                continue
            part = {name: pieces[i].contiguous().cpu() for name, pieces in split.items()}
            if self._buffer and num_bytes([*self._buffer.values(), part]) > self.shard_bytes:
                self.flush()
            self._buffer[row] = part
        if num_bytes(self._buffer.values()) >= self.shard_bytes:
            self.flush()
        return encoded

    def flush(self) -> None:
        """Write what waits as a shard. Raises UserError as :meth:`add` does."""
        if not self._buffer:
            return
        first = min(self._buffer)
        try:
            self._start()
            need = 2 * num_bytes(self._buffer.values())
            check_disk_space(self.folder, need, f"Free some space, or {WITHOUT_STORE}.")
            self._take(write_shard(self.folder, self._buffer))
        except (OSError, SafetensorError, Damaged) as error:
            raise UserError(
                f"The captured states of row {first} could not be written to {self.folder}: {error}.",
                writing_remedy(error, WITHOUT_STORE),
            ) from error
        self._buffer = {}  # after the rows have their place: another thread may look for them meanwhile

    def finish(self) -> None:
        """Put the table of shards into the manifest: from now on each of them must be there."""
        self._find_new_shards()
        self._adopt()
        self.manifest["shards"] = [shard.record() for shard in self.shards()]
        write_json_atomically(self.folder / NAME, self.manifest, indent=1)

    def missing(self) -> list[int]:
        """Rows of the data that are not stored, those of other processes looked for."""
        self._find_new_shards()
        return sorted(set(range(self.manifest["data"]["rows"])) - self.rows())

    def verify(self, progress: Iterable[Shard] | None = None) -> None:
        """Read every byte and compare checksums. Raises UserError for the first file that differs."""
        check_data_files(self.folder, self.manifest, whole=True)
        for shard in self.shards() if progress is None else progress:
            try:
                check_shard(shard)
            except Damaged as error:
                raise self._unusable(shard.path, str(error)) from error

    def _read_row(self, row: int) -> Parts | None:
        waiting = self._buffer.get(row)
        if waiting is not None:
            return waiting
        shard = self._place.get(row)
        if shard is None:
            return None
        try:
            part = read_row(shard, row)
        except (OSError, SafetensorError) as error:
            raise self._unusable(shard.path, f"cannot be read any more ({error})") from error
        if not is_finite(part):
            raise self._unusable(shard.path, f"has states of row {row} that are not finite")
        if self._columns is None:
            return part
        return choose_layers(part, LAYERS, self._columns, self.manifest["hidden_size"])

    def _find_columns(self, layer_ids: Sequence[int]) -> list[int] | None:
        """Places of ``layer_ids`` among the captured layers; None where they are all of them, in order."""
        assert not self.can_grow, "a store that grows takes in all of its layers"
        held = list(self.manifest.get("layer_ids", ()))
        if missing := [layer for layer in layer_ids if layer not in held]:
            raise UserError(
                f"The store {self.folder} has the inputs of layers {held}, but not that of {missing[0]}.",
                "Set head.aux_layer_ids to layers that it has, or capture for this head.",
            )
        return None if list(layer_ids) == held else [held.index(layer) for layer in layer_ids]

    def _start(self) -> None:
        """Make the folder, its manifest and the copy of the packed rows, once."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._adopt():
            return
        data = self.folder / DATA
        if self.data_folder is not None and not data.is_dir():
            with making(data) as work:
                work.mkdir()
                for name in DATA_FILES:
                    shutil.copyfile(self.data_folder / name, work / name)
        if self.data_folder is not None:
            self.manifest["data"]["files"] = describe_files(data)
        write_json_atomically(self.folder / NAME, self.manifest, indent=1)

    def _open_shards(self) -> None:
        remove_leftovers(self.folder)
        table = self.manifest.get("shards")
        if table is None or self.can_grow:
            self._find_new_shards()
            return
        for record in table:
            path = self.folder / record["path"]
            if not path.exists():
                raise self._unusable(path, "is missing")
            try:
                shard = read_shard(path)
            except Damaged as error:
                raise self._unusable(path, str(error)) from None
            if shard.record() != record:
                raise self._unusable(path, "is not the one in the manifest")
            self._take(shard)

    def _find_new_shards(self) -> bool:
        """Take in shards that other processes have written; True when there were any."""
        known = len(self._shards)
        for path in sorted(self.folder.glob("states-*.safetensors")):
            if path.name in self._shards:
                continue
            try:
                self._take(read_shard(path))
            except Damaged as error:
                if not self.can_grow:
                    raise self._unusable(path, str(error)) from None
                path.replace(path.with_name(f"{path.name}.damaged"))
                warnings.warn(f"{path} {error}; it is set aside, its rows are captured again.", stacklevel=2)
        if len(self._shards) > known and "tensors" not in self.manifest:
            self._adopt()
        return len(self._shards) > known

    def _adopt(self) -> bool:
        """Take over the manifest that another process may have written; True when there is one."""
        found = read_manifest(self.folder)
        if found is not None:
            check_fields(self.folder, found, identity(self.manifest), ANOTHER, "of this run")
            self.manifest = found
        return found is not None

    def _take(self, shard: Shard) -> None:
        self._shards[shard.path.name] = shard
        for row in shard.rows:
            self._place.setdefault(row, shard)

    def _unusable(self, path: Path, problem: str) -> UserError:
        return UserError(
            f"The shard {path} {problem}.",
            "Copy it again, or delete it and run the eagle-kit data capture command of the store again.",
        )


def remove_leftovers(folder: Path) -> None:
    """Delete half-written files of processes of this machine that are no more."""
    for path in folder.glob(f".*.{socket.gethostname()}.*.partial"):
        owner = path.name.split(".")[-2]
        if owner.isdigit() and not is_alive(int(owner)):
            remove(path)
