"""Every recipe builds on the meta device and has a plan; plans agree with modules and with torch's counts."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from eagle_kit.config.loading.loader import load_config
from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.gpus import GPUS, find_gpu
from eagle_kit.drafts.registry import kind_of
from eagle_kit.models.bridge.config import BridgedConfig
from eagle_kit.models.loading.known_targets import KNOWN_TARGETS
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.train.__main__ import main
from eagle_kit.train.plan.plan import SUPERVISED_SHARE, USABLE, UTILISATION, GpuPlanner
from eagle_kit.train.plan.report import make_planner, report, table

CONFIGS = Path(__file__).parents[3] / "configs"
RECIPES = sorted(
    path
    for path in CONFIGS.glob("*.yaml")
    if any(f"target: {id_}\n" in path.read_text() for id_ in KNOWN_TARGETS)
)


def planner_of(name: str, gpu: str = "h100-80g", *overrides: str) -> GpuPlanner:
    return make_planner(str(CONFIGS / f"{name}.yaml"), overrides, gpu)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a plan asked for the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_there_are_recipes_for_ten_public_targets() -> None:
    assert len({load_config(TrainConfig, path).target for path in RECIPES}) >= 10


def one_of_a_kind() -> list[Any]:
    """Recipes; those for an architecture and a kind of head that another before them has are nightly."""
    recipes, seen = [], set()
    for path in RECIPES:
        config = load_config(TrainConfig, path)
        kind = KNOWN_TARGETS[config.target].config["architectures"][0], config.head.kind
        recipes.append(pytest.param(path, id=path.stem, marks=[pytest.mark.nightly] * (kind in seen)))
        seen.add(kind)
    return recipes


@pytest.mark.parametrize("path", one_of_a_kind())
def test_a_recipe_builds_on_the_meta_device_and_prints_its_plan(
    path: Path, no_network: None, capsys: pytest.CaptureFixture[str]
) -> None:
    planner = make_planner(str(path), (), "h100-80g")
    with torch.device("meta"):
        costs = planner.costs
        head = kind_of(costs.draft).head_class(costs.draft)
        target = None if isinstance(costs.target, BridgedConfig) else LlamaModel(costs.target)
    trained = sum(parameter.numel() for parameter in head.parameters())
    assert planner.costs.head.total == trained
    if target is not None:  # those of bridged targets are counted by test_known_targets.py
        assert planner.costs.target_weights[1] == sum(p.numel() for p in target.parameters() if p.ndim > 1)
    if target is not None and not planner.costs.draft.owns_output:
        head.bind(target.lm_head)
    assert head.output.weight.shape == (
        planner.costs.draft.draft_vocab_size,
        planner.costs.target.hidden_size,
    )
    eight = planner.place(8)
    assert eight is not None and eight.fits
    assert sum(eight.memory.values()) >= eight.peak > eight.memory["target"]
    assert main([str(path), "--plan"]) == 0
    text = capsys.readouterr().out
    for word in ("target", "head", "teacher and logits", "peak", "8 x h100-80g", "fp8", "Estimates"):
        assert word in text
    comment = path.read_text().split("target:")[0]
    assert comment.startswith("#") and str(path.relative_to(CONFIGS.parent)) in comment
    files = {word.strip(",") for word in comment.split() if word.startswith("train/accelerate/")}
    assert files <= {f"train/accelerate/{name}.yaml" for name in ("multi-gpu", "fsdp2", "zero2", "zero3")}


def test_the_table_of_the_documentation_is_what_the_tool_prints() -> None:
    planners = {str(path): make_planner(str(path), (), "h100-80g") for path in RECIPES}
    text = (CONFIGS.parent / "docs" / "results" / "plans-of-recipes.md").read_text(encoding="utf-8")
    assert "\n".join(table(planners, "h100-80g").splitlines()[1:-1]) in text


def test_a_plan_says_what_a_sharded_target_reads_and_where_it_is_read_whole() -> None:
    text = report("c", planner_of("llama-3.3-70b-eagle3"), "h100-80g")
    assert "8 processes read 141.1 GB of the target together, each its shard" in text
    bridged = report("c", planner_of("gemma-3-27b-eagle3"), "h100-80g")
    assert "each of 8 processes reads the target into main memory: 54.0 GB, together 432.1 GB" in bridged
    assert "processes" not in report("c", planner_of("llama-3.1-8b-eagle3"), "h100-80g")


def test_strategies_follow_from_the_sizes() -> None:
    names = {
        ("llama-3.1-8b-eagle3", "h100-80g"): ("fits", "fits"),
        ("llama-3.3-70b-eagle3", "h100-80g"): ("from a store", "target sharded"),
        ("qwen3-32b-eagle3", "h200"): ("fits", "fits"),
        ("deepseek-v3-eagle3-mla", "h200"): ("from a store", "from a store"),
    }
    for (config, gpu), expected in names.items():
        placements = [planner_of(config, gpu).place(count) for count in (1, 8)]
        assert tuple(p.name for p in placements if p) == expected
    assert (
        planner_of("deepseek-v3-eagle3-mla", "h200").gpus_to_capture() == 32
    )  # two layers of 23 GB are gathered at a time
    assert not planner_of("llama-3.3-70b-eagle3", "rtx4090").place(1).fits


def test_memory_of_an_8b_target_is_what_its_parts_add_up_to() -> None:
    planner = planner_of("llama-3.1-8b-eagle3")
    placement = planner.place(1)
    teacher = 2 * 32000 * 4096
    assert placement.memory["target"] == pytest.approx(2 * 8_030_261_248 + teacher, rel=1e-3)  # norms aside
    # The copy of autocast is without the output layer, which is among the logits.
    rounded = planner.costs.head.total - 32000 * 4096
    assert placement.memory["head, gradient and optimiser"] == 16 * planner.costs.head.total + 2 * rounded
    assert placement.peak <= USABLE * GPUS["h100-80g"].memory
    longer = planner_of("llama-3.1-8b-eagle3", "h100-80g", "data.max_length=8192").place(1)
    assert longer.memory["states and activations"] == pytest.approx(
        2 * placement.memory["states and activations"], rel=0.01
    )


def test_arithmetic_is_what_torch_counts() -> None:
    """Our targets on the meta device under torch's counter, attention aside, and the plan's speed from it."""
    planner = planner_of("qwen3-0.6b-eagle3", "h100-80g", "validation.every=0")
    with torch.device("meta"):
        model = LlamaModel(planner.costs.target)
        model.rope.inv_freq = torch.empty(planner.costs.target.rope_dim // 2, device="meta")
        ids = torch.zeros(32, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.logits(model(ids, ids, lambda layer, q, k, v: q).hidden)
    met, _ = planner.costs.target_weights
    assert counter.get_total_flops() == pytest.approx(2 * 32 * met, rel=1e-6)


def test_speed_is_arithmetic_over_the_assumed_rate() -> None:
    planner = planner_of("llama-3.1-8b-eagle3")
    one, eight = planner.place(1), planner.place(8)
    rate = UTILISATION * 989e12
    at_least = 16 * 4096 * 2 * 6.98e9 / rate  # the layers of the target alone
    head = (
        16 * 4096 * SUPERVISED_SHARE * 7 * 3 * 2 * planner.costs.head.total / rate
    )  # every weight, every row
    assert at_least < one.seconds_per_step < 1.5 * (at_least + head)
    assert 6 < eight.tokens_per_day / one.tokens_per_day <= 8
    assert one.tokens_per_day == pytest.approx(16 * 4096 / one.seconds_per_step * 86400)


def test_a_report_has_the_figures_of_its_placements() -> None:
    # The plan for one and eight GPUs.
    planner = planner_of("llama-3.1-8b-eagle3", "h100-80g", "training.max_steps=1000")
    costs = planner.costs
    config = planner.costs.config
    one = planner.place(1)
    eight = planner.place(8)
    text = report("c.yaml", planner, "h100-80g")
    lines = {line.split("  ")[0].strip(): line for line in text.splitlines()}

    # Sizes of target and head.
    met, total = costs.target_weights
    assert f"{total / 1e9:.2f} B weights, {met / 1e9:.2f} B of them for one token" in lines["target"]
    rows = f"{config.training.sequences_per_step} of {config.data.max_length} tokens a step, 7 steps"
    assert rows in text and f"{costs.head.total / 1e9:.3f} B trained weights, 32000 of 128256 tokens" in text

    # Memory.
    memory = [line.split() for line in text.splitlines() if line.startswith("  ")]
    runtime = next(line for line in memory if line[0] == "runtime")
    assert runtime[1:] == [f"{each.memory['runtime'] / 1e9:.1f}" for each in (one, eight)]
    assert memory[-1] == ["peak", f"{one.peak / 1e9:.1f}", f"{eight.peak / 1e9:.1f}"]
    validation = next(line for line in memory if line[0] == "validation")
    assert validation[1:] == [f"{each.memory['validation'] / 1e9:.1f}" for each in (one, eight)]

    # Time, disk and days.
    assert f"{one.seconds_per_step:.2f} s a step, {one.tokens_per_day / 1e6:.0f} M tokens a day" in text
    assert f"{eight.seconds_per_step:.2f} s a step, {eight.tokens_per_day / 1e6:.0f} M tokens a day" in text
    tokens = 1000 * config.training.sequences_per_step * config.data.max_length
    assert f"the schedule's {tokens / 1e6:.0f} M tokens" in text
    sizes = [tokens * costs.state_bytes(form) / 1e12 for form in ("bf16", "fp8")]
    assert f"{sizes[0]:.2f} TB in bf16, {sizes[1]:.2f} TB in fp8" in text
    days = [tokens / each.tokens_per_day for each in (one, eight)]
    assert f"days for them: {days[0]:.1f} on 1, {days[1]:.1f} on 8" in text
    assert f"capture needs 1 x h100-80g: {planner.capture_tokens_per_day(1) / 1e6:.0f} M tokens a day" in text


def test_rows_that_cannot_be_shared_out_are_said_to_be_so() -> None:
    planner = planner_of("llama-3.1-8b-eagle3", "h200", "training.sequences_per_step=4")
    assert planner.place(8) is None and planner.place(1) is not None
    assert "no multiple of 8" in report("c.yaml", planner, "h200")
    assert "rows not shared" in table({"c.yaml": planner}, "h200")


def test_several_configs_make_a_table_and_name_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    target_config = CONFIGS.parent / "recipes" / "deepseek-15m-target.yaml"
    paths = [str(CONFIGS / "qwen3-8b-eagle3.yaml"), str(target_config)]
    assert main(["--plan", *paths, "--gpu", "l40s"]) == 0
    text = capsys.readouterr().out
    assert "qwen3-8b-eagle3" in text and "left out" in text and "unknown key" in text


@pytest.mark.parametrize("word", ["llama-3.1-8b-eagle3", "configs/llama-3.1-8b-eagle3.yaml"])
def test_a_config_has_its_whole_name_in_the_table(word: str) -> None:
    lines = table({word: planner_of("llama-3.1-8b-eagle3")}, "h200").splitlines()
    assert lines[2].split()[0] == "llama-3.1-8b-eagle3"


def test_mistakes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(CONFIGS / "qwen3-8b-eagle3.yaml")
    with pytest.raises(UserError, match="gpu9"):
        find_gpu("gpu9")
    for arguments in ([config, "--plan", "--gpu", "gpu9"], [config, "--plan", "target=no/such-model"]):
        assert main(arguments) == 2
    assert "not known without a network" in capsys.readouterr().err
