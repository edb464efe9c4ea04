"""Processes, devices and precision of a run, by accelerate."""

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
from eagle_kit.ops.linear.reductions import add_up_in_fp32
from eagle_kit.train.parallel.placement import PATIENCE
from eagle_kit.train.run.trackers import tracker_options

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState

T = TypeVar("T")


def with_precision(config: TrainConfig, *, on_gpu: bool | None = None) -> TrainConfig:
    """Resolve the precision ``auto`` of a config.

    It is the precision of the store of hidden states if there is one; else bfloat16 on a GPU that supports
    it, or if the launcher was asked for it; else float32.

    Args:
        on_gpu: True for GPUs that support bfloat16; None looks at the device of this process.
    """
    if config.training.precision != "auto":
        return config

    # By device and launcher.
    if on_gpu is None:
        on_gpu = not _is_on_cpu() and torch.cuda.is_bf16_supported()
    is_launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower() == "bf16"
    precision = "bfloat16" if on_gpu or is_launched else "float32"

    # By the store.
    if config.data.store is not None:
        manifest = read_manifest(expand(config.data.store)) or {}
        precision = str(manifest.get("precision", precision))
    training = config.training.model_copy(update={"precision": precision})
    return config.model_copy(update={"training": training})


def make_accelerator(config: TrainConfig) -> "Accelerator":
    """Start accelerate: processes, device and trackers.

    Raises:
        UserError: accelerate does not start, or the processes cannot share the rows of a step.
    """
    accelerate = _accelerate()
    logging_dir = os.path.join(config.output_dir, "tensorboard")
    try:
        accelerator: Accelerator = accelerate.Accelerator(
            cpu=_is_on_cpu(),
            mixed_precision="no",  # see eagle_kit.objective.ttt_module.autocast
            log_with=list(tracker_options(config)) or None,
            project_config=accelerate.utils.ProjectConfiguration(
                project_dir=config.output_dir, logging_dir=logging_dir
            ),
            kwargs_handlers=[accelerate.InitProcessGroupKwargs(timeout=PATIENCE)],
        )
    except ValueError as error:  # two of the files of the launch contradict each other
        reason = first_line(error).rstrip(".")
        raise UserError(
            f"accelerate did not start: {reason}.", "Correct the files that it was launched with."
        ) from error
    _check_shares(config, accelerator.num_processes)
    _set_up(accelerator.device, config)
    return accelerator


def make_process_state(config: TrainConfig) -> "PartialState":
    """Start processes and device without an accelerator; the target computes the same as in training."""
    state: PartialState = _accelerate().PartialState(cpu=_is_on_cpu())
    _set_up(state.device, config)
    return state


@contextmanager
def watching(config: TrainConfig, process: "Accelerator | PartialState") -> Iterator[None]:
    """Context in which this process ends with an error message if the heartbeat of another process stops.

    It ends even in a collective, which would otherwise wait for the lost process. If this process fails, its
    own heartbeat stops.
    """
    if process.num_processes == 1 or "MASTER_ADDR" not in os.environ:
        yield
        return
    rank = process.process_index
    size = process.num_processes

    def end(sentence: str) -> None:
        remedy = "See whether its machine runs and can be reached; then go on with --resume."
        print_error(UserError(sentence, remedy), f"process {rank} of {size}")
        os._exit(1)

    heartbeat = Heartbeat(launched_store, rank, size, config.training.peer_timeout_s, end)
    try:
        yield
        heartbeat.leave()
    finally:
        heartbeat.close()


def _accelerate() -> Any:
    """Import accelerate. Raises UserError if it is not installed."""
    try:
        import accelerate
    except ImportError:
        raise UserError(
            "accelerate is not installed.", "Install it with pip install 'eagle_kit[train]'."
        ) from None
    return accelerate


def _is_on_cpu() -> bool:
    """True if training runs on a CPU: the launcher was asked for it, or there is no GPU."""
    is_asked_for = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1")
    return is_asked_for or not torch.cuda.is_available()


def _set_up(device: torch.device, config: TrainConfig) -> None:
    """Set memory and threads of a CPU, or how a GPU multiplies."""
    if device.type == "cpu":
        keep_large_blocks()
        _share_cores(config.training.cpu_threads)
        warn_of_spinning(torch.get_num_threads())
        return
    add_up_in_fp32()  # as the engine of a validation does, so that a resumed run is the uninterrupted one
    if config.training.precision == "tf32":
        torch.set_float32_matmul_precision("high")


def sum_numbers(accelerator: "Accelerator", numbers: Sequence[float]) -> list[float]:
    """Sum each number over the processes, in fp64."""
    if accelerator.num_processes == 1:
        return [float(number) for number in numbers]
    mine = torch.tensor(numbers, dtype=torch.float64, device=accelerator.device)
    total = accelerator.reduce(mine, reduction="sum")
    assert isinstance(total, torch.Tensor)
    return total.tolist()


def gather_objects(accelerator: "Accelerator", mine: T) -> list[T]:
    """Gather an object of every process, in the order of the processes."""
    if accelerator.num_processes == 1:
        return [mine]
    parts: list[Any] = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(parts, mine)
    return parts


def largest(process: "Accelerator | PartialState", number: float) -> float:
    """Maximum of a number over the processes."""
    if process.num_processes == 1:
        return float(number)
    shared = torch.tensor(float(number), dtype=torch.float64, device=process.device)
    torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX)
    return float(shared)


def _check_shares(config: TrainConfig, num_processes: int) -> None:
    """Raise UserError if the packed sequences of a step cannot be divided over processes and forwards."""
    rows = config.training.sequences_per_step
    if rows % num_processes:
        raise UserError(
            f"training.sequences_per_step is {rows}, which {num_processes} processes cannot share equally.",
            f"Set it to a multiple of {num_processes}.",
        )
    forwards = config.training.gradient_accumulation
    rows_per_process = rows // num_processes
    if forwards is not None and rows_per_process % forwards:
        raise UserError(
            f"training.gradient_accumulation is {forwards}, but a process has {rows_per_process} rows.",
            "Set it to a divisor of that, or leave it out for one row per forward.",
        )


def _share_cores(threads: int | None) -> None:
    """Set the number of threads.

    Args:
        threads: the number; None is an equal share of the cores if there is a launcher, which by default
            leaves a process one thread.
    """
    is_launched = "LOCAL_WORLD_SIZE" in os.environ
    if any(name.startswith("ACCELERATE_") for name in os.environ):
        is_launched = True
    if threads is None and is_launched:
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        threads = max(1, num_cores() // num_local)
    if threads is not None:
        torch.set_num_threads(threads)
