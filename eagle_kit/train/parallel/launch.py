"""What accelerate's launcher was asked for: flags that do not fit are refused, CPU processes are started.

`accelerate launch --cpu --num_processes N` starts one process without MPI, and we start the N. On GPUs
accelerate starts every process itself.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from eagle_kit.config.train import TrainingConfig
from eagle_kit.core.errors import UserError

UNUSED_FLAGS = {
    "ACCELERATE_USE_MEGATRON_LM": "--use_megatron_lm",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "--use_parallelism_config",
}
"""What accelerate's launcher sets -> the flag that makes it do so; we know no use for it."""
FIXED_SETTINGS = {
    "ACCELERATE_USE_FSDP": {
        "FSDP_VERSION": ("fsdp_version", ("2",), "Set it to 2."),
        "FSDP_OFFLOAD_PARAMS": ("fsdp_offload_params", ("false",), "Set it to false."),
        "FSDP_RESHARD_AFTER_FORWARD": (
            "fsdp_reshard_after_forward",
            ("true", "full_shard"),
            "Set it to true.",
        ),
        "FSDP_ACTIVATION_CHECKPOINTING": (
            "fsdp_activation_checkpointing",
            ("false",),
            "Set it to false, and training.gradient_checkpointing=steps in the run's own config.",
        ),
    },
    "ACCELERATE_USE_DEEPSPEED": {
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": (
            "deepspeed_config_file",
            ("none",),
            "Write zero_stage into accelerate's file instead.",
        ),
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("zero_stage", ("2", "3"), "Set it to 2 or 3."),
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": (
            "offload_optimizer_device",
            ("none",),
            "Set it to none.",
        ),
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("offload_param_device", ("none",), "Set it to none."),
        "ACCELERATE_GRADIENT_CLIPPING": (
            "gradient_clipping",
            ("none", "auto"),
            "Leave it out, and set training.clip_norm in the run's own config.",
        ),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
            "gradient_accumulation_steps",
            ("1", "auto"),
            "Leave it out, and set training.gradient_accumulation in the run's own config.",
        ),
    },
}
"""Of a launch with this variable: variable -> setting of the launcher, values that we follow, remedy."""
PROGRAMS = {"train": 0, "eagle_kit.train": 0, "eagle_kit": 1, "eagle_kit.cli": 1}
"""Ours that accelerate starts, and how many of their words name what they do."""
RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
)

RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
"""Where launchers say which of all processes this one is, in the order in which accelerate looks."""


def check_launcher(environ: Mapping[str, str], training: TrainingConfig) -> None:
    """Refuse flags of ``accelerate launch``, or of its config file, that would have no effect.

    Args:
        environ: of this process, where the launcher leaves what it was asked for.

    Raises:
        UserError: sharding of a kind that we do not do, compilation, or a precision other than
            ``training.precision``.
    """
    for variable, flag in UNUSED_FLAGS.items():
        if _is_set(environ, variable):
            raise UserError(
                f"accelerate was launched with {flag}, which has no effect here.",
                f"Launch without {flag}.",
            )
    for launch, settings in FIXED_SETTINGS.items():
        if not _is_set(environ, launch):
            continue
        for variable, (name, allowed, remedy) in settings.items():
            value = environ.get(variable, allowed[0]).lower()
            if value not in allowed:
                raise UserError(f"accelerate was launched with {name} {value}, which has no effect.", remedy)
    if (backend := environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()) not in ("", "no"):
        raise UserError(
            f"accelerate was launched with --dynamo_backend {backend}, but the head is not compiled.",
            "Launch without --dynamo_backend.",
        )
    asked, ours = environ.get("ACCELERATE_MIXED_PRECISION", "no").lower(), training.precision
    if asked not in ("", "no") and (asked, ours) != ("bf16", "bfloat16"):
        wanted = "Set training.precision=bfloat16, or launch" if asked == "bf16" else "Launch"
        raise UserError(
            f"accelerate was launched with --mixed_precision {asked}, but training.precision is {ours}.",
            f"{wanted} with --mixed_precision no.",
        )


