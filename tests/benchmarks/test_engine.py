"""The benchmarks over the engine: floors by hand, loads that decode what the engine decodes, and figures that
follow from what was timed."""

import json
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from benchmarks import decode, serving
from benchmarks import models as bench_models
from benchmarks.case import Case, Cost, Form, Machine
from benchmarks.ceilings import Ceilings
from benchmarks.cli import main
from benchmarks.engine import suite
from benchmarks.engine.floor import cycle_forwards
from benchmarks.engine.load import decoding, host_work, loaded, random_prompts, window_forms
from benchmarks.models import check_room, make_models, preset_named
from benchmarks.options import Options
from benchmarks.peers import peer_rate, transformers_seconds
from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.base.draft_model import HeadDraftModel
from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.models.layer_configs import MoEConfig
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.ops.timing import Timer

CPU = torch.device("cpu")
TINY, TINY_VOCAB = preset_named("tiny")
MACHINE = Machine(CPU, torch.float32, Timer(CPU, budget_s=0.0, least=2), Ceilings(1e10, 1e11, 1e-6), 0)
GRID = suite.Grid(
    points=((2, 64), (1, 1 << 20)),
    eager_points=((1, 64),),
    contexts=(64,),
    windows=(1, 8),
    shapes=("none", "2,1,3", "3,2,5"),
)


@pytest.fixture(scope="module")
def models():
    return make_models(TINY, TINY_VOCAB, CPU, torch.float32, 0)


@pytest.fixture(scope="module")
def llm(models):
    return loaded(*models, 2, 40)


@cache
def llama_without_weights():
    config, draft_vocab_size = preset_named("llama-3.1-8b")
    with torch.device("meta"):
        target = LlamaModel(config).bfloat16()
        head = Eagle3Head(Eagle3Config.for_target(config, draft_vocab_size)).bfloat16()
    return target, HeadDraftModel(head, target)


def floors(shape, batch=1, context=1024):
    """Bytes, and milliseconds by bytes and by the floor, at an H200's ceilings."""
    target, draft = llama_without_weights()
    forwards = cycle_forwards(target, draft, SpecShape.parse(shape), batch, context)
    total, h200 = sum(cost.bytes for cost in forwards), Ceilings(4.3e12, 790e12, 1e-6)
    return total, 1e3 * total / 4.3e12, 1e3 * sum(cost.seconds(h200) for cost in forwards)


def test_floors_of_llama_8b_at_the_h200s_ceilings():
    # 7.505 G parameters without the embedding and 128 KB of keys and values a token at 4.3 TB/s.
    num_bytes, _, floor = floors("none")
    assert num_bytes == pytest.approx(2 * 7.505e9 + 1024 * 131072, rel=1e-3)
    assert floor == pytest.approx(3.52, abs=0.01)
    assert floors("3,1,4")[2] == pytest.approx(4.07, abs=0.01)
    assert floors("5,1,6")[1] == pytest.approx(4.42, abs=0.01)
    _, by_bytes, wide = floors("7,8,32", batch=16)
    assert wide > 1.5 * by_bytes, "512 rows compute longer than they read"


def test_floors_stand_for_measured_and_for_stated_bandwidth():
    """A cost of 1 GB and little arithmetic, on a machine that copies 8 of the 10 GB/s of its data sheet."""
    ceilings = Ceilings(8e9, 1e15, 1e-6, sheet_bytes_per_s=10e9)
    row = MACHINE._replace(ceilings=ceilings).compare({"x": lambda: Form(lambda: None)}, Cost(10**9, 1))
    assert row["floor_us"] == pytest.approx(125_000) and row["sheet_floor_us"] == pytest.approx(100_000)
    assert row["share"] / row["sheet_share"] == pytest.approx(1.25)
    assert "sheet_floor_us" not in MACHINE.compare({"x": lambda: Form(lambda: None)}, Cost(10**9, 1))
    arithmetic = Ceilings(8e9, 1e6, 1e-6, 10e9)
    row = MACHINE._replace(ceilings=arithmetic).compare({"x": lambda: Form(lambda: None)}, Cost(1, 10**6))
    assert row["floor_us"] == row["sheet_floor_us"] == pytest.approx(1e6), "arithmetic is as measured in both"


def test_cycles_report_both_floors(models):
    grid = suite.Grid(points=((1, 64),), eager_points=(), contexts=(), shapes=("none", "2,1,3"))
    machine = MACHINE._replace(ceilings=Ceilings(1e10, 1e12, 1e-6, sheet_bytes_per_s=2e10))
    for case in suite.Suite(*models, grid).cases():
        row = case.measure(machine)
        over, stated = row["figures"]["times the floor"], row["figures"]["times the data sheet's floor"]
        assert stated == pytest.approx(1 / row["sheet_share"])
        assert stated > over


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


