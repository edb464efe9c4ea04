"""The benchmark of the kernels: it counts bytes and arithmetic rightly, runs everywhere, and compares forms
that compute the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import eagle_kit
from benchmarks.case import Machine
from benchmarks.kernels import suite
from benchmarks.kernels.attention import prefill_cases, window_cases
from benchmarks.kernels.inputs import TINY, KernelCase, PreparedCase, RandomInputs, tensors_of
from benchmarks.kernels.training import packed_cases
from eagle_kit.core.errors import UserError
from kernel_lab.aot import kernel_modules, operation_of

CPU = torch.device("cpu")


def draw(seed=0) -> RandomInputs:
    return RandomInputs(CPU, torch.float32, seed)


def test_every_kernel_with_a_triton_form_is_measured():
    assert set(suite.KERNELS) == {operation_of(module) for module in kernel_modules()}


BY_HAND = {
    # Two heads x 16 x (key, value) x 4 bytes a token; 4 heads x 16 x 4 bytes of query and result.
    ("window_attention", "decode, batch 1, context 64"): (64 * 256 + 512, 4 * 4 * 16 * 64),
    ("window_attention", "decode, batch 1, context 64, fp8 store"): (64 * 64 + 512, 4 * 4 * 16 * 64),
    ("window_attention", "verify 8 nodes, batch 2, context 128"): (2 * (128 * 256 + 8 * 512), 16 * 256 * 128),
    # 80 latent values a token; a query row is 80 in, 64 out.
    ("mla_attention", "2 heads, decode, batch 2, context 128"): (2 * (128 * 320 + 2 * 576), 4 * 256 * 144),
    # Row i of 32 sees i + 1 keys.
    ("prefill_attention", "batch 1, 32 rows behind 0"): (32 * 768, 4 * 4 * 16 * (32 * 33 // 2)),
    ("small_linear", "down, 8 rows"): (4 * (64 * 96 + 8 * 96 + 8 * 64), 2 * 8 * 64 * 96),
    ("small_linear", "down, 8 rows, fp8"): (64 * 96 + 256 + 4 * (8 * 96 + 8 * 64), 2 * 8 * 64 * 96),
    # The weight, the rows, an id (8 bytes) and a log-probability of each best token.
    ("draft_topk", "4 rows, top 4"): (4 * (128 * 64 + 4 * 64) + 12 * 16, 2 * 4 * 128 * 64),
    # Eight heads of 16 read and written; a position and a row (8 bytes each) a token.
    ("rope", "8 rows"): (2 * 8 * 8 * 16 * 4 + 2 * 8 * 8, 3 * 8 * 8 * 16),
    ("norm", "add, 8 rows"): (4 * (4 * 8 * 64 + 64), 5 * 8 * 64),
    ("swiglu", "8 rows"): (3 * 8 * 96 * 4, 5 * 8 * 96),
    ("commit", "3 tokens, batch 2"): (4 * TINY.model.num_layers * 2 * 16 * 6 * 4, 0),
    # Four heads of 16 x 16; per node 2 x 2 x 16 of keys and queries, 4 x 16 values in, out and written, two
    # numbers a head in and one out, a word of ancestors.
    ("recurrence", "8 nodes, batch 2"): (
        2 * (4 * 256 * 4 + 8 * (64 * 4 + 3 * 64 * 4 + 12 * 4 + 8)),
        2 * 4 * 8 * (4 * 256 + 4 * 8 * 16 + 3 * 8 * 16),
    ),
    ("accept", "greedy 5,4,8, batch 2"): (2 * (8 * 512 * 4 + 16 * 8 + 16 * 6 + 8), 2 * 8 * 512),
    ("accept", "rejection, batch 2"): (2 * 8 * 512, 0),
    ("accept", "rejection tree, batch 2"): (2 * 8 * 512, 0),
    ("accept", "block, batch 2"): (2 * 8 * 512 * 5, 0),
    ("accept", "relaxed, batch 2"): (2 * 4 * 512, 0),
    ("accept", "target only, batch 1"): (6 * 512 * 4, 0),
    ("window_attention", "draft step 4 nodes, batch 2, context 128"): (
        2 * (128 * 256 + 4 * 512),
        4 * 2 * 4 * 4 * 16 * 128,
    ),
    ("prefill_attention", "batch 2, 16 rows behind 48"): (
        2 * (64 * 256 + 16 * 512),
        4 * 4 * 16 * 2 * (16 * 48 + 16 * 17 // 2),
    ),
    ("mla_attention", "2 heads, verify 4 nodes, batch 2, context 128"): (
        2 * (128 * 320 + 4 * 2 * 576),
        4 * 4 * 256 * 144,
    ),
    ("rope", "8 rows, qk-norm"): (2 * 8 * 8 * 16 * 4 + 2 * 8 * 8 + 2 * 16 * 4, 3 * 8 * 8 * 16),
    ("norm", "8 rows"): (4 * (2 * 8 * 64 + 64), 4 * 8 * 64),
    # A root and 512 pages (8 bytes each) in and out, and the number of the row.
    ("rows", "batch 8"): (8 * (2 * 513 + 1) * 8, 0),
    # Embedding, feature, both norms, two numbers a row in; twice the width, and the feature, out.
    ("draft_inputs", "8 rows"): (4 * (8 * 64 * (2 + 2 + 1) + 2 * 64) + 2 * 8 * 8, 8 * 8 * 64),
    # All four experts are chosen: three matrices of 16 x 64 each; two ids (8 bytes) and weights (4) a row.
    ("experts", "8 rows"): (4 * (4 * 3 * 16 * 64 + 2 * 8 * 64) + 8 * 2 * 12, 6 * 8 * 2 * 64 * 16),
    # Tokens and parents (8 bytes each) and scores (4) of 4 + 4 x 16 candidates; four numbers a node out.
    ("tree_build", "window 5,4,8, batch 2"): (2 * (8 + 68 * 20 + 8 * 32), 0),
    ("tree_build", "window 3,1,4, batch 2"): (2 * (8 + 3 * 8 + 4 * 32), 0),
    # 64 children in and to the record; score, number and ancestors of eight nodes in, all five fields out.
    ("tree_build", "beam of 8, batch 2"): (2 * (64 * 12 + 64 * 20 + 8 * 20 + 8 * 36), 0),
    ("best_first", "window 5,4,8, batch 2"): (2 * (8 + 5 * 4 * 12 + 8 * 32), 0),
    ("best_first", "window 7,8,32, batch 1, conditional"): (8 + 7 * 8 * 8 + 7 * 64 * 4 + 32 * 32, 0),
    # Keys, values and decays of three nodes, and the states twice.
    ("recurrence", "commit of 3, batch 2"): (
        2 * 4 * (3 * (2 * 16 + 4 * 16 + 4) + 2 * 4 * 256),
        2 * 2 * 4 * 3 * 256,
    ),
    ("recurrence", "text of 64"): (
        4 * (64 * (2 * 2 * 16 + 2 * 4 * 16 + 2 * 4) + 2 * 4 * 256),
        64 * 4 * (6 * 256 + 4 * 32 * 16 + 3 * 32 * 16),
    ),
    ("sampling", "top-k, top-p, min-p, batch 2"): (2 * 8 * (512 * 4 + 8), 4 * 2 * 8 * 512),
    ("packed_attention", "forward, 64 tokens, 4 documents"): (64 * 768, 4 * 4 * 16 * 4 * (16 * 17 // 2)),
    ("ttt_attention", "forward, 64 rows, 3 own keys"): (64 * 1536, 4 * 4 * 16 * (64 * 65 // 2 + 192)),
    # The inputs twice and their gradients; q, the result and its gradient.
    ("ttt_attention", "forward and backward, 64 rows, 3 own keys"): (
        64 * (3 * (1536 - 256) + 3 * 256),
        4 * 4 * 16 * (64 * 65 // 2 + 192) * 7 // 2,
    ),
    # Features, weight and teacher in, with an index and a weight a row; gradients, loss and best token out.
    ("soft_cross_entropy", "forward and backward, 64 rows"): (
        8 * (64 * 64 + 128 * 64) + 4 * 64 * 128 + 24 * 64,
        6 * 64 * 64 * 128,
    ),
}


@pytest.mark.parametrize(("place", "expected"), BY_HAND.items(), ids=map(str, BY_HAND))
def test_bytes_and_arithmetic_are_those_one_computes_by_hand(place, expected):
    kernel, name = place
    case = next(case for case in suite.KERNELS[kernel](TINY) if case.name == name)
    with torch.enable_grad() if case.trains else torch.inference_mode():
        work = case.make(draw())
        assert (work.num_bytes(work.op("reference")), work.flops) == expected


def test_every_kernel_is_computed_by_hand():
    assert {kernel for kernel, _ in BY_HAND} == set(suite.KERNELS)


@pytest.mark.parametrize("name", suite.KERNELS)
def test_triton_forms_take_the_same_inputs(name, triton_device):
    """On a CPU under the interpreter: only times are then left to a GPU."""
    case = suite.KERNELS[name](TINY)[0]
    dtype = torch.bfloat16 if name == "small_linear" else torch.float32
    with torch.enable_grad() if case.trains else torch.inference_mode():
        work = case.make(RandomInputs(torch.device(triton_device), dtype, 0))
        ours, theirs = work.op("triton"), work.op("reference")
    for mine, other in zip(tensors_of(ours), tensors_of(theirs), strict=True):
        assert mine.shape == other.shape and mine.dtype == other.dtype
    off = suite.deviation(ours, theirs)
    assert off is None or off < (1e-2 if name == "small_linear" else 1e-4)


def measured(kind, nodes, batch, context, median, fp8=False, group="window_attention"):
    """A row of the record, whose floor is 8 us."""
    row = {"group": group, "kind": kind, "nodes": nodes, "batch": batch, "context": context, "fp8": fp8}
    others = {"median": 0.001}
    return {
        **row,
        "case": f"{kind} {nodes} {batch} {context}",
        "byte_floor_us": 8.0,
        "times_us": {"triton": {"median": median}, "torch": others},
    }


ROWS = [
    measured("decode", 1, 64, 1024, 10.0),
    measured("decode", 1, 8, 32768, 9.0, fp8=True),
    measured("decode", 1, 63, 1024, 100.0),  # a token short of a large load
    measured("decode", 1, 1, 4096, 20.0),
    measured("decode", 1, 1, 4096, 1.0, fp8=True),
    measured("verify", 8, 1, 4096, 21.0),
    measured("verify", 16, 1, 4096, 99.0),
    measured("verify", 8, 2, 4096, 99.0),
    measured("verify", 16, 32, 2048, 9.0),
    measured("verify", 32, 64, 8192, 9.5),
    measured("draft step", 4, 64, 8192, 800.0),
    measured("decode", 1, 64, 8192, 800.0, group="mla_attention"),
    {"group": "window_attention", "kind": "decode", "status": "failed"},
]


def test_targets_are_judged_by_the_worst_load_that_they_are_about():
    """The share of large loads in the time of their bytes, and a window's time over a token's."""
    decode, verify, ratio = suite.kernel_targets(ROWS, True)
    assert (decode.measured, decode.at, decode.met) == (0.8, "decode 1 64 1024", False)
    assert (verify.measured, verify.at, verify.met) == (8 / 9.5, "verify 32 64 8192", True)
    assert (ratio.measured, ratio.at, ratio.met) == (1.05, "batch 1, context 4096", True)
    small = suite.kernel_targets(ROWS, False)
    assert [verdict.met for verdict in small] == [None] * 3
    assert small[0].at == "decode 1 63 1024", "at sizes of a trial every load is measured"


def test_results_of_two_forms_are_compared():
    assert suite.deviation((torch.ones(2), torch.ones(2)), (torch.ones(2), torch.tensor([1.0, 2.0]))) > 0.4
    assert suite.deviation(torch.tensor([float("nan")]), torch.ones(1)) != 0.0
    assert suite.deviation(torch.ones(2).long(), torch.ones(2).long()) is None


RIVALS = window_cases(TINY) + prefill_cases(TINY) + packed_cases(TINY)


@pytest.mark.parametrize("case", RIVALS, ids=[case.name for case in RIVALS])
def test_rivals_compute_the_same(case):
    work = case.make(draw())
    ours = work.op("reference")
    assert work.rivals or "fp8" in case.name
    for make in work.rivals.values():
        theirs = make()()
        if ours.ndim == 4:  # [B, Hkv, N G, D], the heads of a key head side by side
            b, n, heads, size = ours.shape
            theirs = theirs.unflatten(2, (n, -1)).permute(0, 2, 1, 3, 4).reshape(b, n, heads, size)
        else:
            theirs = theirs.transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(theirs, ours, atol=2e-5, rtol=2e-4)


def test_inputs_are_fresh_and_a_seed_repeats_them():
    assert torch.equal(draw(1).normal(8), draw(1).normal(8))
    assert not torch.equal(draw(1).normal(8), draw(2).normal(8))
    parents = draw().parents(3, 9)
    assert (parents[:, 1:] < torch.arange(1, 9)).all() and (parents[:, 0] == 0).all()


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    def op(backend):
        return torch.full((4,), 2.0 if backend == "triton" else 1.0)

    monkeypatch.setattr(suite, "triton_available", lambda: True)
    monkeypatch.setattr(Machine, "on_gpu", True)
    with pytest.raises(AssertionError, match=r"1\.0e\+00 from that of the torch form"):
        suite.measure(KernelCase("wrong", lambda draw: PreparedCase(op)), Machine.here(0, tiny=True))


@pytest.mark.nightly
def test_the_whole_benchmark_on_a_cpu(tmp_path):
    path = tmp_path / "out" / "k.json"
    assert suite.main(["--out", str(path), "--no-progress", "--seed", "3"]) == 0
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = list(result["cases"].values())
    assert len(rows) == sum(len(make(TINY)) for make in suite.KERNELS.values())
    assert {row["group"] for row in rows} == set(suite.KERNELS) and {row["status"] for row in rows} == {"ok"}
    assert result["settings"] == {"sizes": "tiny", "device": "CPU", "dtype": "torch.float32"}
    assert result["seed"] == 3 and result["command"].startswith("python kernels bench --out")
    ceilings = result["ceilings"]
    for row in rows:
        floor = max(row["bytes"] / ceilings["copy_bytes_per_s"], row["flops"] / ceilings["flops_per_s"])
        assert row["floor_us"] == pytest.approx(1e6 * floor, abs=1e-3)
        assert row["share"] == pytest.approx(1e6 * floor / row["times_us"]["torch"]["median"], rel=0.01)
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert [verdict["met"] for verdict in result["targets"]] == [None] * 3
    assert all(verdict["measured"] > 0 for verdict in result["targets"])


def test_the_command_measures_the_kernels_that_are_named(tmp_path):
    root = Path(eagle_kit.__file__).parents[1]
    path = tmp_path / "k.json"
    words = ["bench", "--no-progress", "--no-plot", "--only", "swiglu,norm", "--out", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "kernels", *words], cwd=root, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text(encoding="utf-8"))
    assert {row["group"] for row in result["cases"].values()} == {"swiglu", "norm"}
    assert {row["status"] for row in result["cases"].values()} == {"ok"}


def test_a_kernel_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="nonsense"):
        suite.main(["--out", str(tmp_path / "k.json"), "--only", "nonsense"])
