"""Processes, devices and precision: everything that asks accelerate for something."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from eagle_kit.config.loading.command_line import print_error
from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError, first_line
from eagle_kit.core.files import expand
from eagle_kit.core.process import num_cores, warn_of_spinning
from eagle_kit.data.hidden_states.manifest import read_manifest
from eagle_kit.distributed.heartbeat import Heartbeat, launched_store
from eagle_kit.ops.cpu.memory import keep_large_blocks
from eagle_kit.train.parallel.placement import PATIENCE
from eagle_kit.train.run.trackers import tracker_options

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState

T = TypeVar("T")


def with_precision(config: TrainConfig, *, on_gpu: bool | None = None) -> TrainConfig:
    """Settle the precision ``auto``: that of captured states that are given, else bfloat16 on a GPU that has
    it, or where the launcher was asked for it, else float32.

    Args:
        on_gpu: plan for GPUs that have it; default where this process will run.
    """
    if config.training.precision != "auto":
        return config
    if on_gpu is None:
        on_gpu = not _is_on_cpu() and torch.cuda.is_bf16_supported()
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower() == "bf16"
    precision = "bfloat16" if on_gpu or launched else "float32"
    if config.data.store is not None:
        store = read_manifest(expand(config.data.store))
        precision = str((store or {}).get("precision", precision))
    return config.model_copy(update={"training": config.training.model_copy(update={"precision": precision})})


def make_accelerator(config: TrainConfig) -> "Accelerator":
    """Start accelerate: processes, device, precision, trackers. Raises UserError for unfit settings."""
    accelerate = _accelerate()
    try:
        accelerator: Accelerator = accelerate.Accelerator(
            cpu=_is_on_cpu(),
            mixed_precision="no",  # see eagle_kit.objective.ttt_module.autocast
            log_with=list(tracker_options(config)) or None,
            project_config=accelerate.utils.ProjectConfiguration(
                project_dir=config.output_dir, logging_dir=os.path.join(config.output_dir, "tensorboard")
            ),
            kwargs_handlers=[accelerate.InitProcessGroupKwargs(timeout=PATIENCE)],
        )
    except ValueError as error:  # two of the files that it was launched with contradict each other
        reason = first_line(error).rstrip(".")
        raise UserError(
            f"accelerate did not start: {reason}.", "Correct the files that it was launched with."
        ) from error
    _check_shares(config, accelerator.num_processes)
    _set_up(accelerator.device, config)
    return accelerator


def make_process_state(config: TrainConfig) -> "PartialState":
    """Processes and device alone, set up as for training, so that the target computes the same."""
    state: PartialState = _accelerate().PartialState(cpu=_is_on_cpu())
    _set_up(state.device, config)
    return state


@contextmanager
def watching(config: TrainConfig, process: "Accelerator | PartialState") -> Iterator[None]:
    """Context manager: this process is ended with one sentence when another has no heartbeat any more. It may
    be in a collective meanwhile, which nothing else ends. After an error the others miss this one."""
    if process.num_processes == 1 or "MASTER_ADDR" not in os.environ:
        yield
        return
    rank, size = process.process_index, process.num_processes

    def end(sentence: str) -> None:
        missing = UserError(
            sentence, "See whether its machine runs and can be reached; then go on with --resume."
        )
        print_error(missing, f"process {rank} of {size}")
        os._exit(1)

    heartbeat = Heartbeat(launched_store, rank, size, config.training.peer_timeout_s, end)
    try:
        yield
        heartbeat.leave()
    finally:
        heartbeat.close()


def _accelerate() -> Any:
    try:
        import accelerate
    except ImportError:
        raise UserError(
            "accelerate is not installed.", "Install it with pip install 'eagle_kit[train]'."
        ) from None
    return accelerate


def _is_on_cpu() -> bool:
    asked = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1")
    return asked or not torch.cuda.is_available()


def _set_up(device: torch.device, config: TrainConfig) -> None:
    """Memory and threads of a CPU, TF32 of a GPU."""
    if device.type == "cpu":
        keep_large_blocks()
        _share_cores(config.training.cpu_threads)
        warn_of_spinning(torch.get_num_threads())
    elif config.training.precision == "tf32":
        torch.set_float32_matmul_precision("high")


def sum_numbers(accelerator: "Accelerator", numbers: Sequence[float]) -> list[float]:
    """Sum of each number over the processes, in fp64 where the device has it."""
    if accelerator.num_processes == 1:
        return [float(number) for number in numbers]
    total = accelerator.reduce(
        torch.tensor(numbers, dtype=torch.float64, device=accelerator.device), reduction="sum"
    )
    assert isinstance(total, torch.Tensor)
    return total.tolist()


def gather_objects(accelerator: "Accelerator", mine: T) -> list[T]:
    """The objects of all processes, in their order."""
    if accelerator.num_processes == 1:
        return [mine]
    parts: list[Any] = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(parts, mine)
    return parts


def largest(process: "Accelerator | PartialState", number: float) -> float:
    """The largest of all processes' numbers."""
    if process.num_processes == 1:
        return float(number)
    shared = torch.tensor(float(number), dtype=torch.float64, device=process.device)
    torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX)
    return float(shared)


def _check_shares(config: TrainConfig, num_processes: int) -> None:
    rows, training = config.training.sequences_per_step, config.training
    if rows % num_processes:
        raise UserError(
            f"training.sequences_per_step is {rows}, which {num_processes} processes cannot share equally.",
            f"Set it to a multiple of {num_processes}.",
        )
    forwards = training.gradient_accumulation
    if forwards is not None and (rows // num_processes) % forwards:
        raise UserError(
            f"training.gradient_accumulation is {forwards}, but a process has {rows // num_processes} rows.",
            "Set it to a divisor of that, or leave it out for one row per forward.",
        )


def _share_cores(threads: int | None) -> None:
    """Use every core: launchers leave a process one thread unless told otherwise."""
    launched = "LOCAL_WORLD_SIZE" in os.environ or any(name.startswith("ACCELERATE_") for name in os.environ)
    if threads is None and launched:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        threads = max(1, num_cores() // local)
    if threads is not None:
        torch.set_num_threads(threads)
