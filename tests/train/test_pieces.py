"""Order of the data, learning rate, metrics file, launching: the small parts a run rests on."""

import json
import math
import os
import runpy
import signal
import sys
from pathlib import Path

import pytest

from eagle_kit.config.train import TrainingConfig
from eagle_kit.core.errors import UserError
from eagle_kit.train.__main__ import main
from eagle_kit.train.optim.schedule import Schedule, ttt_length_at
from eagle_kit.train.parallel.launch import (
    check_launcher,
    deepspeed_config,
    go_on,
    is_main,
    sharding_asked_for,
)
from eagle_kit.train.run.interrupt import Interrupt
from eagle_kit.train.run.metrics import JsonLines
from eagle_kit.train.run.order import DataOrder, DataPart


def order_of(num_rows: int, sequences_per_step: int, seed: int) -> DataOrder:
    return DataOrder([DataPart(0, num_rows)], sequences_per_step, seed, num_steps=40)


def test_every_row_is_taken_once_per_epoch_across_step_borders() -> None:
    order = order_of(11, 3, seed=5)
    taken = [row for step in range(11) for row in order.rows_of_step(step)]
    for epoch in range(3):
        assert sorted(taken[epoch * 11 : (epoch + 1) * 11]) == list(range(11))
    assert taken[:11] != taken[11:22]


def test_order_depends_on_seed_and_step_only() -> None:
    fresh = order_of(11, 4, seed=5).rows_of_step(7)
    used = order_of(11, 4, seed=5)
    for step in range(20):
        used.rows_of_step(step)
    assert used.rows_of_step(7) == fresh
    assert order_of(11, 4, seed=6).rows_of_step(7) != fresh


def test_processes_share_a_step_without_overlap() -> None:
    order = order_of(50, 6, seed=0)
    shares = [order.share_of(4, process, 3) for process in range(3)]
    assert [len(share) for share in shares] == [2, 2, 2]
    assert [row for share in shares for row in share] == order.rows_of_step(4)


def test_a_data_set_smaller_than_a_step_is_repeated() -> None:
    rows = order_of(2, 5, seed=0).rows_of_step(0)
    assert sorted(rows[:2]) == [0, 1] and sorted(rows[2:4]) == [0, 1]


def test_learning_rate_warms_up_peaks_and_ends_at_its_floor() -> None:
    training = TrainingConfig(learning_rate=1.0, warmup_steps=4, max_steps=20, min_learning_rate_ratio=0.1)
    schedule = Schedule.from_config(training, num_rows=999)
    rates = [schedule.learning_rate(step) for step in range(25)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4] == 1.0
    assert rates[4:21] == sorted(rates[4:21], reverse=True)
    assert rates[20] == rates[24] == pytest.approx(0.1)


