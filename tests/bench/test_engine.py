"""The benchmark of the engine: its floors are those that one computes by hand, its loads run the engine's own
cycles, and it survives what fails."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch

from eagle_kit.bench.engine import models as bench_models
from eagle_kit.bench.engine import sweep as bench_engine
from eagle_kit.bench.engine.floor import cycle_forwards, floor_of
from eagle_kit.bench.engine.load import Load, pool_bytes
from eagle_kit.bench.engine.models import check_room, make_models, preset_named
from eagle_kit.bench.engine.peer import ROOM, Transformers
from eagle_kit.bench.kernels.cost import Cost
from eagle_kit.cli import app
from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import SpecShape
from eagle_kit.models.config import DraftConfig
from eagle_kit.models.config_parts import MoEConfig
from eagle_kit.models.heads.eagle3 import Eagle3Head
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.speculation.propose.draft_model import HeadDraftModel

CPU = torch.device("cpu")
TINY, TINY_VOCAB = preset_named("tiny")
GRID = bench_engine.Grid(
    points=((2, 64), (1, 1 << 20)),
    other_points=((1, 64),),
    contexts=(64,),
    windows=(1, 8),
    batches=(1,),
    rival=(1, 64),
    shapes=("2,1,3", "3,2,5"),
    repeats=2,
)


@pytest.fixture(scope="module")
def models():
    return make_models(TINY, TINY_VOCAB, CPU, torch.float32, 0)


@cache
def llama_without_weights():
    config, draft_vocab_size = preset_named("llama-3.1-8b")
    with torch.device("meta"):
        target = LlamaModel(config).bfloat16()
        head = Eagle3Head(DraftConfig.for_target(config, draft_vocab_size)).bfloat16()
    return target, HeadDraftModel(head, target)


def floor(shape, batch=1, context=1024):
    target, draft = llama_without_weights()
    forwards = cycle_forwards(target, draft, SpecShape.parse(shape), batch, context)
    return floor_of(forwards, 4.3e12, 790e12)


def test_floors_of_llama_8b_at_the_h200s_ceilings():
    # 7.505 G parameters without the embedding and 128 KB of keys and values a token at 4.3 TB/s.
    assert floor("none").bytes == pytest.approx(2 * 7.505e9 + 1024 * 131072, rel=1e-3)
    assert 1e3 * floor("none").seconds == pytest.approx(3.52, abs=0.01)
    assert 1e3 * floor("3,1,4").seconds == pytest.approx(4.07, abs=0.01)
    assert 1e3 * floor("5,1,6").byte_seconds == pytest.approx(4.42, abs=0.01)
    wide = floor("7,8,32", batch=16)
    assert wide.seconds > 1.5 * wide.byte_seconds, "512 rows compute longer than they read"


def test_floors_of_a_tiny_model_by_hand(models):
    target, draft = models
    # Four layers of qkv, out, gate-up, down and two norms; the head, tied; a norm.
    layer = 64 * 128 + 64 * 64 + 64 * 192 + 96 * 64 + 128
    read = 4 * layer + 512 * 64 + 64
    (plain,) = cycle_forwards(target, draft, SpecShape.parse("none"), 3, 10)
    assert plain == Cost(4 * read + 30 * 4 * (2 * 4 * 32), 2 * read * 3 + 4 * 4 * 64 * 30)
    forwards = cycle_forwards(target, draft, SpecShape(3, 2, 5), 3, 10)
    assert len(forwards) == 4 and forwards[1] == forwards[2]
    # The draft's layer reads 2 x 64 values, and has three norms and a last one; its head has 128 rows.
    one = 128 * 128 + 64 * 64 + 64 * 192 + 96 * 64 + 4 * 64
    assert forwards[1] == Cost(4 * (one + 128 * 64) + 30 * 4 * 64, 2 * (one + 128 * 64) * 6 + 4 * 64 * 30 * 2)
    assert forwards[3].bytes - forwards[1].bytes == 4 * 192 * 64, "draft-extend fuses the captured states too"
    assert floor_of([Cost(10, 1), Cost(10, 50)], 1.0, 1.0) == (20, 20.0, 60.0)


def test_a_load_runs_the_engines_cycles_from_its_contexts(models):
    told = {}
    for mode in ("off", "cycle", "phases"):
        torch.manual_seed(5)
        load = Load(*models, batch=2, context=40, mode=mode)
        load.use_shape(SpecShape(3, 2, 5))
        with torch.inference_mode():
            tokens, counts, _ = load.runner.decode(load.requests, 40).copy.wait()
        assert (counts >= 1).all() and (load.runner.slots.seq_lens[:2] == 40 + counts).all()
        told[mode] = [row[:n].tolist() for row, n in zip(tokens, counts.tolist(), strict=True)]
    assert told["off"] == told["cycle"] == told["phases"]


def test_times_of_cycles_start_from_the_same_lengths(models):
    load = Load(*models, batch=2, context=40)
    load.use_shape(SpecShape(2, 1, 3))
    timing, host = load.time_cycles(repeats=4, warmup=1)
    assert timing.repeats == 4 and timing.median > 0 and host > 0
    assert (load.runner.slots.seq_lens[:2] <= 40 + 3).all()


def test_windows_are_verified_by_the_cycle_itself(models):
    load = Load(models[0], None, batch=1, context=40)
    one, eight = load.verification(1), load.verification(8)
    with torch.inference_mode():
        assert one().shape == (1, 1) and eight().shape == (1, 8)
    assert load.runner.slots.seq_lens[0] == 0, "nothing joined, nothing is moved on"


def test_the_pool_takes_the_bytes_that_were_promised(models):
    target, draft = models
    load = Load(target, draft, batch=3, context=40)
    stores = [load.runner.kv, load.runner._drafter.kv]
    taken = sum(tensor.nbytes for kv in stores for tensor in (kv.k, kv.v))
    assert pool_bytes(target, draft, 3, 40) == pytest.approx(taken, rel=0.1)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_engine, "TINY", GRID)
    path = tmp_path / "e.json"

    def run(*words):
        code = app.main(["bench", "engine", "--output", str(path), "--no-progress", *words])
        return code, json.loads(path.read_text(encoding="utf-8"))

    return run


def test_the_whole_benchmark_on_a_cpu(bench, capsys, tmp_path):
    code, result = bench()
    assert code == 0
    parts = result["parts"]
    assert list(parts) == [
        *("verify, context 64", "cycle, batch 2, context 64", "host, batch 1"),
        *("phases, batch 1, context 64", "off, batch 1, context 64"),
    ], "contexts beyond the model's are no parts"
    assert {"date", "command", "machine", "versions", "ceilings", "seed", "targets"} <= result.keys()
    rows = bench_engine.cycle_rows(parts)
    assert [row["shape"] for row in rows] == ["none", "2,1,3", "3,2,5"] * 3
    for row in rows:
        assert row["over_floor"] == pytest.approx(row["cycle_us"]["median"] / row["floor_us"], rel=1e-3)
        for length, rate in row["tokens_per_s"].items():
            expected = row["batch"] * int(length) / (1e-6 * row["cycle_us"]["median"])
            assert rate == pytest.approx(expected, rel=1e-3)
            assert int(length) <= SpecShape.parse(row["shape"]).steps + 1
    assert parts["verify, context 64"]["times_plain"]["1"] == 1.0
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "There is no CUDA device" in out and "transformers is compared on a GPU only" in out
    assert all(verdict["met"] is None and verdict["measured"] for verdict in result["targets"])


def test_a_failed_part_is_recorded_and_the_rest_is_taken_up(bench, monkeypatch, capsys):
    def refuse(self, batch):
        raise RuntimeError("the scheduler is broken")

    with monkeypatch.context() as patch:
        patch.setattr(bench_engine.Bench, "host", refuse)
        patch.setattr(bench_engine.Bench, "cycles", lambda self, *point: {"left_out": "it takes too much"})
        code, result = bench("--no-plot")
    assert code == 1
    failed = result["parts"]["host, batch 1"]
    assert (failed["status"], failed["error"]) == ("failed", "RuntimeError: the scheduler is broken")
    assert result["parts"]["verify, context 64"]["status"] == "ok"
    assert "host, batch 1: FAILED: RuntimeError: the scheduler is broken" in capsys.readouterr().out
    code, again = bench("--no-plot", "--resume")
    assert code == 1 and again["parts"] == result["parts"], "what is done is not done again"


def test_what_finds_no_time_is_left_out_and_done_later(bench, monkeypatch):
    for name in ("cycles", "host"):
        monkeypatch.setattr(bench_engine.Bench, name, lambda self, *point: {})
    code, result = bench("--no-plot", "--minutes", "1e-9")
    assert code == 0 and {part["status"] for part in result["parts"].values()} == {"left out"}
    code, result = bench("--no-plot", "--resume")
    assert code == 0 and {part["status"] for part in result["parts"].values()} == {"ok"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["engine", "--model", "qwen3-30b-a3b"], "The weights take 122.1 GB"),
        (["engine", "--model", "nonsense"], "There are no shapes of 'nonsense'."),
        (["engine", "--resume"], "--resume needs a file"),
        (["--draft", "x", "engine"], "--draft does not apply to bench engine"),
        (["--target", "x", "engine"], "--target does not apply to bench engine"),
    ],
)
def test_mistakes_are_a_sentence_and_a_remedy(words, said, capsys):
    assert app.main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and "->" in error


def test_weights_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr(bench_models, "free_memory", lambda device: 20e9)
    config, _ = preset_named("llama-3.1-8b")
    with pytest.raises(UserError, match=r"The weights take 16.1 GB, and 20.0 GB are free"):
        check_room(config, CPU, torch.bfloat16)


def test_targets_are_judged_on_a_gpu_only():
    row = {"shape": "3,1,4", "mode": "cycle", "batch": 1, "context": 1024}
    parts = {
        "a": {"cycles": [{**row, "over_floor": 1.3}, {**row, "shape": "none", "over_floor": 9.0}]},
        "b": {"context": 1024, "times_plain": {"8": 1.1}},
        "c": {"host": {"host_us": 120.0, "batch": 8}},
    }
    verdicts = bench_engine.engine_targets(parts, counts=True)
    assert [verdict.met for verdict in verdicts] == [True, False, False, True]
    assert [v.met for v in bench_engine.engine_targets(parts, counts=False)] == [None] * 4


@pytest.mark.parametrize("nodes", [1, 8])
def test_transformers_runs_the_same_shapes(nodes):
    rival = Transformers(TINY, CPU, torch.float32, compiled=False)
    assert rival.time("sdpa", 2, 24, nodes, repeats=1).median > 0
    assert sum(p.numel() for p in rival.model.parameters()) == sum(
        p.numel() for p in make_models(TINY, TINY_VOCAB, CPU, torch.float32, 0)[0].parameters()
    )


def test_the_mask_of_transformers_is_the_tree():
    rival = Transformers(TINY, CPU, torch.float32, compiled=False)
    bits = torch.tensor([[0b001, 0b011, 0b101]])
    seen = rival._mask("sdpa", bits, 4)[0, 0] == 0
    assert seen.shape == (3, 4 + ROOM)
    assert [row[:8].int().tolist() for row in seen] == [
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0, 1, 0],
    ]
    assert not seen[:, 7:].any()
    block = rival._mask("flex_attention", bits, 4)
    column = torch.arange(4 + ROOM)
    for node in range(3):
        told = block.mask_mod(torch.tensor(0), torch.tensor(0), torch.tensor(node), column)
        assert torch.equal(told, seen[node])


def test_a_mixture_reads_the_experts_that_its_rows_wake():
    """Four experts of which a row takes one: one row wakes 1, two wake 1.75 on average."""
    moe = MoEConfig(4, 1, 32)
    config = replace(TINY, model_type="qwen3_moe", moe=moe)
    target, draft = make_models(config, 128, torch.device("cpu"), torch.float32, 0)
    expert = config.num_layers * 3 * config.hidden_size * 32
    one, two = (cycle_forwards(target, draft, SpecShape(0, 1, 1), batch, 0)[0] for batch in (1, 2))
    rest = sum(p.numel() for p in target.parameters()) - 4 * expert
    assert one.bytes == 4 * (rest + expert) and two.bytes == 4 * (rest + round(1.75 * expert))
    assert one.flops == 2 * (rest + expert) and two.flops == 2 * one.flops
