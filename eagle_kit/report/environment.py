"""Environment of a measurement: machine, versions, command, date."""

import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eagle_kit.core.process import num_cores

PACKAGES = ("eagle_kit", "torch", "transformers", "accelerate", "numpy", "safetensors")


def describe_machine(device: str) -> dict[str, Any]:
    """CPU model, usable cores, torch threads, memory in GiB, and the GPU when ``device`` is one."""
    import torch

    gpu = None
    if device.startswith("cuda"):
        gpu = torch.cuda.get_device_name(device)
    return {
        "cpu": cpu_model(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "memory_gb": _memory_gb(),
        "gpu": gpu,
        "system": f"{platform.system()} {platform.machine()}",
    }


def peak_memory_gb(device: str) -> float | None:
    """Peak memory of this process in GB (1e9 bytes): allocated on its GPU, or resident where
    ``device`` is a CPU; None where the system does not give it."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device) / 1e9

    # Not by getrusage, whose peak begins on Linux with that of the parent process. The file is read
    # as bytes, since the name of a process may be no UTF-8.
    try:
        status = Path("/proc/self/status").read_bytes()
    except OSError:
        return None
    found = re.search(rb"VmHWM:\s*(\d+) kB", status)
    if found is None:
        return None
    return int(found[1]) * 1024 / 1e9


def machine_title(machine: dict[str, Any]) -> str:
    """One short line: the GPU, or the CPU with its threads."""
    if machine.get("gpu"):
        return str(machine["gpu"])
    threads = machine["threads"]
    unit = "thread" if threads == 1 else "threads"
    return f"{machine['cpu']}, {threads} {unit}"


def cpu_model() -> str:
    """Name of the CPU where the system gives it, else its architecture. Names without a number, as
    clouds give them, are followed by family and model."""
    text = ""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    fields: dict[str, str] = {}
    for line in text.splitlines():
        field, _, value = line.partition(":")
        fields.setdefault(field.strip().lower(), value.strip())
    name = fields.get("model name") or fields.get("hardware") or platform.processor() or platform.machine()
    has_number = any(character.isdigit() for character in name)
    if not has_number and {"cpu family", "model"} <= fields.keys():
        name += f" (family {fields['cpu family']}, model {fields['model']})"
    return name


def describe_versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that decide a result."""
    return {"python": platform.python_version(), **package_versions(PACKAGES)}


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of the named distributions, without those that are not installed."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def command_line() -> str:
    """The command as it was typed, without the folder of the program."""
    program = Path(sys.argv[0]).name
    if program == "__main__.py":
        program = "eagle-kit"
    return shlex.join([program, *sys.argv[1:]])


def now() -> str:
    """Local date and time with its zone, to the second."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None
