"""Heads that speculators' own command line trains are imported, validated, evaluated and served here.

For each kind: their trainer runs with its options left alone, but for those that a CPU forces (``FORCED``)
and the paths; our commands take its checkpoint; acceptance and tokens are compared with their own forward in
a loop over the target's greedy text, and logits with theirs of the same states and tokens.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file
from stages import ROOT, RUNS, PeerError, call, in_words, once, python_of, row

from eagle_kit.core.stats import SpecStats
from eagle_kit.drafts.files.draft import load_draft
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.source import load_tokenizer

sys.path.insert(0, str(ROOT / "tests" / "support"))

from draft_rows import block_logits, eagle3_logits, p_eagle_logits
from tiny_run import make_target

REPORT = ROOT / "docs" / "results" / "trained.md"
DATA = RUNS / "trained-data"
KINDS = ("eagle3", "peagle", "dflash", "dspark")
NUM_PROMPTS = 12
NUM_JUDGED = 6
NUM_TOKENS = 64
QUESTION_LENGTH = 40
"""Characters of a question: tokens of the target are bytes."""
FORCED = (
    "--on-missing raise --draft-attn-impl sdpa --loss-implementation eager --num-workers 0 "
    "--total-seq-len 128 --max-anchors 64 --checkpoint-freq 20"
)
"""States are written before. A CPU has no backward of flex attention and no Triton, and little memory."""
TOLERANCE = 1e-4
"""Of logits, by the largest logit."""
STARTUP_S = 600


# --- Targets and data ------------------------------------------------------------------------------------


def questions() -> list[str]:
    """First turns of the task ``ours``."""
    lines = (ROOT / "eagle_kit" / "data" / "tasks" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["turns"][0] for line in lines]


def make_small_target(folder: Path) -> None:
    """A Llama of eight layers that has learned pieces of the questions, so its text can be drafted."""
    from transformers import LlamaConfig, LlamaForCausalLM

    # Text: beginnings of questions, and what follows as the responses.
    make_target(folder)
    tokenizer = load_tokenizer(folder)
    text: list[int] = []
    for question in questions():
        start = {"role": "user", "content": question[:QUESTION_LENGTH]}
        rest = {"role": "assistant", "content": question[QUESTION_LENGTH:110]}
        text += tokenizer.apply_chat_template([start, rest], return_dict=False)

    # Eight layers, for speculators' usual layer ids to differ, with usual initial weights.
    config = LlamaConfig.from_pretrained(folder)
    config.num_hidden_layers = 8
    config.initializer_range = 0.02
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        starts = torch.randint(len(text) - 97, (12,), generator=generator)
        rows = torch.tensor([text[start : start + 96] for start in starts.tolist()])
        optimizer.zero_grad()
        model(rows, labels=rows).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def prepare() -> dict[str, Any]:
    """The target's folder and its prompts, as questions and as ids."""
    folder = RUNS / "trained-target"
    make_small_target(folder)
    tokenizer = load_tokenizer(folder)
    asked = [question[:QUESTION_LENGTH] for question in questions()[:NUM_PROMPTS]]
    ids = []
    for question in asked:
        chat = [{"role": "user", "content": question}]
        ids.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
    return {"folder": str(folder), "questions": asked, "prompts": ids}


