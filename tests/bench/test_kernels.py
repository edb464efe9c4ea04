"""The benchmark of the kernels: it counts bytes rightly, runs everywhere, and survives what fails."""

import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import eagle_kit
from eagle_kit.bench.kernels import command, cost, run
from eagle_kit.bench.kernels.attention import prefill_cases, window_cases
from eagle_kit.bench.kernels.case import TINY, Case, PreparedCase, RandomInputs
from eagle_kit.bench.kernels.record import Record
from eagle_kit.bench.kernels.report import judge, kernel_targets
from eagle_kit.bench.kernels.training import packed_cases
from eagle_kit.core.errors import UserError
from eagle_kit.kernels.aot import kernel_modules
from eagle_kit.kernels.timing import Timer, Timing

CPU = torch.device("cpu")
CASES = [(name, case) for name, make in run.KERNELS.items() for case in make(TINY)]


def draw(seed=0) -> RandomInputs:
    return RandomInputs(CPU, torch.float32, seed)


def bench(path: Path, *options: str) -> tuple[int, dict]:
    words = ["--output", str(path), "--no-progress", "--no-plot", *options]
    code = command.main(words, lambda device: {"date": "today", "machine": device})
    return code, json.loads(path.read_text(encoding="utf-8"))


def test_every_kernel_with_a_triton_form_is_measured():
    assert set(run.KERNELS) == {module.split(".")[-2] for module in kernel_modules()}


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}: {case.name}" for name, case in CASES])
def test_bytes_of_a_case_are_those_of_its_tensors(name, case):
    with torch.enable_grad() if case.trains else torch.inference_mode():
        work = case.make(draw())
        results = work.op("reference")
    counted = case.cost(4)
    assert counted.bytes > 0
    if work.reads is None:
        assert name == "accept", "only what verifiers read depends on the data"
        return
    moved = [*work.reads, *work.writes, *(run._tensors(results) if work.returns else ())]
    assert counted.bytes == sum(tensor.nbytes for tensor in moved)


def test_costs_of_llama_8b_by_hand():
    # 8 heads x 128 x (key, value) x 2 bytes = 4,096 bytes a token, 2 x 32 heads x 128 x 2 bytes of q and out.
    decode = cost.window_attention(1, 1, 1024, 32, 8, 128)
    assert decode == (1024 * 4096 + 16384, 4 * 32 * 128 * 1024)
    assert cost.window_attention(1, 1, 1024, 32, 8, 128, store_e=1).bytes == 1024 * 2048 + 16384
    verify = cost.window_attention(2, 8, 1024, 32, 8, 128)
    assert verify == (2 * (1024 * 4096 + 8 * 16384), 16 * decode.flops)
    # 576 latent values a token are 1,152 bytes; a query row is 576 in, 512 out.
    assert cost.mla_attention(1, 1, 1000, 16, 512, 64).bytes == 1000 * 1152 + 16 * 1088 * 2
    assert cost.draft_head(1, 4096, 32000, 4).bytes == 32000 * 8192 + 8192 + 48
    assert cost.prefill_attention(1, 2, 3, 1, 1, 1).flops == 4 * (3 + 4 + 5)
    assert cost.accept_sampled("rejection", 2, 5, 1000).bytes == 2 * 6 * 1000
    assert cost.accept_sampled("target_only", 1, 5, 128256).bytes == 6 * 4096 * 2
    assert cost.Cost(4_000, 100).seconds(1e3, 1e3) == 4.0
    assert cost.Cost(4_000, 9_000).seconds(1e3, 1e3) == 9.0


@pytest.mark.parametrize("name", run.KERNELS)
def test_triton_forms_take_the_same_inputs(name, triton_device):
    """On a CPU under the interpreter: what only a GPU would find out is then its times."""
    case = run.KERNELS[name](TINY)[0]
    dtype = torch.bfloat16 if name == "small_linear" else torch.float32
    with torch.enable_grad() if case.trains else torch.inference_mode():
        work = case.make(RandomInputs(torch.device(triton_device), dtype, 0))
        ours, theirs = work.op("triton"), work.op("reference")
    for mine, other in zip(run._tensors(ours), run._tensors(theirs), strict=True):
        assert mine.shape == other.shape and mine.dtype == other.dtype
    deviation = run._deviation(ours, theirs)
    assert deviation is None or deviation < (1e-2 if name == "small_linear" else 1e-4)


def test_results_of_two_forms_are_compared():
    assert run._deviation((torch.ones(2), torch.ones(2)), (torch.ones(2), torch.tensor([1.0, 2.0]))) > 0.4
    assert run._deviation(torch.tensor([float("nan")]), torch.ones(1)) != 0.0
    assert run._deviation(torch.ones(2).long(), torch.ones(2).long()) is None


