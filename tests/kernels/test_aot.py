"""Every configuration of every Triton kernel compiles for GPUs that are not here, without spills."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROBE = """
import json, dataclasses, sys
import triton, triton.language as tl
from eagle_kit.kernels.aot import Variant, compile_variant

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

types = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}
two = {"x": "*fp32", "out": "*fp32"}
for variant in (
    Variant("add", add, types, {"BLOCK": 1024}),
    Variant("no tensor", counts, {"out": "*i64", "n": "i32"}, {"BLOCK": 16}),
    Variant("forgotten", add, {**types, "z": "i32"}, {}),
    Variant("wrong", wrong, {"x": "*fp32"}, {"BLOCK": 16}),
    Variant("no wgmma", add, types, {"BLOCK": 1024}, wgmma=True),
    Variant("spills", large, two, {"BLOCK": 16384}, num_warps=1),
):
    print(json.dumps(dataclasses.asdict(compile_variant(variant, 90))))
"""


def run(*command: str) -> list[dict]:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


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


FIRST = """
import dataclasses, json
from eagle_kit.kernels.aot import compile_variant, kernel_modules, load_variants

for module in kernel_modules():
    variant = load_variants(module)[0]
    print(json.dumps(dataclasses.asdict(compile_variant(variant, variant.archs[-1]))))
"""


def test_the_first_variant_of_every_kernel_compiles(tmp_path):
    script = tmp_path / "first.py"
    script.write_text(FIRST)
    reports = run(str(script))
    assert [(r["name"], r["faults"]) for r in reports if r["faults"]] == [] and len(reports) > 10


@pytest.mark.slow
def test_what_ships_compiles():
    reports = run("-m", "eagle_kit.kernels.aot")
    assert [(r["name"], r["arch"], r["faults"]) for r in reports if r["faults"]] == []
    assert {report["arch"] for report in reports} == {80, 90}
    from eagle_kit.kernels.aot import kernel_modules

    kernels = {module.split(".")[-2] for module in kernel_modules()}
    assert len(kernels) <= len({report["name"] for report in reports})