def test_a_warm_up_is_a_share_of_the_schedule_and_no_longer_than_it() -> None:
    half = TrainingConfig(learning_rate=1.0, warmup_ratio=0.5, epochs=2, sequences_per_step=3)
    schedule = Schedule.from_config(half, num_rows=15)
    assert (schedule.total_steps, schedule.warmup_steps) == (10, 5)
    assert [schedule.learning_rate(step) for step in (0, 4, 5)] == pytest.approx([0.2, 1.0, 1.0])
    long = TrainingConfig(learning_rate=1.0, warmup_steps=99, max_steps=4)
    schedule = Schedule.from_config(long, num_rows=999)
    assert [schedule.learning_rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    for warmup in ("linear", "log"):  # log 1 is 0
        one = TrainingConfig(learning_rate=1.0, warmup_steps=1, warmup=warmup, max_steps=4)
        assert Schedule.from_config(one, num_rows=9).learning_rate(0) == 1.0


def test_a_cosine_is_half_way_in_the_middle() -> None:
    training = TrainingConfig(learning_rate=1.0, warmup_steps=4, max_steps=20, min_learning_rate_ratio=0.2)
    schedule = Schedule.from_config(training, num_rows=9)
    assert [schedule.learning_rate(step) for step in (8, 12)] == pytest.approx(
        [0.2 + 0.8 * (1 + 0.5**0.5) / 2, 0.6]
    )


def test_a_decay_longer_than_what_warm_up_leaves_begins_at_the_peak() -> None:
    training = TrainingConfig(
        learning_rate=1.0, schedule="wsd", warmup_steps=50, decay_ratio=0.8, max_steps=100
    )
    schedule = Schedule.from_config(training, num_rows=999)
    assert [schedule.learning_rate(step) for step in (49, 50)] == [1.0, 1.0]
    assert 0.9 < schedule.learning_rate(52) < 1.0


def test_schedule_spans_the_epochs() -> None:
    assert (
        Schedule.from_config(TrainingConfig(epochs=1.5, sequences_per_step=4), num_rows=10).total_steps == 4
    )


def test_truncate_drops_later_steps_and_a_line_cut_off(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        lines.append({"step": step})
    with lines.path.open("a") as file:
        file.write('{"step": 6, "lo')
    lines.truncate(3)
    assert [json.loads(line)["step"] for line in lines.path.read_text().splitlines()] == [1, 2, 3]


def test_first_signal_asks_and_the_second_interrupts() -> None:
    # A shell that starts us with & has the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Interrupt(announce=False) as interrupt:
            assert not interrupt.requested
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupt.requested
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_sigterm_asks_too_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupt(announce=False) as interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.requested
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("device", [["--cpu"], []])
@pytest.mark.parametrize("count", [["--num_processes", "2"], ["--num_processes", "2", "--num_machines", "2"]])
def test_processes_that_accelerate_did_not_start_are_missed(device: list[str], count: list[str]) -> None:
    """Its own launcher is asked what it sets for the one process that it starts on a machine."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    def launched(*asked: str) -> dict[str, str]:
        meet = ("--machine_rank", "0", "--main_process_ip", "127.0.0.1", "--main_process_port", "29500")
        parsed = launch_command_parser().parse_args([*device, *asked, *meet, "train", "c.yaml"])
        args = _validate_launch_command(parsed)[0]
        assert not args.multi_gpu  # it takes the launcher of one process
        return prepare_simple_launcher_cmd_env(args)[1]

    environ = launched(*count)
    with pytest.raises(UserError, match="has started one") as refused:
        check_launcher(environ, TrainingConfig())
    assert "torchrun" in refused.value.remedy and "--multi_gpu" in refused.value.remedy
    check_launcher(launched("--num_processes", "1"), TrainingConfig())
    for rank in ("RANK", "OMPI_COMM_WORLD_RANK"):  # torchrun or MPI has started them
        check_launcher(environ | {rank: "0"}, TrainingConfig())


def test_the_first_of_all_processes_writes() -> None:
    assert is_main({}) and is_main({"RANK": "0", "OMPI_COMM_WORLD_RANK": "3"})
    for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"):
        assert is_main({name: "0"}) and not is_main({name: "1"})
    assert is_main({"LOCAL_RANK": "1"}) and not is_main({"RANK": "2", "LOCAL_RANK": "0"})


def test_a_launch_shards_by_what_it_was_asked_for() -> None:
    two = {"WORLD_SIZE": "2"}
    assert sharding_asked_for(two) == "none"
    assert sharding_asked_for({**two, "ACCELERATE_USE_FSDP": "1"}) == "fsdp2"
    deepspeed = {**two, "ACCELERATE_USE_DEEPSPEED": "true"}
    assert sharding_asked_for(deepspeed) == "zero2"
    assert sharding_asked_for({**deepspeed, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}) == "zero3"
    assert sharding_asked_for({**two, "ACCELERATE_USE_DEEPSPEED": "false"}) == "none"


def test_a_command_to_go_on_with_names_the_number_of_processes() -> None:
    assert go_on("eagle-kit train c.yaml --resume", {}) == "Go on with: eagle-kit train c.yaml --resume"
    assert go_on("eagle-kit train", {"WORLD_SIZE": "1"}) == "Go on with: eagle-kit train"
    assert go_on("eagle-kit train", {"WORLD_SIZE": "4"}).endswith("eagle-kit train (in 4 processes, as now)")


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("ACCELERATE_USE_MEGATRON_LM", "true", "--use_megatron_lm"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "--use_parallelism_config"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "--dynamo_backend inductor"),
        ("ACCELERATE_MIXED_PRECISION", "bf16", "training.precision=bfloat16"),
        ("ACCELERATE_MIXED_PRECISION", "fp16", "--mixed_precision fp16"),
    ],
)
def test_flags_of_the_launcher_that_would_have_no_effect_are_refused(
    variable: str, value: str, named: str
) -> None:
    with pytest.raises(UserError, match=named):
        check_launcher({variable: value}, TrainingConfig(precision="float32"))


@pytest.mark.parametrize(
    ("flag", "settings", "named"),
    [
        ("FSDP", {"FSDP_VERSION": "1"}, "fsdp_version 1"),
        ("FSDP", {"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params true"),
        ("FSDP", {"FSDP_RESHARD_AFTER_FORWARD": "false"}, "fsdp_reshard_after_forward false"),
        ("FSDP", {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "fsdp_activation_checkpointing true"),
        ("DEEPSPEED", {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, "zero_stage 0"),
        ("DEEPSPEED", {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"}, "cpu and zero_stage 2"),
        ("DEEPSPEED", {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "nvme"}, "offload_optimizer_device"),
        ("DEEPSPEED", {"ACCELERATE_GRADIENT_CLIPPING": "1.0"}, "gradient_clipping 1.0"),
        ("DEEPSPEED", {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "gradient_accumulation_steps 4"),
    ],
)
def test_sharding_settings_that_would_have_no_effect_are_refused(
    flag: str, settings: dict[str, str], named: str
) -> None:
    launched = {f"ACCELERATE_USE_{flag}": "true"}
    with pytest.raises(UserError, match=named):
        check_launcher({**launched, **settings}, TrainingConfig())
    check_launcher(settings, TrainingConfig())  # of another kind of launch


STAGE_1 = {"zero_optimization": {"stage": 1}}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "zero_optimization.stage None"),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage 0"),
        ({**STAGE_1, "train_batch_size": 64}, "training.sequences_per_step"),
        ({**STAGE_1, "train_micro_batch_size_per_gpu": 9}, "training.gradient_accumulation"),
        ({**STAGE_1, "gradient_accumulation_steps": 3}, "training.gradient_accumulation"),
        ({**STAGE_1, "gradient_clipping": 9.0}, "training.clip_norm"),
        ({**STAGE_1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}, "optimizer, which"),
        ({**STAGE_1, "scheduler": {"type": "WarmupLR"}}, "scheduler, which"),
        ({**STAGE_1, "fp16": {"enabled": True}}, "fp16, which"),
        ({**STAGE_1, "bf16": {"enabled": True}}, "bf16, which"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "to nvme"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "and stage 2"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "to nvme"),
    ],
)
def test_a_file_of_deepspeed_s_that_contradicts_the_run_is_refused(
    tmp_path: Path, settings: dict[str, object], named: str
) -> None:
    file = tmp_path / "ds.json"
    environ = {
        "WORLD_SIZE": "2",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file),
    }
    training = TrainingConfig(sequences_per_step=4)
    file.write_text(json.dumps(settings))
    with pytest.raises(UserError, match=f"ds.json has .*{named}"):
        check_launcher(environ, training)
    # The same settings as auto, or switched off, are the run's own.
    words = ("train_batch_size", "gradient_accumulation_steps", "gradient_clipping")
    off = {**STAGE_1, "fp16": {"enabled": False}, "bf16": {"enabled": "auto"}, "train_batch_size": 4}
    file.write_text(json.dumps({**dict.fromkeys(words, "auto"), **off, "wall_clock_breakdown": True}))
    check_launcher(environ, training)
    assert deepspeed_config(environ) == {**STAGE_1, "wall_clock_breakdown": True}
    assert sharding_asked_for(environ) == "zero1"


def test_offloading_that_accelerate_s_own_settings_ask_for_reaches_deepspeed() -> None:
    environ = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
    }
    check_launcher(environ, TrainingConfig())
    on_cpu = {"device": "cpu"}
    zero = {"stage": 3, "offload_optimizer": on_cpu, "offload_param": on_cpu}
    assert deepspeed_config(environ) == {"zero_optimization": zero}
    assert deepspeed_config({**environ, "ACCELERATE_USE_DEEPSPEED": "false"}) == {}


@pytest.mark.parametrize("name", ["multi-gpu", "fsdp2", "zero2", "zero3"])
def test_what_accelerate_makes_of_our_files_is_accepted(name: str) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    file = Path(__file__).parents[2] / "train" / "accelerate" / f"{name}.yaml"
    asked = [
        "--config_file",
        str(file),
        "--num_processes",
        "2",
        "--main_process_port",
        "0",
        "train",
        "c.yaml",
    ]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(asked))
    args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    environ = prepare_deepspeed_cmd_env(args)[1] if name.startswith("zero") else prepare_multi_gpu_env(args)
    check_launcher(environ, TrainingConfig())
    expected = {"multi-gpu": "none"}.get(name, name)
    assert sharding_asked_for({**environ, "WORLD_SIZE": "2"}) == expected
    assert sharding_asked_for({**environ, "WORLD_SIZE": "1"}) == "none"


@pytest.mark.parametrize("asked", ["no", "bf16"])
def test_what_the_launcher_says_by_itself_is_accepted(asked: str) -> None:
    environ = {
        "ACCELERATE_USE_CPU": "True",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_MIXED_PRECISION": asked,
    }
    check_launcher(environ, TrainingConfig(precision="bfloat16"))
    check_launcher(environ, TrainingConfig())
    check_launcher({}, TrainingConfig())


def test_the_launcher_s_own_variables_are_the_ones_that_are_read() -> None:
    """The names are accelerate's, so its own launcher is asked what it sets."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    asked = ["--cpu", "--mixed_precision", "bf16", "--dynamo_backend", "no", "train", "c.yaml"]
    args = launch_command_parser().parse_args([*asked])
    args.num_machines = 1
    environ = prepare_simple_launcher_cmd_env(args)[1]
    with pytest.raises(UserError, match="--mixed_precision bf16"):
        check_launcher(environ, TrainingConfig(precision="float32"))


def test_every_process_of_a_run_says_what_stopped_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"target: t\noutput_dir: {tmp_path}\ndata: {{source: chats.jsonl}}\n")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert main([str(config)]) == 2
    cause, remedy = capsys.readouterr().err.splitlines()
    assert cause.startswith("error in process 2 of 3: The output folder") and remedy.startswith("  -> ")
    assert main([str(config), "seed=-1"]) == 2
    assert capsys.readouterr().err == ""  # process 0 of this machine read the same file


@pytest.mark.parametrize("launcher", [["--num_processes", "1"], ["--multi_gpu", "--num_processes", "2"]])
def test_the_module_and_the_door_are_one_command_for_accelerate_s_launcher(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    launcher: list[str],
) -> None:
    """Its own parser is asked for the command; the module is run in a folder that is not the repository."""
    from accelerate.commands.launch import launch_command_parser

    door = Path(__file__).parents[2] / "train"
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "eagle_kit.train.__main__")  # runpy warns of a module that is imported
    said = []
    for script in (["-m", "eagle_kit.train"], [str(door)]):
        args = launch_command_parser().parse_args([*launcher, *script, "no.yaml", "seed=1", "--resume"])
        monkeypatch.setattr(sys, "argv", [args.training_script, *args.training_script_args])
        run = runpy.run_module if args.module else runpy.run_path
        with pytest.raises(SystemExit) as ended:
            run(args.training_script, run_name="__main__")
        said.append((ended.value.code, capsys.readouterr().err))
    assert said[0] == said[1]
    assert said[0][0] == 2 and "no.yaml" in said[0][1]