def work(python: str, name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in speculators' environment -> its result."""
    log = RUNS / f"{name}.log"
    log.unlink(missing_ok=True)
    path = RUNS / f"{name}-job.json"
    out = RUNS / f"{name}-out.json"
    path.write_text(json.dumps({**job, "out": str(out)}), encoding="utf-8")
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    call([python, str(Path(__file__).with_name("speculators_worker.py")), str(path)], log, environment)
    return json.loads(out.read_text(encoding="utf-8"))


# --- Theirs and ours -------------------------------------------------------------------------------------


def options_of(kind: str, folder: str, checkpoints: Path) -> list[str]:
    """Options of their command line."""
    paths = ["--verifier-name-or-path", folder, "--data-path", str(DATA), "--save-path", str(checkpoints)]
    return ["--speculator-type", kind, *paths, "--log-dir", str(RUNS / "logs"), *FORCED.split()]


def run_ours(*words: object, log: Path) -> None:
    """Run a command of ours."""
    call([sys.executable, "-m", "eagle_kit", *map(str, words)], log, {"HF_HUB_OFFLINE": "1"})


def import_and_evaluate(name: str, given: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """What our commands make of their head."""
    log = RUNS / f"{name}-here.log"
    log.unlink(missing_ok=True)
    head = RUNS / f"{name}-imported"
    results = RUNS / f"{name}-eval"
    for made in (head, results):
        shutil.rmtree(made, ignore_errors=True)
    folder = given["folder"]
    run_ours("import", theirs["head"], "--out", head, "--target", folder, log=log)
    run_ours("validate", head, "--target", folder, log=log)

    # Acceptance and tokens, of eval and of a server.
    task = RUNS / f"{name}-questions.jsonl"
    asked = given["questions"][:NUM_JUDGED]
    lines = [json.dumps({"question_id": str(i), "category": "", "turns": [q]}) for i, q in enumerate(asked)]
    task.write_text("\n".join(lines) + "\n", encoding="utf-8")
    num_drafts = theirs["speculative_tokens"]
    shape = f"{num_drafts},1,{num_drafts + 1}"
    words = ["--target", folder, "--draft", head, "--tasks", task, "--shapes", shape, "--out", results]
    limits = ["--dtype", "float32", "--max-tokens", NUM_TOKENS, "--max-context", 512, "--no-plots"]
    run_ours("eval", *words, *limits, log=log)
    written = (results / "answers.jsonl").read_text(encoding="utf-8")
    answers = [json.loads(line) for line in written.splitlines()]
    drafted = sorted((a for a in answers if a["draft"] is not None), key=lambda a: int(a["id"]))
    total = SpecStats()
    for answer in drafted:
        total.add(SpecStats(**{field: answer[field] for field in SpecStats.__dataclass_fields__}))
    served = serve(folder, head, shape, given["prompts"][:NUM_JUDGED], RUNS / f"{name}-serve.log")
    return {
        "tokens": [answer["token_ids"] for answer in drafted],
        "texts": [answer["text"] for answer in drafted],
        "num_drafts": total.num_verifies,
        "accepted": total.num_accepted_at + [0] * (num_drafts - len(total.num_accepted_at)),
        "served": served,
        "difference": largest_difference(head, folder, theirs),
    }


def serve(folder: str, head: Path, shape: str, prompts: list[list[int]], log: Path) -> dict[str, Any]:
    """Texts and acceptance of a server's completions."""
    words = ["serve", folder, "--draft", head, "--shape", shape, "--dtype", "float32", "--port", 0]
    command = [sys.executable, "-m", "eagle_kit", *map(str, words)]
    accepted: list[int] = []
    texts = []
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        url = url_of(process, log)
        for ids in prompts:
            body = {"prompt": ids, "max_tokens": NUM_TOKENS, "temperature": 0, "return_speculation": True}
            response = (
                httpx.post(f"{url}/v1/completions", json=body, timeout=STARTUP_S).raise_for_status().json()
            )
            texts.append(response["choices"][0]["text"])
            counts = response["speculation"]["num_accepted_at"]
            longest = max(len(accepted), len(counts))
            both = zip(padded(accepted, longest), padded(counts, longest), strict=True)
            accepted = [before + now for before, now in both]
    finally:
        process.terminate()
        process.wait()
    return {"texts": texts, "accepted": accepted}


def url_of(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where a server that was started serves. Raises PeerError if it ends."""
    for _ in range(STARTUP_S):
        said = log.read_text(encoding="utf-8")
        found = [line.split()[-1] for line in said.splitlines() if "Serving" in line]
        if found:
            return found[0]
        if process.poll() is not None:
            raise PeerError(said)
        time.sleep(1)
    raise PeerError(f"no server after {STARTUP_S} s")


def padded(counts: list[int], length: int) -> list[int]:
    """Counts with zeros behind them."""
    return counts + [0] * (length - len(counts))


@torch.no_grad()
def largest_difference(head: Path, folder: str, theirs: dict[str, Any]) -> float:
    """Of our logits from theirs, as a share of the largest one, for the same states and tokens."""
    seen = load_file(theirs["logits"])
    model = load_target(folder)
    ours = load_draft(head, target=model)
    table = ours.embedding(model.embed_tokens.weight)
    num_drafts = theirs["speculative_tokens"]
    worst = 0.0
    for place, logits in zip(seen["places"].tolist(), seen["logits"], strict=True):
        made = logits_of(theirs["kind"], ours, table, seen["states"], seen["ids"], place, num_drafts)
        worst = max(worst, float((made - logits).abs().max() / logits.abs().max()))
    return worst


def logits_of(
    kind: str,
    head: Any,
    table: torch.Tensor,
    states: torch.Tensor,
    ids: torch.Tensor,
    place: int,
    num_drafts: int,
) -> torch.Tensor:
    """Our logits ``[num_drafts, Vd]`` behind the first ``place`` ids, with later ids as the drafts."""
    last = place - 2  # the row of the last known token
    if kind == "eagle3":
        read = ids[1 : place + num_drafts - 1]
        steps = eagle3_logits(head, table.__getitem__, states[: len(read)], read, num_drafts)
        return torch.stack([step[last] for step in steps])
    if kind == "peagle":
        row = torch.tensor([*range(last + 1), *[last] * (num_drafts - 1)])
        depth = torch.tensor([0] * last + list(range(num_drafts)))
        return p_eagle_logits(head, table.__getitem__, states, ids[1:], row, depth)[last:]
    starts = torch.zeros(len(ids), dtype=torch.int64)
    logits, _ = block_logits(head, table.__getitem__, states, ids, starts, torch.tensor([place - 1]))
    return logits[0]


# --- The report ------------------------------------------------------------------------------------------


def compare(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Differences, in words; none when we do what their forward does."""
    found = []
    if ours["tokens"] != theirs["responses"]:
        found.append("eval gives other tokens than transformers")
    if ours["served"]["texts"] != ours["texts"]:
        found.append("serve gives other texts than eval")
    if ours["num_drafts"] != theirs["num_drafts"]:
        found.append(f"{theirs['num_drafts']} drafts there, {ours['num_drafts']} here")
    for name, accepted in (("eval", ours["accepted"]), ("serve", ours["served"]["accepted"])):
        if padded(accepted, len(theirs["accepted"])) != theirs["accepted"]:
            found.append(f"{name} accepts {accepted}")
    if ours["difference"] > TOLERANCE:
        found.append(f"logits differ by {ours['difference']:.1e} of the largest")
    return found


def rows_of_trained(key: str, *, fresh: bool) -> tuple[list[str], bool]:
    """Lines of the report, and whether every trained head does here what it does there."""
    worker = Path(__file__).with_name("speculators_worker.py").read_bytes()
    training = hashlib.sha256(worker + Path(__file__).read_bytes()).hexdigest()[:16]
    try:
        python = python_of("speculators")
        given = once("trained-prompts", training, prepare, fresh=fresh)
        job = {"target": given["folder"], "prompts": given["prompts"], "data": str(DATA)}
        job |= {"num_tokens": NUM_TOKENS, "stages": ["data"]}
        texts = once("trained-texts", training, partial(work, python, "trained-texts", job), fresh=fresh)
    except PeerError as error:
        return [row("speculators", "", "all kinds", "", failed(error), "")], False

    # A kind that is refused or differs does not keep the others from being tried.
    lines = []
    is_same = True
    for kind in KINDS:
        try:
            found, agrees = judge(python, kind, given, texts, (training, key), fresh=fresh)
        except PeerError as error:
            found = row("speculators", "", kind, "", failed(error), "")
            agrees = False
        lines.append(found)
        is_same = is_same and agrees
    return lines, is_same


def failed(error: PeerError) -> str:
    """The last line of a log, as a result."""
    return f"did not run: `{str(error).splitlines()[-1]}`"


def judge(
    python: str,
    kind: str,
    given: dict[str, Any],
    texts: dict[str, Any],
    keys: tuple[str, str],
    *,
    fresh: bool,
) -> tuple[str, bool]:
    """Train a head there and use it here -> a line of the report, and whether both agree."""
    training, code = keys
    name = f"trained-{kind}"
    checkpoints = RUNS / name
    job = {
        "stages": ["train", "draft"],
        "target": given["folder"],
        "options": options_of(kind, given["folder"], checkpoints),
        "checkpoints": str(checkpoints),
        "prompts": given["prompts"][:NUM_JUDGED],
        "responses": texts["responses"][:NUM_JUDGED],
        "logits": str(RUNS / f"{name}-logits.safetensors"),
    }

    def train_there() -> dict[str, Any]:
        shutil.rmtree(checkpoints, ignore_errors=True)
        return {**work(python, name, job), "kind": kind, "responses": job["responses"]}

    theirs = once(name, training, train_there, fresh=fresh)
    here = partial(import_and_evaluate, name, given, theirs)
    ours = once(f"{name}-here", f"{training}{code}", here, fresh=fresh)
    found = compare(theirs, ours)
    what = f"{kind} after {theirs['steps']} steps"
    counts = f"{theirs['num_drafts']} drafts, accepted by position {theirs['accepted']}"
    difference = f"logits within {ours['difference']:.0e} of the largest"
    verdict = "; ".join(found) or f"the same tokens and acceptance in eval and serve, {difference}"
    return row("speculators", in_words(theirs["versions"]), what, counts, verdict, theirs["date"]), not found


def write_trained(key: str, *, fresh: bool) -> bool:
    """The page of results -> whether every trained head does here what it does there."""
    lines, is_same = rows_of_trained(key, fresh=fresh)
    text = (
        f"""# Heads that speculators trains

Written by `make test-peers` (`tests/peers/trained.py`); do not edit. `ARGS="--only trained"` runs this part.

`speculators train` trains each kind on a CPU with its options left alone, but for paths and
`{FORCED}`.
Its target is a Llama of eight layers of width 64 over bytes, which has learned pieces of questions. It reads
the target's greedy responses to the beginnings of {NUM_PROMPTS} questions of the task `ours`, and states that
transformers computes. `eagle-kit import`, `validate`, `eval` and `serve` then take each head, in fp32.

Counts are those of speculators' own forward in a loop over the target's greedy responses of {NUM_TOKENS}
tokens to {NUM_JUDGED} of these prompts, drafting as many tokens as the head's config names. Logits are
compared for the same states and tokens.

| peer | versions | what | counts there | result here | date |
|---|---|---|---|---|---|
"""
        + "\n".join(lines)
        + "\n"
    )
    REPORT.write_text(text, encoding="utf-8")
    return is_same
