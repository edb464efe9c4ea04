"""Compile Triton kernels for GPUs that are not there, and read what came out.

``python kernels compile`` does it in a process of its own, since the interpreter and the compiler
cannot share one.
"""

import argparse
import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from eagle_kit.ops.capability import RESERVED_BYTES, facts_of, multiprocessor
from kernel_lab.ptx import START, allocates_first, hot_loops, waits_first
from kernel_lab.ttgir import conversions
from kernel_lab.variant import SHIPPED, Variant

REGISTERS = 65536
"""32-bit registers of a multiprocessor, of every capability from 8.0 on."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Compiler output of a variant; ``faults`` is empty when all is as it should be."""

    name: str
    arch: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    wgmma: bool
    programs: int
    narrow_loops: int
    direct_loops: int
    conversions: int
    faults: tuple[str, ...]


def compile_variant(variant: Variant, arch: int) -> Report:
    """Compile one variant. A kernel that does not compile is a fault in the report too."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # The description has all arguments of the kernel, and no others.
    names = variant.kernel.arg_names
    signature = {name: variant.types.get(name, "constexpr") for name in names}
    described = {*variant.types, *variant.constants}
    if wrong := described.symmetric_difference(names):
        return _failed(variant, arch, f"its arguments are described wrongly: {', '.join(sorted(wrong))}")
    loose = {each.name for each in variant.kernel.params if each.do_not_specialize}
    if wrong := loose.intersection(variant.aligned):
        fault = f"launches do not specialise on the alignment of {', '.join(sorted(wrong))}"
        return _failed(variant, arch, fault)

    # Compile for the architecture.
    divisible: list[list[Any]] = [["tt.divisibility", 16]]
    attrs = {
        path: divisible
        for path, name, kind in _arguments(signature)
        if kind.startswith("*") or name in variant.aligned
    }
    source = ASTSource(
        fn=variant.kernel, signature=signature, constexprs=dict(variant.constants), attrs=attrs
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    if variant.max_registers is not None:
        options["maxnreg"] = variant.max_registers
    try:
        _lower_with_ones(variant, signature, attrs, arch, options)
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:  # whatever a compiler pass raises
        reason = str(error).strip().splitlines() or ["no reason"]
        return _failed(variant, arch, f"it does not compile: {type(error).__name__}: {reason[-1]}")

    # Read resources, instructions and loops out of what came out.
    registers, stack = _resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    shared = compiled.metadata.shared
    wgmma = "wgmma.mma_async" in ptx or "tcgen05.mma" in ptx
    loops = hot_loops(ptx)
    narrow = sum(loop.is_narrow for loop in loops)
    direct = sum(loop.multiplies and not loop.is_asynchronous for loop in loops)
    programs = resident_programs(arch, registers, shared, variant.num_warps)

    # Faults of resources and of loops.
    faults = []
    if stack and not variant.spills:
        faults.append(f"{stack} bytes of stack")
    if shared > multiprocessor(arch).program_bytes:
        faults.append(f"{shared} bytes of shared memory, {multiprocessor(arch).program_bytes} are there")
    if variant.wgmma and facts_of(arch).multiplies_in_groups and not wgmma:
        faults.append("no wgmma")
    if narrow and not variant.narrow:
        faults.append(f"loads of less than 16 bytes in {narrow} of {len(loops)} loops")
    if direct and variant.num_stages > 1 and not variant.direct:
        faults.append(f"neither cp.async nor TMA in {direct} of {len(loops)} loops")
    converted = conversions(compiled.asm["ttgir"])
    if converted and not variant.converts:
        faults.append(f"{converted} layout conversions of addresses or operands in pipelined loops")

    # Faults of programmatic dependent launch, and of occupancy.
    if variant.constants.get("PDL"):
        if START not in ptx:
            faults.append("it does not let the next launch start")
        if not allocates_first(ptx):
            faults.append("it takes tensor memory behind the start of the next launch")
        if not waits_first(ptx):
            faults.append("it does not wait for the launch before it first of all")
    elif "griddepcontrol" in ptx:
        faults.append("griddepcontrol without PDL")
    if programs < variant.programs:
        faults.append(f"{programs} programs fit on a multiprocessor, not {variant.programs}")

    return Report(
        variant.name,
        arch,
        registers,
        stack,
        shared,
        wgmma,
        programs,
        narrow,
        direct,
        converted,
        tuple(faults),
    )


def _lower_with_ones(
    variant: Variant,
    signature: Mapping[str, str | tuple[str, ...]],
    attrs: Any,
    arch: int,
    options: dict[str, int],
) -> None:
    """Translate the kernel as it is for integers that are 1, which Triton takes for constants at a launch
    unless the kernel forbids it: they are no tensors then. Raises what the translation raises."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    loose = {each.name for each in variant.kernel.params if each.do_not_specialize}
    ones: dict[tuple[int, ...], Any] = {
        path: 1 for path, name, kind in _arguments(signature) if kind in ("i32", "i64") and name not in loose
    }

    def constant(kind: str) -> str:
        return "constexpr" if kind in ("i32", "i64") else kind

    kinds: dict[str, Any] = {
        name: kind
        if name in loose
        else constant(kind)
        if isinstance(kind, str)
        else tuple(map(constant, kind))
        for name, kind in signature.items()
    }
    constants: dict[Any, Any] = {**variant.constants, **ones}
    source = ASTSource(
        fn=variant.kernel,
        signature=kinds,
        constexprs=constants,
        attrs={path: what for path, what in attrs.items() if path not in ones},
    )
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(options)
    source.make_ir(
        target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context
    )


