"""Environment that ``torchrun``, ``deepspeed`` or ``accelerate launch`` gives, and settings that are refused.

``torchrun`` starts processes on CPUs and GPUs. So does ``accelerate launch`` with ``--multi_gpu`` or a config
file of several processes, which also configures how they share the head. Without these, or with ``--cpu``,
``accelerate launch`` starts a single process whatever the number of processes is.
"""

from collections.abc import Mapping
from typing import Any

from eagle_kit.config.train import TrainingConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import expand, read_object

UNUSED_FLAGS = {
    "ACCELERATE_USE_MEGATRON_LM": "--use_megatron_lm",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "--use_parallelism_config",
}
"""Variables of accelerate's launcher -> flags without effect here that set them."""
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
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("zero_stage", ("1", "2", "3"), "Set it to 1, 2 or 3."),
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": (
            "offload_optimizer_device",
            ("none", "cpu"),
            "Set it to none or cpu.",
        ),
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": (
            "offload_param_device",
            ("none", "cpu"),
            "Set it to none, or with zero_stage 3 to cpu.",
        ),
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
"""For each kind of launch: variable -> (setting of the launcher, supported values, remedy)."""
OFFLOADED = {
    "offload_optimizer": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
}
"""Settings of ``zero_optimization`` -> variables with their devices if there is no ``ds_config``."""
OURS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "amp",
)
"""Keys of a ``ds_config`` that the run's own config sets."""
ELSEWHERE = {
    "optimizer": "training.optimizer and what follows it are in the run's own config.",
    "scheduler": "training.schedule and training.warmup_steps are in the run's own config.",
    "fp16": "Set training.precision in the run's own config.",
    "bf16": "Set training.precision=bfloat16 in the run's own config.",
    "amp": "Set training.precision in the run's own config.",
}
"""Sections of a ``ds_config`` that are refused -> remedy."""
RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
"""Variables with the rank of this process, in the order in which accelerate reads them."""


def check_launcher(environ: Mapping[str, str], training: TrainingConfig) -> None:
    """Refuse flags of ``accelerate launch``, or of its config file, that would have no effect.

    Args:
        environ: environment of this process, in which the launcher sets its options.

    Raises:
        UserError: the launch asks for an unsupported kind of sharding, for compilation, for a precision other
            than ``training.precision``, or for several processes of which accelerate has started one.
    """
    # Several processes, of which accelerate starts one.
    launched = "ACCELERATE_MIXED_PRECISION" in environ
    if launched and "MASTER_ADDR" in environ and not set(RANKS) & set(environ):
        raise UserError(
            "accelerate was launched for several processes, and has started one, which knows no other.",
            "Launch with --multi_gpu or train/accelerate/multi-gpu.yaml, on CPUs too and without --cpu, or "
            "with torchrun --nproc_per_node N -m eagle_kit.cli train CONFIG.",
        )

    # Flags and settings without effect.
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
    deepspeed_config(environ, training)

    # Compilation.
    backend = environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if backend not in ("", "no"):
        raise UserError(
            f"accelerate was launched with --dynamo_backend {backend}, but the head is not compiled.",
            "Launch without --dynamo_backend.",
        )

    # Precision. That of the launcher may only repeat that of the config.
    asked = environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if asked in ("", "no") or (asked == "bf16" and training.precision in ("bfloat16", "auto")):
        return
    remedy = "Launch with --mixed_precision no."
    if asked == "bf16":
        remedy = "Set training.precision=bfloat16, or launch with --mixed_precision no."
    raise UserError(
        f"accelerate was launched with --mixed_precision {asked}, but training.precision is "
        f"{training.precision}.",
        remedy,
    )


def check_local_rank(local_rank: int | None, environ: Mapping[str, str]) -> None:
    """Refuse a ``--local_rank`` that contradicts the environment, because only the environment is used.

    Args:
        local_rank: option that DeepSpeed's launcher adds to the command; None without it.

    Raises:
        UserError: ``LOCAL_RANK`` is not set, or has another value.
    """
    if local_rank is None:
        return
    known = environ.get("LOCAL_RANK")
    if known != str(local_rank):
        state = "is not set" if known is None else f"is {known}"
        raise UserError(
            f"--local_rank is {local_rank}, and the variable LOCAL_RANK {state}.",
            "Leave --local_rank to the launcher: deepspeed, torchrun or accelerate launch.",
        )


def sharding_asked_for(environ: Mapping[str, str]) -> str:
    """Sharding of the head that the launcher asks for.

    Returns:
        ``"fsdp2"``, ``"zero1"``, ``"zero2"``, ``"zero3"``, or ``"none"`` if every process has the whole head.
        A single process has it always.
    """
    if environ.get("WORLD_SIZE", "1") == "1":
        return "none"
    if _is_set(environ, "ACCELERATE_USE_FSDP"):
        return "fsdp2"
    if _is_set(environ, "ACCELERATE_USE_DEEPSPEED"):
        return f"zero{deepspeed_config(environ)['zero_optimization']['stage']}"
    return "none"


