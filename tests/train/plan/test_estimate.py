"""The estimate agrees with real modules and with real allocations."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle_kit.config.train import DataConfig, TrainConfig
from eagle_kit.drafts.dflash.head import DFlashConfig
from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.drafts.p_eagle.head import PEagleConfig
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.train.plan.costs import (
    ProcessLayout,
    RunCosts,
    Workload,
    capture_flops,
    data_workload,
    head_flops,
    make_workload,
)
from eagle_kit.train.plan.estimate import Session, make_estimate, measure_matmul_rate
from eagle_kit.train.plan.sizes import head_sizes, num_weights

TARGET = TargetConfig(
    model_type="llama",
    hidden_size=48,
    num_layers=5,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=100,
    vocab_size=331,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)
WORK = Workload(tokens=128, rows=70, steps=4, mean_context=40)


def estimate(num_captures: int = 0, store: str | None = None, validation: int = 200, **training: object):
    config = TrainConfig(
        target="t",
        output_dir="o",
        data=DataConfig(source="c.jsonl", store=store, max_length=128),
        training=training,
        validation={"every": validation},
    )
    session = Session(
        work=WORK,
        micro_batches_per_step=3,
        rows_per_micro_batch=2,
        num_rows=100,
        num_captures=num_captures,
        num_steps=50,
        flops_per_s=1e9,
        free_disk=1e12,
    )
    costs = RunCosts(config, TARGET, Eagle3Config.for_target(TARGET, 64), is_gpu=False)
    return make_estimate(costs, session, num_processes=2)


@pytest.mark.parametrize(
    "flags", [{}, {"fc_norm": True}, {"attention_bias": True}, {"intermediate_size": 77}]
)
def test_number_of_trained_weights_is_exact(flags: dict[str, object]) -> None:
    draft = Eagle3Config.for_target(TARGET, 64, **flags)
    assert head_sizes(draft).total == sum(p.numel() for p in Eagle3Head(draft).parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_number_of_target_weights_leaves_out_norms_only(tied: bool) -> None:
    from dataclasses import replace

    config = replace(TARGET, tie_word_embeddings=tied)
    matrices = sum(p.numel() for p in LlamaModel(config).parameters() if p.ndim == 2)
    assert num_weights(config)[1] == matrices


def test_arithmetic_of_the_head_grows_with_steps() -> None:
    draft = Eagle3Config.for_target(TARGET, 64)
    per_step = head_flops(draft, Workload(128, 70, 5, 40)) - head_flops(draft, WORK)
    matmuls = 6 * 70 * (2 * 48 * (48 + 32) + 48 * 48 + 3 * 48 * 100 + 48 * 64)
    assert per_step == pytest.approx(matmuls + 3 * 70 * 4 * 40 * 48)


def test_arithmetic_of_a_layer_behind_the_first_is_that_of_all_rows_of_all_steps() -> None:
    two, three = (PEagleConfig.for_target(TARGET, 64, num_layers=n) for n in (2, 3))
    work = Workload(128, 70, 5, 0)
    matrices = 48 * (48 + 32) + 48 * 48 + 3 * 48 * 100
    assert head_flops(three, work) - head_flops(two, work) == 6 * (128 + 4 * 70) * matrices


@pytest.mark.parametrize("config_class", [Eagle3Config, PEagleConfig])
def test_arithmetic_of_later_steps_is_that_of_the_rows_that_are_kept(config_class) -> None:
    draft = config_class.for_target(TARGET, 64)
    all_rows, some, first = (
        head_flops(draft, Workload(128, 70, steps, 40, later))
        for steps, later in ((5, None), (5, 1.2), (1, None))
    )
    assert some - first == pytest.approx(1.2 / 4 * (all_rows - first))


def test_a_forward_has_the_rows_of_the_anchors_that_are_drawn() -> None:
    def rows(kind: str, anchors: int) -> int:
        training = {"ttt_length": 7} | ({"num_anchors": anchors} if kind == "dflash" else {})
        config = TrainConfig(
            target="t",
            output_dir="o",
            data=DataConfig(source="c.jsonl"),
            head={"kind": kind},
            training=training,
        )
        return make_workload(config, tokens=1000, supervised=700, conversations=2, mean_context=250).rows

    assert [rows("dflash", anchors) for anchors in (100, 349, 351)] == [200, 698, 700]
    assert rows("eagle3", 1) == 700


def test_a_config_says_how_many_rows_later_steps_have() -> None:
    def later(**settings: object) -> float:
        data = DataConfig(source="c.jsonl")
        config = TrainConfig(target="t", output_dir="o", data=data, **settings)
        return make_workload(config, tokens=1, supervised=1, conversations=1, mean_context=1).later_rows

    assert later(training={"ttt_length": 5}) == 4
    assert later(training={"ttt_length": 5, "down_sample_ratio": 0.5}) == 0.5 + 0.25 + 0.2 + 0.2
    published = later(head={"kind": "p-eagle"}, training={"ttt_length": 8})
    assert published == pytest.approx(0.8 + 0.64 + 0.512 + 0.4096 + 0.32768 + 0.262144 + 0.2097152)


def test_arithmetic_of_a_layer_over_blocks_is_keys_of_the_text_and_rows_of_the_blocks() -> None:
    two, three = (DFlashConfig.for_target(TARGET, num_layers=n, block_size=6) for n in (2, 3))
    work = Workload(128, 20, 5, 0)
    keys, behind = 48 * (48 + 32), 48 * 48 + 3 * 48 * 100
    assert head_flops(three, work) - head_flops(two, work) == 6 * (128 * keys + 20 * 6 * (keys + behind))


def test_arithmetic_of_the_matmuls_equals_a_count_by_torch() -> None:
    """One TTT step over all rows without attention: forward counted by torch, backward twice that."""
    from torch.utils.flop_counter import FlopCounterMode

    draft = Eagle3Config.for_target(TARGET, 64)
    head = Eagle3Head(draft)
    work = Workload(tokens=32, rows=32, steps=1, mean_context=0)
    aux, embeds = torch.randn(32, 3 * 48), torch.randn(32, 48)
    counter = FlopCounterMode(display=False)
    with counter, torch.backends.mkldnn.flags(enabled=False):
        fused = torch.nn.functional.linear(aux, head.fc.weight)
        x, residual = head.midlayer.inputs(fused, embeds)
        torch.nn.functional.linear(x, head.midlayer.self_attn.qkv_proj.weight)
        out = torch.nn.functional.linear(residual, head.midlayer.self_attn.o_proj.weight)
        gate = torch.nn.functional.linear(out, head.midlayer.mlp.gate_up_proj.weight)
        torch.nn.functional.linear(gate[:, :100], head.midlayer.mlp.down_proj.weight)
        torch.nn.functional.linear(out, head.lm_head.weight)
    forward = counter.get_total_flops()
    fusion = 2 * 32 * 3 * 48 * 48
    teacher = 2 * 32 * 48 * 64
    assert head_flops(draft, work) == 3 * forward - fusion + teacher


def test_arithmetic_of_capturing_is_two_operations_a_weight_and_token() -> None:
    layers = sum(
        p.numel() for name, p in LlamaModel(TARGET).named_parameters() if p.ndim == 2 and "layers" in name
    )
    choices, attention = 20 * 48 * 331, 5 * 32 * 2 * 7 * 48
    assert capture_flops(TARGET, Workload(32, 20, 1, 7)) == 2 * (32 * layers + choices + attention)


def test_report_names_memory_disk_and_time() -> None:
    text = estimate().report()
    for word in ("memory", "disk", "time", "50 steps", "target", "checkpoints"):
        assert word in text


def test_cached_states_are_counted_on_disk() -> None:
    assert "captured states" in estimate(cache_hidden_states="disk").disk
    assert "captured states" not in estimate().disk
    half, whole = (
        estimate(cache_hidden_states="disk", precision=precision).disk["captured states"]
        for precision in ("bfloat16", "float32")
    )
    states, best = 4 * 48 * 128 * 100, 4 * 128 * 100
    assert whole == 4 * states + best and half == 2 * states + best


@pytest.mark.parametrize(("keep_last", "ema_decay"), [(1, None), (4, None), (4, 0.9)])
def test_checkpoints_that_are_kept_and_the_average_of_weights_are_counted(keep_last, ema_decay) -> None:
    """A checkpoint is written before the oldest one goes; it has weights, two moments and the average."""
    plain = estimate()
    found = estimate(keep_last=keep_last, ema_decay=ema_decay)
    weights = 4 * found.num_parameters
    has_average = ema_decay is not None
    copies = 3 + has_average
    assert found.disk == {
        f"{keep_last + 1} checkpoints": copies * weights * (keep_last + 1),
        "best": weights,
    }
    name = "head, gradient and optimiser"
    assert plain.memory[name] == 4 * weights
    assert found.memory[name] == (4 + has_average) * weights


def test_a_head_is_counted_by_its_sharding() -> None:
    """Weight, gradient and two moments in fp32; ZeRO has another copy of the weights in shards, and where the
    weights are shards a whole one is gathered. FSDP2 has a whole gradient until a step's last forward."""
    found = {name: ProcessLayout(4, "whole", name).head_bytes for name in ("none", "fsdp2", "zero2", "zero3")}
    assert found == {"none": 16, "fsdp2": 4 + 4 + 12 / 4, "zero2": 4 + 4 + 12 / 4, "zero3": 4 + 20 / 4}


