"""Every flag reaches the option that it names; what does not go together is refused in two lines."""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_head
from tiny_run import make_target

from eagle_kit.cli import app, diagnose, generate, serve_flags, tune
from eagle_kit.config.diagnose import DiagnoseConfig
from eagle_kit.config.engine import EngineConfig, NgramConfig
from eagle_kit.config.loading.flags import options_of
from eagle_kit.config.server import ServerConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.stats import SpecStats
from eagle_kit.data.chat.messages import ChatPrompt
from eagle_kit.data.chat.records import SkipLog
from eagle_kit.drafts.files.draft import save_draft
from eagle_kit.drafts.files.export import Facts
from eagle_kit.models.loading.loader import load_target, target_fingerprint
from eagle_kit.report.tables import Table

CONFIG = Path(__file__).parents[2] / "configs" / "smollm2-135m-eagle3.yaml"
SAMPLING = {
    "--max-tokens": ("max_tokens", 7),
    "--temperature": ("temperature", 0.5),
    "--top-k": ("top_k", 3),
    "--top-p": ("top_p", 0.75),
    "--min-p": ("min_p", 0.125),
    "--seed": ("seed", 11),
}
LOADING = {
    "--chat-template": ("chat_template", Path("chat.jinja")),
    "--max-context": ("max_context", 77),
    "--dtype": ("dtype", "float16"),
    "--quantization": ("quantization", "fp8"),
    "--device": ("device", "cpu"),
}
RANKS = {
    "--tensor-parallel": ("tensor_parallel", 2),
    "--enable-expert-parallel": ("expert_parallel", True),
    "--enable-dp-attention": ("data_parallel_attention", True),
    "--rank-timeout": ("rank_timeout_s", 7.5),
    "--load-timeout": ("load_timeout_s", 8.5),
}
ENGINE = {
    "--gpu-memory-utilization": ("gpu_memory_utilization", 0.75),
    "--max-running-requests": ("max_batch_size", 3),
    "--page-size": ("page_size", 32),
    "--prefill-tokens": ("prefill_tokens", 65),
    "--decode-prefill-tokens": ("decode_prefill_tokens", 66),
    "--mixed-prefill-tokens": ("mixed_prefill_tokens", 67),
    "--prefill-backend": ("prefill_backend", "triton"),
    "--linear-backend": ("linear_backend", "torch"),
    "--kv-memory": ("kv_memory", 1234567),
    "--kv-dtype": ("kv_dtype", "fp8_e4m3"),
    "--lag": ("lag", 1),
    "--batch-sizes": ("batch_sizes", (3,)),
    "--speculative-verifier": ("verifier", "relaxed"),
    "--state-snapshots": ("state_snapshots", 5),
    "--graph-mode": ("graph_mode", "off"),
    "--nvtx": ("nvtx", True),
    "--graph-memory": ("graph_memory", 7654321),
    "--seed": ("seed", 0),
    "--speculative-algorithm": ("algorithm", "EAGLE"),
    "--speculative-token-map": ("token_map", Path("ids.json")),
    "--speculative-tree": ("tree", "static"),
    "--speculative-accept-threshold-single": ("accept_threshold_single", 0.5),
    "--speculative-accept-threshold-acc": ("accept_threshold_acc", 0.25),
}
SERVER = {
    "--host": ("host", "127.0.0.2"),
    "--allowed-host": ("allowed_host", "model.example,other.example"),
    "--forwarded-allow-ips": ("forwarded_allow_ips", "127.0.0.1,10.0.0.0/8"),
    "--api-key": ("api_key", "key"),
    "--served-model-name": ("model_name", "name"),
    "--max-queued-requests": ("max_queued", 3),
    "--max-parallel-per-client": ("max_parallel_per_client", 4),
    "--max-requests-per-minute": ("max_requests_per_minute", 5),
    "--separate-clients": ("separate_clients", True),
    "--warm-up": ("warm_up", "usual"),
    "--reasoning-parser": ("reasoning_parser", "none"),
    "--tool-call-parser": ("tool_call_parser", "hermes"),
    "--grace-period": ("grace_period_s", 2.5),
    "--log-stats-interval": ("log_stats_interval_s", 0.5),
    "--profile-dir": ("profile_dir", Path("traces")),
    "--log-level": ("log_level", "debug"),
}
NGRAM = {
    "--speculative-ngram-min-match-window-size": ("min_match_window_size", 2),
    "--speculative-ngram-max-match-window-size": ("max_match_window_size", 9),
    "--speculative-ngram-min-bfs-breadth": ("min_bfs_breadth", 2),
    "--speculative-ngram-max-bfs-breadth": ("max_bfs_breadth", 8),
    "--speculative-ngram-match-type": ("match_type", "PROB"),
    "--speculative-ngram-branch-length": ("branch_length", 4),
    "--speculative-ngram-capacity": ("capacity", 500),
}


