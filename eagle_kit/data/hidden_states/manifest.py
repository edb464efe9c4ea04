"""Manifest of a store of captured states: their origin, and the fields that must agree. Torch-free.

::

    manifest.json          this
    data/                  the packed sequences, as the data cache keeps them
    states-*.safetensors   shards, see shards.py
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from eagle_kit.core.errors import UserError, shown
from eagle_kit.core.files import check_name, read_object
from eagle_kit.data.chat.row_files import RESPONSE

VERSION = 1
NAME = "manifest.json"
DATA = "data"
DATA_FILES = (
    "ids.npy",
    RESPONSE,
    "ends.npy",
    "counts.npy",
    "groups.npy",
    "rows.json",
    "summary.json",
    "skipped.txt",
)

"""Files of the folder ``DATA``."""
IDENTITY = (
    "version",
    "target.weights",
    "tokenizer",
    "template",
    "layer_ids",
    "layer_ids_are",
    "last_hidden_state",
    "precision",
    "format",
    "data.fingerprint",
)
"""Fields that decide the bytes of the states; names, folders and dates do not."""
NO_FIELD = "nothing"
"""Value of a field that a manifest does not have, for comparisons and messages."""
MOST_ROWS = 10**7
"""Rows of the largest store, so that a damaged manifest does not take memory for more."""
AGAIN = "Copy it again, or capture again."
Count = Annotated[int, Field(ge=0)]
TypeName = Literal["float64", "float32", "float16", "bfloat16", "int64", "int32"]


class DataFile(BaseModel):
    """Size and checksum of a file of the packed sequences."""

    bytes: Count
    sha256: str


class StoredData(BaseModel):
    """The packed sequences; their settings are compared where they are used."""

    source: Any
    max_length: int
    supervised_tokens: Count
    rows: Annotated[int, Field(ge=0, le=MOST_ROWS)]
    files: dict[str, DataFile]


class Origin(BaseModel):
    """The target."""

    name: str
    revision: str | None
    weights: str


class ShardRecord(BaseModel):
    """A shard, as :meth:`eagle_kit.data.hidden_states.shards.Shard.record` has it."""

    path: str
    rows: list[Count]
    tokens: Count
    bytes: Count
    sha256: str


class Manifest(BaseModel):
    """Fields of a manifest that the code reads. Others are only compared (:func:`check_fields`)."""

    target: Origin
    layer_ids: list[int]
    layer_ids_are: str
    last_hidden_state: str
    precision: str
    format: str
    hidden_size: Annotated[int, Field(ge=1)]
    data: StoredData
    tensors: dict[str, TypeName]
    made: dict[str, Any] = {}
    shards: list[ShardRecord] | None = None


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest in ``folder``; None when there is none. Raises UserError when it cannot be read."""
    path = folder / NAME
    if not path.exists():
        return None
    manifest = read_object(path, AGAIN)

    # Check the types of fields, and that no name of a shard leads out of the folder.
    try:
        Manifest.model_validate(manifest, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(
            f"{path} is not the manifest of a store: {shown(where)}: {first['msg']}.", AGAIN
        ) from None
    for shard in manifest.get("shards") or []:
        check_name(shard["path"], path)
    return manifest


def need_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a store that must be there. Raises UserError."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(
            f"{folder} is not a store of captured states: it has no {NAME}.",
            f"Make one with eagle-kit data capture CONFIG --out {folder}.",
        )
    return manifest


def field(manifest: Mapping[str, Any], name: str) -> Any:
    """The value of a dotted field; :data:`NO_FIELD` without one."""
    value: Any = manifest
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return NO_FIELD
        value = value[part]
    return value


def identity(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of :data:`IDENTITY` by name."""
    return {name: field(manifest, name) for name in IDENTITY}


def key(manifest: Mapping[str, Any]) -> str:
    """A folder name for the store: a hash of its :func:`identity`."""
    text = json.dumps(identity(manifest), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_fields(
    folder: Path, manifest: Mapping[str, Any], wanted: Mapping[str, Any], remedy: str, now: str = "here"
) -> None:
    """Raise UserError, with both values, for the first field that differs from its value in ``wanted``.

    Args:
        wanted: values by dotted field name.
        remedy: second sentence of the error.
        now: owner of the wanted values, for the message.
    """
    for name, value in wanted.items():
        found = _from_json(field(manifest, name))
        expected = _from_json(value)
        if found != expected:
            raise UserError(
                f"The store {folder} has {name} {_shown(found)}, but {now} it is {_shown(expected)}.", remedy
            )


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of the packed sequences' files in ``folder``."""
    described: dict[str, dict[str, Any]] = {}
    for name in DATA_FILES:
        path = folder / name
        if path.exists():
            described[name] = {"bytes": path.stat().st_size, "sha256": hash_file(path)}
    return described


def check_data_files(folder: Path, manifest: Mapping[str, Any], *, whole: bool) -> None:
    """Raise UserError for a file of the packed sequences that is missing or of another size. With ``whole``,
    files are read and their checksums compared too."""
    for name, about in manifest["data"]["files"].items():
        check_name(name, folder / NAME)
        path = folder / DATA / name
        size = path.stat().st_size if path.exists() else None
        if size != about["bytes"] or (whole and hash_file(path) != about["sha256"]):
            problem = "is missing" if size is None else "is not what was captured"
            raise UserError(f"{path} {problem}.", "Copy the store again.")


def hash_file(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _from_json(value: Any) -> Any:
    """The value as it is read back from a file: lists for tuples, text for keys."""
    return json.loads(json.dumps(value))


def _shown(value: Any) -> str:
    """The value on at most 80 characters."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
