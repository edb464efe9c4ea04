"""Operations in C++ for fp32 on a CPU, and copies of rows of any type (``csrc``), compiled for this machine
at first use.

The bits of a token's results depend only on the token and on what it attends to. A sum runs over its terms in
their order, whatever the number of rows, the batch, the chunk of a prompt, the pages or the threads, and a
node of a tree sums over its ancestors as plain decoding does over its tokens. (This holds for finite numbers:
keys that are not seen are multiplied by zero.) Weights are read once for all rows of a window, and keys in
place.

The operations need a compiler for C++20: ``CXX``, or ``c++``. Without one, or with ``EAGLE_KIT_CPP=0``,
torch's operations do the same more slowly. The library is kept in ``EAGLE_KIT_CPP``, or in ``cpp`` of the
cache folder, whose mode is 0700. Tested with GCC 12, and with clang 22 and libc++, on Linux. With libc++ an
argument that is refused ends the process, since torch's C++ library does not catch libc++'s exceptions.
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
    """Return whether the operations are available as ``torch.ops.eagle_kit_cpp``. Compiles them if this
    machine has not yet, which takes some seconds, and warns if it cannot."""
    error = problem()
    if error is not None and not _is_disabled():
        warnings.warn(f"Decoding on this CPU is slower than it could be. {error}", stacklevel=2)
    return error is None


@cache
def problem() -> UserError | None:
    """Return why the operations are not available, or None if they are."""
    if _is_disabled():
        return UserError("EAGLE_KIT_CPP is 0.", "Unset it.")
    if not hasattr(torch.ops.eagle_kit_cpp, "linear"):  # a process cannot load two copies
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
    """Return True if the operations are loaded already."""
    return hasattr(torch.ops.eagle_kit_cpp, "linear") and available()


def compiled_folder() -> Path:
    """Folder of the compiled library: ``EAGLE_KIT_CPP``, or ``cpp`` of the cache folder."""
    folder = os.environ.get("EAGLE_KIT_CPP")
    return expand(folder) if folder else cache_folder() / "cpp"


def halves_in_turns(panels: torch.Tensor) -> torch.Tensor:
    """Order panels ``[P, K, W]`` as bfloat16 panels are read: numbers of the two halves of W alternate."""
    return panels.unflatten(2, (2, -1)).transpose(2, 3).flatten(2)


def _is_disabled() -> bool:
    return os.environ.get("EAGLE_KIT_CPP") == "0"


def _default_compiler() -> list[str]:
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise RuntimeError("there is no C++ compiler")


def _load(compiler: list[str]) -> None:
    """Load the library for this machine, and compile it if the folder has none that can be loaded.

    Only a library that this user or root has written is loaded, from a folder in which nobody else can write.

    Raises:
        UserError: others can write to the folder, or the compiler does not take the sources.
        RuntimeError: the compiler fails for another reason, which may be gone the next time.
        OSError: the folder cannot be written, or the library cannot be loaded.
    """
    # The library and its folder.
    command = [*compiler, *_flags()]
    version = _run([*compiler, "--version"])
    folder = compiled_folder()
    library = folder / f"{_key([*command, version])}.so"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    reason = why_unsafe(folder)
    if reason is not None:
        raise UserError(
            f"The folder of compiled operations, {folder}, is not used, since {reason}.",
            "Take that access away, or set EAGLE_KIT_CPP to a folder that is yours alone.",
        )

    # Compile it once, and again if it cannot be loaded: it may be of another system, or truncated.
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
    """Compile unless another process has meanwhile.

    An error in the sources, which every attempt would repeat, is remembered in a file ``.failed``. Any other
    failure, such as a full disk or a compiler that was killed, is not.
    """
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
        with suppress(OSError):  # without the file, the next attempt finds the error again
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
    """Run a compiler and return its output. Raises RuntimeError with its first error, and OSError."""
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
    if done.returncode:
        lines = done.stderr.splitlines()
        first_line = lines[0] if lines else "it says nothing"
        error = next((line for line in lines if "error" in line), first_line)
        message = f"{command[0]} fails: {error.strip()}"
        if done.returncode > 0 and SOURCE_ERROR.search(error):
            raise SourceError(message)
        raise RuntimeError(message)
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
    """Name of a library: a hash of sources, compiler, torch, system and processor."""
    parts = [(FOLDER / name).read_text() for name in (*SOURCES, *HEADERS)]
    parts += [*command, torch.__version__, platform.machine(), *platform.libc_ver(), _processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _processor() -> str:
    """The processor's instruction sets, or else the name of the machine: machines of several kinds may share
    a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.node()
    for line in lines:
        if line.startswith(("flags", "Features")):
            return line
    return platform.node()


def _sums_in_one_order() -> bool:
    """Return whether a row of a product has the same bits in any number of rows and from weights of either
    type. The sources are written for it, but a compiler is free to fuse a multiplication and an addition in
    one place and not in another."""
    with _disable_current_modes():  # real tensors, where the caller's are fake, counted or recorded
        generator = torch.Generator().manual_seed(0)
        width = torch.ops.eagle_kit_cpp.panel_width()
        x = torch.randn(MANY_ROWS, COMPARED_TERMS, generator=generator, device="cpu")
        weight = torch.randn(2, COMPARED_TERMS, width, generator=generator, device="cpu").bfloat16()
        fp32_panels = weight.float()
        product = torch.ops.eagle_kit_cpp.linear
        expected = product(x, fp32_panels, 2 * width, None)
        for num_rows in (*range(1, COMPARED_ROWS + 1), MANY_ROWS):
            for panels in (fp32_panels, halves_in_turns(weight)):
                if not torch.equal(product(x[:num_rows], panels, 2 * width, None), expected[:num_rows]):
                    return False
        return True