def words_of(table):
    """The flags of a table as a command line has them."""
    words = []
    for flag, (_, value) in table.items():
        values = value if isinstance(value, tuple) else (value,)
        words += [flag] if value is True else [flag, *map(str, values)]
    return words


def fields_of(table):
    """What the flags of a table set."""
    return dict(table.values())


def found_of(options, table):
    return {name: getattr(options, name) for name, _ in table.values()}


def test_every_sampling_flag_reaches_the_parameters():
    args = app.parse(["generate", *words_of(SAMPLING), "--stop", "one", "--stop", "two"])
    params = options_of(args, generate.GenerateOptions).sampling_params
    assert params == SamplingParams(**fields_of(SAMPLING), stop=("one", "two"))
    unlike = [name for name, value in vars(SamplingParams()).items() if getattr(params, name) != value]
    assert set(unlike) == {*fields_of(SAMPLING), "stop"}


def test_every_flag_of_the_server_reaches_its_options():
    table = {**ENGINE, **LOADING, **RANKS}
    flags = {**serve_flags.ENGINE_FLAGS, **serve_flags.DRAFT_FLAGS}
    in_other_tests = {"shape", "sampled_drafts", "prefix_cache", "kv_tokens"}
    assert {name for name, _ in table.values()} == {*flags, "algorithm", "seed"} - in_other_tests
    args = app.parse(["serve", "model", *words_of({**table, **SERVER, **NGRAM})])
    config = serve_flags.engine_config(args)
    assert found_of(config, table) == fields_of(table)
    assert config.ngram == NgramConfig(**fields_of(NGRAM))
    assert set(fields_of(NGRAM)) == set(NgramConfig.model_fields)
    assert set(fields_of(SERVER)) == set(ServerConfig.model_fields) - {"max_body_bytes", "model_aliases"}
    assert found_of(options_of(args, ServerConfig, serve_flags.SERVER_FLAGS), SERVER) == fields_of(SERVER)


