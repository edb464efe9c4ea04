"""Captured states on disk: the results of the target's forward for every packed sequence, so that it runs
once.

A store is a folder of shards (``shards.py``), a manifest (``manifest.py``) and the packed sequences: all that
training needs, here or on another machine. A shard is written under another name and renamed, so every shard
is whole, and any number of processes may write different rows.

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
from eagle_kit.data.hidden_states.format import (
    check_finite,
    choose_layers,
    decode,
    encode,
    finite_flags,
    is_finite,
    names_of_dtypes,
)
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
    """Encoded tensors of packed sequences by row number. Nothing is written before the first :meth:`flush`.

    With a ``manifest`` the store may grow: a damaged shard is renamed with a warning, so that its rows are
    captured again. Without one the store is only read, and a damaged shard is an error.

    Args:
        folder: of the store. If there is a manifest in it, that store is opened.
        manifest: describes the states that will be added; None to read an existing store.
        data_folder: the packed sequences, copied into a new store.
        shard_bytes: largest size of a shard of more than one row.
        layer_ids: the captured layers to read, in this order, of a store that is only read; None reads all of
            them.

    Raises:
        UserError: the store in ``folder`` has another identity than ``manifest`` (the message names the
            field); a shard is missing or damaged; or a layer is not in the store.
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
        self.folder = folder
        self.data_folder = data_folder
        self.shard_bytes = shard_bytes
        self.can_grow = manifest is not None

        # Read the manifest of the folder, and compare it with that of the run.
        found: dict[str, Any] | None
        if manifest is None:
            found = need_manifest(folder)
            self.manifest = found
        else:
            found = read_manifest(folder)
            if found is not None:
                check_fields(folder, found, identity(manifest), ANOTHER, "of this run")
            self.manifest = found or manifest

        self._layer_indices = None if layer_ids is None else self._find_layers(layer_ids)

        # Rows are in the buffer until their shard is written.
        self._buffer: dict[int, Parts] = {}
        self._shards: dict[str, Shard] = {}  # by file name
        self._shard_of_row: dict[int, Shard] = {}
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
        """True if states are read back as they were computed, to the bit."""
        if self.format == "bf16":
            return bool(self.manifest["precision"] == "bfloat16")
        return self.format == "computed"

    def rows(self) -> set[int]:
        """The rows that are stored or wait to be written."""
        return self._shard_of_row.keys() | self._buffer.keys()

    def shards(self) -> list[Shard]:
        """The shards, in the order of their first rows."""
        return sorted(self._shards.values(), key=lambda shard: (shard.rows, shard.path.name))

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.bytes for shard in self._shards.values())

    def read(self, rows: Sequence[int]) -> Parts | None:
        """The encoded tensors of ``rows`` on the CPU, end to end; None if a row is missing. Several threads
        may read while one adds rows.

        Raises:
            UserError: a shard cannot be read any more.
        """
        parts = self._read_rows(rows)
        if parts is None:
            return None
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def read_pinned(self, rows: Sequence[int]) -> Parts | None:
        """As :meth:`read`, into page-locked memory, from which copies to a GPU are asynchronous."""
        parts = self._read_rows(rows)
        if parts is None:
            return None
        pinned = {}
        for name, first in parts[0].items():
            pieces = [part[name] for part in parts]
            shape = (sum(len(piece) for piece in pieces), *first.shape[1:])
            whole = torch.empty(shape, dtype=first.dtype, pin_memory=True)
            pinned[name] = torch.cat(pieces, out=whole)
        return pinned

    def decode(self, parts: Parts, device: torch.device) -> dict[str, torch.Tensor]:
        """Decode the result of :meth:`read` on ``device``, in the types that were captured."""
        moved = {name: part.to(device, non_blocking=True) for name, part in parts.items()}
        return decode(moved, self.manifest["tensors"])

    def load(self, rows: Sequence[int], device: torch.device) -> dict[str, torch.Tensor] | None:
        """:meth:`read` and :meth:`decode`. If a row is missing, shards of other processes are opened first.
        None if it is missing there too."""
        parts = self.read(rows)
        if parts is None and self._find_new_shards():
            parts = self.read(rows)
        if parts is None:
            return None
        return self.decode(parts, device)

    def add(self, rows: Sequence[int], lengths: Sequence[int], tensors: dict[str, torch.Tensor]) -> Parts:
        """Encode ``tensors`` and add them to the buffer; write a shard whenever it is full.

        Args:
            rows: numbers of the packed sequences; those that are stored already are skipped.
            lengths: tokens of each row.
            tensors: of all rows end to end along dimension 0.

        Returns:
            The encoded tensors, as :meth:`read` will return them.

        Raises:
            UserError: states that are not finite, a full disk, or a folder that cannot be written to.
        """
        dtypes = names_of_dtypes(tensors)
        check_finite(finite_flags(tensors), dtypes)
        encoded = encode(tensors, self.format, self.manifest["hidden_size"])
        self.add_encoded(rows, lengths, encoded, dtypes)
        return encoded

    def add_encoded(
        self, rows: Sequence[int], lengths: Sequence[int], encoded: Parts, dtypes: dict[str, str]
    ) -> None:
        """Add encoded tensors to the buffer; write a shard whenever it is full.

        Args:
            rows: numbers of the packed sequences; those that are stored already are skipped.
            lengths: tokens of each row.
            encoded: result of :func:`~eagle_kit.data.hidden_states.format.encode` for finite tensors. The
                buffer keeps the memory of tensors on the CPU.
            dtypes: name and dtype, such as ``float32``, of every tensor before it was encoded.

        Raises:
            UserError: a full disk, or a folder that cannot be written to.
        """
        self.manifest.setdefault("tensors", dtypes)

        # Buffer each row, in shards of at most ``shard_bytes``.
        split = {name: tensor.split(list(lengths)) for name, tensor in encoded.items()}
        for i, row in enumerate(rows):
            if row in self._shard_of_row or row in self._buffer:
                continue
            part = {name: pieces[i].contiguous().cpu() for name, pieces in split.items()}
            if self._buffer and num_bytes([*self._buffer.values(), part]) > self.shard_bytes:
                self.flush()
            self._buffer[row] = part
        if num_bytes(self._buffer.values()) >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write the buffered rows as a shard. Raises UserError as :meth:`add` does."""
        if not self._buffer:
            return
        first = min(self._buffer)
        try:
            self._start()
            need = 2 * num_bytes(self._buffer.values())
            check_disk_space(self.folder, need, f"Free some space, or {WITHOUT_STORE}.")
            self._register(write_shard(self.folder, self._buffer))
        except (OSError, SafetensorError, Damaged) as error:
            raise UserError(
                f"The captured states of row {first} could not be written to {self.folder}: {error}.",
                writing_remedy(error, WITHOUT_STORE),
            ) from error
        # Only after the shard is registered: another thread may read these rows meanwhile.
        self._buffer = {}

    def finish(self) -> None:
        """Write the list of shards into the manifest. From now on a missing shard is an error."""
        self._find_new_shards()
        self._adopt_manifest()
        self.manifest["shards"] = [shard.record() for shard in self.shards()]
        write_json_atomically(self.folder / NAME, self.manifest, indent=1)

    def missing(self) -> list[int]:
        """Rows of the data that neither this process nor another one has stored, ascending."""
        self._find_new_shards()
        return sorted(set(range(self.manifest["data"]["rows"])) - self.rows())

    def verify(self, progress: Iterable[Shard] | None = None) -> None:
        """Read every byte and compare checksums. Raises UserError for the first file that differs.

        Args:
            progress: :meth:`shards` wrapped to show progress.
        """
        check_data_files(self.folder, self.manifest, whole=True)
        shards = self.shards() if progress is None else progress
        for shard in shards:
            try:
                check_shard(shard)
            except Damaged as error:
                raise self._unusable(shard.path, str(error)) from error

    def _read_rows(self, rows: Sequence[int]) -> list[Parts] | None:
        """The encoded tensors of each row; None if a row is missing. Raises UserError as :meth:`read`."""
        parts = []
        for row in rows:
            part = self._read_row(row)
            if part is None:
                return None
            parts.append(part)
        return parts

    def _read_row(self, row: int) -> Parts | None:
        """The encoded tensors of a row, from the buffer or its shard; None if it is in neither."""
        buffered = self._buffer.get(row)
        if buffered is not None:
            return buffered
        shard = self._shard_of_row.get(row)
        if shard is None:
            return None
        try:
            part = read_row(shard, row)
        except (OSError, SafetensorError) as error:
            raise self._unusable(shard.path, f"cannot be read any more ({error})") from error
        if not is_finite(part):
            raise self._unusable(shard.path, f"has states of row {row} that are not finite")
        if self._layer_indices is None:
            return part
        return choose_layers(part, LAYERS, self._layer_indices, self.manifest["hidden_size"])

    def _find_layers(self, layer_ids: Sequence[int]) -> list[int] | None:
        """Indices of ``layer_ids`` among the captured layers; None if they are all of them, in order."""
        assert not self.can_grow, "a store that grows takes in all of its layers"
        captured = list(self.manifest.get("layer_ids", ()))
        for layer in layer_ids:
            if layer not in captured:
                raise UserError(
                    f"The store {self.folder} has the inputs of layers {captured}, but not that of {layer}.",
                    "Set head.aux_layer_ids to layers that it has, or capture for this head.",
                )
        if list(layer_ids) == captured:
            return None
        return [captured.index(layer) for layer in layer_ids]

    def _start(self) -> None:
        """Make the folder, its manifest and the copy of the packed sequences, unless a process has made
        them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._adopt_manifest():
            return
        if self.data_folder is not None:
            data = self.folder / DATA
            if not data.is_dir():
                with making(data) as work:
                    work.mkdir()
                    for name in DATA_FILES:
                        shutil.copyfile(self.data_folder / name, work / name)
            self.manifest["data"]["files"] = describe_files(data)
        write_json_atomically(self.folder / NAME, self.manifest, indent=1)

    def _open_shards(self) -> None:
        """Register the shards of the folder. Raises UserError, in a store that is only read, for one that is
        damaged or not as the manifest has it."""
        remove_leftovers(self.folder)

        # While rows are added the manifest has no list of shards.
        records = self.manifest.get("shards")
        if records is None or self.can_grow:
            self._find_new_shards()
            return

        for record in records:
            path = self.folder / record["path"]
            if not path.exists():
                raise self._unusable(path, "is missing")
            try:
                shard = read_shard(path)
            except Damaged as error:
                raise self._unusable(path, str(error)) from None
            if shard.record() != record:
                raise self._unusable(path, "is not the one in the manifest")
            self._register(shard)

    def _find_new_shards(self) -> bool:
        """Register shards that other processes have written; True if there were any."""
        num_known = len(self._shards)
        for path in sorted(self.folder.glob("states-*.safetensors")):
            if path.name in self._shards:
                continue
            try:
                self._register(read_shard(path))
            except Damaged as error:
                if not self.can_grow:
                    raise self._unusable(path, str(error)) from None
                path.replace(path.with_name(f"{path.name}.damaged"))
                warnings.warn(f"{path} {error}; it is set aside, its rows are captured again.", stacklevel=2)

        # The dtypes of the tensors are in the manifest of the process that wrote first.
        has_new = len(self._shards) > num_known
        if has_new and "tensors" not in self.manifest:
            self._adopt_manifest()
        return has_new

    def _adopt_manifest(self) -> bool:
        """Use the manifest that another process has written; False if there is none."""
        found = read_manifest(self.folder)
        if found is None:
            return False
        check_fields(self.folder, found, identity(self.manifest), ANOTHER, "of this run")
        self.manifest = found
        return True

    def _register(self, shard: Shard) -> None:
        """Record which rows are in a shard; a row that is in several is read from the first one."""
        self._shards[shard.path.name] = shard
        for row in shard.rows:
            self._shard_of_row.setdefault(row, shard)

    def _unusable(self, path: Path, problem: str) -> UserError:
        """The error for a shard; ``problem`` is a predicate."""
        return UserError(
            f"The shard {path} {problem}.",
            "Copy it again, or delete it and run the eagle-kit data capture command of the store again.",
        )


def remove_leftovers(folder: Path) -> None:
    """Delete partly written files of processes of this machine that have ended."""
    for path in folder.glob(f".*.{socket.gethostname()}.*.partial"):
        owner = path.name.split(".")[-2]
        if owner.isdigit() and not is_alive(int(owner)):
            remove(path)