RIVALS = window_cases(TINY) + prefill_cases(TINY) + packed_cases(TINY)


@pytest.mark.parametrize("case", RIVALS, ids=[case.name for case in RIVALS])
def test_rivals_compute_the_same(case):
    work = case.make(draw())
    ours = work.op("reference")
    for make in work.rivals.values():
        theirs = make()()
        if ours.ndim == 4:  # [B, Hkv, N G, D], the heads of a key head side by side
            b, n, heads, size = ours.shape
            theirs = theirs.unflatten(2, (n, -1)).permute(0, 2, 1, 3, 4).reshape(b, n, heads, size)
        else:
            theirs = theirs.transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(theirs, ours, atol=2e-5, rtol=2e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_sees_the_same_tree(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    case = next(
        c for c in window_cases(replace(TINY, flex=(2, 128))) if c.name.startswith("verify 8 nodes, batch 2")
    )
    work = case.make(draw())
    theirs = work.rivals["flex"]()()
    torch.testing.assert_close(theirs.transpose(1, 2), work.op("reference"), atol=2e-5, rtol=2e-4)


def test_inputs_are_fresh_and_a_seed_repeats_them():
    assert torch.equal(draw(1).normal(8), draw(1).normal(8))
    assert not torch.equal(draw(1).normal(8), draw(2).normal(8))
    parents = draw().parents(3, 9)
    assert (parents[:, 1:] < torch.arange(1, 9)).all() and (parents[:, 0] == 0).all()


def test_a_time_is_a_median_with_its_spread():
    timing = Timing.of([5.0, 1.0, 3.0], "clock")
    assert timing == (3.0, 1.0, 5.0, 3, "clock")
    ten = Timing.of([float(i) for i in range(20)], "clock")
    assert (ten.median, ten.low, ten.high) == (9.5, 2.0, 17.0)
    calls = []
    timed = Timer(CPU, budget_s=0.0, least=4).time(lambda: calls.append(1))
    assert timed.repeats == 4 and len(calls) == 6 and timed.how == "clock"


def test_the_whole_benchmark_on_a_cpu(tmp_path, capsys):
    path = tmp_path / "out" / "k.json"
    words = ["--output", str(path), "--no-progress", "--seed", "3"]
    assert command.main(words, lambda device: {"date": "today", "machine": {"device": device}}) == 0
    result = json.loads(path.read_text(encoding="utf-8"))
    assert set(result["parts"]) == set(run.KERNELS)
    assert result["settings"] == {"sizes": "tiny", "device": "CPU", "dtype": "torch.float32"}
    assert result["seed"] == 3 and result["running"] is None and result["ceilings"]["copy_bytes_per_s"] > 0
    for name, part in result["parts"].items():
        assert part["status"] == "ok" and len(part["cases"]) == len(run.KERNELS[name](TINY))
        for row in part["cases"]:
            floor = max(
                row["bytes"] / result["ceilings"]["copy_bytes_per_s"],
                row["flops"] / result["ceilings"]["flops_per_s"],
            )
            assert row["floor_us"] == pytest.approx(1e6 * floor, abs=1e-3)
            assert row["share"] == pytest.approx(1e6 * floor / row["times_us"]["torch"]["median"], rel=0.01)
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "There is no CUDA device" in out and "not judged" in out
    assert [verdict["met"] for verdict in result["targets"]] == [None] * 3


def broken(sizes):
    def refuse(_):
        raise RuntimeError("the kernel is broken\nin many lines")

    good = run.swiglu_cases(sizes)[0]
    return [Case("bad", good.cost, lambda d: PreparedCase(refuse)), good]


def test_a_failure_is_recorded_and_stops_nothing(tmp_path, monkeypatch, capsys):
    def undescribed(sizes):
        raise ValueError("no sizes")

    monkeypatch.setitem(run.KERNELS, "norm", broken)
    monkeypatch.setitem(run.KERNELS, "rope", undescribed)
    code, result = bench(tmp_path / "k.json", "--only", "rope,norm", "--only", "swiglu")
    assert code == 1
    norm, rope, swiglu = (result["parts"][name] for name in ("norm", "rope", "swiglu"))
    assert [norm["status"], rope["status"], swiglu["status"]] == ["failed", "failed", "ok"]
    assert norm["cases"][0]["error"] == "RuntimeError: the kernel is broken"
    assert norm["cases"][1]["times_us"], "the other case of the same kernel is measured"
    assert "no sizes" in rope["cases"][0]["error"]
    printed = capsys.readouterr()
    assert "norm: bad failed: RuntimeError: the kernel is broken" in printed.err
    assert "failed: rope, norm" in printed.out


def test_parts_are_saved_one_by_one_and_taken_up(tmp_path, monkeypatch):
    path = tmp_path / "k.json"

    def interrupt(_):
        raise KeyboardInterrupt

    case = Case("interrupted", lambda e: cost.Cost(1), lambda d: PreparedCase(interrupt))
    monkeypatch.setitem(run.KERNELS, "swiglu", lambda sizes: [case])
    with pytest.raises(KeyboardInterrupt):
        bench(path, "--only", "norm,swiglu")
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert saved["parts"]["norm"]["status"] == "ok"
    monkeypatch.undo()
    before = saved["parts"]["norm"]
    saved["running"] = "commit"  # as a crash leaves it
    path.write_text(json.dumps(saved), encoding="utf-8")
    code, result = bench(path, "--only", "norm,swiglu,commit", "--resume")
    assert code == 1 and result["parts"]["norm"] == before and result["parts"]["swiglu"]["status"] == "ok"
    assert result["parts"]["commit"] == {"status": "failed", "error": "It ended the process."}


def test_what_finds_no_time_is_left_out_and_done_later(tmp_path):
    path = tmp_path / "k.json"
    code, result = bench(path, "--only", "norm", "--minutes", "1e-9")
    assert code == 0 and result["parts"]["norm"]["status"] == "left out"
    assert {row["left_out"] for row in result["parts"]["norm"]["cases"]} == {"no time was left"}
    code, result = bench(path, "--only", "norm", "--resume")
    assert code == 0 and result["parts"]["norm"]["status"] == "ok"


def test_a_file_of_other_settings_is_not_mixed_in(tmp_path):
    path = tmp_path / "k.json"
    Record(path, {}, {"sizes": "full"})
    with pytest.raises(UserError, match="sizes full then, tiny now"):
        Record(path, {}, {"sizes": "tiny"}, resume=True)
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(UserError, match="is not a result of this benchmark"):
        Record(path, {}, {"sizes": "tiny"}, resume=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "nonsense"], "There is no kernel 'nonsense'"),
        (["--minutes", "0"], "--minutes is 0"),
        (["--resume"], "--resume needs a file"),
        (["--output", "/proc/no/such/k.json"], "cannot be written"),
    ],
)
def test_mistakes_are_a_sentence_and_a_remedy(words, said):
    with pytest.raises(UserError, match=said):
        command.main(words, lambda device: {})