def test_switches_of_the_server_reach_its_options(capsys):
    def config(*words):
        return serve_flags.engine_config(app.parse(["serve", "model", *words]))

    # Switches, and values that another flag gives as well.
    usual = config()
    assert (usual.prefix_cache, usual.sampled_drafts, usual.graph_mode) == (True, False, None)
    assert config("--no-prefix-cache").prefix_cache is False
    assert config("--speculative-sampled-drafts").sampled_drafts is True
    assert config("--disable-cuda-graph").graph_mode == "off"
    assert config("--disable-cuda-graph", "--graph-mode", "off").graph_mode == "off"
    assert str(config("--shape", "3,2,6").shape) == "3,2,6"
    assert config("--speculative-algorithm", "NONE").algorithm == "auto"
    assert config("--seed", "0").seed == 0 and len({config().seed for _ in range(4)}) > 1

    # Options that change texts are announced.
    assert "LOSSY" not in capsys.readouterr().err
    config("--speculative-accept-threshold-acc", "0.5")
    assert "accept thresholds below 1 are LOSSY" in capsys.readouterr().err
    config("--quantization", "fp8")
    assert "fp8 is LOSSY" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "flags", "schema", "table"),
    [
        (["generate"], generate.FLAGS, EngineConfig, {**LOADING, **RANKS}),
        (["generate"], generate.FLAGS, EngineConfig, {"--shape": ("shape", "none")}),
        (["generate"], generate.FLAGS, EngineConfig, {"--batch-size": ("max_batch_size", 5)}),
        (["generate"], generate.FLAGS, EngineConfig, {"--algorithm": ("algorithm", "NGRAM")}),
        (["generate"], generate.FLAGS, EngineConfig, {"--token-map": ("token_map", Path("a.json"))}),
        (["tune", "draft"], tune.FLAGS, EngineConfig, {**LOADING, **RANKS}),
        (["tune", "draft"], tune.FLAGS, EngineConfig, {"--kv-dtype": ("kv_dtype", "fp8_e4m3")}),
        (["tune", "draft"], tune.FLAGS, EngineConfig, {"--graph-mode": ("graph_mode", "off")}),
        (["tune", "draft"], tune.FLAGS, EngineConfig, {"--batch-size": ("max_batch_size", 5)}),
        (["eval"], serve_flags.ENGINE_FLAGS, EngineConfig, {**LOADING, **RANKS}),
        (["diagnose", "draft"], diagnose.ENGINE_FLAGS, EngineConfig, LOADING),
        (
            ["diagnose", "draft"],
            diagnose.FLAGS,
            DiagnoseConfig,
            {
                "--task": ("task", "human_eval"),
                "--limit": ("limit", 9),
                "--max-tokens": ("max_tokens", 9),
                "--context": ("context", 70),
                "--seed": ("seed", 5),
            },
        ),
    ],
)
def test_flags_of_other_commands_reach_their_options(command, flags, schema, table):
    options = options_of(app.parse([*command, *words_of(table)]), schema, flags)
    found = {name: str(value) for name, value in found_of(options, table).items()}
    assert found == {name: str(value) for name, value in fields_of(table).items()}


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_every_flag_of_an_evaluation_reaches_it(monkeypatch, tmp_path, passed, code):
    asked = []

    def run_eval(target, drafts, config, *, out, servers, settings):
        asked.append((target, drafts, config, out))
        assert not servers and not settings
        return {"passed": passed}

    monkeypatch.setattr("eagle_kit.eval.runner.run_eval", run_eval)
    words = ["--target", "t", "--draft", "a", "b", "--name", "x", "y", "--out", str(tmp_path)]
    words += ["--tasks", "one", "two", "--shapes", "3,1,4", "auto", "--max-tokens", "9", "--limit", "4"]
    words += ["--temperature", "0", "0.5", "--top-p", "0.75", "--seed", "2", "7", "--no-plots"]
    words += ["--batch-size", "3", "--chat-template-kwargs", '{"a": 1}']
    assert app.main(["eval", *words]) == code
    ((target, drafts, config, out),) = asked
    assert (target, drafts, out) == ("t", {"x": "a", "y": "b"}, tmp_path)
    assert (config.tasks, config.shapes) == (("one", "two"), ("3,1,4", "auto"))
    assert (config.max_tokens, config.limit, config.plots) == (9, 4, False)
    assert (config.temperatures, config.top_p, config.seeds) == ((0.0, 0.5), 0.75, (2, 7))
    assert (config.engine.max_batch_size, config.chat_template_kwargs) == (3, {"a": 1})


