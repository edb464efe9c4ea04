"""``make test-peers``: our heads in vLLM and in speculators, and theirs here.

It writes ``docs/results/peers.md`` and ``docs/results/trained.md``.

Each peer gets an environment of its own in ``.venv-peers``, which is made once. Stages that are done are kept
in ``runs/peers`` while the head and our code stay what they were, so a run that was stopped goes on;
``--fresh`` does all of them again. A peer that cannot be installed or run is reported with its error.
"""

import argparse
import hashlib
import importlib.metadata
import json
import subprocess
import sys
import xml.etree.ElementTree
from functools import partial
from pathlib import Path
from typing import Any

import torch
from stages import ROOT, RUNS, PeerError, call, in_words, once, python_of, row, say
from trained import REPORT as TRAINED
from trained import write_trained

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.stats import SpecStats
from eagle_kit.data.tasks.sets import load_task
from eagle_kit.drafts.files.export import export_draft
from eagle_kit.engine.llm import LLM
from eagle_kit.models.loading.source import resolve_target

REPORT = ROOT / "docs" / "results" / "peers.md"
TARGET = "smollm2-135m-instruct"
HEAD = ROOT / "checkpoints" / "smollm2-135m-eagle3"
DRAFTS = 4
NUM_TOKENS = 64
PROMPTS = ("writing-01", "writing-05", "reasoning-05", "math-05", "code-01", "code-08")


def prompts() -> list[list[int]]:
    """The prompts as the target's token ids."""
    by_id = {prompt.id: prompt for prompt in load_task("ours").prompts}
    llm = LLM(TARGET, dtype="float32", device="cpu")
    return [llm.tokenize_task(by_id[name].given()) for name in PROMPTS]


def decode_here(given: list[list[int]]) -> dict[str, Any]:
    """Responses and counts of our engine."""
    llm = LLM(TARGET, HEAD, shape=f"{DRAFTS},1,{DRAFTS + 1}", dtype="float32", device="cpu", max_context=512)
    outputs = llm.generate(given, SamplingParams(max_tokens=NUM_TOKENS))
    total = SpecStats()
    for output in outputs:
        total.add(output.stats)
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "num_drafts": total.num_verifies,
        "accepted": list(total.num_accepted_at),
    }


def decode_in_vllm(python: str, given: list[list[int]], format: str) -> dict[str, Any]:
    """Responses and counts of vLLM with an export of ours in one format."""
    head = RUNS / f"head-{format}"
    export_draft(HEAD, head, target=TARGET, dtype=torch.float32, format=format)
    job = {
        "target": str(resolve_target(TARGET)),
        "head": str(head),
        "drafts": DRAFTS,
        "prompts": given,
        "num_tokens": NUM_TOKENS,
        "out": str(RUNS / f"vllm-{format}-out.json"),
    }
    path = RUNS / f"vllm-{format}-job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    log = RUNS / f"vllm-{format}.log"
    log.unlink(missing_ok=True)
    environment = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    call([python, str(Path(__file__).with_name("vllm_worker.py")), str(path)], log, environment)
    return json.loads(Path(job["out"]).read_text(encoding="utf-8"))


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Differences, in words; none when both engines did the same.

    vLLM counts accepted tokens behind a cut by ``max_tokens``, too: at most one draft of each response.
    """
    found = []
    if ours["tokens"] != theirs["tokens"]:
        pairs = enumerate(zip(ours["tokens"], theirs["tokens"], strict=True))
        places = [number for number, (here, there) in pairs if here != there]
        found.append(f"other tokens in responses {places}")
    if ours["num_drafts"] != theirs["num_drafts"]:
        found.append(f"{theirs['num_drafts']} drafts there, {ours['num_drafts']} here")
    for depth, (here, there) in enumerate(zip(ours["accepted"], theirs["accepted"], strict=True), 1):
        if not here <= there <= here + len(PROMPTS):
            found.append(f"position {depth}: {there} accepted there, {here} here")
    return found


def check_speculators(python: str) -> dict[str, Any]:
    """Their classes load our exports with equal logits, and what they save is read here bit for bit."""
    report = RUNS / "speculators.xml"
    log = RUNS / "speculators.log"
    log.unlink(missing_ok=True)
    files = sorted((ROOT / "tests" / "checkpoints" / "formats").glob("test_speculators_*.py"))
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    failure = ""
    try:
        call([*command, *map(str, files)], log, environment)
    except PeerError as error:
        failure = str(error)
    if not report.is_file():
        raise PeerError(failure)
    suite = xml.etree.ElementTree.parse(report).getroot()[0]
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    question = (
        "import importlib.metadata as m, json;"
        "print(json.dumps({n: m.version(n) for n in ('speculators', 'transformers', 'torch')}))"
    )
    versions = json.loads(subprocess.run([python, "-c", question], capture_output=True, text=True).stdout)
    return {**counts, "versions": versions, "failure": failure}


def fingerprint() -> str:
    """What results depend on: the head's files and our code."""
    digest = hashlib.sha256()
    parts = [*HEAD.glob("*.json"), *HEAD.glob("*.safetensors"), *(ROOT / "eagle_kit").rglob("*.py")]
    for path in sorted(parts):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def rows_of_vllm(key: str, *, fresh: bool) -> tuple[list[str], bool]:
    """Lines of the report, and whether vLLM does what our engine does."""
    given = once("prompts", key, lambda: {"ids": prompts()}, fresh=fresh)["ids"]
    ours = once("here", key, lambda: decode_here(given), fresh=fresh)
    lines = []
    is_same = True
    try:
        python = python_of("vllm")
        for format in ("vllm", "speculators"):
            stage = partial(decode_in_vllm, python, given, format)
            theirs = once(f"vllm-format-{format}", key, stage, fresh=fresh)
            found = compare(ours, theirs)
            is_same = is_same and not found
            counts = f"{theirs['num_drafts']} drafts, accepted by position {theirs['accepted']}"
            here = f"here {ours['num_drafts']} and {ours['accepted']}"
            verdict = "; ".join(found) or "the same tokens and acceptance"
            versions = in_words(theirs["versions"])
            what = f"`--format {format}`"
            lines.append(row("vLLM", versions, what, f"{counts}; {here}", verdict, theirs["date"]))
    except PeerError as error:
        is_same = False
        lines.append(row("vLLM", "", "", f"did not run: `{str(error).splitlines()[-1]}`", "", ""))
    return lines, is_same


