"""The judge of a target that processes share: what the plan says of a process, held to two of them."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from live_bytes import LiveBytes
from rank_processes import run_ranks
from tiny import tiny_head
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_kit.config.train import DataConfig, JudgeConfig, TrainConfig
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.models.loading.loader import load_target, read_target_config
from eagle_kit.train.parallel.placement import between_whole_ends, load_cut
from eagle_kit.train.plan.costs import ProcessLayout, RunCosts
from eagle_kit.train.run.judge import Judge
from eagle_kit.train.run.setup import TrainingComponents

LENGTH, SIZE = 700, 2
PROMPTS = [[(5 * i + 3 * j) % 1900 for j in range(LENGTH)] for i in range(2)]
JUDGE = JudgeConfig(every=1, shapes=("3,1,4",), max_tokens=8, batch_size=8)


def make_target(folder: Path, tied: bool) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        vocab_size=1901,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def bytes_of(target: torch.nn.Module, shared: torch.nn.Module) -> int:
    """Bytes of the matrices of ``target`` that are not those of ``shared``."""

    def matrices(module: torch.nn.Module) -> dict[int, int]:
        sizes: dict[int, int] = {}
        for each in module.parameters():
            if each.ndim > 1:
                address = each.untyped_storage().data_ptr()
                sizes[address] = max(sizes.get(address, 0), each.nbytes)
        return sizes

    there = matrices(shared)
    return sum(size for address, size in matrices(target).items() if address not in there)


def judged(ranks: Any, folder: Path, head: DraftHead, placement: str) -> tuple[int, int, int]:
    """Bytes of the process's cut target beside the one that is captured from, of both, and the most that
    judging allocates."""
    process: Any = SimpleNamespace(
        process_index=ranks.rank, num_processes=ranks.size, device=torch.device("cpu")
    )
    cut = load_cut(folder, process, torch.float32, "")
    if placement == "tensor-parallel":
        captured = between_whole_ends(cut, folder)
    else:
        captured = load_target(folder)
        TrainingComponents(captured, folder, "", None, None, cut).share_embedding()  # type: ignore[arg-type]
    judge = Judge(cut, PROMPTS, JUDGE)
    with LiveBytes() as live:
        judge.judge(head)
    apart = bytes_of(cut, captured)
    return apart, apart + bytes_of(captured, torch.nn.Module()), live.peak


def planned(target: TargetConfig, head: DraftHead, placement: str, size: int = SIZE) -> dict[str, float]:
    config = TrainConfig(
        target="t",
        output_dir="o",
        data=DataConfig(source="c.jsonl", max_length=2 * LENGTH),
        training={"target_placement": placement, "precision": "float32"},
        judge=JUDGE,
    )
    return RunCosts(config, target, head.config, is_gpu=False).memory(ProcessLayout(size, "sharded"), 64, 64)


@pytest.mark.parametrize(
    ("placement", "tied"),
    [
        ("fsdp", False),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (("fsdp", True), ("tensor-parallel", False), ("tensor-parallel", True))
        ),
    ],
)
def test_the_plan_of_a_shared_target_s_judge_is_what_a_process_allocates(
    tmp_path: Path, placement: str, tied: bool
) -> None:
    make_target(tmp_path, tied)
    whole, config = load_target(tmp_path), read_target_config(tmp_path)
    head = tiny_head(whole, 200)
    plan = planned(config, head, placement)
    copied = 4 * 200 * config.hidden_size  # the teacher's rows
    for apart, both, peak in run_ranks(SIZE, judged, tmp_path, head, placement, timeout_s=120):
        if placement == "fsdp":
            assert plan["target, cut for the judge"] == pytest.approx(apart, rel=0.01)
        else:  # 951 or 950 rows of the output layer
            assert "target, cut for the judge" not in plan
            assert plan["target"] - copied == pytest.approx(both, rel=0.01)
        assert plan["judge"] < peak < 1.25 * plan["judge"]


def test_a_target_that_is_not_cut_over_so_many_is_not_judged(tmp_path: Path) -> None:
    make_target(tmp_path, True)
    head = tiny_head(load_target(tmp_path), 200)
    config = read_target_config(tmp_path)
    assert "judge" in planned(config, head, "fsdp", 8)
    assert "judge" not in planned(config, head, "fsdp", 16)  # of 8 query heads
    assert planned(config, head, "tensor-parallel", 16)["target"] == math.inf