def test_an_evaluation_is_one_run_of_wandb_however_often_it_is_asked_for(monkeypatch, tmp_path):
    """wandb's own run and files, offline."""
    wandb = pytest.importorskip("wandb")
    init = wandb.init
    finish = wandb.Run.finish
    runs = []
    summaries = []

    def note(**options):
        runs.append(init(**options))
        return runs[-1]

    def note_summary(run):
        summaries.append(dict(run.summary))
        finish(run)

    row = {"task": "ours", "category": "all", "shape": "4,1,5", "accept_length": 2.5, "speedup": None}
    summary = {
        "passed": True,
        "settings": {"max_tokens": 9},
        "rows": [{**row, "draft": "x"}, {**row, "draft": None, "shape": "none", "accept_length": None}],
    }
    monkeypatch.setattr("eagle_kit.eval.runner.run_eval", lambda *given, out, **others: summary)
    monkeypatch.setattr(wandb, "init", note)
    monkeypatch.setattr(wandb.Run, "finish", note_summary)
    words = ["eval", "--target", "t", "--draft", "x", "--out", str(tmp_path)]
    words += ["--tracking", "wandb=offline", "tags=[a]"]
    assert app.main([*words, "project=mine"]) == 0
    assert app.main([*words, "project=mine", "group=heads"]) == 0

    assert [run.project for run in runs] == ["mine", "mine"]
    assert runs[0].id == runs[1].id == (tmp_path / "wandb-run-id.txt").read_text().strip()
    assert (runs[0].name, runs[0].tags, runs[1].group) == (tmp_path.name, ("a",), "heads")
    assert runs[0].config["max_tokens"] == 9
    assert summaries == [{"ours/all/x/4,1,5/accept_length": 2.5}] * 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, a head, and three conversations."""
    root = tmp_path_factory.mktemp("flags")
    target = make_target(root / "target")
    save_draft(tiny_head(load_target(target), draft_vocab_size=90), root / "head", metadata={})
    chats = [
        {"messages": [{"role": "user", "content": f"{name}? " + "It sees the dog. " * 30}, response]}
        for name in ("Who", "When", "Where")
        for response in ({"role": "assistant", "content": f"{name}, that is told nowhere. " * 20},)
    ]
    (root / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return root


def test_every_flag_of_regenerate_reaches_it(monkeypatch, folders, tmp_path):
    asked = []

    def regenerate(responder, source, out, options, *, target):
        asked.append((responder, source, out, options, target))
        none = {"left_out": {}, "shortened": {}, "num_found": 0, "num_written": 0}
        return SimpleNamespace(skipped=SkipLog(), stats=SpecStats(), **none)

    monkeypatch.setattr("eagle_kit.datagen.regenerate.regenerate.regenerate", regenerate)

    # All flags at once.
    (tmp_path / "patterns").write_text("Non\n")
    (tmp_path / "task.jsonl").write_text('{"prompt": "What is it?"}\n')
    words = ["--source", str(folders / "chats.jsonl"), "--target", str(folders / "target")]
    words += ["--out", str(tmp_path / "o.jsonl"), *words_of(SAMPLING), "--stop", "end", "--batch-size", "3"]
    words += ["--limit", "5", "--samples", "2", "--max-turns", "4", "--max-prompt-tokens", "40", "--ids"]
    words += ["--shard", "1/3", "--chat-template-kwargs", '{"think": true}', "--skip-refusals"]
    words += ["--refusal-patterns", str(tmp_path / "patterns"), "--skip-truncated"]
    words += ["--near-duplicates", "0.5", "--decontaminate", str(tmp_path / "task.jsonl")]
    (tmp_path / "chat.jinja").write_text("{{ messages[0]['content'] }}")
    words += ["--chat-template", str(tmp_path / "chat.jinja")]
    assert app.main(["data", "regenerate", *words]) == 0

    # What was asked for.
    ((responder, source, out, options, target),) = asked
    assert (source, out) == (str(folders / "chats.jsonl"), tmp_path / "o.jsonl")
    prompt = ChatPrompt([{"role": "user", "content": "Hi"}])
    assert responder.num_tokens(prompt) == len("Hi")
    assert target.startswith(f"{target_fingerprint(folders / 'target')}, chat template ")
    assert options.sampling == SamplingParams(**fields_of(SAMPLING), stop=("end",))
    assert (options.limit, options.samples, options.max_turns, options.max_prompt_tokens) == (5, 2, 4, 40)
    assert (options.with_ids, options.shard, options.near_duplicates) == (True, (1, 3), 0.5)
    assert (options.skip_refusals, options.refusals, options.skip_truncated) == (True, ("Non",), True)
    assert options.test_prompts == ("What is it?",)
    assert [variant.kwargs for variant in options.chat_template_kwargs] == [{"think": True}]
    assert responder.batch_size == 3
    assert responder.max_prompt_tokens == 40 + 7 - 1, "a context of prompt and response"


def test_flags_of_a_server_that_answers_reach_it(monkeypatch, folders, tmp_path):
    made = []

    def stop(options):
        made.append(options)
        raise UserError("No server is here.", "Start one.")

    monkeypatch.setattr("eagle_kit.datagen.regenerate.server.ServerResponder", stop)
    monkeypatch.setenv("THE_KEY", "secret")
    words = ["--source", str(folders / "chats.jsonl"), "--out", str(tmp_path / "o.jsonl"), "--ids"]
    words += ["--base-url", "http://there", "--model", "m", "--concurrency", "3", "--retries", "2"]
    assert app.main(["data", "regenerate", *words, "--api-key-env", "THE_KEY"]) == 2
    (options,) = made
    assert (options.base_url, options.model) == ("http://there", "m")
    assert (options.concurrency, options.retries) == (3, 2)
    assert (options.api_key, options.with_ids) == ("secret", True)


def test_prompts_are_skipped_drawn_and_chosen_as_asked(folders, tmp_path, capsys):
    def made(*words, source=folders / "chats.jsonl"):
        out = tmp_path / "prompts.jsonl"
        command = ["data", "prompts", "--source", str(source), "--out", str(out), "--limit", "40"]
        assert app.main([*command, *words]) == 0
        return [json.loads(line) for line in out.read_text().splitlines()]

    # The seed draws them.
    whole = made()
    assert whole == made("--seed", "0") and 1 < len(whole) < 40
    assert "of 40 prompts" in capsys.readouterr().err
    assert any(made("--seed", str(seed)) != whole for seed in (1, 2, 3))

    # Those of the first record are skipped.
    rest = tmp_path / "rest.jsonl"
    rest.write_text("".join((folders / "chats.jsonl").read_text().splitlines(keepends=True)[1:]))
    behind = made("--skip", "1")
    assert behind and all("messages" in one or "prompt" in one for one in behind)
    assert "Who" in json.dumps(whole)
    assert "Who" not in json.dumps(behind)

    # Those of one category are chosen.
    kinds = {one["category"] for one in whole}
    chosen = sorted(kinds)[0]
    assert {one["category"] for one in made("--categories", chosen)} == {chosen} < kinds

    # None is left.
    words = ["--source", str(rest), "--out", str(tmp_path / "p"), "--limit", "1", "--skip", "9"]
    assert app.main(["data", "prompts", *words]) == 2
    assert "gives no prompts behind --skip" in capsys.readouterr().err


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("words", [("head", "--target", "target"), ("target", "--draft", "head")])
def test_a_server_is_of_the_draft_and_target_that_were_given(
    folders, monkeypatch, capsys, tmp_path, words, named
):
    """Either may come first; the name and the key that are not given have defaults."""
    pytest.importorskip("fastapi")
    served = []

    def note(app, sock):
        served.append(app)
        return 0

    monkeypatch.setattr("eagle_kit.server.api.server.run_forever", note)
    monkeypatch.setenv("EAGLE_KIT_API_KEY", "of the environment")
    monkeypatch.setenv("EAGLE_KIT_CACHE", str(tmp_path))
    command = ["serve", *(str(folders / word) if word[0] != "-" else word for word in words)]
    options = ["--port", "0", "--shape", "2,1,3", "--max-context", "64", "--no-self-test"]
    more = ["--served-model-name", "mine", "--api-key", "given"] if named else []
    assert app.main([*command, *options, "--warm-up", "none", "--graph-mode", "off", *more]) == 0
    said = capsys.readouterr().err
    assert f"target     {folders / 'target'}" in said and f"draft      {folders / 'head'}" in said
    assert "self-test" not in said and "tokens per verify" not in said
    config = served[0].state.service.config
    expected = ("target", "of the environment")
    if named:
        expected = ("mine", "given")
    assert (config.model_name, config.api_key) == expected
    assert {"target", str(folders / "target"), "head"} <= set(config.model_aliases)


def test_every_flag_of_a_capture_reaches_it(monkeypatch, tmp_path):
    asked = []

    def note(config, options):
        asked.append(options)
        return 0

    monkeypatch.setattr("eagle_kit.datagen.hidden_states.capture.capture", note)
    out = tmp_path / "out"
    config = str(CONFIG)

    # By our engine.
    words = ["data", "capture", config, "--out", str(out)]
    assert app.main(words) == 0
    assert app.main([*words, "--shard", "1/3", "--dry-run", "--verify", "seed=5"]) == 0
    usual, other = asked
    assert (usual.out, usual.shard, usual.dry_run, usual.verify) == (out, (0, 1), False, False)
    assert (other.shard, other.dry_run, other.verify) == ((1, 3), True, True)
    assert other.arguments == (config, "seed=5") and usual.other is other.other is None

    # By another engine.
    engine = ["--engine", "vllm", "--engine-python", "py", "--engine-args", '{"a": 8}']
    assert app.main([*words, *engine, "--no-check"]) == 0
    assert app.main([*words, *engine[:4]]) == 0
    unchecked, checked = (options.other for options in asked[2:])
    assert (unchecked.python, unchecked.engine_args, unchecked.checks) == ("py", {"a": 8}, False)
    assert (checked.python, checked.engine_args, checked.checks) == ("py", {}, True)
    assert unchecked.arguments == (*engine, "--no-check") and checked.arguments == tuple(engine[:4])

    # From files.
    words = ["data", "import-states", config, "--from", "files", "--out", str(out)]
    layers = ["--layers", "2", "final", "--convention", "outputs", "--no-check", "--verify"]
    assert app.main([*words, *layers]) == 0 and app.main(words) == 0
    given, usual = asked[4:]
    assert (given.out, given.verify, usual.verify) == (out, True, False)
    found = given.other.folder, given.other.layers, given.other.convention, given.other.checks
    assert found == (Path("files"), (2, "final"), "outputs", False)
    found = usual.other.folder, usual.other.layers, usual.other.convention, usual.other.checks
    assert found == (Path("files"), None, "inputs", True)


class Hub:
    """A repository that notes what is uploaded to it."""

    def __init__(self, asked, *given):
        self.asked = asked
        self.given = given

    def upload(self, folder):
        self.asked.append((self.given, folder))


def test_every_flag_of_export_and_import_reaches_it(monkeypatch, tmp_path):
    asked = []

    def note(*args, **options):
        asked.append((args, options))
        return SimpleNamespace(kind=SimpleNamespace(name="eagle3"), maker="somebody")

    monkeypatch.setattr("eagle_kit.drafts.files.export.export_draft", note)
    monkeypatch.setattr("eagle_kit.drafts.files.export.import_draft", note)
    monkeypatch.setattr("eagle_kit.drafts.files.publish.Repository", lambda *given: Hub(asked, *given))

    # Each call notes what it asked for, and the upload what it sent.
    out = tmp_path / "out"
    out.mkdir()
    words = ["--target", "t", "--format", "vllm", "--license", "mit"]
    more = ["--dtype", "float16", "--eval", str(tmp_path), "--push", "a/b", "--private"]
    assert app.main(["export", "run", "--out", str(out), *words, *more]) == 0
    assert app.main(["export", "run", "--out", str(out), "--dtype", "keep"]) == 0
    assert app.main(["import", "theirs", "--out", str(out), *words]) == 0
    (args, options), (repository, folder), (_, usual), (theirs, imported) = asked
    assert args == ("run", out) and (options["target"], options["format"]) == ("t", "vllm")
    assert options["dtype"] == torch.float16 and options["facts"] == Facts(tmp_path, "mit", "a/b")
    assert (repository, folder) == (("a/b", True), out)
    assert (usual["target"], usual["format"], usual["dtype"]) == (None, "eagle-kit", None)
    assert usual["facts"] == Facts(None, "", "")
    assert theirs == ("theirs", out)
    assert imported == {"format": "vllm", "target": "t", "facts": Facts(licence="mit")}


def test_every_flag_of_a_measurement_of_shapes_reaches_it(monkeypatch, folders, tmp_path):
    asked = []

    def stop(llm, options):
        asked.append((llm.config, options))
        raise UserError("That is enough.", "Go home.")

    monkeypatch.setattr("eagle_kit.eval.tune.tune", stop)
    for name in ("one", "two"):
        lines = [{"id": f"{name}{i}", "prompt": f"Number {i}?"} for i in range(12)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    # Two tasks of twelve prompts each.
    words = ["tune", str(folders / "head"), "--target", str(folders / "target"), "--max-context", "64"]
    words += ["--tasks", str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl")]
    words += ["--max-tokens", "9", "--graph-mode", "off", "--batch-size", "2"]
    for more in (["--passes", "3", "--limit", "4"], ["--limit", "4", "--seed", "1"], ["--check"], []):
        assert app.main([*words, *more]) == 2
    (config, options), (_, other), _, _ = asked
    assert (config.max_context, config.max_batch_size, options.max_tokens) == (64, 2, 9)
    assert (options.num_passes, other.num_passes) == (3, None)
    drawn = [[prompt.id for task in each.tasks for prompt in task.prompts] for _, each in asked]
    assert [len(ids) for ids in drawn] == [8, 8, 12, 24], "--check keeps half of a task back"
    assert drawn[0] != drawn[1]


def test_runs_are_reported_under_the_labels_and_in_the_shape_that_were_given(monkeypatch, tmp_path):
    asked = []
    table = Table(["a"], [["b"]])
    monkeypatch.setattr(
        "eagle_kit.train.run.report.compare_runs",
        lambda *given: asked.append(given) or SimpleNamespace(table=table, png="p", page="q"),
    )
    monkeypatch.setattr("eagle_kit.train.run.report.write_report", lambda *given: asked.append(given))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1").mkdir()
    words = ["base=a,b", "lr=1", "plain/c", "--out", "o", "--shape", "3,1,4"]
    assert app.main(["report", *words]) == 0
    groups = {"base": [Path("a"), Path("b")], "lr=1": [Path("lr=1")], "c": [Path("plain/c")]}
    assert app.main(["report", "one", "--out", "o"]) == 0
    assert asked == [(groups, Path("o"), "3,1,4"), (Path("one"), Path("o"))]


REFUSED = {
    "data regenerate --source CHATS --out o.jsonl --model m": "--model and --api-key-env",
    "data regenerate --source CHATS --out o.jsonl --base-url http://x --draft d": "--draft is for our engine",
    "data regenerate --source CHATS --out o.jsonl --base-url http://x --api-key-env NO_KEY": "is not set",
    "data regenerate --source CHATS --out o.jsonl --base-url http://x --chat-template c": "for our engine",
    "data prompts --source a --out b --limit 0": "--limit is 0",
    "data prompts --source a --out b --limit 1 --skip -1": "--skip is -1",
    "data prompts --source a --out b --limit 1 --categories poems": "no prompts of poems",
    "data preview CONFIG --record -1": "--record is -1",
    "data import-states CONFIG --from x --out y --layers 1 last": "'last'",
    "data capture CONFIG --out y --engine vllm --engine-args [1]": "--engine-args",
    "data capture CONFIG --out y --engine-python p": "--engine-python is for --engine vllm",
    "data capture CONFIG --out y --engine-args {}": "--engine-args is for --engine vllm",
    "data capture CONFIG --out y --no-check": "--no-check is for --engine vllm",
    "data vocab CONFIG --out y head.start_from=z head.draft_vocab_size=null": "brings its vocabulary",
    'data vocab CONFIG --out y "head={kind: eagle1}"': "needs no map to be trained",
    "eval --draft d --tracking wandb=sometimes": "`wandb` in --tracking is 'sometimes'",
    "eval --draft d --tracking teams=us": "--tracking has the unknown key `teams`",
    "eval --draft d --tracking project=p": "--tracking was given without a tracker",
    "eval --draft d --tracking wandb=offline report=true": "which only a training has",
    "make-draft t --budget 9m --tracking project=p": "--tracking was given without a tracker",
    "data vocab CONFIG --out y --size 9": "--size is for heads that propose every token",
    'data vocab CONFIG --out y --size 1 "head={kind: eagle1}"': "--size is 1",
    "export run --out o --private": "--private was given without --push",
    "diagnose d --shape 3,1,4": "--shape was given without a server",
    "validate d --decode 1": "--decode is 1",
    "tune d --out check.json": "--out is of what --check finds",
    "demo --minutes 1441": "--minutes is 1441",
    "report a=one,two": "no folder in common",
    "report a=one,two a=three --out o": "label a is given twice",
    "generate --prompt a --file b": "--file was given beside --prompt",
    "serve m --target t --draft d": "--draft was given beside --target",
    "serve m --gpu h100-80g": "--gpu is of --plan",
    "train CONFIG --gpu h100-80g": "--gpu is of --plan",
    "train CONFIG --max-steps 0": "--max-steps is 0",
    "train CONFIG --max-steps x": "invalid int value: 'x'",
    "tune d --passes 0": "--passes is 0",
    "report one --shape 3,1,4": "--shape is for several runs",
    "serve m --disable-cuda-graph --graph-mode cycle": "--graph-mode was given beside",
    "serve TARGET --port 0 --speculative-algorithm MEDUSA": "'MEDUSA' is not known",
    "eval --chat-template-kwargs [1]": "--chat-template-kwargs is no JSON object",
    "bench": "none was given",
    "bench --draft d --rounds 0": "--rounds is 0",
    "bench --draft d --batches 1 0": "--batches is",
    "bench --draft d --shapes 4": "'4' is not of the form",
    "bench --draft d serve --base-url http://127.0.0.1:1": "before serve",
    "bench --dtype float32 serve --base-url http://127.0.0.1:1": "before serve",
    "bench --draft d --out .": "is a folder",
    "bench serve --base-url http://127.0.0.1:1 --out .": "is a folder",
    "bench serve --base-url x": "'x' is not a URL",
}
"""Part of the error by command; CONFIG, CHATS and TARGET stand for paths."""


@pytest.mark.parametrize("command", REFUSED)
def test_what_does_not_go_together_is_refused(command, folders, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"CONFIG": str(CONFIG), "CHATS": str(folders / "chats.jsonl"), "TARGET": str(folders / "target")}
    assert app.main([names.get(word, word) for word in shlex.split(command)]) == 2
    *_, error, remedy = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and REFUSED[command] in error and remedy.startswith("  -> ")


@pytest.mark.parametrize("shard", ["2/2", "-1/2", "1", "0/0", "a/b"])
def test_a_shard_that_is_none_is_refused(shard, capsys):
    assert app.main(["data", "regenerate", "--source", "a", "--out", "b", f"--shard={shard}"]) == 2
    assert f"--shard is {shard}" in capsys.readouterr().err