def test_the_argument_of_deepspeed_s_launcher_agrees_with_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It adds ``--local_rank=N`` before the script's arguments, and sets LOCAL_RANK."""
    config = tmp_path / "config.yaml"
    config.write_text(f"target: t\noutput_dir: {tmp_path}\ndata: {{source: chats.jsonl}}\n")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["--local_rank=0", str(config)]) == 2
    assert "The output folder" in capsys.readouterr().err, "it has got as far as without the argument"
    assert main(["--local-rank=1", str(config)]) == 2
    assert "--local_rank is 1, and the variable LOCAL_RANK is 0" in capsys.readouterr().err
    monkeypatch.delenv("LOCAL_RANK")
    assert main(["--local_rank=0", str(config)]) == 2
    assert "LOCAL_RANK is not set" in capsys.readouterr().err


def rates(**training: object) -> list[float]:
    config = TrainingConfig(learning_rate=1.0, max_steps=20, min_learning_rate_ratio=0.1, **training)
    schedule = Schedule.from_config(config, num_rows=9)
    return [schedule.learning_rate(step) for step in range(22)]


def test_every_schedule_falls_as_it_says_from_the_peak_to_its_floor() -> None:
    assert rates(warmup_steps=0, schedule="constant") == [1.0] * 22
    linear = rates(warmup_steps=4, schedule="linear")
    assert linear[4] == 1.0 and linear[12] == pytest.approx(0.55) and linear[20] == pytest.approx(0.1)
    stable = rates(warmup_steps=4, schedule="wsd", decay_ratio=0.25)
    assert stable[4:16] == [1.0] * 12
    assert stable[15:] == pytest.approx([1.0, 0.82, 0.64, 0.46, 0.28, 0.1, 0.1])


