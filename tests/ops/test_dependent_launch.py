"""Which kernels start before the launch before them has ended, on which GPUs; and reading it in PTX."""

import pytest
import torch

pytest.importorskip("triton")

from eagle_kit.ops import dependent_launch
from eagle_kit.ops.capability import facts_of
from eagle_kit.ops.dependent_launch import launch_options
from kernel_lab.aot import kernel_modules, load_variants, operation_of
from kernel_lab.ptx import waits_first
from kernel_lab.variant import SHIPPED

CYCLE = {
    *("draft_inputs", "draft_topk", "mla_attention", "norm", "rope", "small_linear", "swiglu"),
    "window_attention",
}
"""Operations of a cycle whose launches are short and follow one another."""


def test_kernels_of_a_cycle_start_early_from_hopper_on_and_no_others():
    for arch in SHIPPED:
        for module in kernel_modules():
            operation = operation_of(module)
            part = module.rpartition(".")[2]
            for variant in load_variants(module, arch):
                wanted = arch >= 90 and operation in CYCLE and part == "triton"
                assert variant.constants.get("PDL", False) == wanted, (variant.name, arch)


def test_launches_ask_for_it_where_kernels_wait(monkeypatch):
    assert launch_options(torch.device("cpu")) == {"PDL": False, "launch_pdl": False}
    for arch, early in ((80, False), (89, False), (90, True), (120, True)):
        facts = facts_of(arch)
        monkeypatch.setattr(dependent_launch, "device_facts", lambda device, facts=facts: facts)
        assert launch_options(torch.device("cuda")) == {"PDL": early, "launch_pdl": early}


HEAD = ".visible .entry f(\n\t.param .u64 a\n)\n{\n\tld.param.b64 %rd1, [a];\n"
WAIT = "\tgriddepcontrol.wait; // dummy %r1\n"


@pytest.mark.parametrize(
    ("body", "waits"),
    [
        (f"{WAIT}\tld.global.b32 %r2, [%rd1];\n\tret;\n", True),
        (f"\tprefetch.global.L2 [%rd1];\n\tst.shared.b32 [%r3], %r2;\n{WAIT}\tret;\n", True),
        (f"\t@%p1 ld.global.v4.b32 {{ %r2 }}, [ %rd1 + 0 ];\n{WAIT}\tret;\n", False),
        (f"\tcp.async.cg.shared.global [ %r2 ], [ %rd1 ], 0x10;\n{WAIT}\tret;\n", False),
        (f"\tatom.global.add.u32 %r2, [%rd1], 1;\n{WAIT}\tret;\n", False),
        (
            f"\t@%p1 bra $L1;\n{WAIT}\tbra.uni $L2;\n$L1:\n{WAIT}$L2:\n\tst.global.b32 [%rd1], 1;\n\tret;\n",
            True,
        ),
        (f"\t@%p1 bra $L1;\n{WAIT}$L1:\n\tst.global.b32 [%rd1], %r2;\n\tret;\n", False),
        (f"\t@%p1 ret;\n{WAIT}\tst.global.b32 [%rd1], %r2;\n\tret;\n", False),
        (f"$L1:\n\t@%p1 bra $L1;\n{WAIT}\tret;\n", True),
        ("\t// griddepcontrol.wait\n\tret;\n", False),
    ],
)
def test_every_way_from_the_entry_waits_before_it_touches_memory(body, waits):
    assert waits_first(f"{HEAD}{body}}}\n") == waits
