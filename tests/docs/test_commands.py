"""Commands of the documentation: flags and keys exist, and the blocks of tutorials and how-to pages run.

A page's blocks of ``bash`` run in order, in one shell, in a copy of the checkout, as a reader would run them.
Blocks of ``python`` run there as programs. Blocks of ``console`` may need a GPU or a network; only their
flags are checked.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock
from pages import DOCS, FOLDERS, ROOT, all_pages, blocks, code_words, name_of

from eagle_kit.cli import app
from eagle_kit.config.train import TrainConfig
from eagle_kit.train.__main__ import build_parser as build_train_parser
from generate.options import options_page

PAGES = [*sorted(DOCS.glob("tutorials/*.md")), *sorted(DOCS.glob("how-to/*.md"))]
IN_CI = {"docs/tutorials/llama-8b-on-one-gpu.md"}
"""Pages whose commands take seconds; the others run in the nightly tests."""
ELSEWHERE = {"docs/how-to/use-from-python.md"}
"""Pages whose blocks another test runs (tests/examples/test_examples.py)."""
LIMIT_S = 1800
PRETRAIN = (
    "training.steps=15 training.rows=2 training.length=96 training.warmup_steps=5 text.max_tokens=200000"
)
FEW_STEPS = "training.max_steps=4 training.warmup_steps=1 data.eval_conversations=4 validation.prompts=2"
SMALLER = {
    f"docs/how-to/train-for-a-{page}-target.md": {
        f"recipes/{target}-target.yaml": f"recipes/{target}-target.yaml {PRETRAIN}",
        "--limit 600": "--limit 20 --temperature 1",
        " --max-tokens 192": " --max-tokens 48",
        f"configs/{target}-eagle3.yaml": f"configs/{target}-eagle3.yaml {FEW_STEPS}",
        "--limit 24": "--limit 4 --max-tokens 32",
    }
    for page, target in (("hybrid", "qwen3.5-17m"), ("deepseek", "deepseek-15m"))
}
"""Pages whose commands take an hour -> words of the commands, and their smaller settings in the test. After
few steps the greedy response of a target is empty, so responses are sampled."""


# Running


def page_cases() -> Iterator[Any]:
    """Pages with something to run."""
    for page in PAGES:
        name = name_of(page)
        languages = {block.language for block in blocks(page.read_text(encoding="utf-8"))}
        if name not in ELSEWHERE and languages & {"bash", "python"}:
            marks = () if name in IN_CI else (pytest.mark.nightly,)
            yield pytest.param(page, marks=marks, id=name)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache of converted targets and measurements, apart from the user's."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the checkout, in which commands may write."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for path in ROOT.iterdir():
        if path.is_file() and not path.is_symlink():
            shutil.copy(path, copy)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.mark.real
@pytest.mark.parametrize("page", list(page_cases()))
def test_the_blocks_of_a_page_run(page: Path, checkout: Path, cache: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.sh"
    script.write_text(shell_script(page, tmp_path), encoding="utf-8")
    log = tmp_path / "log.txt"

    # One page with a server at a time: two servers would take the same port.
    one_at_a_time: AbstractContextManager[Any] = nullcontext()
    if "--port" in script.read_text(encoding="utf-8"):
        one_at_a_time = FileLock(Path(tempfile.gettempdir(), f"eagle-kit-pages-{os.getuid()}.lock"))
    with one_at_a_time:
        returncode = run(script, checkout, cache, log)
    assert returncode == 0, log.read_text(encoding="utf-8", errors="replace")[-5000:]


def shell_script(page: Path, folder: Path) -> str:
    """The blocks of a page as one script, which stops at the first command that fails."""
    lines = ["set -euo pipefail"]
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language not in ("bash", "python"):
            continue
        lines.append(f"echo '== {name_of(page)}, line {block.line}'")
        if block.language == "bash":
            lines.append(block.code)
        else:
            program = folder / f"line-{block.line}.py"
            program.write_text(block.code, encoding="utf-8")
            lines.append(f"python {shlex.quote(str(program))}")
    script = "\n".join(lines) + "\n"
    for words, smaller in SMALLER.get(name_of(page), {}).items():
        assert words in script
        script = script.replace(words, smaller)
    return script


def run(script: Path, checkout: Path, cache: Path, log: Path) -> int:
    """Run a script in the checkout and end all that it has started; returns its exit code."""
    paths = [str(checkout), str(checkout / "kernels")]
    environment = {
        **os.environ,
        "EAGLE_KIT_CACHE": str(cache),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", str(script)],
            cwd=checkout,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(LIMIT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# Reading


def command_lines(page: Path) -> Iterator[str]:
    """Commands of `eagle-kit` in the blocks of a page."""
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language not in ("bash", "console", "sh", ""):
            continue
        lines = iter(block.code.replace("\\\n", " ").splitlines())
        for line in lines:
            command = line.strip().removeprefix("$ ")
            if command.startswith("eagle-kit "):
                yield whole_command(command, lines)


def whole_command(command: str, lines: Iterator[str]) -> str:
    """A command whose quotes are closed, with as many of the lines behind it as that takes."""
    while True:
        try:
            shlex.split(command, comments=True)
        except ValueError:
            command += "\n" + next(lines)
        else:
            return command


def words_of(command: str) -> list[str]:
    """Arguments of a command, up to a pipe, a redirection, `&`, `;` or a comment. Variables are left out."""
    words = []
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.wordchars += "$@:%+,[]{}^!"
    lexer.commenters = "#"
    for word in lexer:
        if set(word) <= set("|&;<>()"):
            break
        words.append(word)
    return [word for word in words[1:] if not word.startswith("$")]


def refusal(words: list[str]) -> str | None:
    """Message of the parser of `eagle-kit` that refuses the arguments; None if it accepts them."""
    try:
        if words[0] in app.DELEGATED:
            app.parse_with_overrides(build_train_parser(), words[1:])
        else:
            app.parse(words)
    except SystemExit as end:
        return None if end.code in (0, None) else "refused"
    except argparse.ArgumentError as error:
        return str(error)
    return None


@pytest.mark.parametrize("page", all_pages(), ids=name_of)
def test_every_command_has_the_flags_that_the_parser_takes(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = []
    for command in command_lines(page):
        if refusal(words_of(command)) is not None:
            refused.append(f"{command}: {capsys.readouterr().err.strip().splitlines()[-1:]}")
    assert refused == []


KEY = re.compile(r"(?:data|head|training|validation|tracking)(?:\.\w+)+")


@pytest.fixture(scope="module")
def keys() -> set[str]:
    """Keys of a training's YAML file, and their sections."""
    found = set(re.findall(r"\*\*`([\w.]+)`\*\*", options_page())) | set(TrainConfig.model_fields)
    sections = {key.rpartition(".")[0] for key in found}
    return found | sections


@pytest.mark.parametrize("page", all_pages(), ids=name_of)
def test_every_key_that_a_page_names_exists(page: Path, keys: set[str]) -> None:
    text = page.read_text(encoding="utf-8")
    words = set(code_words(text))
    for block in blocks(text):
        words |= set(block.code.split())
    named = set()
    for word in words:
        match = KEY.match(word)
        is_file = word.endswith((".py", ".md", ".json", ".jsonl", ".yaml"))
        if match and not is_file:
            named.add(match[0])
    assert sorted(named - keys) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_fragment_of_a_config_has_keys_that_exist(page: Path, keys: set[str]) -> None:
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language != "yaml":
            continue
        content = yaml.safe_load(block.code)
        if isinstance(content, dict) and content.keys() <= TrainConfig.model_fields.keys():
            assert sorted(set(dotted(content)) - keys) == [], f"line {block.line}"


def dotted(content: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Keys of a mapping and of the mappings inside of it."""
    for name, value in content.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{name}.")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_blocks_of_a_page_are_commands_that_bash_reads(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language == "bash":
            checked = subprocess.run(["bash", "-n"], input=block.code, text=True, capture_output=True)
            assert checked.returncode == 0, f"line {block.line}: {checked.stderr}"