def _arguments(
    signature: Mapping[str, str | tuple[str, ...]],
) -> Iterator[tuple[tuple[int, ...], str, str]]:
    """Path, name and type of every argument, those in tuples included."""
    for i, (name, kind) in enumerate(signature.items()):
        if isinstance(kind, tuple):
            yield from (((i, j), name, each) for j, each in enumerate(kind))
        else:
            yield (i,), name, kind


def _failed(variant: Variant, arch: int, fault: str) -> Report:
    return Report(variant.name, arch, 0, 0, 0, False, 0, 0, 0, 0, (fault,))


def resident_programs(capability: int, registers: int, shared_bytes: int, num_warps: int) -> int:
    """Number of programs that fit on a multiprocessor at once.

    Args:
        registers: of a thread; they are allotted to a warp in steps of 256.
        shared_bytes: of a program.
    """
    limits = multiprocessor(capability)
    of_warp = -(-32 * registers // 256) * 256
    return min(
        limits.programs,
        limits.warps // num_warps,
        REGISTERS // of_warp // num_warps,
        limits.total_bytes // (shared_bytes + RESERVED_BYTES),
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of stack."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"REG:(\d+)", text)[0]), int(re.findall(r"STACK:(\d+)", text)[0])


def kernel_modules() -> list[str]:
    """Names of the modules of the package with Triton kernels."""
    import eagle_kit.ops

    found = pkgutil.walk_packages(eagle_kit.ops.__path__, "eagle_kit.ops.")
    return [module.name for module in found if module.name.endswith((".triton", ".triton_backward"))]


def operation_of(module: str) -> str:
    """Name of the operation of a module of kernels: ``window_attention`` of
    ``ops.attention.window.triton``."""
    *_, folder, name, _ = module.split(".")
    return f"{name}_attention" if folder == "attention" else name


def load_variants(module: str, arch: int) -> list[Variant]:
    """Variants of a module of kernels that ship for ``arch``; see :mod:`kernel_lab.variants`."""
    file = module.rpartition(".")[2]
    table = operation_of(module) + file.removeprefix("triton")
    listed = importlib.import_module(f"kernel_lab.variants.{table}").variants
    if inspect.signature(listed).parameters:  # blocks depend on the device
        found = listed(facts_of(arch))
    else:
        found = listed()
    return [variant for variant in found if arch in variant.archs]


def _compile(job: tuple[str, int, int]) -> Report:
    module, index, arch = job
    return compile_variant(load_variants(module, arch)[index], arch)


SAMPLE = (
    # Attention in registers that just suffice, which one compiler or another has spilled.
    (80, "window_attention bf16 D128 G4 N1 page 16 split merged"),
    (90, "window_attention bf16 D128 G4 N1 page 16 fp8 split merged"),
    (90, "window_attention bf16 D256 G2 N8 page 16 split merged window 4096 capped True"),
    (90, "mla_attention bf16 keys bf16 rows 128 split"),
    # Positions that a compiler needed in two layouts.
    (90, "window_attention bf16 D128 G5 N1 page 16 split merged chunk 8192"),
    # Matrix instructions of other GPUs, for which a version needed twice the shared memory, and fp8 there.
    (100, "mla_attention bf16 keys bf16 rows 16 split merged"),
    (100, "small_linear bf16 weight bf16 M64 split"),
    (120, "window_attention bf16 D128 G4 N1 page 16 fp8 split merged"),
)
"""Capability and name of configurations that show most of what a version of Triton changes, in a minute."""


def compile_all(
    words: Sequence[str] = (), archs: Sequence[int] = SHIPPED, processes: int = 2, *, is_sample: bool = False
) -> list[Report]:
    """Compile every variant whose name contains one of ``words``, for each of ``archs`` that it ships for.

    Args:
        words: parts of names; none stands for all variants.
        is_sample: compile those of :data:`SAMPLE` among them only.
    """
    jobs = []
    for module in kernel_modules():
        for arch in archs:
            for index, variant in enumerate(load_variants(module, arch)):
                is_wanted = not words or any(word in variant.name for word in words)
                if is_wanted and (not is_sample or (arch, variant.name) in SAMPLE):
                    jobs.append((module, index, arch))
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(_compile, jobs))


def main(argv: Sequence[str] | None = None) -> int:
    """Print a JSON line per variant; exit code 1 when one has a fault."""
    parser = argparse.ArgumentParser(
        prog="python kernels compile",
        description="Compile the kernels for GPUs that need not be there; a JSON line each.",
    )
    parser.add_argument("wanted", nargs="*", help="parts of variants' names; default all")
    parser.add_argument("--sample", action="store_true", help="a few that show most, in a minute")
    parser.add_argument(
        "--arch", type=int, nargs="+", choices=SHIPPED, default=SHIPPED, help="compute capabilities times 10"
    )
    args = parser.parse_args(argv)
    reports = compile_all(args.wanted, args.arch, is_sample=args.sample)
    for report in reports:
        print(json.dumps(dataclasses.asdict(report)))
    return 1 if any(report.faults for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
