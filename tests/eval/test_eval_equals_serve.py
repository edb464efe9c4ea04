"""What ``eval`` measures of a setting is what a server with the same flags counts of the same prompts."""

import copy
import json
import shlex
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_mtp import save_target
from tiny_rule import VOCABULARY, learned_head, learned_target, texts
from tiny_rule_llm import word_tokenizer
from tiny_run import make_target

from eagle_kit.cli.serve_flags import parse_serve_flags
from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.eval import EvalConfig
from eagle_kit.drafts.files.draft import save_draft
from eagle_kit.engine.llm import LLM
from eagle_kit.eval.engines import NamedSetting
from eagle_kit.eval.runner import run_eval
from eagle_kit.eval.servers.measured_server import MeasuredServer
from eagle_kit.eval.summary import find_row
from tests.server.api.serving import serving

COMMON = "--max-running-requests 2 --max-context 256 --device cpu --graph-mode off"
NUM_PROMPTS = 4
NUM_TOKENS = 24
MODES = {
    "chain": ("--draft HEAD --shape 3,1,4", (0.0, 1.0)),
    "tree": ("--draft HEAD --shape 4,3,9", (0.0, 1.0)),
    "static tree": ("--draft HEAD --speculative-tree static --shape 5,4,26", (0.0, 1.0)),
    "token map": ("--draft SMALL --speculative-token-map MAP --shape 3,2,6", (0.0,)),
    "NGRAM": ("--speculative-algorithm NGRAM --shape 6,3,8", (0.0, 1.0)),
    "STANDALONE": ("--draft SMALL --speculative-algorithm STANDALONE --shape 3,4,12", (0.0, 1.0)),
    "sampled": ("--draft HEAD --speculative-sampled-drafts --shape 3,1,4", (0.0, 1.0)),
    "sampled static tree": (
        "--draft HEAD --speculative-tree static --shape 5,4,26 --speculative-sampled-drafts",
        (1.0,),
    ),
    "rejection": (
        "--draft HEAD --speculative-sampled-drafts --speculative-verifier rejection --shape 3,1,4",
        (1.0,),
    ),
    "thresholds": (
        "--draft HEAD --shape 3,1,4 --speculative-accept-threshold-single 0.3 "
        "--speculative-accept-threshold-acc 0.5",
        (0.0, 1.0),
    ),
    "fp8": ("--draft HEAD --shape 3,1,4 --kv-dtype fp8_e4m3", (0.0, 1.0)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drafts on the disk, and a task."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("modes")
    save_draft(learned_head(), folder / "head", metadata={})
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "small")
    (folder / "map.json").write_text(json.dumps(list(range(0, VOCABULARY, 2))))
    lines = [json.dumps({"prompt": " ".join(f"w{i}" for i in text.prompt)}) for text in texts(NUM_PROMPTS)]
    (folder / "task.jsonl").write_text("\n".join(lines))
    return folder


def options_of(flags: str, folder: Path) -> tuple[EngineConfig, str | None]:
    """The engine and the draft of flags of ``serve``."""
    for name, path in (("HEAD", "head"), ("SMALL", "small"), ("MAP", "map.json")):
        flags = flags.replace(name, str(folder / path))
    options = parse_serve_flags(["target", *shlex.split(f"{flags} {COMMON}")])
    return options.engine, options.flags.draft


def learned_llm(engine: EngineConfig, draft: Any = None) -> LLM:
    return LLM(copy.deepcopy(learned_target()), draft, engine, tokenizer=word_tokenizer())


def measured(
    mode: str,
    llm: LLM,
    target: str | Path,
    setting: NamedSetting,
    temperatures: tuple[float, ...],
    task: Path,
    out: Path,
    **options: Any,
) -> dict[str, Any]:
    """Evaluate a setting beside a server around ``llm``."""
    config = EvalConfig(
        tasks=(str(task),),
        temperatures=temperatures,
        seeds=(5, 6),
        max_tokens=NUM_TOKENS,
        plots=False,
        engine=EngineConfig(max_batch_size=1, graph_mode="off", device="cpu"),
    )
    with closing(llm), serving(llm, llm.engine()) as server:
        servers = [MeasuredServer("server", server.url)]
        return run_eval(
            target, {}, config, out=out, quiet=True, settings=[setting], servers=servers, **options
        )


def check_equal(summary: dict[str, Any], mode: str, shape: str, temperature: float) -> None:
    """Compare the rows of a setting and of its server."""
    ours = find_row(summary, mode, shape, temperature=temperature)
    theirs = find_row(summary, "server", shape, temperature=temperature)
    assert ours["num_answers"] == theirs["num_answers"] >= NUM_PROMPTS
    assert ours["num_tokens"] == theirs["num_tokens"]
    assert ours["num_verifies"] == theirs["num_verifies"] > 0

    # Where cycles without a draft emit tokens too, counters have a bonus token behind the end of responses.
    num_bonus = (theirs["accept_length"] - ours["accept_length"]) * ours["num_verifies"]
    assert round(num_bonus, 6) in (range(ours["num_answers"] + 1) if mode == "NGRAM" else [0])

    # The counters have a depth that nothing reached.
    reached = ours["acceptance_per_position"]
    counted = theirs["acceptance_per_position"]
    assert counted[: len(reached)] == pytest.approx(reached)
    assert not any(counted[len(reached) :])


@pytest.mark.parametrize("mode", MODES)
def test_accept_length_of_a_mode_is_that_of_the_servers_counters(
    mode: str, folder: Path, tmp_path: Path
) -> None:
    flags, temperatures = MODES[mode]
    engine, draft = options_of(flags, folder)
    setting = NamedSetting(mode, draft, engine, (str(engine.shape),))

    def engines(target: str, settings: Any) -> list[LLM]:
        plain = EngineConfig(max_context=256, max_batch_size=1, device="cpu", graph_mode="off")
        return [learned_llm(plain), *(learned_llm(each.engine, each.draft) for each in settings)]

    summary = measured(
        mode,
        learned_llm(engine, draft),
        "a-target",
        setting,
        temperatures,
        folder / "task.jsonl",
        tmp_path / "out",
        engines=engines,
    )
    for temperature in temperatures:
        check_equal(summary, mode, str(engine.shape), temperature)
        row = find_row(summary, mode, str(engine.shape), temperature=temperature)
        assert row["accept_length"] > 1.02, "something was accepted"
    assert summary["passed"] is True


def test_modules_in_the_targets_folder_are_measured_as_served(folder: Path, tmp_path: Path) -> None:
    make_target(tmp_path / "target")
    save_target(tmp_path / "made", vocab_size=300, eos_token_id=2, bos_token_id=1)
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        shutil.move(tmp_path / "made" / name, tmp_path / "target" / name)
    target = tmp_path / "target"
    engine, _ = options_of("--speculative-algorithm NEXTN --shape 3,4,8", folder)
    summary = measured(
        "modules",
        LLM(target, None, engine),
        target,
        NamedSetting("modules", None, engine, ("3,4,8",)),
        (0.0, 1.0),
        folder / "task.jsonl",
        tmp_path / "out",
    )
    for temperature in (0.0, 1.0):
        check_equal(summary, "modules", "3,4,8", temperature)
    assert find_row(summary, "modules", "3,4,8")["accept_length"] > 1.0
    assert summary["passed"] is True
