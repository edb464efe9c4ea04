"""Facts of the machine for a bug report: versions, and what nvidia-smi says; no names of hosts and users."""

import csv
import getpass
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import eagle_kit
from eagle_kit.core.switches import VARIABLE
from eagle_kit.report.environment import describe_machine, describe_versions, package_versions

PACKAGES = ("triton", "flash-attn", "flashinfer-python", "llguidance")
"""Packages beside those of every report that decide what runs on a GPU."""
VARIABLES = (
    VARIABLE,
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_P2P_DISABLE",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_LOGS",
    "TRITON_INTERPRET",
)
"""Environment variables that change what runs on a GPU. No others go into the file."""
SMI_FIELDS = (
    "index",
    "driver_version",
    "persistence_mode",
    "ecc.mode.current",
    "mig.mode.current",
    "compute_mode",
    "clocks_throttle_reasons.active",
    "temperature.gpu",
    "pcie.link.gen.current",
    "pcie.link.width.current",
    "memory.used",
)
SMI_SECONDS = 20.0
NVLINK = re.compile(r"NV\d+")
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
IDLE = 0x1
POWER_CAP = 0x4
HARMLESS_THROTTLING = IDLE | POWER_CAP
"""Reasons of lower clocks that are no fault: nothing to do, and the power limit."""


def machine_facts() -> dict[str, Any]:
    """Versions, CPU, environment variables, and facts of nvidia-smi. Nothing here makes a CUDA context."""
    import torch

    versions = {**describe_versions(), **package_versions(PACKAGES), "torch_cuda": torch.version.cuda}
    return {
        "versions": versions,
        "commit": commit_of_package(),
        "machine": describe_machine("cpu"),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "nvidia_smi": nvidia_smi(),
    }


def commit_of_package() -> str | None:
    """Commit of the package: of the repository that it is in, or that pip installed it from."""
    folder = Path(eagle_kit.__file__).parents[1]
    if (folder / ".git").exists():
        lines = _run(["git", "-C", str(folder), "rev-parse", "HEAD"])
        return lines[0] if lines else None
    with suppress(PackageNotFoundError, json.JSONDecodeError):
        text = distribution("eagle_kit").read_text("direct_url.json")
        found = json.loads(text or "{}").get("vcs_info", {}).get("commit_id")
        return str(found) if found else None
    return None


def nvidia_smi() -> dict[str, Any] | None:
    """State of each GPU, number and memory of other programs, and connections; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    fields = ",".join(SMI_FIELDS)
    gpus = parse_table(_run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]), SMI_FIELDS)
    programs = _run(["nvidia-smi", "--query-compute-apps=used_memory", "--format=csv,noheader"])
    topology = [ESCAPES.sub("", line) for line in _run(["nvidia-smi", "topo", "-m"])]
    return {"gpus": gpus, "memory_of_programs": programs, "topology": topology}


def parse_table(lines: Sequence[str], names: Sequence[str]) -> list[dict[str, str]]:
    """Parse lines of values separated by commas; lines with another number of values are left out."""
    rows = []
    for values in csv.reader(lines, skipinitialspace=True):
        if len(values) == len(names):
            rows.append(dict(zip(names, values, strict=True)))
    return rows


def is_throttled(reasons: str) -> bool:
    """True if nvidia-smi's bits, such as ``0x0000000000000008``, name a reason that is a fault."""
    try:
        return bool(int(reasons, 16) & ~HARMLESS_THROTTLING)
    except ValueError:
        return False


def has_nvlink(topology: Sequence[str]) -> bool | None:
    """True if a matrix of ``nvidia-smi topo -m`` has an NVLink; None without a matrix."""
    rows = [line for line in topology if line.startswith("GPU")]
    if not rows:
        return None
    return any(NVLINK.search(line) for line in rows)


def _run(command: Sequence[str]) -> list[str]:
    """Lines that a program printed; none where it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def without_names(value: Any) -> Any:
    """Copy JSON values, with the home folder as ``~`` and without the names of host and user."""
    return _replaced(value, _private_names())


def _replaced(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for name, shown in names.items():
            value = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", shown, value)
        return value
    if isinstance(value, Mapping):
        return {_replaced(key, names): _replaced(each, names) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(each, names) for each in value]
    return value


def _private_names() -> dict[str, str]:
    """Names of this machine, each with its replacement; the longest first."""
    names: dict[str, str] = {}
    with suppress(RuntimeError):
        home = str(Path.home())
        if len(home) > 1:
            names[home] = "~"
    with suppress(OSError, KeyError, ImportError):
        user = getpass.getuser()
        if user not in ("root", "user"):
            names[user] = "USER"
    host = socket.gethostname()
    if host not in ("", "localhost"):
        names[host] = "HOST"
        names.setdefault(host.partition(".")[0], "HOST")
    return dict(sorted(names.items(), key=lambda pair: -len(pair[0])))