def deepspeed_config(environ: Mapping[str, str], training: TrainingConfig | None = None) -> dict[str, Any]:
    """Settings for DeepSpeed; empty if the launcher does not ask for it.

    They are those of DeepSpeed's config file (``ds_config``) in the launch, without those that the run's
    config sets. Without such a file they are the stage and the offloading of accelerate's own options.

    Args:
        training: settings that the file must not contradict; None does not compare.

    Raises:
        UserError: the file cannot be read, contradicts ``training``, or asks for something unsupported.
    """
    if not _is_set(environ, "ACCELERATE_USE_DEEPSPEED"):
        return {}
    name = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if name == "none":
        return {"zero_optimization": _zero_of_launcher(environ)}
    settings = read_object(expand(name))
    if training is not None:
        _check_deepspeed_config(name, settings, training, int(environ.get("WORLD_SIZE", "1")))
    return {key: value for key, value in settings.items() if key not in OURS and value != "auto"}


def _zero_of_launcher(environ: Mapping[str, str]) -> dict[str, Any]:
    """Section ``zero_optimization`` by accelerate's own options.

    Raises:
        UserError: weights are offloaded at a stage at which every process has all of them.
    """
    stage = int(environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
    zero: dict[str, Any] = {"stage": stage}
    for part, variable in OFFLOADED.items():
        device = environ.get(variable, "none").lower()
        if device != "none":
            zero[part] = {"device": device}
    if "offload_param" in zero and stage != 3:
        raise UserError(
            f"accelerate was launched with offload_param_device cpu and zero_stage {stage}.",
            "Set offload_param_device to none, or zero_stage to 3.",
        )
    return zero


def _check_deepspeed_config(
    file: str, settings: Mapping[str, Any], training: TrainingConfig, num_processes: int
) -> None:
    """Raise UserError if a setting of DeepSpeed's file contradicts the run's config, or is unsupported."""
    # Settings that both files have must agree.
    rows = training.sequences_per_step // num_processes
    forwards = training.gradient_accumulation or rows
    clipping = training.clip_norm or 0.0
    ours = {
        "train_batch_size": ("training.sequences_per_step", training.sequences_per_step),
        "train_micro_batch_size_per_gpu": ("training.gradient_accumulation", rows // forwards),
        "gradient_accumulation_steps": ("training.gradient_accumulation", forwards),
        "gradient_clipping": ("training.clip_norm", clipping),
    }
    for key, (name, value) in ours.items():
        theirs = settings.get(key, "auto")
        if theirs not in ("auto", value):
            raise UserError(
                f"{file} has {key} {theirs}, but {name} in the run's own config makes it {value}.",
                f"Leave {key} out of {file}, or set it to auto.",
            )

    # The optimiser, its schedule and the precision are those of the run's config alone.
    for key, remedy in ELSEWHERE.items():
        theirs = settings.get(key)
        if isinstance(theirs, dict):
            theirs = theirs.get("enabled", True)
        if theirs not in (None, False, "auto"):
            raise UserError(f"{file} has {key}, which has no effect here.", f"Leave {key} out. {remedy}")

    # Stages and offloading.
    zero = settings.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if not isinstance(zero, dict) or stage not in (1, 2, 3):
        raise UserError(
            f"{file} has the zero_optimization.stage {stage}.", "Set it to 1, 2 or 3, or launch without it."
        )
    for part in OFFLOADED:
        offload = zero.get(part) or {}
        device = offload.get("device", "none") if isinstance(offload, dict) else offload
        if device not in ("none", "auto", "cpu", None):
            raise UserError(
                f"{file} has zero_optimization.{part} to {device}, which is not supported.",
                f"Set its device to cpu, or leave {part} out.",
            )
        if device == "cpu" and part == "offload_param" and stage != 3:
            raise UserError(
                f"{file} has zero_optimization.{part} and stage {stage}.",
                f"Leave {part} out, or set stage to 3.",
            )


def is_main(environ: Mapping[str, str]) -> bool:
    """True in the main process, which writes the files."""
    for name in RANKS:
        if name in environ:
            return environ[name] == "0"
    return True


def go_on(command: str, environ: Mapping[str, str]) -> str:
    """Sentence with the command that continues a stopped one, in the same number of processes."""
    sentence = f"Go on with: {command}"
    count = environ.get("WORLD_SIZE", "1")
    if count != "1":
        sentence += f" (in {count} processes, as now)"
    return sentence


def _is_set(environ: Mapping[str, str], variable: str) -> bool:
    """True if a flag of the launcher is set in the environment."""
    return environ.get(variable, "").lower() in ("true", "1")
