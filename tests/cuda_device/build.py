"""Build of the libraries of the CUDA device in software, with gcc and g++, into a folder of the environment.

The names that a library has to have are read from the installed packages: the symbols that torch and NVIDIA's
libraries import, and the functions of the driver that torch and Triton look up by name. Names without a body
in ``native/`` become a table: routines of cuBLAS are launches, and the others log their name and answer "not
supported" when they are called.
"""

import hashlib
import importlib.metadata
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

NATIVE = Path(__file__).parent / "native"
SITE = Path(importlib.metadata.distribution("torch").locate_file(""))
INCLUDES = (SITE / "triton" / "backends" / "nvidia" / "include", SITE / "nvidia" / "cu13" / "include")
OPTIONS = ("-std=gnu11", "-O2", "-g", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter")
POISON = "poison.so"
"""The part that is attached to torch's caching allocator, in mode "values" only."""
POISON_OPTIONS = (
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-shared",
    f"-I{SITE / 'torch' / 'include'}",
    f"-L{SITE / 'torch' / 'lib'}",
)
POISON_LIBRARIES = ("-lc10_cuda", "-lc10")
CUBLAS_ROUTINE = re.compile(r"cublas(?!Set|Get)(?:[SDCZ]|I[sdcz])[a-z]\w*|cublas(?:Gemm\w*|Dot)Ex")
"""Routines that compute, by their type letters, against settings of a handle."""


class Library(NamedTuple):
    """A library of the device: its source, its options, and the error "not supported" of its functions."""

    file: str
    source: str
    not_supported: int
    options: tuple[str, ...] = ()

    @property
    def is_driver(self) -> bool:
        """The driver has no versions of symbols, and names of it are looked up."""
        return self.file.startswith("libcuda.")


LIBRARIES = (
    Library("libcudart.so.13", "runtime.c", 801),
    Library("libcublas.so.13", "cublas.c", 15),
    Library("libcublasLt.so.13", "cublas.c", 15, ("-DIS_CUBLAS_LT",)),
    Library("libcuda.so.1", "driver.c", 801),
)
NVML = "libnvidia-ml.so.1"
"""Built beside the others, and in front where EAGLE_KIT_DEVICE_NVML is set. It has no other names than its
bodies'."""


def build() -> Path:
    """Folder of the libraries, built where this environment has none of these sources."""
    folder = Path(sys.prefix) / "cuda_device" / _digest()
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for library in LIBRARIES:
            _build(library, folder)
        _link_without_version(folder / "libcuda.so.1", folder / "libcuda.so")
        _build_poison(folder)
        _build_nvml(folder)
        (folder / "complete").touch()
    return folder


def _digest() -> str:
    """Of all that the libraries are made from."""
    found = hashlib.sha256()
    for path in sorted([Path(__file__), *NATIVE.iterdir()]):
        found.update(path.read_bytes())
    for name in ("torch", "triton"):
        found.update(importlib.metadata.version(name).encode())
    return found.hexdigest()[:16]


def _link_without_version(path: Path, link: Path) -> None:
    """Triton links its launcher with ``-lcuda``."""
    if not link.is_symlink():
        link.symlink_to(path.name)


def _build_poison(folder: Path) -> None:
    """It calls the runtime, which is loaded before it."""
    made = folder / f"{POISON}.{os.getpid()}"
    includes = [f"-I{path}" for path in INCLUDES]
    _run(["g++", *POISON_OPTIONS, *includes, str(NATIVE / "poison.cpp"), *POISON_LIBRARIES, "-o", str(made)])
    made.replace(folder / POISON)


def _build_nvml(folder: Path) -> None:
    made = folder / f"{NVML}.{os.getpid()}"
    linked = ["-shared", f"-Wl,-soname,{NVML}"]
    _run(["gcc", *OPTIONS, *linked, str(NATIVE / "nvml.c"), "-o", str(made)])
    made.replace(folder / NVML)


def _build(library: Library, folder: Path) -> None:
    """Compile the source, which shows the names that have bodies, then link it with a table of the others."""
    prefix = folder / f"{library.file}.{os.getpid()}"
    compiler = ["gcc", *OPTIONS, *(f"-I{path}" for path in INCLUDES), *library.options]
    bodies = Path(f"{prefix}.o")
    _run([*compiler, "-c", str(NATIVE / library.source), "-o", str(bodies)])

    # The table.
    table = folder / f"{library.file}.table.h"
    missing = sorted(imported_symbols(library) - defined_symbols(bodies))
    table.write_text("".join(f"{_macro(library, name)}({name})\n" for name in missing))

    # The library, whose symbols have the version that those who import them ask for.
    versions = Path(f"{prefix}.map")
    versions.write_text("{ global: *; };\n" if library.is_driver else f"{library.file} {{ global: *; }};\n")
    defined = [f'-DTABLE="{table}"', f"-DERROR={library.not_supported}"]
    linked = ["-shared", f"-Wl,-soname,{library.file}", f"-Wl,--version-script={versions}"]
    sources = [str(NATIVE / "table.c"), str(bodies)]
    _run([*compiler, *defined, *linked, *sources, "-lpthread", "-ldl", "-o", str(prefix)])
    prefix.replace(folder / library.file)
    versions.unlink()
    bodies.unlink()


def _macro(library: Library, name: str) -> str:
    return "ROUTINE" if library.file == "libcublas.so.13" and CUBLAS_ROUTINE.fullmatch(name) else "ABSENT"


def imported_symbols(library: Library) -> set[str]:
    """Names of a library's functions that installed libraries import, or look up where it is the driver."""
    names = set()
    for path in _installed_libraries():
        if library.is_driver and not _needs(path, library.file):
            continue
        for symbol in _symbols(path, "--undefined-only"):
            name, _, version = symbol.partition("@")
            if version == library.file or (library.is_driver and re.fullmatch(r"cu[A-Z]\w+", name)):
                names.add(name)
    return names | _looked_up_names() if library.is_driver else names


def defined_symbols(path: Path) -> set[str]:
    """Names of functions that an object file or a library has."""
    return {symbol.partition("@")[0] for symbol in _symbols(path, "--defined-only")}


def _looked_up_names() -> set[str]:
    """Functions of the driver whose names stand in torch's libraries or in Triton's launcher."""
    declared = set(re.findall(r"\b(cu[A-Z]\w+)\(", (INCLUDES[0] / "cuda.h").read_text(errors="replace")))
    found = set(re.findall(r"\bcu[A-Z]\w+", (INCLUDES[0].parent / "driver.c").read_text()))
    for name in ("libc10_cuda.so", "libtorch_cuda.so"):
        with (
            (SITE / "torch" / "lib" / name).open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            found.update(each.decode() for each in re.findall(rb"(?<=\0)cu[A-Z]\w+(?=\0)", content))
    return found & declared


def _installed_libraries() -> Iterator[Path]:
    """Iterate over the libraries of torch and of NVIDIA, but those that this device replaces."""
    replaced = {library.file for library in LIBRARIES}
    for pattern in ("torch/lib/*.so*", "nvidia/*/lib/*.so*"):
        for path in sorted(SITE.glob(pattern)):
            if path.name not in replaced and not path.is_symlink():
                yield path


def _needs(path: Path, file: str) -> bool:
    return f"[{file}]" in _run(["readelf", "-d", str(path)])


@cache
def _symbols(path: Path, which: str) -> tuple[str, ...]:
    """The dynamic symbols of a library, or all of an object file."""
    dynamic = [] if path.suffix == ".o" else ["-D"]
    lines = _run(["nm", *dynamic, which, "--extern-only", "--with-symbol-versions", str(path)]).splitlines()
    return tuple(line.split()[-1] for line in lines if line.split())


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    print(build())