def test_a_forward_is_an_average_one_of_the_data() -> None:
    config = TrainConfig(
        target="t", output_dir="o", data=DataConfig(source="c", max_length=64), training={"ttt_length": 3}
    )

    class Data(SimpleNamespace):
        def __len__(self) -> int:
            return 20

    data: Any = Data(num_tokens=1000, num_conversations=40, num_supervised_tokens=250)
    work = data_workload(config, data, 2)
    assert (work.tokens, work.rows, work.steps, work.mean_context) == (100, 25, 3, 25 / 2)
    data.num_conversations = 10  # of 100 tokens, which are cut into rows of 64
    assert data_workload(config, data, 1).mean_context == 32


def test_the_whole_report_of_a_session() -> None:
    found = estimate(20, cache_hidden_states="disk")
    lines = found.report().splitlines()
    assert lines[0] == f"head    {found.num_parameters / 1e6:.2f} M trained weights"
    assert lines[1].startswith(f"memory  {found.peak / 1e9:.2f} GB per process at the peak (")
    assert "mapped" not in lines[1]
    mapped = replace(found, session=replace(found.session, mapped=1.07e9)).report().splitlines()
    assert mapped[1].startswith(lines[1]) and "1.07 GB of weight files are mapped" in mapped[1]
    assert lines[2].startswith(f"disk    {sum(found.disk.values()) / 1e9:.2f} GB (3 checkpoints")
    assert lines[2].endswith("1000.0 free")
    assert found.flops_per_step == 3 * 2 * head_flops(Eagle3Config.for_target(TARGET, 64), WORK)
    online = estimate()
    assert online.flops_per_step - found.flops_per_step == 3 * 2 * capture_flops(TARGET, WORK)
    assert f"({found.flops_per_step / 1e9:.0f} GFLOP a step at 55% of 1 GFLOP/s" in lines[3]
    assert lines[3].startswith("time    50 steps of ")


