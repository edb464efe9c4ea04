"""Operations in C++ for fp32 on a CPU, and copies of rows of any type (``csrc``), compiled for this machine
when they are first needed.

A token's results depend on that token and what it attends to alone, to the bit: a product's sum runs over its
terms in their order, whatever the number of rows, the batch, the chunk of a prompt, the pages or the threads,
and a node of a tree sums over its ancestors as plain decoding does over its tokens. (Among finite numbers:
what is not seen is multiplied by zero.) Weights are read once for all rows of a window, and keys where they
lie.

They need a C++ compiler for C++20: ``CXX``, or ``c++``. Where there is none, or with ``EAGLE_KIT_CPP=0``,
torch's operations do the same more slowly. What was compiled is kept in ``EAGLE_KIT_CPP``, or ``cpp`` of the
cache folder. Tried with GCC 12 on Linux, and compiled by clang.
"""

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import (
    cache_folder,
    expand,
    remove,
    replacing,
    taking_turns,
    why_unsafe,
    write_text_atomically,
)

SOURCES = ("linear.cpp", "attention.cpp", "layers.cpp", "logits.cpp", "rows.cpp")
HEADERS = ("threads.h", "vectors.h")
FOLDER = Path(__file__).parent / "csrc"
ANOTHER_COMPILER = "Set CXX to a C++ compiler for C++20."
REMOVE_CAUSE = "Remove that cause, or set CXX to a C++ compiler for C++20."
SOURCE_ERROR = re.compile(r":\d+(:\d+)?: error: ")
"""An error at a place of a source. Fatal errors are of files that cannot be written or found."""
COMPARED_ROWS = 29
"""Numbers of rows that are compared, from 1: more than two blocks of a product have."""
MANY_ROWS = 97
"""Another number of rows that is compared: enough for blocks that prefetch nothing."""
COMPARED_TERMS = 200
"""Terms of the compared products: more than two chunks of a product have."""


@cache
def available() -> bool:
    """Return whether the operations are at hand, as ``torch.ops.eagle_kit_cpp``; compiles them where this
    machine has not, which takes some seconds, and warns where it cannot."""
    found = problem()
    if found is not None and not _is_refused():
        warnings.warn(f"Decoding on this CPU is slower than it could be. {found}", stacklevel=2)
    return found is None