def sharding_asked_for(environ: Mapping[str, str]) -> str:
    """How the launcher wants the processes to share the head: ``"none"`` (each has all of it), ``"fsdp2"``,
    ``"zero2"`` or ``"zero3"``; of one process always ``"none"``."""
    if environ.get("WORLD_SIZE", "1") == "1":
        return "none"
    if _is_set(environ, "ACCELERATE_USE_FSDP"):
        return "fsdp2"
    if _is_set(environ, "ACCELERATE_USE_DEEPSPEED"):
        return f"zero{environ.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', '2')}"
    return "none"


def is_main(environ: Mapping[str, str]) -> bool:
    """Whether this process is the first of all, the one that writes."""
    return next((environ[name] for name in RANKS if name in environ), "0") == "0"


def _is_set(environ: Mapping[str, str], variable: str) -> bool:
    return environ.get(variable, "").lower() in ("true", "1")


def cpu_processes_to_start(environ: Mapping[str, str], parent_command: Sequence[str]) -> int:
    """How many processes accelerate was asked for but did not start; 1 when there is nothing to do.

    Args:
        environ: of this process, where accelerate marks a CPU launch and the meeting point of several
            processes.
        parent_command: command line of the parent process, which holds the number.
    """
    asked = environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1") and "MASTER_ADDR" in environ
    if not asked or any(name in environ for name in RANK_VARIABLES):
        return 1
    arguments = _launch_arguments(parent_command)
    if arguments is None:
        return 1
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    args, _ = launch_command_parser().parse_known_args(arguments)
    if args.num_processes is None:
        args.num_processes = load_config_from_file(args.config_file).num_processes
    return 1 if (args.num_machines or 1) > 1 else max(1, args.num_processes)


def start_cpu_processes(count: int, argv: Sequence[str], module: str = "eagle_kit.train") -> int:
    """Run ``python -m module argv`` in ``count`` processes that find each other.

    Returns their exit code. SIGINT and SIGTERM are passed on once; when one fails, the others are ended.
    """
    processes = [
        subprocess.Popen([sys.executable, "-m", module, *argv], env=environment, start_new_session=True)
        for environment in _environments(count)
    ]

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    previous: dict[signal.Signals, Any] = {
        number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        return _wait(processes)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def parent_command() -> list[str]:
    """Command line of the parent process; empty when it cannot be read."""
    return next(iter(parent_commands(1)), [])


def parent_commands(generations: int) -> list[list[str]]:
    """Command lines of this process's parent, the parent's parent and so on, as far as they can be read."""
    import psutil

    try:
        return [process.cmdline() for process in psutil.Process().parents()[:generations]]
    except psutil.Error:
        return []


def launch_words(commands: Sequence[Sequence[str]]) -> list[str] | None:
    """``accelerate launch`` with its options and the program, but not the program's arguments; None when it
    was not the launcher that started a program of ours.

    Args:
        commands: command lines of which one may be that of the launcher.
    """
    for command in commands:
        arguments = _launch_arguments(command)
        if arguments is not None:
            from accelerate.commands.launch import launch_command_parser

            try:
                args, _ = launch_command_parser().parse_known_args(arguments)
            except SystemExit:  # words that look like the launcher's are another program's
                return None
            kept = PROGRAMS.get(args.training_script)
            if kept is None:
                return None
            options = arguments[: len(arguments) - len(args.training_script_args)]
            return ["accelerate", "launch", *options, *args.training_script_args[:kept]]
    return None


def _launch_arguments(command: Sequence[str]) -> list[str] | None:
    """What follows ``accelerate launch`` (or ``accelerate-launch``, or ``-m accelerate.commands.launch``)."""
    for i, word in enumerate(command):
        name = os.path.basename(word)
        if name in ("accelerate-launch", "accelerate.commands.launch") or word.endswith(
            "accelerate/commands/launch.py"
        ):
            return list(command[i + 1 :])
        if word == "launch" and i and "accelerate" in command[i - 1]:
            return list(command[i + 1 :])
    return None


def _environments(count: int) -> list[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def _wait(processes: list["subprocess.Popen[bytes]"]) -> int:
    """Wait until all ended well or one did not."""
    while True:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes) or any(code not in (None, 0, 130) for code in codes):
            return max((code if code >= 0 else 128 - code for code in codes if code is not None), default=0)
        time.sleep(0.1)
