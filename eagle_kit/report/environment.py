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
    """CPU model, usable cores, torch threads, memory in GB, and the GPU when ``device`` is one."""
    import torch

    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    return {
        "cpu": cpu_model(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "memory_gb": _memory_gb(),
        "gpu": gpu,
        "system": f"{platform.system()} {platform.machine()}",
    }


def peak_memory_gb(device: str) -> float | None:
    """Peak memory of this process: allocated on its GPU, or resident beside a CPU; None where the system does
    not tell."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device) / 1e9
    with suppress(OSError):  # not getrusage, which on Linux begins with what the parent process had
        status = Path("/proc/self/status").read_bytes()  # a process may have any name
        if found := re.search(rb"VmHWM:\s*(\d+) kB", status):
            return int(found[1]) * 1024 / 1e9
    return None


def machine_title(machine: dict[str, Any]) -> str:
    """One short line: the GPU, or the CPU with its threads."""
    if machine.get("gpu"):
        return str(machine["gpu"])
    threads = machine["threads"]
    return f"{machine['cpu']}, {threads} thread{'' if threads == 1 else 's'}"


def cpu_model() -> str:
    """Name of the CPU where the system tells it, else its architecture. Names without a number, as clouds
    give them, are followed by family and model."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            field, _, value = line.partition(":")
            fields.setdefault(field.strip().lower(), value.strip())
    except OSError:
        pass
    name = fields.get("model name") or fields.get("hardware") or platform.processor() or platform.machine()
    if not any(character.isdigit() for character in name) and {"cpu family", "model"} <= fields.keys():
        name += f" (family {fields['cpu family']}, model {fields['model']})"
    return name


def describe_versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that decide a result."""
    return {"python": platform.python_version(), **package_versions(PACKAGES)}


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of those of the named distributions that are installed."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def command_line() -> str:
    """The command as it was typed, without the folder of the program."""
    program = Path(sys.argv[0]).name
    return shlex.join(["eagle-kit" if program == "__main__.py" else program, *sys.argv[1:]])


def now() -> str:
    """Local date and time with its zone, to the second."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None
