"""Every configuration of every Triton kernel compiles for GPUs that are not here, without spills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_kit.ops.capability import facts_of
from kernel_lab.aot import resident_programs
from kernel_lab.ptx import allocates_first
from kernel_lab.variant import SHIPPED

pytest.importorskip("triton")

PROBE = """
import json, dataclasses, sys
import triton, triton.language as tl
from kernel_lab.aot import compile_variant
from kernel_lab.variant import Variant
from eagle_kit.ops.dependent_launch import gdc_launch_dependents, gdc_wait, prefetch

@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, i < n) + tl.load(y + i, i < n), i < n)

@triton.jit
def wrong(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), tl.zeros((BLOCK, 2), tl.float32))

@triton.jit
def large(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i)
    tl.store(out + i, value / tl.sum(value, 0))

@triton.jit
def counts(out, n, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), n.to(tl.int64))

@triton.jit
def sums(x, out, stride, rows, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(rows):
        total += tl.load(x + row * stride + i)
    tl.store(out + i, total)

@triton.jit(do_not_specialize=["stride"])
def loose_sums(x, out, stride, rows, BLOCK: tl.constexpr):
    sums(x, out, stride, rows, BLOCK)

@triton.jit
def product(x, out, size, BLOCK: tl.constexpr):
    i, k = tl.arange(0, 64), tl.arange(0, BLOCK)
    total = tl.zeros([64, 64], tl.float32)
    for start in range(0, size, BLOCK):
        part = tl.load(x + i[:, None] * size + start + k[None, :])
        total = tl.dot(part, tl.trans(part), total)
    tl.store(out + i[:, None] * 64 + i[None, :], total)

@triton.jit
def unpipelined(x, out, size, BLOCK: tl.constexpr):
    i, k = tl.arange(0, 64), tl.arange(0, BLOCK)
    total = tl.zeros([64, 64], tl.float32)
    for start in tl.range(0, size, BLOCK, num_stages=1):
        part = tl.load(x + i[:, None] * size + start + k[None, :])
        total = tl.dot(part, tl.trans(part), total)
    tl.store(out + i[:, None] * 64 + i[None, :], total)

@triton.jit
def early(x, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr, FIRST: tl.constexpr, BRANCH: tl.constexpr):
    i = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        prefetch(x + i)
        if FIRST:
            value = tl.load(x + i)
        if BRANCH:
            if size > 7:
                gdc_wait()
        else:
            gdc_wait()
    if not FIRST:
        value = tl.load(x + i)
    tl.store(out + i, value)

@triton.jit
def alone(x, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr, FIRST: tl.constexpr, BRANCH: tl.constexpr):
    gdc_wait()
    if size > 7:
        return
    tl.store(out + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK)))

@triton.jit
def gathered(x, rows, out, size, BLOCK: tl.constexpr, TURNED: tl.constexpr):
    i, k = tl.arange(0, 64), tl.arange(0, BLOCK)
    total = tl.zeros([64, 64], tl.float32)
    for start in range(0, size, 64):
        row = tl.load(rows + start + i)
        if TURNED:  # each row is the sum of others, which lie across the threads
            row = tl.sum(tl.where(i[:, None] > i[None, :], row[:, None], 0), 0)
        part = tl.load(x + row[:, None] * BLOCK + k[None, :])
        total = tl.dot(part, tl.trans(part), total)
    tl.store(out + i[:, None] * 64 + i[None, :], total)

types = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}
two = {"x": "*fp32", "out": "*fp32"}
summed = {**two, "stride": "i32", "rows": "i32"}
half = {"x": "*bf16", "out": "*fp32", "size": "i32"}
sized = {**two, "size": "i32"}
rows = {"x": "*bf16", "rows": "*i64", "out": "*fp32", "size": "i32"}
waits = {"BLOCK": 128, "PDL": True, "FIRST": False, "BRANCH": False}
for variant in (
    Variant("add", add, types, {"BLOCK": 1024}),
    Variant("no tensor", counts, {"out": "*i64", "n": "i32"}, {"BLOCK": 16}),
    Variant("forgotten", add, {**types, "z": "i32"}, {}),
    Variant("wrong", wrong, {"x": "*fp32"}, {"BLOCK": 16}),
    Variant("no wgmma", add, types, {"BLOCK": 1024}, wgmma=True),
    Variant("spills", large, two, {"BLOCK": 16384}, num_warps=1),
    Variant("wide", sums, summed, {"BLOCK": 1024}, ("stride",)),
    Variant("narrow", sums, summed, {"BLOCK": 1024}),
    Variant("loose", loose_sums, summed, {"BLOCK": 1024}, ("stride",)),
    Variant("few", sums, summed, {"BLOCK": 4096}, ("stride",), 16, programs=8),
    Variant("pipelined", product, half, {"BLOCK": 64}, ("size",), programs=4),
    Variant("direct", unpipelined, half, {"BLOCK": 64}, ("size",)),
    Variant("large", product, half, {"BLOCK": 256}, ("size",), num_stages=5),
    Variant("turned", gathered, rows, {"BLOCK": 64, "TURNED": True}),
    Variant("straight", gathered, rows, {"BLOCK": 64, "TURNED": False}),
    Variant("waits", early, sized, waits),
    Variant("reads before", early, sized, {**waits, "FIRST": True}),
    Variant("may not wait", early, sized, {**waits, "BRANCH": True}),
    Variant("lets none start", alone, sized, waits),
    Variant("waits for nothing", alone, sized, {**waits, "PDL": False}),
):
    arch = 89 if variant.name == "large" else 90
    print(json.dumps(dataclasses.asdict(compile_variant(variant, arch))))
"""


def lines_of(*command: str) -> list[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return done.stdout.splitlines()


def run(*command: str) -> list[dict]:
    return [json.loads(line) for line in lines_of(*command)]


def test_faults_are_found(tmp_path):
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    reports = {report["name"]: report for report in run(str(script))}
    assert reports["add"]["faults"] == [] and reports["add"]["registers"] > 0
    assert "described wrongly: BLOCK, z" in reports["forgotten"]["faults"][0]
    assert "does not compile" in reports["wrong"]["faults"][0]
    assert "'int' object has no attribute 'to'" in reports["no tensor"]["faults"][0]
    assert reports["no wgmma"]["faults"] == ["no wgmma"]
    assert any("stack" in fault or "shared" in fault for fault in reports["spills"]["faults"])
    assert reports["wide"]["faults"] == [] == reports["pipelined"]["faults"]
    assert reports["narrow"]["faults"] == ["loads of less than 16 bytes in 1 of 1 loops"]
    assert reports["loose"]["faults"] == ["launches do not specialise on the alignment of stride"]
    assert reports["few"]["faults"] == ["4 programs fit on a multiprocessor, not 8"]
    assert reports["direct"]["faults"] == ["neither cp.async nor TMA in 1 of 1 loops"]
    assert "bytes of shared memory, 101376 are there" in reports["large"]["faults"][0]
    assert reports["straight"]["faults"] == [] and reports["turned"]["conversions"] > 0
    turned = f"{reports['turned']['conversions']} layout conversions of addresses or operands"
    assert reports["turned"]["faults"] == [f"{turned} in pipelined loops"]
    assert reports["waits"]["faults"] == []
    late = ["it does not wait for the launch before it first of all"]
    assert reports["reads before"]["faults"] == late == reports["may not wait"]["faults"]
    assert reports["lets none start"]["faults"] == ["it does not let the next launch start"]
    assert reports["waits for nothing"]["faults"] == ["griddepcontrol without PDL"]


def test_tensor_memory_is_taken_before_the_next_launch_starts():
    start = "griddepcontrol.launch_dependents;"
    take = "@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r5], 64;"
    give = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
    assert allocates_first("\n".join([take, give, start]))
    assert allocates_first("\n".join([start, "ret;"])) and allocates_first(take)
    assert not allocates_first("\n".join([start, take, give]))
    assert not allocates_first("\n".join([take, start, take]))


FIRST = """
import dataclasses, json
from kernel_lab.aot import compile_variant, kernel_modules, operation_of, load_variants
from kernel_lab.variant import SHIPPED

for module in kernel_modules():
    for arch in (90,) if operation_of(module) not in ("window_attention", "small_linear") else SHIPPED:
        print(json.dumps(dataclasses.asdict(compile_variant(load_variants(module, arch)[0], arch))))
"""


def test_the_first_variant_of_every_kernel_compiles(tmp_path):
    script = tmp_path / "first.py"
    script.write_text(FIRST)
    reports = run(str(script))
    assert [(r["name"], r["faults"]) for r in reports if r["faults"]] == [] and len(reports) > 10


LATENTS = """
import sys
from eagle_kit.ops.attention.mla import sizes
from kernel_lab.aot import compile_variant, load_variants
from kernel_lab.variant import SHIPPED