def test_a_mixture_reads_the_experts_that_its_rows_wake():
    """Four experts of which a row takes one: one row wakes 1, two wake 1.75 on average."""
    config = replace(TINY, model_type="qwen3_moe", moe=MoEConfig(4, 1, 32))
    target, draft = make_models(config, 128, CPU, torch.float32, 0)
    expert = config.num_layers * 3 * config.hidden_size * 32
    one, two = (cycle_forwards(target, draft, SpecShape(0, 1, 1), batch, 0)[0] for batch in (1, 2))
    rest = sum(p.numel() for p in target.parameters()) - 4 * expert
    assert one.bytes == 4 * (rest + expert) and two.bytes == 4 * (rest + round(1.75 * expert))
    assert one.flops == 2 * (rest + expert) and two.flops == 2 * one.flops


def test_presets_are_the_published_shapes():
    sizes = {name: sum(p.numel() for p in target_on_meta(name).parameters()) for name in bench_models.PRESETS}
    assert sizes["llama-3.1-8b"] == 8_030_261_248 and sizes["smollm2-135m"] == 134_515_008
    assert sizes["qwen3-30b-a3b"] == 30_532_122_624 and preset_named("llama-3.1-8b")[1] == 32000


def target_on_meta(name):
    with torch.device("meta"):
        return LlamaModel(preset_named(name)[0])


def test_a_load_decodes_what_the_engine_decodes(llm):
    prompts = random_prompts(llm, 2, 40)
    assert prompts[0] != prompts[1] and [len(prompt) for prompt in prompts] == [40, 40]
    expected = [out.token_ids for out in llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))]
    with decoding(llm, prompts, SpecShape(3, 2, 5)) as engine:
        running = list(engine.scheduler.running)
        assert len(running) == 2 and all(request.token_ids for request in running)
        while min(len(request.token_ids) for request in running) < 8:
            assert engine.step() == running, "every step is a cycle of all requests"
    assert sorted(request.token_ids[:8] for request in running) == sorted(expected)
    assert not engine.has_work and engine.kv_usage == 0.0


def test_a_response_that_ends_while_cycles_are_timed_is_a_failure(models):
    short = loaded(*models, 1, 40)
    with (
        pytest.raises(RuntimeError, match="ended"),
        decoding(short, random_prompts(short, 1, 40)) as engine,
    ):
        while engine.has_work:
            engine.step()


def test_the_hosts_work_is_a_part_of_the_step(llm):
    with decoding(llm, random_prompts(llm, 2, 40)) as engine:
        graphs = engine.runner.graphs
        found = host_work(engine, MACHINE, steps=3)
        assert engine.runner.graphs is graphs, "the engine is as it was"
    assert 0 < found["host_ms"] < found["step_ms"]
    assert found["host_share"] == pytest.approx(found["host_ms"] / found["step_ms"])


def test_the_hosts_work_cannot_be_told_where_cycles_run_in_python(models):
    llm = loaded(*models, 1, 8, graph_mode="off")
    with pytest.raises(UserError, match="torch|host"), decoding(llm, random_prompts(llm, 1, 8)) as engine:
        host_work(engine, MACHINE)


def test_windows_are_verified_behind_the_context(llm):
    forms = window_forms(llm, (1, 8), 40)
    assert list(forms) == ["1 node", "8 nodes"]
    one, eight = forms["1 node"]().run(), forms["8 nodes"]().run()
    assert one.shape == (1, 1) and eight.shape == (1, 8)
    (prompt,) = random_prompts(llm, 1, 40)
    # The root of a window is its own token, so plain decoding's next one follows from the same keys.
    assert 0 <= int(one[0, 0]) < llm.target.config.vocab_size and len(prompt) == 40


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "TINY", GRID)
    path = tmp_path / "e.json"

    def run(*words):
        code = main(["engine", "--out", str(path), "--no-progress", *words])
        return code, json.loads(path.read_text(encoding="utf-8"))

    return run


