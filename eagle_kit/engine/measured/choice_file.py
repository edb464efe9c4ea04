"""File of measured choices in the cache folder, so that an engine makes the same ones after a restart.

Its name holds a hash of all that the times depend on: device, driver, libraries, and the sources of the
kernels. A file that another user may have written is not read, as with compiled operations
(``ops/cpu/cpp.py``).
"""

import hashlib
import json
import logging
import math
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from eagle_kit.core.errors import UserError, first_line
from eagle_kit.core.files import (
    cache_folder,
    read_object,
    remove,
    replacing,
    taking_turns,
    why_unsafe,
    writing_remedy,
)
from eagle_kit.core.switches import disabled_parts
from eagle_kit.engine.measured.choice import BackendChoice
from eagle_kit.models.loading.source import SET_CACHE

FORMAT = 1
CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12")
"""Names of the packages that hold cuBLAS; torch of another origin brings its own."""
DRIVER = Path("/proc/driver/nvidia/version")
logger = logging.getLogger(__name__)


def folder() -> Path:
    """Folder of measured choices."""
    return cache_folder() / "choices"


def device_key(device: torch.device, sources: Iterable[Path]) -> dict[str, str]:
    """Facts that the times of kernels on a GPU depend on, for the name of a file.

    Args:
        sources: files and folders of the project's kernels that are measured.
    """
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "driver": driver_version(),
        "cuda": str(torch.version.cuda),
        "cublas": _first_version(CUBLAS),
        "torch": torch.__version__,
        "triton": _first_version(("triton",)),
        "kernels": hash_of_sources(sources),
        "disabled": ",".join(sorted(disabled_parts())),
    }


def driver_version() -> str:
    """Version of NVIDIA's driver, as its module of the kernel gives it; "unknown" where it does not."""
    with suppress(OSError):
        return DRIVER.read_text(errors="replace").partition("\n")[0].strip()
    return "unknown"


def hash_of_sources(sources: Iterable[Path]) -> str:
    """Short hash of Python files, and of those in folders."""
    found = hashlib.sha256()
    for source in sources:
        files = sorted(source.rglob("*.py")) if source.is_dir() else [source]
        for file in files:
            found.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def _first_version(packages: Iterable[str]) -> str:
    for name in packages:
        with suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    return "none"


class ChoiceFile:
    """Choices by name, in one file that several processes may extend.

    A choice is written when it is made, and the first process that writes a name decides: another one that
    has measured the same name takes what is in the file. What cannot be read or written costs a measurement
    and a warning, never a request.

    Args:
        kind: beginning of the file's name, such as ``"linear"``.
        key: what the choices depend on, for the hash in the file's name; it is kept in the file for people.

    Attributes:
        path: the file.
        num_read: choices of this process that came out of the file.
        is_used: False once the file cannot be used.
    """

    def __init__(self, kind: str, key: Mapping[str, str]) -> None:
        self.key = dict(key)
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder() / f"{kind}-{digest}.json"
        self.num_read = 0
        self.is_used = True
        self._known = self._read()

    def get(self, name: str, backends: Container[str]) -> BackendChoice[Any] | None:
        """Choice of ``name``, if it is known and one of ``backends``."""
        choice = self._known.get(name)
        if choice is None or choice.backend not in backends:
            return None
        self.num_read += 1
        return choice

    def add(self, name: str, choice: BackendChoice[Any], backends: Container[str]) -> BackendChoice[Any]:
        """Write a choice and return it, or that of another process which was first."""
        if not self.is_used:
            return choice
        try:
            # Only this user may write what the next start reads.
            self.path.parent.parent.mkdir(parents=True, exist_ok=True)
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            self._check_folder()
            if not self.is_used:
                return choice

            with taking_turns(self.path):
                self._known = self._read()
                first = self.get(name, backends)
                if first is not None:
                    return first
                self._known[name] = choice
                self._write()
        except OSError as error:
            self._give_up(error)
        return choice

    def _give_up(self, error: OSError) -> None:
        """Use the file no more, since it cannot be reached or written."""
        self.is_used = False
        text = "Measured choices cannot be kept, and are measured at each start: %s. %s"
        logger.warning(text, error, writing_remedy(error, SET_CACHE))

    def _check_folder(self) -> None:
        """Use the file no more if others can write into its folder."""
        reason = why_unsafe(self.path.parent)
        if reason is not None:
            self.is_used = False
            text = "The folder of measured choices, %s, is not used, since %s. Take that access away, or %s."
            logger.warning(text, self.path.parent, reason, SET_CACHE)

    def _read(self) -> dict[str, BackendChoice[Any]]:
        """Choices in the file. One that others may have written, or that cannot be read, is deleted with a
        warning: owner and mode of a file that is only replaced would stay."""
        try:
            if not self.path.is_file():
                return {}
            self._check_folder()
            if not self.is_used:
                return {}
            reason = why_unsafe(self.path)
        except OSError as error:  # such as a folder that this user cannot enter
            self._give_up(error)
            return {}
        if reason is None:
            try:
                return self._parse(read_object(self.path))
            except UserError as error:
                reason = error.cause.rstrip(".")
            except (ValueError, OverflowError, KeyError, TypeError, AttributeError) as error:
                reason = f"it does not hold choices ({first_line(error)})"
        logger.warning("%s is not used, and its choices are measured again: %s.", self.path, reason)
        with suppress(OSError):
            remove(self.path)
        return {}

    def _parse(self, data: Mapping[str, Any]) -> dict[str, BackendChoice[Any]]:
        """Choices in the object that :meth:`_write` has made. Raises ValueError, OverflowError, KeyError,
        TypeError or AttributeError for anything else."""
        if data["format"] != FORMAT or data["key"] != self.key:
            raise ValueError("another format or key")
        found: dict[str, BackendChoice[Any]] = {}
        for name, entry in data["choices"].items():
            seconds = {str(backend): float(value) for backend, value in entry["seconds"].items()}
            if not all(math.isfinite(value) and value > 0 for value in seconds.values()):
                raise ValueError("a measured time is no time")
            if not isinstance(entry["backend"], str):
                raise TypeError("a backend is no text")
            found[name] = BackendChoice(entry["backend"], seconds)
        return found

    def _write(self) -> None:
        """Replace the file by all known choices."""
        choices = {}
        for name, choice in sorted(self._known.items()):
            seconds = {backend: float(f"{value:.4g}") for backend, value in choice.seconds.items()}
            choices[name] = {"backend": choice.backend, "seconds": seconds}
        text = json.dumps({"format": FORMAT, "key": self.key, "choices": choices}, indent=1)
        with replacing(self.path) as work:
            work.write_text(text + "\n")
            work.chmod(0o644)  # the umask may let a group write