def test_captures_of_the_first_epoch_are_in_the_time_and_later_steps_save_them() -> None:
    online = estimate()
    warm, cold = estimate(cache_hidden_states="disk"), estimate(40, cache_hidden_states="disk")
    assert warm.capture_seconds == 0 and warm.seconds < online.seconds
    one = capture_flops(TARGET, WORK) / (1e9 * 0.55)  # 2 rows of one of 2 processes
    assert cold.seconds == pytest.approx(warm.seconds + 40 / 2 * one / 2)
    assert "the states of 40 rows" in cold.report() and "states of" not in warm.report()
    every_row_once = estimate(50 * 3 * 2 * 2, cache_hidden_states="disk")
    assert every_row_once.seconds == pytest.approx(online.seconds)


def test_measured_rate_is_plausible() -> None:
    rate = measure_matmul_rate(torch.device("cpu"), seconds=0.05)
    assert 1e8 < rate < 1e14


def test_a_target_counts_as_far_as_it_is_held():
    """From a store nothing is held but what the head reads; sharded, that is whole all the same."""
    ends, rows, whole = 4 * 331 * 48, 4 * 64 * 48, 4 * num_weights(TARGET)[1]
    assert estimate().memory["target"] == whole + rows
    assert estimate(store="states", validation=0).memory["target"] == ends + rows
    assert estimate(store="states").memory["target"] == whole + rows, "validation runs it"
    sharded = estimate(validation=0, target_placement="fsdp").memory["target"]
    gathered = 2 * (whole - ends) / TARGET.num_layers
    assert sharded == pytest.approx(ends + rows + (whole - ends) / 2 + gathered)
    cut = estimate(validation=0, target_placement="tensor-parallel").memory["target"]
    assert cut == pytest.approx(sharded - gathered)


def test_validating_and_training_take_turns() -> None:
    validated, plain = estimate(), estimate(validation=0)
    assert "validation" in validated.memory and "validation" not in plain.memory
    training = plain.memory["states and activations"] + plain.memory["teacher and logits"]
    assert validated.peak == pytest.approx(plain.peak + max(0.0, validated.memory["validation"] - training))
    assert plain.peak == pytest.approx(sum(plain.memory.values()))