def test_the_whole_benchmark_on_a_cpu(bench, tmp_path):
    code, result = bench()
    assert code == 0
    rows = result["cases"]
    assert list(rows) == [
        "verify: context 64",
        *(f"cycle: {shape}, batch 2, context 64" for shape in GRID.shapes),
        *(f"off: {shape}, batch 1, context 64" for shape in GRID.shapes),
    ], "contexts beyond the model's are no cases"
    assert result["settings"]["model"] == "tiny (random weights)"
    for row in list(rows.values())[1:]:
        median, figures = row["times_us"]["cycle"]["median"], row["figures"]
        assert row["times_us"]["cycle"]["how"] == "clock, in a row"
        assert figures["times the floor"] == pytest.approx(median / row["floor_us"], rel=1e-3)
        tokens = {"none": 1, "2,1,3": 3, "3,2,5": 3}[row["shape"]]
        assert figures["tokens a cycle"] == tokens
        assert figures["tokens/s"] == pytest.approx(row["batch"] * tokens / (1e-6 * median), rel=1e-3)
        assert ("host_us" in figures) == (row["mode"] == "cycle") and row["bytes"] > 0
    assert set(rows["verify: context 64"]["times_us"]) == {"1 node", "8 nodes"}
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")
    assert all(verdict["met"] is None and verdict["measured"] > 0 for verdict in result["targets"])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["engine", "--model", "qwen3-30b-a3b"], "122.1 GB"),
        (["engine", "--model", "nonsense"], "nonsense"),
        (["engine", "--resume"], "--resume"),
        (["engine", "--host", "--model", "tiny"], "--model does not apply"),
        (["train", "--model", "tiny", "--length", "0"], "--length is 0"),
        (["decode", "--minutes", "0"], "--minutes is 0"),
        (["decode", "--tensor-parallel", "2", "--no-compare"], "--no-compare does not apply"),
        (["tune", "--draft", "d", "--rounds", "0"], "--rounds is 0"),
        (["tune", "--draft", "a/d", "b/d"], "Two drafts have one name"),
        (["soak", "--resume", "--out", "x.json"], "A soak cannot be resumed"),
    ],
)
def test_a_mistake_is_named(words, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert named in capsys.readouterr().err


def test_a_case_that_cannot_run_is_left_out_with_its_reason(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--supervised-share", "0", "--model", "tiny"]) == 0
    assert "--supervised-share" in capsys.readouterr().out


def test_weights_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr(bench_models, "free_memory", lambda device: 20e9)
    config, _ = preset_named("llama-3.1-8b")
    with pytest.raises(UserError, match="16.1 GB"):
        check_room(config, CPU, torch.bfloat16)


def measured(cases):
    return {case.key: case.measure(MACHINE) for case in cases}


class FakeTransformers:
    """Takes a second for every token it generates beyond the prompt's."""

    device = CPU

    def __init__(self, clock):
        self.clock = clock

    def generate(self, ids, *, max_new_tokens, **options):
        self.clock[0] += 10.0 + max_new_tokens


def test_the_rate_of_transformers_is_without_its_prefill(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("benchmarks.case.time.perf_counter", lambda: clock[0])
    seconds = partial(transformers_seconds, FakeTransformers(clock))
    assert peer_rate(seconds, [[1, 2]] * 4, num_tokens=64) == pytest.approx(4.0)


def test_decoding_is_measured_by_windows_cycles_and_rates(models, monkeypatch):
    llm = loaded(*models, 1, 64)
    monkeypatch.setattr(llm, "tokenize_task", lambda text: [5, 6, 7])
    rows = measured(decode.cases(llm, batches=(2,)))
    assert list(rows) == [
        "window: batch 1, 256 tokens",
        *(f"cycle: {shape}" for shape in decode.SHAPES),
        "plain decoding: batch 2",
    ]
    assert next(iter(rows["window: batch 1, 256 tokens"]["times_us"])) == "1 node"
    for shape in decode.SHAPES:
        times = rows[f"cycle: {shape}"]["times_us"]
        cycle, window = times["cycle"]["median"], times[f"{SpecShape.parse(shape).tokens} nodes"]["median"]
        assert rows[f"cycle: {shape}"]["figures"]["times its target window"] == pytest.approx(cycle / window)
        assert cycle > 0.5 * window, "a cycle has its target window in it"
    assert rows["plain decoding: batch 2"]["figures"]["tokens/s"] > 0


def test_serving_is_measured_by_host_batching_prefixes_and_ngrams(models):
    target, draft = models
    llm = serving.LLM(target, draft=draft, max_context=1280)
    chats = random_prompts(llm, 3, 50)
    rows = measured(serving.cases(llm, chats, max_tokens=4, batches=(2,), stored=20_000))
    host, together = rows["host: batch 2"]["figures"], rows["batching: 3 prompts"]["figures"]
    assert 0 < host["host_share"] < 1
    assert together["same answers"] is True
    ratio = together["together tokens/s"] / together["one by one tokens/s"]
    assert together["times faster"] == pytest.approx(ratio)
    hit = rows["prefix cache: first token"]["figures"]
    assert hit["times sooner"] == pytest.approx(hit["miss_ms"] / hit["hit_ms"]) and hit["times sooner"] > 1.5
    log = rows["n-grams: log"]["figures"]
    assert 20_000 <= log["stored"] < 21_000 and 0 < log["proposal_ms"] < 1e3 and 0 < log["insert_us"] < 1e3


def test_cases_have_names_of_their_own(models):
    cases = [*suite.Suite(*models, suite.Grid()).cases(), Case("a", "b", lambda machine: {})]
    assert len({case.key for case in cases}) == len(cases)
    assert Options().minutes > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_hosts_time_is_refused_without_a_gpu(capsys):
    assert main(["engine", "--host", "--tiny"]) == 2
    error = capsys.readouterr().err
    assert "CUDA device" in error and "benchmarks serve" in error
