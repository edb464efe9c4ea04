"""Records of data sets that the ``datasets`` library reads, by name, by folder, or by a preset."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import expand

GRAMMAR = "datasets:NAME[@REVISION][:SPLIT[:CONFIG[:FILES]]]"
COLON = re.compile(r":(?![^\[]*\])")
"""A colon outside the brackets of a split such as ``train[:1000]``."""


@dataclass(frozen=True)
class DataSet:
    """A data set and the part of it that is read.

    Attributes:
        name: a hub id, or a folder.
        revision: branch, tag or commit of the hub.
        files: patterns of files of the repository or folder.
    """

    name: str
    split: str = "train"
    config: str | None = None
    revision: str | None = None
    files: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "DataSet":
        """Read :data:`GRAMMAR` without its first word. Raises UserError."""
        name, *others = COLON.split(text)
        if len(others) > 3 or not name:
            raise UserError(f"The data set {text!r} is not a name of one.", f"Write {GRAMMAR}.")
        split, config, files = [*others, "", "", ""][:3]  # missing parts are empty
        revision = ""
        if not expand(name).is_dir():
            name, _, revision = name.partition("@")
        return cls(
            name=name,
            split=split or "train",
            config=config or None,
            revision=revision or None,
            files=tuple(filter(None, files.split(","))),
        )

    @property
    def folder(self) -> Path | None:
        """The local folder of this name; None if there is none."""
        folder = expand(self.name)
        return folder if folder.is_dir() else None


@dataclass(frozen=True)
class Preset:
    """A public set under a short name.

    Attributes:
        source: value of ``data.source`` for the set.
        licence: a hint for people.
    """

    source: str
    licence: str


PRESETS = {
    "alpaca": Preset("datasets:tatsu-lab/alpaca", "CC BY-NC 4.0"),
    "gsm8k": Preset("datasets:openai/gsm8k:train:main", "MIT"),
    "lmsys-chat-1m": Preset("datasets:lmsys/lmsys-chat-1m", "its own, accepted on its page"),
    "magpie": Preset("datasets:Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered", "Llama 3.1 Community"),
    "metamath": Preset("datasets:meta-math/MetaMathQA", "MIT"),
    "openthoughts": Preset("datasets:open-thoughts/OpenThoughts-114k", "Apache 2.0"),
    "perfectblend": Preset("datasets:mlabonne/open-perfectblend", "Apache 2.0"),
    "sharegpt": Preset("datasets:Aeala/ShareGPT_Vicuna_unfiltered", "Apache 2.0"),
    "smoltalk": Preset("datasets:HuggingFaceTB/smoltalk:train:all", "Apache 2.0"),
    "tulu3": Preset("datasets:allenai/tulu-3-sft-mixture", "ODC-BY 1.0, of parts others"),
    "ultrachat": Preset("datasets:HuggingFaceH4/ultrachat_200k:train_sft", "MIT"),
    "wildchat": Preset("datasets:allenai/WildChat-1M", "ODC-BY 1.0"),
    "xlam": Preset("datasets:Salesforce/xlam-function-calling-60k", "CC BY 4.0, accepted on its page"),
}
"""Sets that many heads are trained on; the licences were not compared with their cards."""


def preset(name: str) -> Preset:
    """The preset ``name``. Raises UserError if there is none."""
    if name not in PRESETS:
        raise UserError(f"There is no preset {name!r}.", f"Use one of {', '.join(PRESETS)}.")
    return PRESETS[name]


def read_data_set(text: str, is_limited: bool) -> Iterator[tuple[str, Any]]:
    """Records of a data set, each with its place, such as ``name#1``.

    Args:
        text: :data:`GRAMMAR` without its first word.
        is_limited: True if only some records will be read: the set is then streamed, and not downloaded.

    Raises:
        UserError: the library is missing, or the data set cannot be loaded or read.
    """
    try:
        import datasets  # noqa: F401
    except ImportError:
        raise UserError(
            "The package datasets is not installed.", "Install it with pip install 'eagle_kit[train]'."
        ) from None
    data_set = DataSet.parse(text)
    number = 0
    try:
        for record in _load(data_set, is_limited):
            number += 1
            yield f"{data_set.name}#{number}", without_null(record)
    except UserError:
        raise
    except Exception as error:  # network, access, naming and format errors of many kinds
        reason = (str(error).strip().splitlines() or ["no details"])[0]
        behind = f" behind record {number}" if number else ""
        raise UserError(
            f"The data set {data_set.name} could not be loaded{behind} ({type(error).__name__}: {reason}).",
            "Check its name, its split and the network, or give a file.",
        ) from error


def _load(data_set: DataSet, is_limited: bool) -> Any:
    """The data set, or a stream of it."""
    from datasets import load_dataset, load_from_disk

    # A folder of save_to_disk.
    folder = data_set.folder
    if folder is not None and (folder / "dataset_dict.json").is_file():
        splits = load_from_disk(str(folder))
        if data_set.split not in splits:
            raise UserError(
                f"The data set {data_set.name} has no split {data_set.split!r}.",
                f"Use one of {', '.join(splits)}.",
            )
        return splits[data_set.split]
    if folder is not None and (folder / "state.json").is_file():
        if data_set.split != "train":
            raise UserError(
                f"The data set {data_set.name} was saved without splits.", f"Leave out {data_set.split!r}."
            )
        return load_from_disk(str(folder))

    # Any other data set of the library.
    names = [data_set.name]
    if data_set.config is not None:
        names.append(data_set.config)
    more: dict[str, Any] = {}
    if data_set.revision is not None:
        more["revision"] = data_set.revision
    if data_set.files:
        more["data_files"] = list(data_set.files)
    if is_limited and "[" not in data_set.split:  # a stream has no slices
        more["streaming"] = True
    return load_dataset(*names, split=data_set.split, **more)


def without_null(value: Any) -> Any:
    """A record of Arrow without the keys that are null.

    Arrow gives every object of a column the keys of all of them, so the arguments of one call would appear in
    the others.
    """
    if isinstance(value, dict):
        return {key: without_null(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_null(inner) for inner in value]
    return value