def test_logarithmic_warm_up_and_linear_decay_are_deepspeed_s() -> None:
    """``WarmupDecayLR`` after its source: gamma of iteration t, which step t + 1 uses; the first has 0."""
    warm, total = 6, 20
    theirs = [0.0]
    for t in range(total):
        falling = (total - t) / (total - warm)
        theirs.append(math.log(t + 1) / math.log(warm) if t < warm else falling)
    config = TrainingConfig(
        learning_rate=1.0,
        max_steps=total,
        warmup_steps=warm,
        warmup="log",
        schedule="linear",
        min_learning_rate_ratio=0.0,
    )
    schedule = Schedule.from_config(config, num_rows=9)
    ours = [schedule.learning_rate(step) for step in range(total)]
    assert ours[: warm + 1] == pytest.approx(theirs[: warm + 1])
    assert ours[warm:] == pytest.approx(theirs[warm + 1 :])  # their peak is used twice


def test_a_curriculum_gives_every_length_its_part_and_then_the_full_one() -> None:
    training = TrainingConfig(ttt_length=5, ttt_curriculum={"start": 2, "share": 0.6})
    lengths = [ttt_length_at(training, step, 50) for step in range(60)]
    assert [lengths.count(k) for k in (2, 3, 4)] == [10, 10, 10] and lengths == sorted(lengths)
    assert lengths[30:] == [5] * 30
    whole = TrainingConfig(ttt_length=3, ttt_curriculum={"start": 3, "share": 1.0})
    assert [ttt_length_at(whole, step, 9) for step in (0, 8)] == [3, 3]
    assert ttt_length_at(TrainingConfig(ttt_length=5), 0, 50) == 5