@cache
def problem() -> UserError | None:
    """Say why the operations are not at hand; None where they are."""
    if _is_refused():
        return UserError("EAGLE_KIT_CPP is 0.", "Unset it.")
    if not hasattr(torch.ops.eagle_kit_cpp, "linear"):  # two copies in a process cannot be
        try:
            _load(shlex.split(os.environ.get("CXX", "")) or _default_compiler())
        except UserError as error:
            return error
        except (OSError, RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            return UserError(f"The operations in C++ cannot be compiled: {reason}.", REMOVE_CAUSE)
    if not _sums_in_one_order():
        return UserError("The C++ compiler adds up in another order for other rows.", ANOTHER_COMPILER)
    return None


def is_loaded() -> bool:
    """Return True if the operations are at hand already."""
    return hasattr(torch.ops.eagle_kit_cpp, "linear") and available()


def compiled_folder() -> Path:
    """Folder of what was compiled: ``EAGLE_KIT_CPP``, or ``cpp`` of the cache folder."""
    place = os.environ.get("EAGLE_KIT_CPP")
    return expand(place) if place else cache_folder() / "cpp"


def halves_in_turns(panels: torch.Tensor) -> torch.Tensor:
    """Order panels ``[P, K, W]`` as those of bfloat16 are read: numbers of the two halves of W in turns."""
    return panels.unflatten(2, (2, -1)).transpose(2, 3).flatten(2)


def _is_refused() -> bool:
    return os.environ.get("EAGLE_KIT_CPP") == "0"


def _default_compiler() -> list[str]:
    found = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if found is None:
        raise RuntimeError("there is no C++ compiler")
    return [found]


def _load(compiler: list[str]) -> None:
    """Load the library for this machine, compiled where the cache has none that can be loaded.

    Only what this user or root has written is loaded, from a folder in which nobody else can write.

    Raises:
        UserError: others can write to the folder, or the compiler does not take the sources.
        RuntimeError: the compiler fails for another reason, which may not be there the next time.
        OSError: the folder cannot be written, or what was compiled cannot be loaded.
    """
    # The library and its folder.
    command = [*compiler, *_flags()]
    version = _run([*compiler, "--version"])
    folder = compiled_folder()
    library = folder / f"{_key([*command, version])}.so"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if (reason := why_unsafe(folder)) is not None:
        raise UserError(
            f"The folder of compiled operations, {folder}, is not used, since {reason}.",
            "Take that access away, or set EAGLE_KIT_CPP to a folder that is yours alone.",
        )

    # It is compiled once, and again where it is of another system, or cut off.
    for attempt in range(2):
        if not _is_ours(library):
            with taking_turns(library):
                _compile_once(command, library)
        try:
            torch.ops.load_library(str(library))
            return
        except OSError:
            if attempt:
                raise
            library.unlink(missing_ok=True)


def _compile_once(command: list[str], library: Path) -> None:
    """Compile where another process has not meanwhile, and note an error in the sources, which would come
    again each time. Any other failure, such as a full disk or a compiler that was killed, is not noted."""
    if _is_ours(library):
        return
    failed = library.with_suffix(".failed")
    if _is_ours(failed):
        raise _refuses_sources(failed.read_text(), failed)
    for planted in (library, failed):
        remove(planted)
    try:
        _compile(command, library)
    except SourceError as error:
        with suppress(OSError):  # then it is found again the next time
            write_text_atomically(failed, str(error))
            failed.chmod(0o644)
        raise _refuses_sources(str(error), failed) from None
    library.chmod(0o755)


def _is_ours(path: Path) -> bool:
    """Return True for a file that is there and can be written by this user and root alone."""
    return path.is_file() and why_unsafe(path) is None


def _refuses_sources(reason: str, failed: Path) -> UserError:
    return UserError(
        f"The operations in C++ cannot be compiled: {reason}.",
        f"{ANOTHER_COMPILER[:-1]}; to try the same one again, delete {failed}.",
    )


def _compile(command: list[str], library: Path) -> None:
    """Compile every source by ``command``, at the same time, and link them to ``library``."""
    print(f"Compiling operations for this CPU, once, into {library.parent}.", file=sys.stderr)
    with tempfile.TemporaryDirectory() as place, replacing(library) as path:
        objects = [str(Path(place) / f"{name}.o") for name in SOURCES]
        pairs = zip(SOURCES, objects, strict=True)
        calls = [[*command, "-c", str(FOLDER / source), "-o", made] for source, made in pairs]
        with ThreadPoolExecutor() as pool:
            list(pool.map(_run, calls))
        links = [f"-L{_torch() / 'lib'}", "-ltorch_cpu", "-lc10"]
        _run([*command, "-shared", *objects, "-o", str(path), *links])


class SourceError(RuntimeError):
    """The compiler does not take a source, and will not the next time."""


def _run(command: list[str]) -> str:
    """Run a compiler -> what it says. Raises RuntimeError with its first error, and OSError."""
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
    if done.returncode:
        lines = done.stderr.splitlines()
        said = next((line for line in lines if "error" in line), lines[0] if lines else "it says nothing")
        is_of_source = done.returncode > 0 and SOURCE_ERROR.search(said)
        raise (SourceError if is_of_source else RuntimeError)(f"{command[0]} fails: {said.strip()}")
    return done.stdout


def _flags() -> list[str]:
    machine = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    return [
        "-O3",
        machine,
        "-ffp-contract=fast",
        "-std=c++20",
        "-fPIC",
        "-pthread",
        f"-I{_torch() / 'include'}",
    ]


def _torch() -> Path:
    return Path(torch.__file__).parent


def _key(command: list[str]) -> str:
    """Name of what is compiled: sources, compiler, torch, system, and what kind of processor this is."""
    parts = [(FOLDER / name).read_text() for name in (*SOURCES, *HEADERS)]
    parts += [*command, torch.__version__, platform.machine(), *platform.libc_ver(), _processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _processor() -> str:
    """What instructions the processor has, or which machine this is; homes are shared by machines of several
    kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.node()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.node())


def _sums_in_one_order() -> bool:
    """Return whether a row of a product has the same bits in any number of rows and from weights of either
    type, as the sources are written for: a compiler is free to fuse a multiplication and an addition in one
    place and not in another."""
    with _disable_current_modes():  # real tensors, where the caller's are fake, counted or recorded
        generator = torch.Generator().manual_seed(0)
        width = torch.ops.eagle_kit_cpp.panel_width()
        x = torch.randn(MANY_ROWS, COMPARED_TERMS, generator=generator, device="cpu")
        short = torch.randn(2, COMPARED_TERMS, width, generator=generator, device="cpu").bfloat16()
        panels = short.float(), halves_in_turns(short)
        product = torch.ops.eagle_kit_cpp.linear
        whole = product(x, panels[0], 2 * width, None)
        counts = *range(1, COMPARED_ROWS + 1), MANY_ROWS
        products = ((product(x[:n], part, 2 * width, None), whole[:n]) for n in counts for part in panels)
        return all(torch.equal(*pair) for pair in products)