chosen = sizes.fits_64_rows
for arch in SHIPPED:
    facts = sizes.DeviceFacts(132, arch, 0)
    sizes.fits_64_rows = lambda facts: True
    variants = load_variants("eagle_kit.ops.attention.mla.triton", arch)
    wide = [each for each in variants if each.name.startswith("mla_attention bf16 keys bf16 rows 128 split")]
    assert len(wide) == 4 and all(each.constants["QUERIES"] == 64 for each in wide)
    print(int(chosen(facts)), int(not any(compile_variant(each, arch).faults for each in wide)))
"""


def test_latents_have_as_many_query_rows_as_compile(tmp_path):
    """With the version of Triton that is installed, on every capability. A version that is not listed takes
    fewer rows everywhere, though some capabilities may have registers for more."""
    from eagle_kit.ops.attention.mla.sizes import HOISTING_VERSIONS, VERSION

    script = tmp_path / "latents.py"
    script.write_text(LATENTS)
    reports = [tuple(map(int, line.split())) for line in lines_of(str(script))]
    chosen = [line[0] for line in reports]
    compiled = [line[1] for line in reports]
    assert len(reports) == len(SHIPPED)
    assert chosen == (compiled if VERSION in HOISTING_VERSIONS else [0] * len(SHIPPED)), reports


def test_the_sample_is_of_configurations_that_ship():
    """It is what CI compiles with the Triton of torch's build for CUDA."""
    from kernel_lab.aot import SAMPLE, kernel_modules, load_variants

    shipped = {
        (arch, variant.name)
        for arch in SHIPPED
        for module in kernel_modules()
        for variant in load_variants(module, arch)
    }
    assert shipped.issuperset(SAMPLE) and len(SAMPLE) > 5


@pytest.mark.nightly
def test_what_ships_compiles():
    reports = run("-m", "kernel_lab.aot")
    assert [(r["name"], r["arch"], r["faults"]) for r in reports if r["faults"]] == []
    assert {report["arch"] for report in reports} == set(SHIPPED)
    from kernel_lab.aot import kernel_modules, operation_of

    kernels = {operation_of(module) for module in kernel_modules()}
    assert len(kernels) <= len({report["name"] for report in reports})


def test_blocks_shrink_until_they_fit():
    h200, a100, l40s = (facts_of(capability) for capability in (90, 80, 89))
    assert h200.fit(64, 3, 512, programs=2) == (64, 3)  # 96 of 113 KB
    assert a100.fit(64, 3, 512, programs=2) == (64, 3)  # 64 of 81 KB: one buffer less where mma.sync reads
    assert l40s.fit(64, 3, 512, programs=2) == (64, 2)  # 32 of 49 KB
    assert l40s.fit(128, 2, 512, programs=2) == (64, 2)
    assert l40s.fit(64, 3, 512, fixed_bytes=64 << 10) == (64, 2)
    assert facts_of(75).shared_bytes == 99 << 10  # what is not known gets least
    assert [h200.multiplies_in_groups, a100.multiplies_in_groups, facts_of(120).multiplies_in_groups] == [
        True, False, False,
    ]  # fmt: skip
    capabilities = (80, 86, 87, 89, 90, 100, 120, 121)
    converting = [each for each in capabilities if facts_of(each).converts_fp8]
    small = [each for each in capabilities if facts_of(each).is_small]
    assert converting == [89, 90, 100, 120, 121]
    assert small == [86, 89, 120, 121]


def test_programs_are_counted_by_what_runs_out_first():
    assert resident_programs(90, 128, 0, 4) == 4  # registers: 65,536 / (128 x 128)
    assert resident_programs(90, 32, 100 << 10, 4) == 2  # shared memory
    assert resident_programs(89, 32, 100, 16) == 3  # 48 warps
    assert resident_programs(80, 16, 100, 1) == 32


@pytest.mark.parametrize(
    ("word", "code", "output", "error"),
    [("--help", 0, "--arch", ""), ("no_such_kernel", 2, "", "no_such_kernel"), ("--arch=x", 2, "", "--arch")],
)
def test_the_command_has_help_and_refuses_what_fits_nothing(word, code, output, error):
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "kernels", "compile", word]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == code and output in done.stdout and error in done.stderr
