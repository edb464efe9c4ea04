"""Launches of Triton kernels on the CPU by Triton's own front end, in a process without its interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


def run(tmp_path: Path, text: str) -> dict:
    """Run a script, whose last line prints JSON."""
    script = tmp_path / "script.py"
    script.write_text(text)
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    environment |= {"EAGLE_KIT_TRITON_ON_CPU": str(tmp_path / "kernels")}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "triton")}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


LAUNCHES = """
import json
import torch, triton, triton.language as tl
from tests.triton_on_cpu import host_backend
from tests.triton_on_cpu.kernel import KernelFault

host_backend.install(80)

@triton.jit
def part(x, i, n):
    return tl.load(x + i, mask=i < n, other=0.0)

@triton.jit
def scaled_sums(tensors, n, factor, out, IS_SQUARED: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = part(tensors[0], i, n).to(tl.float32) + part(tensors[1], i, n)
    if IS_SQUARED:
        total = total * total
    tl.store(out + i, total * factor, mask=i < n)

@triton.jit(do_not_specialize=["n"])
def too_far(x, n):
    tl.store(x + tl.arange(0, 4), n, mask=tl.arange(0, 4) < n)

found = {}
x, y = torch.arange(10.0).bfloat16(), torch.ones(10)
for factor, is_squared in ((2, False), (0.5, True), (1, True)):  # 1 is a constant for Triton
    out = torch.full((10,), -1.0)
    scaled_sums[lambda meta: (triton.cdiv(10, meta["BLOCK"]),)](
        (x, y), 10, factor, out, IS_SQUARED=is_squared, BLOCK=4
    )
    found[f"{factor} {is_squared}"] = out.tolist()
found["launches"] = dict(host_backend.launches)
short = torch.zeros(3)
too_far[(1,)](short, 3)
try:
    too_far[(1,)](short, 4)
except KernelFault as fault:
    found["fault"] = str(fault)
found["short"] = short.tolist()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What the script above finds."""
    return run(tmp_path_factory.mktemp("launches"), LAUNCHES)


def test_launches_go_through_tritons_front_end(found):
    """Tuples, functions, constants, numbers that become constants, a grid that is a function."""
    sums = [i + 1 for i in range(10)]
    assert found["2 False"] == [2 * each for each in sums]
    assert found["0.5 True"] == [each * each / 2 for each in sums]
    assert found["1 True"] == [each * each for each in sums]
    assert found["launches"] == {"__main__.scaled_sums": 3}


def test_a_fault_names_the_line_of_the_kernel(found):
    line = 1 + LAUNCHES.splitlines().index("    tl.store(x + tl.arange(0, 4), n, mask=tl.arange(0, 4) < n)")
    assert found["short"] == [4.0, 4.0, 4.0]
    assert f"script.py:{line}, in program (0, 0, 0): byte 12" in found["fault"]


TRANSLATIONS = """
import json
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from kernel_lab.aot import kernel_modules, load_variants
from tests.triton_on_cpu.translation import translate
from tests.triton_on_cpu.ttir import UnknownOperation, read_module

def intermediate_code(variant, capability):
    signature = {name: variant.types.get(name, "constexpr") for name in variant.kernel.arg_names}
    source = ASTSource(variant.kernel, signature, dict(variant.constants), {})
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, functions, backend.get_module_map(), context)
    stages = {}
    backend.add_stages(stages, options, source.language)
    return str(stages["ttir"](module, {}))

found = {"translated": [], "refused": {}}
for capability in CAPABILITIES:
    for module in kernel_modules():
        for variant in load_variants(module, capability)[:LIMIT]:
            try:
                translate(read_module(intermediate_code(variant, capability)))
            except UnknownOperation as error:
                found["refused"][f"{variant.name} {capability}"] = str(error)
            else:
                found["translated"].append(f"{module}.{variant.kernel.__name__}")
print(json.dumps(found))
"""


def translations(tmp_path: Path, capabilities: tuple[int, ...], limit: int | None) -> dict:
    text = TRANSLATIONS.replace("CAPABILITIES", repr(capabilities)).replace("LIMIT", repr(limit))
    return run(tmp_path, text)


def test_the_first_variant_of_every_kernel_module_is_translated(tmp_path):
    """With programmatic launches, as a GPU of capability 9.0 has them."""
    found = translations(tmp_path, (90,), 1)
    assert found["refused"] == {} and len(set(found["translated"])) > 20


@pytest.mark.nightly
def test_every_variant_that_ships_is_translated(tmp_path):
    found = translations(tmp_path, (80, 90, 120), None)
    assert found["refused"] == {} and len(set(found["translated"])) > 40


def recorded(tmp_path: Path, operations: tuple[str, ...], *, interpreted: bool) -> list:
    """Name and tensors of each launch of the self-check of these operations."""
    file = tmp_path / f"recorded-{interpreted}.pt"
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpreted))}
    command = [sys.executable, "-m", "tests.triton_on_cpu.recorded_launches", str(file), *operations]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(file)


# Not draft_topk: the upper halves of its integers are bits of floats, whose last one may differ.
SAMPLE = ("norm", "rope", "accept", "commit", "best_first")
ALL = (
    *SAMPLE, "attention/prefill", "attention/window", "attention/mla", "recurrence", "small_linear",
    "experts", "tree_build", "sampling", "attention/packed", "attention/ttt", "soft_cross_entropy", "swiglu",
    "rows", "draft_inputs",
)  # fmt: skip


@pytest.mark.parametrize("operations", [SAMPLE, pytest.param(ALL, marks=pytest.mark.nightly)], ids=len)
def test_launches_leave_what_the_interpreter_leaves(operations, tmp_path):
    """Integers and NaN are equal, other floats but for the order of sums."""
    theirs = recorded(tmp_path, operations, interpreted=True)
    ours = recorded(tmp_path, operations, interpreted=False)
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    assert len({name for name, _ in ours}) >= len(operations)
    for (name, here), (_, there) in zip(ours, theirs, strict=True):
        for number, (mine, expected) in enumerate(zip(here, there, strict=True)):
            where = f"tensor {number} of {name}: {mine} instead of {expected}"
            if not expected.is_floating_point():
                assert torch.equal(mine, expected), where
                continue
            finite = expected.double().nan_to_num(0, 0, 0)
            largest = float(finite.abs().max()) if finite.numel() else 0.0
            close = torch.isclose(mine.double(), expected.double(), 0, 1e-6 * largest, equal_nan=True)
            assert close.all(), where