def row(kind, batch, nodes, context, share=0.9, us=10.0):
    values = {"kind": kind, "batch": batch, "nodes": nodes, "context": context, "fp8": False}
    return {
        "case": f"{kind} {context}",
        **values,
        "share_of_copy": share,
        "times_us": {"triton": {"median": us}},
    }


def test_targets_take_the_worst_large_case():
    rows = [
        *(
            row("decode", 1, 1, 1024, 0.1, 10.0),
            row("decode", 8, 1, 8192, 0.86),
            row("decode", 64, 1, 8192, 0.9),
        ),
        *(
            row("verify", 1, 8, 1024, 0.1, 10.7),
            row("verify", 8, 8, 8192, 0.79),
            row("verify", 8, 16, 8192, 0.9),
        ),
    ]
    decode, verify, ratio = kernel_targets({"window_attention": {"cases": rows}}, counts=True)
    assert (decode.measured, decode.met) == (0.86, True)
    assert (verify.measured, verify.met) == (0.79, False) and "MISSED" in str(verify)
    assert ratio.measured == pytest.approx(1.07) and ratio.met and "met" in str(ratio)
    assert [v.met for v in kernel_targets({}, counts=True)] == [None] * 3
    assert judge("x", 1.0, [(1.0, "here")], at_least=True, counts=True).met
    assert judge("x", 1.0, [(1.0, "here")], at_least=False, counts=True).met


def test_the_door_runs_it(tmp_path, monkeypatch, capsys):
    root = Path(eagle_kit.__file__).parents[1]
    path = tmp_path / "k.json"
    words = ["bench", "--no-progress", "--no-plot", "--only", "swiglu", "--output", str(path)]
    line = [sys.executable, "kernels", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=root, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["command"].startswith("python kernels bench --no-progress")
    assert {"date", "machine", "versions"} <= result.keys() and "triton" in result["versions"]
    monkeypatch.setattr(sys, "argv", ["kernels", "bench", "--only", "nonsense"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(root / "kernels"), run_name="__main__")
    assert ended.value.code == 2
    assert "There is no kernel 'nonsense'." in capsys.readouterr().err