def rows_of_speculators(key: str, *, fresh: bool) -> tuple[list[str], bool]:
    """Lines of the report, and whether all tests in the environment of speculators pass."""
    try:
        python = python_of("speculators")
        theirs = once("speculators", key, partial(check_speculators, python), fresh=fresh)
    except PeerError as error:
        cause = f"did not run: `{str(error).splitlines()[-1]}`"
        return [row("speculators", "", "", cause, "", "")], False
    bad = theirs["failures"] + theirs["errors"]
    verdict = f"{bad} failed" if bad else "equal logits, and bit for bit back"
    counts = f"{theirs['tests']} tests, {theirs['skipped']} skipped"
    what = "`test_speculators_*.py`"
    versions = in_words(theirs["versions"])
    return [row("speculators", versions, what, counts, verdict, theirs["date"])], bad == 0


def main() -> int:
    """Run all stages and write the report; 1 if a peer differs or cannot be run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="do stages again that are done")
    parser.add_argument("--only", choices=["vllm", "speculators", "trained"], help="one of the judges")
    options = parser.parse_args()
    RUNS.mkdir(parents=True, exist_ok=True)
    key = fingerprint()

    # Our heads there.
    judges = {"vllm": rows_of_vllm, "speculators": rows_of_speculators}
    lines: list[str] = []
    is_same = True
    for name, judge in judges.items():
        if options.only not in (None, name):
            lines.append(row(name, "", "", "left out of this run", "", ""))
            continue
        found, agrees = judge(key, fresh=options.fresh)
        lines += found
        is_same = is_same and agrees
    if options.only != "trained":
        write_report(lines)
        say(f"written: {REPORT.relative_to(ROOT)}")
        print("\n".join(lines))

    # Their heads here.
    if options.only in (None, "trained"):
        is_same = write_trained(key, fresh=options.fresh) and is_same
        say(f"written: {TRAINED.relative_to(ROOT)}")
        print(TRAINED.read_text(encoding="utf-8"))
    return int(not is_same)


def write_report(lines: list[str]) -> None:
    """The page of results."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    text = (
        f"""# Other engines as judges

Written by `make test-peers` (`tests/peers/run.py`); do not edit.

The shipped head, exported in fp32, in chains of {DRAFTS} on {len(PROMPTS)} prompts of the task `ours`
({", ".join(PROMPTS)}), {NUM_TOKENS} tokens each, greedy. Where `max_tokens` cuts a draft vLLM counts
what is behind the cut, too. Here: {in_words(versions)}.

| peer | versions | what | counts | result | date |
|---|---|---|---|---|---|
"""
        + "\n".join(lines)
        + "\n"
    )
    REPORT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
